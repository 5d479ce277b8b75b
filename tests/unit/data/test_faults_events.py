"""Faults in what happened when: ties, repeats, nobody's rows, clocks, users that are no people (D2 to D17)."""

from __future__ import annotations

import itertools
import json
import tracemalloc

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gem.data.ingest.canonical import check_spec
from gem.errors import SpecError
from gem.training.data import StoreReader
from tests.unit.data.fault_log import (
    DAY_MS,
    HOUR_MS,
    START_MS,
    build,
    data_files,
    fault_spec,
    good_shows,
    labels_of,
    put,
    reads,
    timelines,
)  # fmt: skip

SHOWS = good_shows()
NOON = START_MS + DAY_MS + 12 * HOUR_MS
POST = {"id": 1, "u": 1, "a": 11, "t": NOON}


def show(number: int, user: int, time_ms: int, clicked: int = 0) -> dict:
    return {"show": number, "u": user, "a": 10, "tab": "feed", "t": time_ms, "y": clicked}


def test_d2_tied_timestamps(tmp_path):
    """Three posts and three impressions of one request at one ms: one order, whatever file they come in."""
    posts = [POST | {"id": i, "a": 11 + i} for i in range(3)]
    tied = [show(100 + i, 1, NOON, clicked=1) for i in range(3)]
    later = show(200, 1, NOON + 1)
    made = []
    for n, order in enumerate(itertools.permutations(range(3))):
        files = {f"posts__{at}": [posts[i]] for at, i in enumerate(order)}
        shows = [*SHOWS, later, *(tied[i] for i in order)]
        made.append(build(put(tmp_path / f"raw{n}", shows=shows, **files), tmp_path / f"store{n}")[1])
    for other in made[1:]:
        assert data_files(other) == data_files(made[0])
    seen = reads(made[0])
    assert seen[100] == seen[101] == seen[102] and all(t < NOON - START_MS for _, t, _, _ in seen[100])
    fresh = seen[200][len(seen[100]) :]
    assert sorted(fresh) == sorted(
        [(10, NOON - START_MS, 1, 1)] * 3 + [(11 + i, NOON - START_MS, 2, 0) for i in range(3)]
    )


def test_d3_duplicate_events(tmp_path):
    """The same id in two days' files is one event; with another payload it is set aside with its reason."""
    first = [POST, POST | {"id": 2, "t": NOON + 5}, POST | {"id": "2", "u": 2}]
    clean = put(
        tmp_path / "clean", shows=SHOWS, posts__1=pa.Table.from_pylist([r | {"id": int(r["id"])} for r in first])
    )
    again = [POST, POST, POST | {"id": 2, "t": NOON + DAY_MS}, POST | {"id": 2, "a": 14, "t": NOON + 5}]
    raw = put(tmp_path / "raw", shows=SHOWS, posts__1=pq.read_table(clean / "posts-1.parquet"), posts__2=again)
    record, store = build(raw, tmp_path / "store")
    assert timelines(store) == timelines(build(clean, tmp_path / "other")[1])
    assert record["rows"]["duplicate_events"] == 2 and record["rows"]["conflicting_events"] == 2
    assert record["quarantine_reasons"] == {"posts": {"conflicting_duplicate": 2}}
    aside = [json.loads(r) for r in pq.read_table(tmp_path / "store/quarantine/posts-00000.parquet")["row"].to_pylist()]
    assert {(r["ad"], r["time_ms"]) for r in aside} == {(11, NOON + DAY_MS), (14, NOON + 5)}


def test_d3_an_id_counts_within_its_user_and_kind_and_must_be_there(tmp_path):
    posts = pa.Table.from_pylist([POST, POST | {"u": 2}, POST | {"id": None}, POST | {"id": None}])
    record, store = build(put(tmp_path / "raw", shows=SHOWS, posts=posts), tmp_path / "store")
    assert record["quarantine_reasons"] == {"posts": {"null_id": 2}} and record["rows"]["duplicate_events"] == 0
    assert [sum(k == 2 for _, _, k, _ in timelines(store)[u]) for u in (1, 2)] == [1, 1]
    events = fault_spec().model_dump()["events"]
    for i, change, why in ((0, {}, "one per impression"), (1, {"list_before": {"column": "t"}, "time": None}, "lists")):
        wrong = [e | change | {"id": "show"} if n == i else e for n, e in enumerate(events)]
        with pytest.raises(SpecError, match=rf"events\.{i}\.id: .*{why}"):
            check_spec(fault_spec(events=wrong), {})


