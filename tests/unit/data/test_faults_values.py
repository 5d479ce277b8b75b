"""Faults in what a cell says: ids, local times, numbers that are none, labels, odd text (D5, D8, D13, D14, D15)."""

from __future__ import annotations

import datetime as dt
import math
import os
import subprocess
import sys
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from gem.errors import DataError
from gem.model.ranker import Ranker
from gem.training.data import StoreReader
from gem.training.objective import task_losses
from serving.spelling import entity_keys
from tests.unit.data.fault_log import (
    DAY_MS,
    HOUR_MS,
    SPEC,
    START_MS,
    build,
    fault_spec,
    good_shows,
    labels_of,
    put,
    reads,
    timelines,
)  # fmt: skip
from tests.unit.model.synthetic import MODEL

SHOWS = good_shows()
NOON = START_MS + DAY_MS + 12 * HOUR_MS


def batch_of(store):
    """All impressions in one batch; the reader refuses ids outside their tables."""
    imp = store.impressions()
    return StoreReader(store, store.timelines(), imp, 20).batch(np.arange(len(imp)))


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_d5_negative_and_huge_ids(tmp_path, kind):
    """Ids beside nulls come out as they went in, and no embedding row is anything but 0 or more."""
    users = (-1, 2**53 + 1, 2**63 - 1, -(2**63))
    ads = (-1, -2, 2**53 + 1, 2**53 + 3, 2**63 - 1)
    shows = [r | {"a": ads[r["a"] - 10]} for r in good_shows(users)]
    wrong = [shows[0] | {"show": 900, "u": None}, shows[1] | {"show": 901, "a": None}]
    raw = put(tmp_path / "raw")
    if kind == "parquet":
        put(raw, shows=[*shows, *wrong])
    else:
        lines = [",".join("" if r[c] is None else str(r[c]) for c in shows[0]) for r in (*shows, *wrong)]
        (raw / "shows.csv").write_text(",".join(shows[0]) + "\n" + "\n".join(lines) + "\n")
    record, store = build(raw, tmp_path / "store")
    assert record["quarantine_reasons"] == {"shows": {"null_ad": 1, "null_user": 1}}
    assert set(store.users.keys.to_pylist()) == {None, *users} and set(store.ads.keys.to_pylist()) == {None, *ads}
    for user in users:
        own = sorted((r["a"], r["t"] - START_MS, 1, r["y"]) for r in shows if r["u"] == user)
        assert sorted(timelines(store)[user]) == own and store.users.index_of(user) > 0
    assert store.users.index_of(2**53) == store.users.index_of(-3) == 0
    rows = store.schema.tables()
    tables = {f.name: f.table for s in (store.schema.user, store.schema.ad, store.schema.context) for f in s.fields}
    for name, ids in batch_of(store).lookups().items():
        assert int(ids.min()) >= 0 and int(ids.max()) < rows[tables[name]], name


@pytest.mark.parametrize(
    "times",
    [
        pa.array(["2024-03-10 01:30:00", "2024-03-10 03:30:00"]),
        pa.array(["2024-03-10T01:30:00-05:00", "2024-03-10T03:30:00-04:00"]),
        pa.array([NOON, NOON], pa.timestamp("ms")),
        pa.array([NOON, NOON], pa.timestamp("ms", "America/New_York")),
    ],
    ids=["naive text", "text of two offsets", "timestamp without zone", "timestamp with zone"],
)
@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_d8_naive_timezone_dst(tmp_path, times, kind):
    """Whatever is not a whole number of UTC is refused as a file, in either format; nothing of it is stored."""
    table = pa.Table.from_pylist(SHOWS[:2])
    table = table.set_column(table.column_names.index("t"), "t", times)
    raw = put(tmp_path / "raw")
    if kind == "parquet":
        put(raw, shows=table)
    else:
        lines = [",".join(str(v) for v in row.values()) for row in table.to_pylist()]
        (raw / "shows.csv").write_text(",".join(table.column_names) + "\n" + "\n".join(lines) + "\n")
    with pytest.raises(DataError, match=r'column "t".*(expected, got timestamp|cannot be read).*integer, UTC epoch'):
        build(raw, tmp_path / "store")
    assert not (tmp_path / "store" / "manifest.json").exists()


