"""Reading an epoch: every impression exactly once, whatever the number of ranks, also when a reader is killed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from gem.data.batch import Batch
from gem.data.store import FeatureStore
from gem.training.data import Prefetch, RankShare, StoreReader
from gem.training.plan import plan_epoch, remaining
from tests.unit.data.random_store import Shape, reopened, write_store

ROOT = Path(__file__).resolve().parents[3]
SHAPE = Shape(num_users=60, shown=8)


def batches(store: FeatureStore, start: int = 0, rank: int = 0, world: int = 1, epoch: int = 0) -> Iterator[Batch]:
    """One rank's batches of an epoch from position `start` on, read as training reads them."""
    imp = store.impressions()
    plan = plan_epoch(imp.user, imp.day, batch_size=32, window_days=2, seed=7, epoch=epoch)
    share = RankShare(StoreReader(store, store.timelines(), imp, 10), rank, world)
    return iter(Prefetch(share.build, (at for _, at in remaining(plan, start))))


def read_slowly(folder: Path, log: Path) -> None:
    """Write the impressions of each batch as one line, the line being the record that this batch is done."""
    with log.open("a") as f:
        for batch in batches(write_store(folder / "store", SHAPE)):
            f.write(" ".join(map(str, batch.impression_id.tolist())) + "\n")
            f.flush()
            time.sleep(0.01)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> FeatureStore:
    return write_store(tmp_path_factory.mktemp("reading") / "store", SHAPE)


def test_a_killed_reader_goes_on_where_it_stopped(store: FeatureStore, tmp_path: Path) -> None:
    log = tmp_path / "seen"
    code = (
        f"from tests.unit.training.test_exactly_once import *; read_slowly(Path({str(tmp_path)!r}), Path({str(log)!r}))"
    )
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'platform'}:{ROOT}", "OMP_NUM_THREADS": "1"}
    child = subprocess.Popen([sys.executable, "-c", code], env=environment)
    try:
        until = time.monotonic() + 60
        while not log.exists() or log.read_text().count("\n") < 5:
            assert child.poll() is None and time.monotonic() < until, "the reader ended before it was killed"
            time.sleep(0.002)
    finally:
        child.kill()
        child.wait(10)
    done = log.read_text().split("\n")[:-1]  # a line cut short was not done
    seen = [int(word) for line in done for word in line.split()]
    rest = [i for batch in batches(store, start=len(done)) for i in batch.impression_id.tolist()]
    assert rest and len(done) >= 5
    assert sorted(seen + rest) == sorted(store.impressions().impression_id.tolist())


@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_ranks_together_read_the_global_batch_and_no_user_twice(store: FeatureStore, world: int) -> None:
    whole = list(batches(store))
    parts = [list(batches(store, rank=rank, world=world)) for rank in range(world)]
    assert {len(p) for p in parts} == {len(whole)}
    for one, shares in zip(whole, zip(*parts, strict=True), strict=True):
        mine = [s for s in shares if s.mask.any()]  # a rank without a share gets a row with nothing to learn
        assert sorted(i for s in mine for i in s.impression_id.tolist()) == sorted(one.impression_id.tolist())
        users = [u for s in mine for u in s.users.ids["user_id"].tolist()]
        assert sorted(users) == one.users.ids["user_id"].tolist()


def test_the_order_is_a_function_of_seed_and_epoch(store: FeatureStore) -> None:
    again = reopened(store.path, dict(store.manifest), store.schema)
    first, second, other = (
        np.concatenate([b.impression_id.numpy() for b in batches(s, epoch=e)]).tolist()
        for s, e in ((store, 0), (again, 0), (store, 1))
    )
    assert first == second
    assert first != other and sorted(first) == sorted(other)


def test_the_balance_of_every_batch_is_reported(store: FeatureStore) -> None:
    imp = store.impressions()
    reader = StoreReader(store, store.timelines(), imp, 10)
    shares = [RankShare(reader, rank, 3) for rank in range(3)]
    at = np.arange(0, len(imp), 2)
    got = [share.build(at) for share in shares]
    tokens = [int((1 + b.cut.clamp(max=10)).sum()) for b in got]  # no history here is longer than is carried
    assert [s.max_over_mean for s in shares] == [[pytest.approx(max(tokens) / np.mean(tokens))]] * 3
    assert 1 <= max(tokens) / np.mean(tokens) < 1.1
    RankShare(reader).build(at)
