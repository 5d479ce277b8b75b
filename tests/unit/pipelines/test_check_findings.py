"""Every finding of `check`: there when its fault is injected, absent on the clean log; the figures by hand."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gem.config import RunConfig
from gem.data.profile.samples import KeySample, merge_columns, smallest_per_day
from gem.data.profile.stats import auc, column_auc, drift_codes, psi, wilson
from gem.data.spec import parse_spec
from pipelines.check.finding import ERROR, HINT, OK, WARN, Finding
from pipelines.check.gather import gather
from pipelines.check.judge import judge
from pipelines.check.measures import measure
from tests.unit.pipelines import check_log
from tests.unit.pipelines.check_log import DAY_MS, HOUR_MS, PER_DAY, Tables

Spec = dict[str, Any]
Fault = Callable[[Tables, Spec], None]
NOW_MS = check_log.START_MS + 30 * DAY_MS


def one_by_one(name: str, function: Callable[[Any], Any], tasks: Any) -> list[Any]:
    """In this process, with tasks and answers as JSON, as Ray Data carries them."""
    return [json.loads(json.dumps(function(json.loads(json.dumps(task))))) for task in tasks]


def findings(folder: Path, data: Tables, spec: Spec, change: Callable[[Path], None] = lambda _: None) -> list[Finding]:
    check_log.write(folder / "data", data)
    change(folder / "data")
    (folder / "work").mkdir()
    facts = gather(
        RunConfig(), parse_spec(spec), folder / "data", folder / "work", lambda size: one_by_one, NOW_MS
    )  # fmt: skip
    return judge(facts, measure(facts))


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> list[Finding]:
    return findings(tmp_path_factory.mktemp("clean"), check_log.tables(), check_log.spec())


def seconds_as_ms(d: Tables, s: Spec) -> None:
    d["log"]["at"][: 3 * PER_DAY] //= 1000


def other_zone(d: Tables, s: Spec) -> None:
    for table in ("log", "sales"):
        d[table]["at"] = d[table]["at"] + 12 * HOUR_MS
    d["log"]["date"] = check_log.days(d["log"]["at"])


def one_day_shifted(d: Tables, s: Spec) -> None:
    at = d["log"]["at"][2 * PER_DAY : 3 * PER_DAY]
    d["log"]["at"][2 * PER_DAY : 3 * PER_DAY] = at // DAY_MS * DAY_MS + (at + 8 * HOUR_MS) % DAY_MS
    s["labels"].pop("sale")


def wrong_date(d: Tables, s: Spec) -> None:
    d["log"]["date"][::5] = np.roll(d["log"]["date"], PER_DAY)[::5]


def leak(d: Tables, s: Spec) -> None:
    noise = np.random.default_rng(1).random(len(d["log"]["row"])) < 0.03
    d["log"]["seen"] = np.where(noise, 0, d["log"]["clicked"])


def leak_as_feature(d: Tables, s: Spec) -> None:
    leak(d, s)
    s["context"]["features"].append({"name": "seen", "kind": "categorical"})


def repeated(d: Tables, s: Spec) -> None:
    rows = np.r_[np.arange(len(d["log"]["row"])), np.arange(0, len(d["log"]["row"]), 12)]
    d["log"] = {c: v[np.sort(rows)] for c, v in d["log"].items()}


def request_ids(d: Tables, s: Spec) -> None:
    d["log"]["row"] = d["log"]["row"] // 2
    d["log"]["person"] = np.repeat(d["log"]["person"][::2], 2)


def missing_users(d: Tables, s: Spec) -> None:
    d["people"] = {c: v[::2] for c, v in d["people"].items()}


def other_user_ids(d: Tables, s: Spec) -> None:
    d["people"]["person"] = d["people"]["person"] + 10_000


def user_twice(d: Tables, s: Spec) -> None:
    d["people"]["person"][1] = 0


def other_sale_keys(d: Tables, s: Spec) -> None:
    d["sales"]["row"] = d["sales"]["row"] + 10**6


def hot_user(d: Tables, s: Spec) -> None:
    d["views"]["person"][::2] = 7


def burst(d: Tables, s: Spec) -> None:
    d["views"]["person"][:12], d["views"]["item"][:12], d["views"]["at"][:12] = 7, np.arange(12), d["views"]["at"][0]


def lost_day(d: Tables, s: Spec) -> None:
    keep = d["log"]["date"] != "2024-03-06"
    d["log"] = {c: v[keep] for c, v in d["log"].items()}


def part_of_last_day(d: Tables, s: Spec) -> None:
    d["log"] = {c: v[: -PER_DAY + 100] for c, v in d["log"].items()}


def nulls(d: Tables, s: Spec) -> None:
    device = d["log"]["device"].astype(object)
    device[2 * PER_DAY : 3 * PER_DAY : 2] = None
    d["log"]["device"] = device


def empty_column(d: Tables, s: Spec) -> None:
    d["people"]["town"] = np.full(check_log.USERS, None, dtype=object)
    d["people"]["town"][0] = ""


def null_users(d: Tables, s: Spec) -> None:
    person = d["log"]["person"].astype(object)
    person[::40] = None
    d["log"]["person"] = person


def many_null_users(d: Tables, s: Spec) -> None:
    null_users(d, s)
    d["log"]["person"][::10] = None


def odd_day(d: Tables, s: Spec) -> None:
    d["log"]["clicked"][2 * PER_DAY : 3 * PER_DAY : 3] = 1


def no_clicks(d: Tables, s: Spec) -> None:
    d["log"]["clicked"][:] = 0


def dead_surface(d: Tables, s: Spec) -> None:
    d["log"]["clicked"][d["log"]["place"] == "b"] = 0


def drift(d: Tables, s: Spec) -> None:
    d["log"]["device"][-PER_DAY:][::2] = "web"


def new_values(d: Tables, s: Spec) -> None:
    d["log"]["device"] = np.where(d["log"]["row"] % 2 == 0, d["log"]["date"], d["log"]["device"])


def young(d: Tables, s: Spec) -> None:
    s["labels"]["sale"] |= {"complete": False, "window_hours": 30}
    d["sales"] = {c: v[d["sales"]["at"] < check_log.START_MS + 5 * DAY_MS] for c, v in d["sales"].items()}


def negative_price(d: Tables, s: Spec) -> None:
    d["items"]["price"][:4] = -1.0


def dwell_in_seconds(d: Tables, s: Spec) -> None:
    d["views"]["spent"] = d["views"]["spent"] // 1000


def constant_slot(d: Tables, s: Spec) -> None:
    d["log"]["slot"][:] = 1.0


def id_as_feature(d: Tables, s: Spec) -> None:
    d["log"]["request"] = np.array([f"r{i}" for i in d["log"]["row"]])
    s["context"]["features"].append({"name": "request", "kind": "categorical"})


def no_users(d: Tables, s: Spec) -> None:
    d["log"]["person"] = np.full(len(d["log"]["row"]), None, dtype=object)
    d["log"]["person"][0] = ""


def two_days(d: Tables, s: Spec) -> None:
    d["log"] = {c: v[: 2 * PER_DAY] for c, v in d["log"].items()}


def lost_views(d: Tables, s: Spec) -> None:
    d["views"] = {c: v[d["views"]["at"] // 86_400 != 19_788] for c, v in d["views"].items()}


def many_surfaces(d: Tables, s: Spec) -> None:
    d["log"]["place"] = d["log"]["row"] % 300


def no_such_column(d: Tables, s: Spec) -> None:
    s["impressions"]["surface"] = "plaec"


# One run per group: the faults of a group do not touch each other.
GROUPS: list[list[tuple[Fault, str, str, str]]] = [
    [(seconds_as_ms, ERROR, "refused", "year")],
    [(no_such_column, ERROR, "refused", "place")],
    [(no_users, ERROR, "split", "no impressions are left")],
    [(two_days, ERROR, "split", "three days"), (lost_views, WARN, "missing days", "2024-03-06")],
    [(other_zone, WARN, "time zone", "shifted by about +12 h")],
    [(one_day_shifted, WARN, "shifted day", "2024-03-06 looks like the other days' moved by +8 h")],
    [(request_ids, ERROR, "duplicates", "share row with an impression of another")],
    [
        (leak, HINT, "leak", "unused column"),
        (hot_user, WARN, "hot user", "user 7)"),
        (negative_price, WARN, "contract", "4 rows (10 %): negative numbers under log1p"),
        (nulls, WARN, "null jump", "50 % null on 2024-03-06, 0 % on a usual day"),
        (young, HINT, "immature", "younger than the window of 30 h"),
    ],
    [
        (leak_as_feature, ERROR, "leak", "as an outcome does: AUC 0.9"),
        (missing_users, WARN, "coverage", "50 % of the users"),
        (dwell_in_seconds, WARN, "unit", "100 % of the durations are below a second"),
        (wrong_date, WARN, "day column", "name another day"),
    ],
    [
        (odd_day, WARN, "label rate", "on a usual day"),
        (user_twice, WARN, "duplicates", "1 rows repeat a key, such as 0"),
        (burst, WARN, "burst", "user 7 has 12 different events in one second"),
        (repeated, WARN, "duplicates", "200 rows (7.7 %) repeat row; 200 of them are equal"),
    ],
    [
        (other_user_ids, ERROR, "coverage", "0 % of the users"),
        (other_sale_keys, ERROR, "coverage", "0 % of the outcomes"),
        (new_values, HINT, "new values", "50 % of the rows of 2024-03-09"),
        (many_surfaces, WARN, "cardinality", "300 different surfaces"),
    ],
    [
        (constant_slot, HINT, "cardinality", "single value"),
        (null_users, WARN, "quarantine", "53 of 2,100 rows (2.5 %) go to the quarantine: null_user 53"),
        (part_of_last_day, WARN, "thin days", "2024-03-09 (97 rows)"),
    ],
    [
        (empty_column, WARN, "nulls", "1 columns have no value"),
        (drift, WARN, "drift", "shift on 2024-03-09: PSI 0."),
        (id_as_feature, HINT, "cardinality", "an id, hardly a feature"),
        (dead_surface, WARN, "label rate", "surface b (0/"),
    ],
    [
        (many_null_users, ERROR, "quarantine", "null_user 200"),
        (no_clicks, ERROR, "label rate", "nothing to learn"),
        (lost_day, WARN, "missing days", "2024-03-06"),
    ],
]
CASES = [(group, *fault) for group, faults in enumerate(GROUPS) for fault in faults]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[Finding]]:
    @functools.cache
    def of_group(group: int) -> list[Finding]:
        data, spec = check_log.tables(), check_log.spec()
        for fault, *_ in GROUPS[group]:
            fault(data, spec)
        return findings(tmp_path_factory.mktemp("fault"), data, spec)

    return of_group


@pytest.mark.parametrize(
    ("group", "fault", "level", "check", "text"), CASES, ids=[fault.__name__ for _, fault, *_ in CASES]
)
def test_fault(
    group: int, fault: Fault, level: str, check: str, text: str, runs: Callable[[int], list[Finding]],
    clean: list[Finding],
) -> None:  # fmt: skip
    found = runs(group)
    assert [f for f in found if (f.level, f.check) == (level, check) and text in f.what + f.todo], found
    assert [f for f in clean if (f.level, f.check) == (level, check)] == []


def test_the_clean_log_wakes_nobody(clean: list[Finding]) -> None:
    assert [f for f in clean if f.level in (ERROR, WARN)] == []
    assert {"schema", "quarantine", "drift", "leak", "label rate", "coverage", "time zone"} <= {
        f.check for f in clean if f.level == OK
    }


def test_type_that_changes_between_files(tmp_path: Path) -> None:
    def change(folder: Path) -> None:
        table = pq.read_table(folder / "log-1.parquet")
        for column, values in (("device", pa.array(range(len(table)))), ("more", pa.array(["x"] * len(table)))):
            at = table.column_names.index(column) if column in table.column_names else len(table.column_names)
            table = (table.set_column if at < table.num_columns else table.add_column)(at, column, values)
        pq.write_table(table, folder / "log-1.parquet")

    found = findings(tmp_path, check_log.tables(), check_log.spec(), change)
    typed = [f for f in found if f.check == "type"]
    assert [(f.level, f.where) for f in typed] == [(ERROR, "log.device"), (HINT, "log.more")]
    assert "text in log-0.parquet, integer in log-1.parquet" in typed[0].what


def test_wilson_by_hand() -> None:
    # p = 1/10, z = 2: middle (0.1 + 0.2) / 1.4, half 2 / 1.4 * sqrt(0.009 + 0.01)
    low, high = wilson(1, 10, 2.0)
    assert low == pytest.approx(0.3 / 1.4 - 2 / 1.4 * 0.019**0.5)
    assert high == pytest.approx(0.3 / 1.4 + 2 / 1.4 * 0.019**0.5)
    assert wilson(0, 0) == (0.0, 1.0)
    assert wilson(0, 50)[0] == 0.0 < wilson(0, 50)[1]


def test_psi_by_hand() -> None:
    # shares 1/2, 1/2 -> 1/4, 3/4: (-1/4) ln(1/2) + (1/4) ln(3/2) = (1/4) ln 3
    assert psi([10, 10], [5, 15]) == pytest.approx(np.log(3) / 4)
    assert psi([3, 7, 0], [30, 70, 0]) == pytest.approx(0)
    assert psi([1, 1], [0, 0]) == 0


def test_drift_codes_split_the_earlier_rows_into_tenths() -> None:
    values = pa.array([*np.arange(1000.0), None, 5000.0])
    before = np.r_[np.ones(1000, bool), np.zeros(2, bool)]
    codes = drift_codes(values, before)
    assert np.bincount(codes[before]).tolist() == [100] * 10
    assert codes[-2:].tolist() == [10, 9]


@pytest.mark.parametrize("seed", range(3))
def test_auc_against_all_pairs(seed: int) -> None:
    rng = np.random.default_rng(seed)
    y, score = rng.integers(0, 2, 60), rng.integers(0, 9, 60).astype(np.float64)
    pairs = [(s > t) + (s == t) / 2 for s in score[y == 1] for t in score[y == 0]]
    expected = float(np.mean(pairs))
    assert auc(y, score) == pytest.approx(expected)
    fold = np.zeros(60, np.int64)  # one fold only: numbers are judged by their order alone
    assert column_auc(pa.array(score), y.astype(np.float64), fold) == pytest.approx(max(expected, 1 - expected))


def test_rare_values_do_not_pass_for_signal() -> None:
    """A value per row tells nothing about other rows; the order of a category's label rates does."""
    rng = np.random.default_rng(0)
    y, fold = rng.integers(0, 2, 2000).astype(np.float64), rng.integers(0, 2, 2000)
    assert column_auc(pa.array([f"id{i}" for i in range(2000)]), y, fold) == pytest.approx(0.5, abs=0.01)
    assert column_auc(pa.array(np.where(y == 1, "yes", "no")), y, fold) == 1.0


