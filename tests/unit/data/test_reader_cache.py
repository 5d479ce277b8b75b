"""The mapped arrays of a store: what they hold against a naive reading of the files, and how they come and go."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gem.data import reader_cache
from gem.data.batch import EntityRows
from gem.data.build import store_write
from gem.data.reader_build import EVENT_COLUMNS, ArrayWriter
from gem.data.store import FeatureStore
from gem.errors import StoreError
from gem.training.data import StoreReader
from tests.unit.data.random_store import Shape, reopened, write_store

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> FeatureStore:
    return write_store(tmp_path_factory.mktemp("made") / "store")


@pytest.fixture
def store(made: FeatureStore, tmp_path: Path) -> FeatureStore:
    """A store of one's own, without a cache."""
    shutil.copytree(made.path, tmp_path / "store")
    return reopened(tmp_path / "store", dict(made.manifest), made.schema)


def rows_of(store: FeatureStore, kind: str) -> list[dict[str, Any]]:
    """Every stored row, file by file; `before` is the oldest partition."""
    files = sorted(f for f in store.manifest["files"] if f.startswith(kind))
    files.sort(key=lambda f: "day=before" not in f)
    rows = []
    for file in files:
        rows += [{"day": file.split("/")[1][4:], **r} for r in pq.ParquetFile(store.path / file).read().to_pylist()]
    return rows


def caches(store: FeatureStore) -> list[str]:
    return sorted(p.name for p in (store.path.parent / ".readers").iterdir() if p.name != ".locks")


def test_timelines_are_each_users_events_in_file_order(made: FeatureStore) -> None:
    got, rows, num_users = made.timelines(), rows_of(made, "timelines"), len(made.users)
    assert len(got.ad) == len(rows) == made.manifest["rows"]["events"] and len(got.offsets) == num_users + 1
    for user in range(num_users):
        own = slice(got.offsets[user], got.offsets[user + 1])
        for name in EVENT_COLUMNS:
            assert getattr(got, name)[own].tolist() == [r[name] for r in rows if r["user"] == user], (user, name)
        assert (np.diff(got.known_ms[own]) >= 0).all()


@pytest.mark.parametrize("days", [None, [0], [1, 2], [2, 0], [1, 1], [0, 2]])
def test_impressions_of_any_days_are_the_stored_rows_in_order(made: FeatureStore, days: list[int] | None) -> None:
    wanted = made.days if days is None else [made.days[d] for d in days]
    got, rows = made.impressions(None if days is None else wanted), rows_of(made, "impressions")
    rows = [r | {"number": n} for n, day in enumerate(wanted) for r in rows if r["day"] == day]
    assert got.days == tuple(wanted) and got.day.tolist() == [r["number"] for r in rows]
    for name in ("impression_id", "user", "ad", "time_ms", "cut", "surface"):
        assert getattr(got, name).tolist() == [r[name] for r in rows], name
    labels = [[r["label_click"], r["label_conversion"]] for r in rows]
    assert got.labels.tolist() == [[float(x == 1) for x in row] for row in labels]
    assert got.mask.tolist() == [[float(x >= 0) for x in row] for row in labels]
    assert got.true["click"].tolist() == [r["true_click"] for r in rows]
    some = got.take(np.arange(len(got))[::-3])
    for imp, at in ((got, rows), (some, rows[::-3])):
        check_context(imp.context_rows(np.arange(len(imp))), at)
    assert got.context.field("hour").size >= len(got)


def check_context(got: EntityRows, rows: list[dict[str, Any]]) -> None:
    ids = {n: v.tolist() for n, v in got.ids.items()}
    assert ids["surface"] == [r["surface"] for r in rows]
    assert ids["hour"] == [r["ctx_hour"] for r in rows] and ids["device"] == [r["ctx_device"] for r in rows]
    ends = got.offsets["words"].tolist()
    assert [ids["words"][a:b] for a, b in itertools.pairwise(ends)] == [r["ctx_words"] for r in rows]
    slot = [[0.0, 1.0] if r["ctx_slot"] != r["ctx_slot"] else [r["ctx_slot"], 0.0] for r in rows]
    assert got.numeric.tolist() == slot and got.vectors.tolist() == [r["ctx_page"] for r in rows]