def test_d3_an_event_delivered_again_in_the_next_window(tmp_path):
    """Windows give what one build gives: the repeat is counted, what says something else is set aside."""
    raw = put(tmp_path / "raw", shows__1=SHOWS, posts__1=[POST, POST | {"id": 2}])
    build(raw, tmp_path / "one")
    again = [POST, POST | {"id": 2, "a": 14, "t": NOON + DAY_MS}, POST | {"id": 7, "t": NOON + 3 * DAY_MS}]
    put(raw, shows__2=good_shows(num_days=5)[len(SHOWS) :], posts__2=again)
    (record, grown), (other, anew) = (
        build(raw, tmp_path / "two", parent=tmp_path / "one"),
        build(raw, tmp_path / "anew"),
    )
    assert timelines(grown) == timelines(anew) and reads(grown) == reads(anew)
    assert [t - NOON + START_MS for _, t, k, _ in timelines(grown)[1] if k == 2] == [0, 0, 3 * DAY_MS]
    for found in (record, other):
        assert found["rows"]["duplicate_events"] == found["rows"]["conflicting_events"] == 1
        assert found["quarantine_reasons"] == {"posts": {"conflicting_duplicate": 1}}


def test_d4_null_user_id(tmp_path):
    """Rows without a user are counted and set aside; nobody's history is not made of them."""
    nobody = [show(900 + i, 1, NOON + i) | {"u": None} for i in range(3)]
    posts = [POST, POST | {"id": 2, "u": None}]
    raw = put(tmp_path / "raw", shows=[*SHOWS, *nobody], posts=posts)
    (raw / "shows-more.csv").write_text("show,u,a,tab,t,y\n" + f"950,,10,feed,{NOON},1\n951,nan,10,feed,{NOON},1\n")
    record, store = build(raw, tmp_path / "store")
    assert record["quarantine_reasons"] == {"posts": {"null_user": 1}, "shows": {"null_user": 5}}
    assert store.users.keys.to_pylist() == [None, 1, 2, 3, 4] or set(store.users.keys.to_pylist()[1:]) == {1, 2, 3, 4}
    assert timelines(store)[None] == [] and int((store.impressions().user == 0).sum()) == 0
    assert set(reads(store)) == {r["show"] for r in SHOWS}


def buy(number: int, at: int, user: int = 1) -> dict:
    return {"show": number, "u": user, "a": 10, "t": at}


@pytest.mark.parametrize("text", [False, True])
def test_d7_an_outcome_before_its_impression(tmp_path, text):
    """Within the bound it counts as at the impression; beyond it is no label. Its own impression never reads it."""
    shown = [show(n, 1, NOON + n * HOUR_MS, clicked=1) for n in (100, 101, 102)]
    last = show(200, 1, NOON + 110 * HOUR_MS)
    t = {r["show"]: r["t"] for r in shown}
    buys = [buy(100, t[100] - 1000), buy(101, t[101] - 3 * DAY_MS), buy(102, t[102] + 1), buy(777, NOON)]
    if text:
        shown, buys = ([r | {"show": f"s{r['show']}"} for r in rows] for rows in (shown, buys))
    spec = fault_spec(impressions=fault_spec().model_dump()["impressions"] | {"id": None}) if text else fault_spec()
    shows = [r | {"show": f"s{r['show']}"} for r in (*SHOWS, last)] if text else [*SHOWS, last]
    record, store = build(put(tmp_path / "raw", shows=[*shows, *shown], buys=buys), tmp_path / "store", spec)
    imp = store.impressions()
    number = {r["t"]: int(str(r["show"]).strip("s")) for r in (*shows, *shown) if r["u"] == 1}
    mine = [
        i for i in range(len(imp)) if int(imp.time_ms[i]) in number and store.users.keys[int(imp.user[i])].as_py() == 1
    ]
    by_number = {number[int(imp.time_ms[i])]: int(imp.impression_id[i]) for i in mine}
    won = labels_of(store)
    assert [won[by_number[n]] for n in (100, 101, 102)] == [(1, 1), (1, 0), (1, 1)]
    assert record["repairs"] == {"clamped_outcome:conversion": 1, "outcome_before_impression:conversion": 1}
    seen = reads(store)
    bought = {b["t"] - START_MS for b in buys}
    for n, at in t.items():
        own = buys[n - 100]["t"] - START_MS
        assert ((10, own, 3, 0) not in seen[by_number[n]] and at > own) or own == at + 1 - START_MS
    assert {x[1] for x in seen[by_number[200]] if x[2] == 3} == bought


