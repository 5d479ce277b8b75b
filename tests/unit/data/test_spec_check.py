"""Specs that contradict themselves or the headers of their files, each refused with a way out."""

from __future__ import annotations

import copy

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gem.data.ingest.canonical import check_spec, resolve_files
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
        ("labels.conversion.at_least", 3, r"labels.conversion.at_least: only for a label with a `column`"),
        ("events.0.item", {"price": "p"}, r"events.0: give either `ad` or"),
        ("events.1.ingested", {"column": "until"}, r"events.1.ingested: not for lists without times"),
        ("events.0.action", "place", r"events.0: give both `action` .* and `action_flags`"),
        ("ads.features.0.hash_rows", 10, r"ads.features.price.hash_rows: only for `kind: categorical` and `multi`"),
        ("users.features.0.since", "2026-1-1", r'country.since: "2026-1-1" is not a day; write it as YYYY-MM-DD'),
        ("users.key", None, r"users: give both `table` and `key`, or neither"),
        ("users", {"features": [{"name": "x", "kind": "numeric"}]}, r"users.features: features need a `table`"),
        ("tables.log.files", ["../log*"], r"tables.log.files: '../log\*' leaves the data folder"),
        ("tables.log.separator", '"', r"tables.log.separator: .* cannot separate columns"),
        ("tables.log.encoding", "latin-11", r'encoding: nobody knows "latin-11". Did you mean "latin-1"\?'),
        ("tables.users.columns", ["user", "user"], r"tables.users.columns: \['user'\] named more than once"),
        ("tables.sales", {"files": ["sales*"], "format": "parquet", "separator": ";"}, r"separator: only for CSV"),
        ("tables.log.path_columns", "day_(", r"path_columns: 'day_\(' is no regular expression"),
        ("tables.log.path_columns", "day_([0-9])", r"path_columns: no named group"),
        (
            "tables.log.constants",
            {"shown_ms": 1},
            r"tables.log.constants.shown_ms: .* a column \"shown_ms\" of its own",
        ),
        (
            "tables.log",
            {"files": ["log*"], "row_number": "row", "constants": {"row": 1}},
            r'tables.log.row_number: the column "row" is already made by constants.row',
        ),
        (
            "tables.log.row_time",
            {"column": "at", "start": "2026-02-30", "step_us": 1},
            r'tables.log.row_time.start: "2026-02-30" is not a day',
        ),
        (
            "tables.log.row_time",
            {"column": "at", "start": "2026-02-20", "step_us": 1, "days": {"a": 1}},
            r"row_time.days: needs `day`",
        ),
        (
            "tables.log.row_time",
            {"column": "at", "start": "2026-02-20", "step_us": 1, "day": "plase"},
            r'tables.log.row_time.day: table "log" has no column "plase". Did you mean "place"\?',
        ),
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


def test_contradictions_of_two_fields(folder):
    hashed = {"name": "town", "column": "country", "kind": "categorical", "hash_rows": 100}
    with pytest.raises(SpecError, match=r"`hash_rows` and `min_count` contradict each other"):
        check(changed("users.features.+", hashed | {"min_count": 2}), folder)
    raw = changed("users.features.+", hashed | {"table": "country"})
    with pytest.raises(
        SpecError, match=r'town.hash_rows: 100, but users.features.country .* table "country" with None'
    ):
        check(raw, folder)
    raw["users"]["features"][0] |= {"hash_rows": 100, "hashes": 3}
    with pytest.raises(SpecError, match=r"town.hashes: 2, but users.features.country .* with 3"):
        check(raw, folder)
    raw = changed("events.+", RAW["events"][0] | {"ad": None, "item": {"prise": "p"}})
    with pytest.raises(SpecError, match=r'events.2.item: no ad feature "prise". Did you mean "price"\?'):
        check(raw, folder)
    raw = changed("tables.log.row_time", {"column": "made", "start": "2026-02-20", "step_us": 1})
    raw["impressions"]["time"] = {"column": "made", "unit": "s"}
    with pytest.raises(SpecError, match=r"impressions.time.unit: the times that row_time makes are in ms, got `s`"):
        check(raw, folder)


def test_the_action_and_the_arrival_of_an_event_are_outcomes(folder):
    raw = changed("events.0.action", "place")
    raw["events"][0]["action_flags"] = {"x": "seen"}
    raw["context"]["features"] = [{"name": "peek", "column": "place", "kind": "categorical"}]
    with pytest.raises(SpecError, match=r"peek: column \"place\" is an outcome \(the action of event seen"):
        check(raw, folder)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("impresions", r'dataset spec: impresions: no such field. Did you mean "impressions"\? Allowed: about, ads,'),
        ("tables.log.seperator", r'tables.log.seperator: no such field. Did you mean "separator"\?'),
        ("tables.log.row_time.stert", r'row_time.stert: no such field. Did you mean "start"\?'),
        ("events.0.flag", r'events.0.flag: no such field. Did you mean "flags"\?'),
        ("events.0.dwell.units", r'events.0.dwell.units: no such field. Did you mean "unit"\?'),
        ("ads.features.0.hashrows", r'ads.features.0.hashrows: no such field. Did you mean "hash_rows"\?'),
        ("labels.click.at_most", r'labels.click.at_most: no such field. Did you mean "at_least"\?'),
    ],
)
def test_misspelt_fields_get_the_nearest_name(path, message):
    raw = changed(path, 1)
    with pytest.raises(SpecError, match=message):
        parse_spec(raw)