@pytest.mark.parametrize(("first", "hours"), [((2024, 3, 8), 23), ((2024, 11, 1), 25)])
def test_d8_days_over_a_change_of_the_clock(tmp_path, first, hours):
    """An impression an hour for five days: each has the local day that the zone database gives, the third is odd."""
    zone = ZoneInfo("America/New_York")
    start = int(dt.datetime(*first, tzinfo=zone).timestamp() * 1000)
    shows = [SHOWS[0] | {"show": i, "u": 1 + i % 2, "t": start + i * HOUR_MS} for i in range(5 * 24 - 1)]
    spec = fault_spec(impressions=SPEC["impressions"] | {"zone": zone.key})
    store = build(put(tmp_path / "raw", shows=shows), tmp_path / "store", spec)[1]
    imp = store.impressions()
    days = [imp.days[d] for d in imp.day]
    assert days == [dt.datetime.fromtimestamp(t / 1000, zone).date().isoformat() for t in imp.time_ms.tolist()]
    assert store.manifest["rows"]["impressions_by_day"][f"{first[0]}-{first[1]:02d}-{first[2] + 2:02d}"] == hours
    assert {int(i): int(c) for i, c in zip(imp.impression_id, imp.cut, strict=True)} == {i: i // 2 for i in range(119)}


def test_d13_nan_inf_dense(tmp_path):
    """No NaN, infinity or negative count reaches the model: masked, flagged as missing, counted; the loss is finite."""
    prices = {10: math.nan, 11: math.inf, 12: -math.inf, 13: -1.0, 14: -2.0, 15: 5.0, 16: 0.0, 17: None}
    lengths = [-1.0, -2.0, 3.0, None, 0.0, math.nan, math.inf]
    number = {"kind": "numeric", "transform": "log1p"}
    shows = [r | {"a": 10 + n % 8, "len": lengths[n % 7]} for n, r in enumerate(SHOWS)]
    spec = fault_spec(
        tables=SPEC["tables"] | {"ads": {"files": ["ads.parquet"]}},
        ads={"table": "ads", "key": "a", "min_count": 1, "features": [number | {"name": "price"}]},
        context={"features": [number | {"name": "len"}]},
    )
    raw = put(tmp_path / "raw", shows=shows, ads=pa.table({"a": list(prices), "price": list(prices.values())}))
    record, store = build(raw, tmp_path / "store", spec)
    kept = [r for r in shows if r["len"] is None or math.isfinite(r["len"])]
    assert record["quarantine_reasons"] == {"shows": {"nan_numeric": len(shows) - len(kept)}}
    negative = sum(r["len"] is not None and r["len"] < 0 for r in kept)
    assert record["repairs"] == {"nan:price": 1, "infinite:price": 2, "negative:price": 2, "negative:len": negative}
    ads = store.ads.rows(np.array([store.ads.index_of(a) for a in prices])).numeric
    missing = [a not in (15, 16) for a in prices]
    assert ads[:, 1].tolist() == [float(m) for m in missing] and bool(torch.isfinite(ads).all())
    assert ads[missing, 0].tolist() == [0.0] * 6, ads
    batch = batch_of(store)
    assert bool(torch.isfinite(batch.context.numeric).all())
    unknown = {r["show"] for r in kept if r["len"] is None or r["len"] < 0}
    flags = dict(zip(batch.impression_id.tolist(), batch.context.numeric[:, 1].tolist(), strict=True))
    assert {show for show, flag in flags.items() if flag} == unknown and set(flags) == {r["show"] for r in kept}
    logits = Ranker(store.schema, MODEL)(batch).logits
    assert bool(torch.isfinite(task_losses(logits, batch.labels, batch.mask, store.schema)).all())


def test_d14_bad_label(tmp_path):
    """What is neither 0, 1 nor empty costs its row; an empty label is unknown and teaches nothing."""
    wrong = [2, -1, 0.5, math.inf]
    rows = [SHOWS[0] | {"show": 900 + i, "t": NOON + i, "y": y} for i, y in enumerate([*wrong, None, math.nan])]
    shows = [r | {"y": float(r["y"])} for r in SHOWS]
    record, store = build(put(tmp_path / "raw", shows=[*shows, *rows]), tmp_path / "store")
    assert record["quarantine_reasons"] == {"shows": {"bad_label": 4}}
    labels = labels_of(store)
    assert set(labels) == {r["show"] for r in SHOWS} | {904, 905}
    assert labels[904][0] is labels[905][0] is None and {v[0] for v in labels.values()} == {0, 1, None}
    assert all(t - NOON + START_MS not in range(4) for _, t, _, _ in timelines(store)[1])
    batch = batch_of(store)
    logits = Ranker(store.schema, MODEL)(batch).logits.detach()
    loss = task_losses(logits, batch.labels, batch.mask, store.schema)
    unknown = batch.mask[:, 0] == 0
    assert int(unknown.sum()) == 2
    logits[unknown] += 7.0
    moved = task_losses(logits, batch.labels, batch.mask, store.schema)
    assert moved[0] == loss[0] and moved[1] != loss[1]  # that nothing was bought is known all the same


ODD = ("e\u0301", "\u00e9", "", "-7", "🙂", "nu\x00l", "x" * 10_000, "é" * 128, "广告")


def odd_store(folder):
    """Users of odd spelling, one file for each; the hash of the store says all about it."""
    raw = put(folder / "raw", shows__0=[r | {"a": f"ad {r['a']}"} for r in good_shows(("a", "b"))])
    for n, user in enumerate(ODD):
        show = good_shows(("a",))[0] | {"show": 900 + n, "u": user, "t": NOON + n * 1000, "a": f"ad {user[:9]}"}
        put(raw, **{f"shows__{n + 1}": [show]})
    return build(raw, folder / "store")


def test_d15_unicode_ids(tmp_path):
    """One user whatever the spelling of its accent, in the log, in another process, and when a request asks for it."""
    record, store = odd_store(tmp_path)
    assert record["quarantine_reasons"] == {"shows": {"null_user": 1, "bad_id": 1, "id_too_long": 1}}
    assert set(store.users.keys.to_pylist()) == {None, "a", "b", "\u00e9", "-7", "🙂", "é" * 128, "广告"}
    assert [t - (NOON - START_MS) for _, t, _, _ in timelines(store)["\u00e9"]] == [0, 1000]
    for spelt, asked in (("\u00e9", "e\u0301"), ("-7", -7), ("广告", " 广告 ")):
        (key,) = entity_keys(store.users, [asked])
        assert str(key) == spelt and store.users.index_of(key) == store.users.index_of(spelt) > 0
    code = (
        "from pathlib import Path; from tests.unit.data.test_faults_values import odd_store; "
        f"print(odd_store(Path({str(tmp_path / 'other')!r}))[1].hash)"
    )
    child = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert child.stdout.split() == [store.hash]


def test_times_before_2000_and_in_the_future(tmp_path):
    """Rows of an impossible time are set aside; none is in a history, and none moves the test day."""
    far = [0, -5, 946_684_799_999, 4_102_444_800_000, 2**62]
    ahead = int(dt.datetime.now(dt.UTC).timestamp() * 1000) + 2 * DAY_MS
    shows = [*SHOWS, *(SHOWS[0] | {"show": 900 + i, "t": t} for i, t in enumerate([*far, ahead]))]
    posts = [{"id": i, "u": 1, "a": 10, "t": t} for i, t in enumerate([*far, ahead, NOON])]
    record, store = build(put(tmp_path / "raw", shows=shows, posts=posts), tmp_path / "store", max_quarantine_share=0.9)
    found = {"future_time": 1, "time_out_of_range": 5}
    assert record["quarantine_reasons"] == {"posts": found, "shows": found}
    assert set(reads(store)) == {r["show"] for r in SHOWS} and store.split.test_day == "2024-03-07"
    assert [t for _, t, k, _ in timelines(store)[1] if k == 2] == [NOON - START_MS]
    assert pq.read_table(tmp_path / "store/quarantine/posts-00000.parquet").num_rows == 6
