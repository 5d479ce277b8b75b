"""Specs that contradict themselves or the headers of their files, each refused with a way out."""

from __future__ import annotations

import copy

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gem.data.canonical import check_spec, resolve_files
from gem.data.spec import parse_spec
from gem.errors import SpecError

RAW = {
    "name": "small",
    "tables": {
        "log": {"files": ["log*"]},
        "sales": {"files": ["sales.parquet"]},
        "users": {"files": ["users.csv"]},
        "ads": {"files": ["ads.csv"]},
        "extra": {"files": ["extra.csv"], "optional": True},
    },
    "impressions": {
        "table": "log",
        "user": "user",
        "ad": "item",
        "surface": "place",
        "time": {"column": "shown_ms"},
        "id": "ref",
        "duplicate_key": ["ref"],
        "outcomes": ["clicked", "watched"],
        "true_probability": {"click": "p"},
    },
    "labels": {
        "click": {"column": "clicked"},
        "conversion": {"table": "sales", "key": "ref", "time": {"column": "at"}, "window_hours": 2, "given": "click"},
    },
    "events": [
        {
            "kind": "seen",
            "table": "log",
            "user": "user",
            "ad": "item",
            "time": {"column": "shown_ms"},
            "flags": {"click": "clicked", "like": "liked"},
            "dwell": {"column": "watched"},
        },
        {"kind": "old", "table": "extra", "user": "user", "ad": "items", "list_before": {"column": "until"}},
    ],
    "users": {"table": "users", "key": "user", "features": [{"name": "country", "kind": "categorical"}]},
    "ads": {"table": "ads", "key": "item", "features": [{"name": "price", "kind": "numeric", "transform": "log1p"}]},
    "context": {"features": [{"name": "slot", "kind": "categorical"}]},
}


@pytest.fixture
def folder(tmp_path):
    names = ["user", "item", "place", "shown_ms", "ref", "clicked", "watched", "liked", "p", "slot"]
    pq.write_table(pa.table({n: [1] for n in names}), tmp_path / "log.parquet")
    pq.write_table(pa.table({"ref": [1], "at": [1]}), tmp_path / "sales.parquet")
    (tmp_path / "users.csv").write_text("user,country\n1,fr\n")
    (tmp_path / "ads.csv").write_text("item,price\n1,2\n")
    return tmp_path


def changed(path, value):
    """RAW with one place changed; `path` is dotted, numbers are list positions, `+` appends."""
    raw = copy.deepcopy(RAW)
    node = raw
    *way, last = path.split(".")
    for part in way:
        node = node[int(part)] if isinstance(node, list) else node.setdefault(part, {})
    if last == "+":
        node.append(value)
    elif isinstance(node, list):
        node[int(last)] = value
    else:
        node[last] = value
    return raw


def check(raw, folder):
    spec = parse_spec(raw)
    check_spec(spec, resolve_files(spec, folder))


def test_a_good_spec_passes_with_and_without_its_optional_table(folder):
    check(RAW, folder)
    (folder / "extra.csv").write_text("user,items,until\n")
    check(RAW, folder)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("impressions.user", "usr", r'impressions.user: table "log" has no column "usr". Did you mean "user"\?'),
        ("impressions.surface", "plaice", r'impressions.surface: .*Did you mean "place"\?'),
        ("impressions.time", {"column": "shown"}, r'impressions.time.column: .*"shown_ms"\?'),
        ("impressions.day", "plac", r'impressions.day: .*Did you mean "place"\?'),
        ("impressions.duplicate_key", ["reff"], r'impressions.duplicate_key: .*Did you mean "ref"\?'),
        ("impressions.outcomes", ["clickd"], r'impressions.outcomes: .*Did you mean "clicked"\?'),
        ("impressions.true_probability", {"click": "pp"}, r"impressions.true_probability.click: .*has no column"),
        ("labels.click", {"column": "clikced"}, r'labels.click.column: .*Did you mean "clicked"\?'),
        ("labels.conversion.time", {"column": "att"}, r'labels.conversion.time.column: table "sales".*"at"\?'),
        ("labels.conversion.key", "rf", r'labels.conversion.key: table "log" has no column "rf".*"ref"\?'),
        ("events.0.ad", "itm", r'events.0.ad: .*Did you mean "item"\?'),
        ("events.0.flags", {"like": "likd"}, r'events.0.flags.like: .*Did you mean "liked"\?'),
        ("events.0.dwell", {"column": "watchd"}, r'events.0.dwell.column: .*"watched"\?'),
        ("users.key", "userid", r'users.key: table "users".*"user"\?.*users.csv has: user, country'),
        ("users.features.0.column", "contry", r'users.features.country: .*Did you mean "country"\?'),
        ("ads.features.0.column", "prize", r'ads.features.price: .*Did you mean "price"\?'),
        ("context.features.0.column", "slots", r'context.features.slot: .*Did you mean "slot"\?'),
    ],
)
def test_misspelt_columns_get_the_nearest_name(folder, path, value, message):
    with pytest.raises(SpecError, match=message):
        check(changed(path, value), folder)