def test_d7_an_outcome_that_comes_a_window_late_is_not_read_by_its_impression(tmp_path):
    """The impression stands in the store; the purchase of a skewed clock is delivered with the next day."""
    shown = show(100, 1, NOON + 5, clicked=1)
    raw = put(tmp_path / "raw", shows__1=[*SHOWS, shown], buys__1=[buy(0, START_MS + 7 * HOUR_MS)])
    build(raw, tmp_path / "one")
    put(raw, shows__2=good_shows(num_days=5)[len(SHOWS) :], buys__2=[buy(100, NOON), buy(0, NOON - 7)])
    grown, anew = build(raw, tmp_path / "two", parent=tmp_path / "one")[1], build(raw, tmp_path / "anew")[1]
    assert reads(grown) == reads(anew) and labels_of(grown) == labels_of(anew)
    assert labels_of(grown)[100] == (1, 1)
    assert [x[1] for x in reads(grown)[100] if x[2] == 3] == [7 * HOUR_MS, NOON - 7 - START_MS]


def test_d7_an_event_of_tomorrow_is_in_no_history(tmp_path):
    """A day's file with times beyond that day: a little is moved back to the day's end, more is set aside."""
    raw = tmp_path / "raw"
    for d in range(4):
        day = [r for r in SHOWS if (r["t"] - START_MS) // DAY_MS == d]
        end = START_MS + (d + 1) * DAY_MS
        ahead = [show(500 + 10 * d, 1, end + 60_000), show(501 + 10 * d, 1, end + 20 * HOUR_MS)]
        put(raw)
        (raw / f"day=2024-03-{4 + d:02d}").mkdir()
        pq.write_table(pa.Table.from_pylist([*day, *ahead]), raw / f"day=2024-03-{4 + d:02d}" / "shows.parquet")
    record, store = build(raw, tmp_path / "store")
    assert record["quarantine_reasons"] == {"shows": {"future_time": 4}} and record["repairs"] == {"clamped_time": 4}
    assert set(reads(store)) == {r["show"] for r in SHOWS} | {500, 510, 520, 530}
    at = dict(zip(store.impressions().impression_id.tolist(), store.impressions().time_ms.tolist(), strict=True))
    assert [at[500 + 10 * d] for d in range(4)] == [START_MS + (d + 1) * DAY_MS - 1 for d in range(4)]


def test_d9_late_backfilled_feature(tmp_path):
    """An event of before T that arrived after T is not there at T, in one build as in windows."""
    events = [
        e | ({"ingested": {"column": "in"}} if e["kind"] == "post" else {}) for e in fault_spec().model_dump()["events"]
    ]
    spec = fault_spec(events=events)
    late = POST | {"t": START_MS + HOUR_MS, "in": NOON + DAY_MS}
    raw = put(tmp_path / "raw", shows__1=SHOWS, posts__1=[POST | {"id": 9, "in": NOON}])
    build(raw, tmp_path / "one", spec)
    put(raw, shows__2=good_shows(num_days=5)[len(SHOWS) :], posts__2=[late, POST | {"id": 9, "in": NOON + 2 * DAY_MS}])
    grown, anew = build(raw, tmp_path / "two", spec, tmp_path / "one")[1], build(raw, tmp_path / "anew", spec)[1]
    assert reads(grown) == reads(anew) and timelines(grown) == timelines(anew)
    for r in (r for r in good_shows(num_days=5) if r["u"] == 1):
        seen = [x for x in reads(grown)[r["show"]] if x[2] == 2]
        known = [(11, HOUR_MS, 2, 0)] if r["t"] > NOON + DAY_MS else []
        known += [(11, NOON - START_MS, 2, 0)] if r["t"] > NOON else []
        assert sorted(seen) == sorted(known)


def heavy(user: int, size: int, days: int = 4) -> list[dict]:
    """Posts of one user, two to a second."""
    return [
        {"id": i, "u": user, "a": 10 + i % 5, "t": START_MS + (i % days) * DAY_MS + i // days * 500}
        for i in range(size)
    ]


def test_d16_history_50k(tmp_path):
    """The reader takes the last events only, in bounded memory; other users are as they are without that user."""
    own = [show(1000 + i, 99, START_MS + 3 * DAY_MS + 20 * HOUR_MS + i) for i in range(50)]
    light = build(put(tmp_path / "light", shows=[*SHOWS, *own], posts=[POST]), tmp_path / "small")[1]
    posts = [POST, *heavy(99, 50_000)]
    full = put(tmp_path / "raw", shows=[*SHOWS, *own], posts=posts)
    record, store = build(full, tmp_path / "big", max_rows_per_user_day=20_000)
    assert record["rows"]["capped_events"] == 0 and store.timelines().lengths().max() == 50_050
    theirs = [k for k in (1, 2, 3, 4)]
    assert [timelines(store)[u] for u in theirs] == [timelines(light)[u] for u in theirs]
    batches = []
    for found in (store, light):
        imp = found.impressions()
        at = np.flatnonzero(np.isin(imp.user, [found.users.index_of(u) for u in theirs]))
        assert [found.users.index_of(u) for u in theirs] == [store.users.index_of(u) for u in theirs]
        batches.append(StoreReader(found, found.timelines(), imp, 100).batch(at))
    for name in ("ad", "kind", "flags", "time_ms", "offsets"):
        assert getattr(batches[0].timeline, name).tolist() == getattr(batches[1].timeline, name).tolist()
    imp = store.impressions()
    at = np.flatnonzero(imp.user == store.users.index_of(99))
    reader = StoreReader(store, store.timelines(), imp, 100)
    tracemalloc.start()
    batch = reader.batch(at)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 << 20 and len(batch.timeline.ad) <= 150
    last = sorted(p["t"] for p in posts if p["u"] == 99)[-100:]
    first_cut = int(batch.cut[0])
    assert batch.timeline.time_ms[first_cut - 100 : first_cut].tolist() == last


def test_d16_rows_of_a_user_and_a_day_are_capped(tmp_path):
    """The first so many of a day stay, in whatever order they come; the rest is counted and the user flagged."""
    posts = heavy(99, 4000)
    made = []
    for n, rows in enumerate((posts, posts[::-1])):
        raw = put(tmp_path / f"raw{n}", shows=SHOWS, posts=rows)
        made.append(build(raw, tmp_path / f"store{n}", max_rows_per_user_day=300))
    assert data_files(made[0][1]) == data_files(made[1][1])
    record, store = made[0]
    assert record["rows"]["capped_events"] == 4 * 700
    kept = sorted(t - START_MS for d in range(4) for t in sorted(p["t"] for p in posts[d::4])[:300])
    assert [t for _, t, _, _ in timelines(store)[99]] == kept
    flagged = {u["user"]: u for u in store.manifest["hot_users"]}
    assert flagged["99"]["capped"] == 2800 and flagged["99"]["events"] == 1200 and flagged["99"]["share"] > 0.9


def test_d17_hot_user_bot(tmp_path):
    """A user with 30 % of all clicks in bursts of ten a second is named with its share and its peak."""
    shows = good_shows(tuple(range(1, 41)))
    clicks = sum(r["y"] for r in shows)
    bot = [show(5000 + i, 77, START_MS + i // 10 * 60_000 + i % 10 * 90, clicked=1) for i in range(clicks * 3 // 7)]
    raw = put(tmp_path / "raw", shows=[*shows, *bot])
    record = build(raw, tmp_path / "store")[0]
    (found,) = record["hot_users"]
    assert found["user"] == "77" and found["peak_per_s"] == 10 and found["capped"] == 0
    assert found["share"] == pytest.approx(len(bot) / (len(bot) + len(shows)), abs=1e-3) and found["events"] == len(bot)
    assert len(bot) / (len(bot) + clicks) == pytest.approx(0.3, abs=0.01)
    late = [show(9000 + i, 78, START_MS + 4 * DAY_MS + i * 100) for i in range(300)]
    put(raw, shows__2=[*good_shows(tuple(range(1, 41)), 5)[len(shows) :], *late])
    grown = build(raw, tmp_path / "two", parent=tmp_path / "store")[0]["hot_users"]
    assert {u["user"]: u["peak_per_s"] for u in grown} == {"77": 10, "78": 10}
    assert {u["user"]: u["share"] for u in grown}["78"] == pytest.approx(300 / 380, abs=1e-3)  # of its own window


def test_d17_a_list_without_times_is_no_burst(tmp_path):
    """The times within a stored history are made up, a millisecond apart."""
    users = tuple(range(1, 41))
    lists = [{"u": u, "seq": list(range(10, 40)), "t": START_MS - HOUR_MS} for u in users]
    before = {"kind": "before", "table": "lists", "user": "u", "ad": "seq", "list_before": {"column": "t"}}
    raw = fault_spec().model_dump()
    spec = fault_spec(tables=raw["tables"] | {"lists": {"files": ["lists*"]}}, events=[*raw["events"], before])
    record, store = build(put(tmp_path / "raw", shows=good_shows(users), lists=lists), tmp_path / "store", spec)
    assert record["hot_users"] == [] and len(timelines(store)[1]) == 30 + 8


def test_one_user_with_half_of_all_events(tmp_path):
    shows = good_shows(tuple(range(1, 31)))
    half = [show(5000 + i, 0, START_MS + i * (4 * DAY_MS // len(shows)) + 7) for i in range(len(shows))]
    record, store = build(put(tmp_path / "raw", shows=[*shows, *half]), tmp_path / "store", num_shards=4)
    assert record["rows_out"] == 2 * len(shows) and [u["user"] for u in record["hot_users"]] == ["0"]
    cuts = {int(i): int(c) for i, c in zip(store.impressions().impression_id, store.impressions().cut, strict=True)}
    assert [cuts[r["show"]] for r in half] == list(range(len(half)))
