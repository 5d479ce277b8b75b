"""Past counts against a loop over all events for every impression, and that a day never sees itself."""

from __future__ import annotations

import datetime as dt
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from gem.data.build import store_write
from gem.data.past import (
    AdValues,
    CountTable,
    DirectIndex,
    PastCounts,
    count_events,
    count_past,
    day_starts,
    num_signals,
    past_fields,
    past_matches,
)
from gem.data.schema import NUM_RESERVED, Field, Schema, Side
from tests.unit.data.random_store import DAY_MS, START_MS, Shape, write_store
from tests.unit.data.random_store import make_schema as store_schema
from tests.unit.model.synthetic import make_schema

Array = np.ndarray
Events = dict[str, Array]
SCHEMA = make_schema()
DAYS = ("2023-11-15", "2023-11-16", "2023-11-19")  # the 17th and 18th have no impressions
NUM_ADS = 9


def naive_counts(
    schema: Schema, events: Events, values: dict[str, list[int]], starts: list[int], shown: tuple[int, int, int]
) -> Array:
    """[M, S] of one impression (ad, surface, ms): every event that became known before its day, match by match."""
    ad, surface, now = shown
    begun = [s for s in starts if s <= now]
    out = np.zeros((len(past_matches(schema)), len(schema.kinds), 1 + len(schema.flags)))
    for e in range(len(events["ad"])):
        if not begun or events["known_ms"][e] >= begun[-1]:
            continue
        other, kind = int(events["ad"][e]), int(events["kind"][e]) - 1
        same = [True, surface >= NUM_RESERVED and int(events["surface"][e]) == surface, other == ad != 0]
        for name in past_fields(schema):
            same.append(values[name][ad] >= NUM_RESERVED and values[name][ad] == values[name][other])
        for m, matches in enumerate(same):
            if matches:
                out[m, kind, 0] += 1
                for f in range(len(schema.flags)):
                    out[m, kind, 1 + f] += int(events["flags"][e]) >> f & 1
    return out.reshape(len(out), -1)


def random_log(seed: int, num: int = 120) -> tuple[Events, dict[str, list[int]]]:
    """Events (some unknown ads, reserved surfaces, times right at the start of a day) and the values of the ads."""
    rng = np.random.default_rng(seed)
    starts = day_starts(DAYS, "UTC")
    known = starts[0] + rng.integers(-2 * DAY_MS, 8 * DAY_MS, num)
    ties = rng.random(num) < 0.3
    known[ties] = rng.choice(starts, int(ties.sum())) + rng.integers(-1, 2, int(ties.sum()))
    events = {
        "ad": rng.integers(0, NUM_ADS, num),
        "kind": rng.integers(1, 3, num).astype(np.uint8),
        "flags": rng.integers(0, 4, num).astype(np.uint16),
        "surface": rng.integers(0, 5, num).astype(np.int16),
        "known_ms": known,
    }
    return events, {f.name: rng.integers(0, 6, NUM_ADS).tolist() for f in SCHEMA.ad.fields}


def past_of(events: Events, values: dict[str, list[int]], schema: Schema = SCHEMA) -> PastCounts:
    ads, starts = AdValues.of(schema, lambda name: np.array(values[name]), NUM_ADS), day_starts(DAYS, "UTC")
    return PastCounts(dict(count_past(schema, events, ads, starts)), ads, starts)


def impressions(seed: int, num: int = 60) -> tuple[Array, Array, Array]:
    """Any ad and surface, also unknown ones; before the first day, at its start, between days and long after."""
    rng = np.random.default_rng(seed + 100)
    starts = day_starts(DAYS, "UTC")
    now = starts[0] + rng.integers(-DAY_MS, 9 * DAY_MS, num)
    now[: 3 * len(starts)] = np.concatenate([starts - 1, starts, starts + 1])
    return rng.integers(0, NUM_ADS, num), rng.integers(0, 5, num), now


@pytest.mark.parametrize("num", [0, 1, 120])
@pytest.mark.parametrize("seed", range(4))
def test_counts_are_those_of_a_loop_over_all_events(seed: int, num: int) -> None:
    events, values = random_log(seed, num)
    ad, surface, now = impressions(seed)
    got = past_of(events, values).at(ad, surface, now)
    starts = day_starts(DAYS, "UTC").tolist()
    shown = list(zip(ad.tolist(), surface.tolist(), now.tolist(), strict=True))
    expected = np.array([naive_counts(SCHEMA, events, values, starts, s) for s in shown])
    np.testing.assert_array_equal(got, expected)
    assert got.shape == (60, len(past_matches(SCHEMA)), num_signals(SCHEMA))
    assert got.dtype == np.float32
    if num == 120:
        assert (expected.sum((0, 2)) > 0).all(), "every match meets something"
        assert not got[now < starts[0]].any() and (now < starts[0]).any()
        assert not got[ad == 0, 2].any()
        assert not got[surface < NUM_RESERVED, 1].any()


@pytest.mark.parametrize("day", range(4))
def test_what_becomes_known_on_a_day_or_later_changes_nothing_for_it(day: int) -> None:
    events, values = random_log(7)
    ad, surface, _ = impressions(7)
    starts = day_starts(DAYS, "UTC")
    now = np.full(ad.size, starts[day]) + np.arange(ad.size) * 1000
    before = past_of(events, values).at(ad, surface, now)
    late = events["known_ms"] >= starts[day]
    assert (events["known_ms"] == starts[day]).any()
    changed = {k: v.copy() for k, v in events.items()}
    changed["ad"][late] = (changed["ad"][late] + 1) % NUM_ADS
    changed["flags"][late] ^= 3
    np.testing.assert_array_equal(past_of(changed, values).at(ad, surface, now), before)
    more = {k: np.concatenate([v, v[late], v[late]]) for k, v in events.items()}
    np.testing.assert_array_equal(past_of(more, values).at(ad, surface, now), before)
    # The same for one event that became known a moment before the day is seen.
    one = {k: np.append(v, v[:1]) for k, v in events.items()}
    one["known_ms"][-1] = starts[day] - 1
    after = past_of(one, values).at(ad, surface, now)
    np.testing.assert_array_equal(after[:, 0].sum(1) > before[:, 0].sum(1), True)