def test_every_file_of_a_table_is_looked_at(folder):
    (folder / "log-2.csv").write_text("user,item,place,shown_ms,ref,clicked,watched,liked,p\n")
    with pytest.raises(SpecError, match=r'context.features.slot: table "log" has no column "slot".*log-2.csv has'):
        check(RAW, folder)
    (folder / "log-2.csv").write_text("user,item,place,shown_ms,ref,clicked,watched,liked,p,slot,slot\n")
    with pytest.raises(SpecError, match=r"header names \['slot'\] more than once"):
        check(RAW, folder)


@pytest.mark.parametrize(
    ("column", "why"),
    [
        ("clicked", "the label click"),
        ("watched", "dwell time of event seen"),
        ("liked", "the flag like of event seen"),
        ("p", "the true probability of label click"),
    ],
)
@pytest.mark.parametrize("side", ["context", "users", "ads"])
def test_outcomes_are_refused_as_features(folder, column, why, side):
    raw = copy.deepcopy(RAW)
    raw[side]["features"] = [{"name": "peek", "column": column, "kind": "numeric"}]
    if side != "context":  # an entity table that is the impression log itself
        raw[side]["table"] = "log"
    with pytest.raises(
        SpecError, match=rf'features.peek: column "{column}" is an outcome \(.*{why}.* known only after'
    ):
        check(raw, folder)


def test_outcomes_that_are_only_listed_are_refused_too(folder):
    raw = changed("context.features.+", {"name": "place2", "column": "place", "kind": "categorical"})
    check(raw, folder)
    raw["impressions"]["outcomes"].append("place")
    with pytest.raises(SpecError, match=r"place2.*listed in impressions.outcomes"):
        check(raw, folder)


def test_the_log_of_a_label_is_no_feature(folder):
    raw = changed(
        "ads", {"table": "sales", "key": "ref", "features": [{"name": "sold_at", "column": "at", "kind": "numeric"}]}
    )
    with pytest.raises(SpecError, match=r"ads.features.sold_at.*in the log of label conversion.*known only after"):
        check(raw, folder)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("context.features.0.name", "country", r"context.features.country: the name is already used by users"),
        ("context.features.0.name", "hour", r"hour: the name is already used by the platform itself.*Rename it"),
        ("users.features.0.name", "ad_id", r"users.features.ad_id: the name is already used"),
        ("labels.click.given", "conversion", r"labels.click.given: the first label has no condition"),
        ("labels.conversion.given", "clik", r'labels.conversion.given: no label "clik". Did you mean "click"\?'),
        ("labels.conversion.given", "conversion", r'no label "conversion".*Allowed: click'),
        ("labels.conversion.window_hours", 0, r"labels.conversion: .*`window_hours` above 0"),
        ("labels.conversion.column", "liked", r"labels.conversion: give either `column`"),
        ("impressions.table", "lug", r'impressions.table: no table "lug". Did you mean "log"\?'),
        ("ads.table", "adds", r'ads.table: no table "adds". Did you mean "ads"\?'),
        ("users.table", "extra", r'users.table: table "extra" is optional; only tables of event sources may be'),
        ("impressions.zone", "Asia/Shangai", r'unknown time zone "Asia/Shangai". Did you mean "Asia/Shanghai"\?'),
        ("impressions.true_probability", {"clic": "p"}, r'no label "clic". Did you mean "click"\?'),
        ("surfaces.objective", {"feed": "clik"}, r'surfaces.objective.feed: no label "clik". Did you mean "click"\?'),
        ("events.0.kind", " ", r"events.0.kind: empty"),
        ("events.0.list_before", {"column": "shown_ms"}, r"events.0: give either `time` or"),
        ("events.0.always", [f"f{i}" for i in range(15)], r"events: 17 different flags, at most 16 allowed"),
        ("ads.features.0.kind", "embedding", r"ads.features.price.width: needed"),
        ("ads.features.0.width", 3, r"ads.features.price.width: needed .* for no other kind"),
        ("users.features.0.transform", "log1p", r"country.transform: only for `kind: numeric`"),
        (
            "context.features.+",
            {"name": "e", "column": "slot", "kind": "embedding", "width": 2},
            r"context.features.e: an embedding belongs to a user or an ad",
        ),
        ("labels", {}, r"labels: none given"),
    ],
)
def test_specs_that_contradict_themselves(folder, path, value, message):
    with pytest.raises(SpecError, match=message):
        check(changed(path, value), folder)


def test_a_condition_stands_before_what_it_conditions(folder):
    raw = changed("labels.late", {"column": "liked"})
    raw["labels"]["conversion"]["given"] = "late"
    with pytest.raises(SpecError, match=r'label "late" must stand before "conversion"'):
        check(raw, folder)


def test_sixteen_flags_are_allowed(folder):
    check(changed("events.0.always", [f"f{i}" for i in range(14)]), folder)
