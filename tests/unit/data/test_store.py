"""The whole store, built in this process from a made-up log, against a naive reading of the raw rows."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gem.config import DataConfig, RunConfig
from gem.data.keys import KeyIndex
from gem.data.schema import OOV
from gem.data.spec import parse_spec
from gem.data.store import FeatureStore
from gem.errors import DataError, StoreError
from pipelines.distribute import in_process
from pipelines.preprocess import build_store
from tests.unit.data.toy_log import DAY_MS, SPEC, START_MS, naive, toy_rows, toy_spec, write_toy

ROWS = toy_rows()


def quiet(_: str) -> None:
    pass


def config(**data: Any) -> RunConfig:
    return RunConfig(data=replace(DataConfig(num_shards=3), **data))


def build(raw: Path, out: Path, spec: Any = None, **data: Any) -> dict[str, Any]:
    return build_store(config(**data), spec or toy_spec(), (raw, out), quiet, in_process)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    root = tmp_path_factory.mktemp("toy")
    return root / "store", build(write_toy(root / "raw", ROWS), root / "store")


@pytest.fixture
def store(built: tuple[Path, dict[str, Any]]) -> FeatureStore:
    return FeatureStore.open(built[0])


def test_every_impression_matches_the_naive_reading(store: FeatureStore) -> None:
    expected, seen = naive(ROWS), store.impressions()
    assert sorted(seen.impression_id.tolist()) == sorted(expected)
    tasks = [t.name for t in store.schema.tasks]
    for i, show in enumerate(seen.impression_id.tolist()):
        want = expected[show]
        raw = want["row"]
        assert seen.cut[i] == want["cut"]
        assert seen.days[seen.day[i]] == want["day"]
        assert store.users.keys[int(seen.user[i])].as_py() == raw["person"]
        assert store.ads.keys[int(seen.ad[i])].as_py() == raw["item"]
        assert seen.time_ms[i] == raw["at"] and seen.surface[i] == store.encoder.surface_code(raw["place"])
        for k, task in enumerate(tasks):
            assert (seen.labels[i, k], seen.mask[i, k]) == (float(want[task] == 1), float(want[task] >= 0))
    assert {want["conversion"] for want in expected.values()} == {1, 0, -1}


def test_stored_context_equals_the_context_encoded_for_a_request(store: FeatureStore) -> None:
    seen, expected = store.impressions([store.days[-1]]), naive(ROWS)
    raw = [expected[s]["row"] for s in seen.impression_id.tolist()]
    columns = {name: [r[name] for r in raw] for name in ("device", "slot")}
    served = store.encoder.encode_context(columns, seen.time_ms, [r["place"] for r in raw])
    logged = seen.context_rows(np.arange(len(seen)))
    assert {n: v.tolist() for n, v in served.ids.items()} == {n: v.tolist() for n, v in logged.ids.items()}
    assert served.numeric.tolist() == logged.numeric.tolist()


def test_timelines_hold_every_distinct_event_once_in_order(store: FeatureStore) -> None:
    timelines = store.timelines()
    shows = {r["show_id"]: r for r in ROWS["shows"] if r["person"] is not None}
    expected = Counter((r["person"], r["item"], r["at"], 1, r["clicked"]) for r in shows.values())
    expected += Counter({(r["person"], r["item"], r["at"] * 1000, 2, 0): 1 for r in ROWS["views"]})
    got: Counter[tuple[int, ...]] = Counter()
    for user in range(len(store.users)):
        own = slice(timelines.offsets[user], timelines.offsets[user + 1])
        assert bool((np.diff(timelines.known_ms[own]) >= 0).all())
        key = store.users.keys[user].as_py()
        items = store.ads.keys.take(pa.array(timelines.ad[own])).to_pylist()
        columns = (items, *(getattr(timelines, n)[own].tolist() for n in ("time_ms", "kind", "flags")))
        got.update((key, *row) for row in zip(*columns, strict=True))
    assert got == expected
    assert timelines.offsets[1] == 0 and timelines.offsets[-1] == len(timelines.ad) == store.manifest["rows"]["events"]
    assert timelines.lengths().sum() == len(timelines.ad)


def test_record_counts_what_came_in_and_what_was_dropped(built: tuple[Path, dict[str, Any]]) -> None:
    record = built[1]
    no_user = sum(r["person"] is None for r in ROWS["shows"])
    distinct = len({r["show_id"] for r in ROWS["shows"] if r["person"] is not None})
    assert record["quarantine_reasons"] == {"shows": {"null_user": no_user}}
    assert record["duplicates"] == len(ROWS["shows"]) - no_user - distinct > 0
    assert (record["rows_out"], record["quarantined"]) == (distinct, no_user)
    assert record["rows_in"] == sum(len(t) for t in ROWS.values())
    rows = pq.read_table(built[0] / "quarantine" / "shows-00000.parquet").to_pylist()
    assert len(rows) == no_user and json.loads(rows[0]["row"])["person"] is None
    assert {r["file"] for r in rows} <= {"shows-0.parquet", "shows-1.parquet"}
    assert not (built[0] / ".fragments").exists()


def test_entities_of_the_log_that_no_table_describes_still_have_a_row(store: FeatureStore) -> None:
    assert store.users.index_of(29) > 0 and store.ads.index_of("1029") > 0  # persons 28+ and items 1022+ are not listed
    rows = store.users.rows(np.array([0, store.users.index_of(29)]))
    assert rows.ids["town"].tolist() == [1, 1] and rows.numeric.tolist() == [[0.0, 1.0]] * 2
    assert rows.ids["user_id"].tolist()[0] == OOV and rows.ids["user_id"].tolist()[1] > OOV
    assert store.users.index_of("nobody") == store.users.index_of(None) == store.users.index_of(True) == 0
    assert store.users.index_many(pa.array(["3", None, "zz"])).tolist() == [store.users.index_of(3), 0, 0]


def test_vocabulary_counts_training_days_only(store: FeatureStore) -> None:
    train = set(store.split.train_days)
    expected = Counter(str(w["row"]["person"]) for w in naive(ROWS).values() if w["day"] in train)
    order = sorted(expected, key=lambda k: (-expected[k], k))
    assert store.encoder.vocabularies["user_id"].to_list() == order
    views = Counter(str(r["item"]) for r in _distinct_views() if _day(r["at"]) <= max(train))
    shown = Counter(str(w["row"]["item"]) for w in naive(ROWS).values() if w["day"] in train)
    known = Counter(
        str(w["row"]["item"]) for w in naive(ROWS).values() if _day((w["row"]["at"] + 30_000) // 1000) <= max(train)
    )
    total = views + shown + known
    expected_ads = sorted((k for k in total if total[k] >= 2), key=lambda k: (-total[k], k))
    assert store.encoder.vocabularies["ad_id"].to_list() == expected_ads


def _distinct_views() -> list[dict[str, Any]]:
    return [dict(t) for t in {tuple(sorted(r.items())) for r in ROWS["views"]}]


def _day(seconds: int) -> str:
    return f"2024-03-{4 + (seconds * 1000 - START_MS) // DAY_MS:02d}"


def test_take_and_single_days(store: FeatureStore) -> None:
    everything = store.impressions()
    some = everything.take(np.array([5, 2, 2]))
    assert some.impression_id.tolist() == everything.impression_id[[5, 2, 2]].tolist() and len(some) == 3
    assert some.context_rows(np.array([1])).ids["hour"].tolist() == [everything.context.field("hour")[2]]
    parts = [len(store.impressions([d])) for d in store.days]
    assert sum(parts) == len(everything) and parts == list(store.manifest["rows"]["impressions_by_day"].values())
    with pytest.raises(StoreError, match=r"no impressions on \['2020-01-01'\]"):
        store.impressions(["2020-01-01"])


def test_d1_unsorted_events(built: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    other = build(write_toy(tmp_path / "raw", ROWS, seed=5, parts=3), tmp_path / "store")
    first, second = FeatureStore.open(built[0]), FeatureStore.open(tmp_path / "store")
    data = [f for f in first.manifest["files"] if not f.startswith(("quarantine/", "windows/"))]
    assert len(data) > 20
    assert {f: first.manifest["files"][f] for f in data} == {f: second.manifest["files"].get(f) for f in data}
    assert other["duplicates"] == built[1]["duplicates"]


def test_same_input_same_hash_and_number_of_shards_only_moves_rows(
    built: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    raw = built[0].parent / "raw"
    assert build(raw, tmp_path / "again")["store_hash"] == built[1]["store_hash"] == FeatureStore.open(built[0]).hash
    three = FeatureStore.open(built[0]).impressions()
    b = three.take(np.argsort(three.impression_id))
    for num_shards in (1, 40):  # 30 users: some shards have none
        build(raw, tmp_path / f"{num_shards}", num_shards=num_shards)
        other = FeatureStore.open(tmp_path / f"{num_shards}").impressions()
        a = other.take(np.argsort(other.impression_id))
        assert a.cut.tolist() == b.cut.tolist() and a.labels.tolist() == b.labels.tolist()


def test_a_flipped_byte_a_missing_and_a_cut_file_are_named(built: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    copy = tmp_path / "store"
    shutil.copytree(built[0], copy)
    victim = copy / "timelines" / "day=2024-03-05" / "shard-001.parquet"
    good = victim.read_bytes()
    victim.write_bytes(good[:50] + bytes([good[50] ^ 1]) + good[51:])
    with pytest.raises(StoreError, match=r"timelines/day=2024-03-05/shard-001.parquet is corrupted"):
        FeatureStore.open(copy)
    FeatureStore.open(copy, verify=False)
    victim.write_bytes(good[:-1])
    with pytest.raises(StoreError, match=r"shard-001.parquet has \d+ bytes, the manifest says"):
        FeatureStore.open(copy, verify=False)
    victim.unlink()
    with pytest.raises(StoreError, match=r"shard-001\.parquet is missing"):
        FeatureStore.open(copy)
    (copy / "manifest.json").unlink()
    with pytest.raises(StoreError, match="not a finished feature store"):
        FeatureStore.open(copy)


def test_another_store_version_is_refused(built: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps({"version": 99}))
    with pytest.raises(StoreError, match="store version 99"):
        FeatureStore.open(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(StoreError, match="cannot be read"):
        FeatureStore.open(tmp_path)


def test_too_much_quarantine_stops_and_shows_the_rows(tmp_path: Path) -> None:
    raw = write_toy(tmp_path / "raw", ROWS)
    with pytest.raises(DataError, match=r'table "shows": \d+ of \d+ rows.*allowed are 0.1%.*null_user \d+') as e:
        build(raw, tmp_path / "run" / "preprocess" / "key", max_quarantine_share=0.001)
    path = tmp_path / "run" / "quarantine-shows.parquet"
    assert str(path) in str(e.value) and pq.read_table(path)["reason"].unique().to_pylist() == ["null_user"]


def test_a_missing_day_is_allowed_and_reported(tmp_path: Path) -> None:
    rows = ROWS | {"shows": [r for r in ROWS["shows"] if not 2 <= (r["at"] - START_MS) // DAY_MS < 3]}
    record = build(write_toy(tmp_path / "raw", rows), tmp_path / "store")
    assert record["missing_days"] == ["2024-03-06"] and "2024-03-06" not in record["days"]


def test_text_keys_in_one_file_turn_all_keys_to_text(tmp_path: Path) -> None:
    rows = ROWS | {"views": [{**r, "person": f"{r['person']}"} for r in ROWS["views"]] + [_text_view()]}
    build(write_toy(tmp_path / "raw", rows), tmp_path / "store")
    store = FeatureStore.open(tmp_path / "store")
    assert store.users.keys.type == pa.string() and store.users.index_of("guest-7") > 0
    expected = naive(ROWS)
    seen = store.impressions()
    assert [expected[s]["cut"] for s in seen.impression_id.tolist()] == seen.cut.tolist()
    assert store.users.index_of(3) == store.users.index_of("3") > 0


def _text_view() -> dict[str, Any]:
    return {"person": "guest-7", "item": 1000, "at": START_MS // 1000}


def test_without_events_every_cut_is_zero(tmp_path: Path) -> None:
    spec = parse_spec(SPEC | {"events": []})
    build(write_toy(tmp_path / "raw", ROWS), tmp_path / "store", spec)
    store = FeatureStore.open(tmp_path / "store")
    assert store.impressions().cut.max() == 0 and len(store.timelines().ad) == 0
    assert store.timelines().offsets.tolist() == [0] * (len(store.users) + 1)


def test_a_log_day_column_decides_over_the_time(tmp_path: Path) -> None:
    """Client clocks run late: the log's own day is the next one for shows of the last hour."""
    shown = [r | {"logged": _logged(r["at"])} for r in ROWS["shows"]]
    conversion = SPEC["labels"]["conversion"] | {"complete": True}  # by its own day the last day is not settled
    labels = SPEC["labels"] | {"conversion": conversion}
    spec = parse_spec(SPEC | {"impressions": SPEC["impressions"] | {"day": "logged"}, "labels": labels})
    build(write_toy(tmp_path / "raw", ROWS | {"shows": shown}), tmp_path / "store", spec)
    seen = FeatureStore.open(tmp_path / "store").impressions()
    days = [int(seen.days[d].replace("-", "")) for d in seen.day]
    assert days == [_logged(t) for t in seen.time_ms.tolist()]
    assert 20240309 in days


def _logged(at: int) -> int:
    return 20240304 + (at - START_MS + 3_600_000) // DAY_MS


def test_key_index_of_numbers_and_text() -> None:
    ints = KeyIndex(pa.array([None, 7, 2**53 + 1, -1]))
    assert ints.index_many(pa.array([2**53 + 1, 2**53, -1, None, 7])).tolist() == [2, 0, 3, 0, 1]
    assert ints.index_many(pa.array(["7", "07", None])).tolist() == [1, 0, 0]
    assert [ints.index_of(k) for k in (7, "7", np.int64(-1), 7.5)] == [1, 1, 3, 0]
    text = KeyIndex(pa.array([None, "7", "é"]))
    assert text.index_many(pa.array([7, 8])).tolist() == [1, 0] and text.index_of("é") == 2
    assert KeyIndex(pa.array([None], pa.int64())).index_many(pa.array([1])).tolist() == [0]