@pytest.mark.parametrize("max_history", [1, 4, 100])
def test_batches_from_the_maps_hold_what_a_naive_reading_finds(made: FeatureStore, max_history: int) -> None:
    timelines, imp = made.timelines(), made.impressions(made.days[1:])
    users, ads = (pq.read_table(made.path / f).to_pylist() for f in (store_write.USERS, store_write.ADS))
    events: dict[int, list[dict[str, Any]]] = {}
    for row in rows_of(made, "timelines"):
        events.setdefault(row["user"], []).append(row)
    shown = {r["impression_id"]: r for r in rows_of(made, "impressions")}
    at = np.random.default_rng(max_history).permutation(len(imp))[:70]
    batch = StoreReader(made, timelines, imp, max_history).batch(at)
    assert sorted(batch.impression_id.tolist()) == sorted(imp.impression_id[at].tolist())
    towns, ad_ids, brands = batch.users.ids["town"].tolist(), batch.ads.ids["ad_id"].tolist(), batch.ads.ids["brand"]
    ends = batch.ads.offsets["tags"].tolist()
    tags = [batch.ads.ids["tags"][a:b].tolist() for a, b in itertools.pairwise(ends)]
    for n, number in enumerate(batch.impression_id.tolist()):
        want, user, ad = shown[number], int(batch.user_of[n]), int(batch.ad_of[n])
        assert towns[user] == users[want["user"]]["town"] and ad_ids[ad] == want["ad"] + 3
        assert brands[ad] == ads[want["ad"]]["brand"] and tags[ad] == ads[want["ad"]]["tags"]
        known = [e for e in events.get(want["user"], []) if e["known_ms"] < want["time_ms"]]
        assert want["cut"] == len(known)
        end = int(batch.timeline.offsets[user]) + int(batch.cut[n])
        read = slice(end - len(known[-max_history:]), end)
        assert read.start >= int(batch.timeline.offsets[user])
        for name in ("kind", "flags", "surface", "dwell", "time_ms"):
            assert getattr(batch.timeline, name)[read].tolist() == [e[name] for e in known[-max_history:]], name
        assert [ad_ids[a] - 3 for a in batch.timeline.ad[read].tolist()] == [e["ad"] for e in known[-max_history:]]


def test_neighbouring_days_are_read_only_parts_of_one_map(made: FeatureStore) -> None:
    every, last = made.impressions(), made.impressions(made.days[1:])
    assert not last.user.flags.writeable and not made.timelines().ad.flags.writeable
    assert last.impression_id[0] == every.impression_id[-len(last)] and last.rows is None
    assert not last.labels.flags.owndata and not last.context.ids.flags.owndata


def test_a_built_cache_is_found_by_the_next_process_and_partitions_are_read_no_more(store: FeatureStore) -> None:
    first = store.timelines().ad.tolist()
    assert caches(store) == [store.hash[:16]]
    shutil.rmtree(store.path / "timelines")
    again = reopened(store.path, dict(store.manifest), store.schema)
    assert again.timelines().ad.tolist() == first


def truncate(folder: Path) -> None:
    file = folder / "timelines" / "ad.npy"
    file.write_bytes(file.read_bytes()[:-1])


def forget_array(folder: Path) -> None:
    (folder / "impressions" / "mask.npy").unlink()


def tear(folder: Path) -> None:
    file = folder / "cache.json"
    file.write_text(file.read_text()[:-5])


def outdate(folder: Path) -> None:
    file = folder / "cache.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"version": 0}))


def empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