def test_key_samples_merge_to_the_sample_of_all_rows() -> None:
    rng = np.random.default_rng(0)
    hashes = rng.integers(0, 2**64, 3000, dtype=np.uint64)
    rows = rng.choice(hashes, 20_000)
    for limit in (100, 10_000):
        whole = KeySample.of(rows, limit)
        merged = functools.reduce(
            lambda a, b: KeySample.merge([a, b]), (KeySample.of(p, limit) for p in np.split(rows, 5))
        )
        num = len(merged.hashes)
        assert merged.hashes.tolist() == whole.hashes[:num].tolist() and num > 0.9 * len(whole.hashes)
        assert merged.rows.tolist() == whole.rows[:num].tolist()
        assert merged.num_rows == 20_000
        assert merged.num_keys == pytest.approx(len(np.unique(rows)), rel=0 if limit > 3000 else 0.3)
    half = KeySample.of(np.unique(rows)[::2], 10_000)
    assert KeySample.of(rows, 10_000).found_in(half)[0] == pytest.approx(0.5, abs=0.001)
    assert half.found_in(KeySample.of(rows, 10_000)) == (1.0, 1.0)


def test_smallest_per_day_is_mergeable_and_drops_repeats() -> None:
    rng = np.random.default_rng(0)
    rank = rng.permutation(np.repeat(np.arange(500, dtype=np.uint64), 2))
    table = pa.table({"rank": rank, "day": (rank % 3).astype(np.int32)})
    parts = pa.concat_tables([smallest_per_day(table.slice(i * 250, 250), 20) for i in range(4)])
    expected = sorted((d, r) for d in range(3) for r in range(d, 60, 3))
    for found in (smallest_per_day(table, 20), smallest_per_day(parts, 20)):
        assert sorted(zip(found["day"].to_pylist(), found["rank"].to_pylist(), strict=True)) == expected


def test_merged_columns() -> None:
    one = {"rows": 3, "nulls": 1, "type": "int64", "min": 2, "max": 9, "sum": 11.0}
    two = {"rows": 2, "nulls": 2, "type": "string"}
    assert merge_columns([one, two]) == one | {"rows": 5, "nulls": 3, "type": "int64 | string"}