def test_counts_stand_still_within_a_day() -> None:
    events, values = random_log(3)
    past = past_of(events, values)
    start = int(day_starts(DAYS, "UTC")[1])
    ad, surface = np.full(3, 4), np.full(3, 3)
    got = past.at(ad, surface, np.array([start, start + DAY_MS // 2, start + DAY_MS - 1]))
    assert (got == got[0]).all() and got.any()


@pytest.mark.parametrize("seed", range(3))
def test_a_table_is_its_events_by_code_and_slot(seed: int) -> None:
    rng = np.random.default_rng(seed)
    code, slot = rng.integers(0, 8, 90), rng.integers(0, 5, 90)  # slot 4 is after the last start
    kind, bits = rng.integers(1, 4, 90), rng.integers(0, 4, 90)
    table = count_events(code, slot, (kind, bits), (3, 2, 4))
    assert (np.diff(table.keys) > 0).all()
    for c in range(10):
        for s in range(-1, 4):
            expected = np.zeros((3, 3))
            for e in range(90):
                if code[e] == c >= NUM_RESERVED and slot[e] <= s:
                    expected[kind[e] - 1] += [1, bits[e] & 1, bits[e] >> 1]
            np.testing.assert_array_equal(table.at(np.array([c]), np.array([s]))[0], expected.reshape(-1))


def test_an_empty_table_counts_nothing() -> None:
    nothing = np.zeros(0, np.int64)
    table = count_events(nothing, nothing, (nothing, nothing), (2, 1, 3))
    assert isinstance(table, CountTable) and table.sums.shape == (0, 4)
    np.testing.assert_array_equal(table.at(np.array([3, 50]), np.array([0, 2])), np.zeros((2, 4)))


def test_fields_that_are_counted_are_closed_ones_with_most_rows() -> None:
    sizes = {"a": 7, "b": 90, "c": 30, "d": 8, "e": 5, "f": 60}
    fields = [Field("ad_id", "ad_id", 999), Field("open", "open", 500, multi=True, hashes=2)]
    fields += [Field(n, n, rows, multi=n == "c") for n, rows in sizes.items()]
    schema = replace(SCHEMA, ad=Side(tuple(fields)))
    assert past_matches(schema) == ("everything", "surface", "ad", "b", "f", "c", "d", "a")


def test_days_start_at_local_midnight() -> None:
    shanghai = day_starts(("2022-05-06", "2022-05-04"), "Asia/Shanghai").tolist()
    assert shanghai == [int(dt.datetime(2022, 5, d, 16, tzinfo=dt.UTC).timestamp() * 1000) for d in (3, 5, 6)]
    assert day_starts((), "UTC").tolist() == [0]


def test_a_stores_counts_are_those_of_its_timelines(tmp_path: Path) -> None:
    shape = Shape(num_users=15, num_ads=12, past=4, seed=3)
    store, schema = write_store(tmp_path / "store", shape), store_schema(shape)
    t, rows = store.timelines(), store.impressions()
    ads, values = pq.ParquetFile(store.path / store_write.ADS).read(), {}
    for field in schema.ad.fields:
        column = ads[field.name].to_pylist()
        values[field.name] = [v[0] if v else 0 for v in column] if field.multi else column
    events = {n: getattr(t, n) for n in ("ad", "kind", "flags", "surface", "known_ms")}
    starts = [START_MS // DAY_MS * DAY_MS + d * DAY_MS for d in range(shape.num_days + 1)]
    assert starts[0] == START_MS and (events["known_ms"] == starts[1]).any(), "the log holds ties with a day's start"
    got = store.past.at(rows.ad, rows.surface, rows.time_ms)
    shown = zip(rows.ad.tolist(), rows.surface.tolist(), rows.time_ms.tolist(), strict=True)
    expected = np.array([naive_counts(schema, events, values, starts, s) for s in shown])
    np.testing.assert_array_equal(got, expected)
    assert (expected.sum((0, 2)) > 0).all()


@pytest.mark.parametrize("seed", range(4))
def test_a_log_that_is_too_large_for_row_numbers_is_searched_to_the_same_counts(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    events, values = random_log(seed)
    rng, starts = np.random.default_rng(seed), day_starts(DAYS, "UTC")
    ad, surface = rng.integers(0, NUM_ADS, 200), rng.integers(0, 5, 200)
    time = starts[0] + rng.integers(-3 * DAY_MS, 9 * DAY_MS, 200)
    direct = past_of(events, values).at(ad, surface, time)
    monkeypatch.setattr(DirectIndex, "MAX_CELLS", 0)
    assert np.array_equal(past_of(events, values).at(ad, surface, time), direct)
    assert direct.any()


@pytest.mark.parametrize(("day", "hours"), [("2022-10-30", 25), ("2022-03-27", 23), ("2022-06-01", 24)])
def test_the_last_day_ends_when_its_clocks_say_so(day: str, hours: int) -> None:
    first, after = day_starts([day], "Europe/Berlin").tolist()
    assert after - first == hours * 3_600_000