@pytest.mark.parametrize("damage", [truncate, forget_array, tear, outdate, empty])
def test_a_damaged_cache_is_built_again_also_while_another_holds_it(
    store: FeatureStore, damage: Callable[[Path], None]
) -> None:
    held = store.timelines()
    first = held.kind.tolist()
    damage(store.path.parent / ".readers" / store.hash[:16])
    again = reopened(store.path, dict(store.manifest), store.schema)
    assert again.timelines().kind.tolist() == first and len(again.impressions()) == len(rows_of(store, "impressions"))
    assert caches(store) == [store.hash[:16]]


def test_of_two_at_once_one_builds_and_the_other_waits(store: FeatureStore, monkeypatch: pytest.MonkeyPatch) -> None:
    builds: list[int] = []
    build = reader_cache.build_arrays

    def slow(*args: Any) -> dict[str, int]:
        builds.append(1)
        time.sleep(0.1)
        return build(*args)

    monkeypatch.setattr(reader_cache, "build_arrays", slow)
    results: list[int] = []

    def read() -> None:
        results.append(len(reopened(store.path, dict(store.manifest), store.schema).timelines().ad))

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert results == [store.manifest["rows"]["events"]] * 3 and len(builds) == 1


CHILD = """
import json, sys
from pathlib import Path
from tests.unit.data.random_store import Shape, make_schema, reopened
store = Path(sys.argv[1])
found = reopened(store, json.loads((store / "manifest.json").read_text()), make_schema(Shape()))
print("ready", flush=True)
sys.stdin.readline()
print(len(found.timelines().ad), int(found.impressions().impression_id.sum()))
"""


def test_two_processes_build_at_once(store: FeatureStore) -> None:
    (store.path / "manifest.json").write_text(json.dumps(store.manifest))
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'platform'}:{ROOT}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", CHILD, str(store.path)]
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True, bufsize=1
    )
    assert child.stdin is not None and child.stdout is not None and child.stdout.readline() == "ready\n"
    child.stdin.write("go\n")
    mine = len(store.timelines().ad)
    theirs = child.communicate(timeout=60)[0].split()
    total = sum(r["impression_id"] for r in rows_of(store, "impressions"))
    assert theirs == [str(store.manifest["rows"]["events"]), str(total)] and mine == int(theirs[0])
    assert int(store.impressions().impression_id.sum()) == total
    assert caches(store) == [store.hash[:16]]


def grown(store: FeatureStore, number: int) -> FeatureStore:
    """Another version of the store: one more file of events, on a later day."""
    file = store_write.paths_of(store.manifest["files"], "timelines")[-1]
    table = pq.ParquetFile(store.path / file).read()
    later = pa.array(table["known_ms"].to_numpy() + 10**10 * number)
    table = table.set_column(table.column_names.index("known_ms"), "known_ms", later)
    relative = store_write.partition_path("timelines", f"2024-01-{number:02d}", 0)
    entry = store_write.write_table(store.path, relative, table)
    files = {**store.manifest["files"], relative: entry}
    return reopened(store.path, {**store.manifest, "files": files}, store.schema)


def test_an_appended_store_gets_a_cache_of_its_own_and_the_oldest_unused_ones_go(store: FeatureStore) -> None:
    before = len(store.timelines().ad)
    second = grown(store, 1)
    assert len(second.timelines().ad) > before
    third = grown(second, 2)
    third.timelines()
    keys = [s.hash[:16] for s in (store, second, third)]
    assert caches(store) == sorted(keys), "the oldest is in use"
    assert store.timelines().offsets[-1] == before
    del store._arrays
    fourth = grown(third, 3)
    fourth.timelines()
    assert caches(store) == sorted([keys[1], keys[2], fourth.hash[:16]]), "nobody reads the first any more"


def test_leftovers_of_builders_that_died_go(store: FeatureStore) -> None:
    home = store.path.parent / ".readers"
    for name in (f"{store.hash[:16]}.building", "0123456789abcdef.building", "0123456789abcdef.removed-77"):
        (home / name / "timelines").mkdir(parents=True)
    store.timelines()
    assert caches(store) == [store.hash[:16]]


def test_where_nothing_can_be_written_beside_the_store_the_temp_folder_serves(
    store: FeatureStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temp"))
    (store.path.parent / ".readers").write_text("no folder")
    assert len(store.timelines().ad) == store.manifest["rows"]["events"]
    assert list((tmp_path / "temp").glob(f"gem-readers-{os.getuid()}/*/{store.hash[:16]}/timelines/ad.npy"))
    shutil.move(tmp_path / "temp" / f"gem-readers-{os.getuid()}", tmp_path / "moved")
    (tmp_path / "temp" / f"gem-readers-{os.getuid()}").symlink_to(tmp_path / "moved")
    with pytest.raises(StoreError, match=r"gem-readers-\d+ \(belongs to another user\)"):
        reopened(store.path, dict(store.manifest), store.schema).timelines()
    (tmp_path / "blocked").write_text("no folder")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "blocked"))
    again = reopened(store.path, dict(store.manifest), store.schema)
    with pytest.raises(StoreError, match=r"no place for the arrays training reads: .*\.readers .*make one of them wri"):
        again.timelines()


@pytest.mark.parametrize("where", ["reserve", "append"])
def test_a_full_disk_says_so_and_leaves_nothing(
    store: FeatureStore, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ArrayWriter, where, full)
    with pytest.raises(StoreError, match=r"no space left for the arrays training reads, in .*GiB free.*run again"):
        store.timelines()
    assert caches(store) == []
    monkeypatch.undo()
    assert len(store.timelines().ad) == store.manifest["rows"]["events"]


def changed(store: FeatureStore, change: Callable[[pa.Table], pa.Table]) -> None:
    file = store.path / store_write.paths_of(store.manifest["files"], "timelines")[-1]
    pq.write_table(change(pq.ParquetFile(file).read()), file)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.take(list(range(t.num_rows))[::-1]), r"users must rise from 0 to 39 within a file"),
        (lambda t: t.set_column(0, "user", pa.array(np.arange(40, 40 + t.num_rows, dtype=np.int32))), "users must ri"),
        (lambda t: t.set_column(1, "known_ms", pa.array(np.zeros(t.num_rows, np.int64))), "in the order they became"),
        (lambda t: t.drop_columns(["flags"]), r"shard-002.parquet lacks the columns \['flags'\]"),
    ],
)
def test_partitions_that_break_the_contract_are_refused(
    store: FeatureStore, change: Callable[[pa.Table], pa.Table], said: str
) -> None:
    changed(store, change)
    with pytest.raises(StoreError, match=said):
        store.timelines()
    assert caches(store) == []


def test_a_flipped_byte_in_a_partition_never_becomes_an_array(store: FeatureStore) -> None:
    file = store.path / sorted(f for f in store.manifest["files"] if f.startswith("impressions"))[0]
    raw = bytearray(file.read_bytes())
    raw[60] ^= 255
    file.write_bytes(raw)
    with pytest.raises(StoreError, match=r"shard-000.parquet cannot be read .*preprocess again"):
        store.impressions()


def test_rows_of_another_type_are_refused_not_cut(tmp_path: Path) -> None:
    writer = ArrayWriter(tmp_path / "x.npy", "i4")
    with pytest.raises(StoreError, match=r"rows of \(\) int32 expected, got \(\) int64"):
        writer.append(np.array([2**40]))
    writer.append(np.array([7], np.int16))
    writer.close()
    assert np.load(tmp_path / "x.npy").tolist() == [7]


def test_a_store_without_events(tmp_path: Path) -> None:
    store = write_store(tmp_path / "store", Shape(past=0, daily=0))
    assert len(store.timelines().ad) == 0 and store.timelines().offsets.tolist() == [0] * 41
    assert store.impressions().cut.max() == 0
