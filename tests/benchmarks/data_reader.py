"""How fast one core reads training batches: `measure_reader`, for the claim reader_impressions_per_s.

A feature store of random content on disk, read through `StoreReader` from its mapped arrays: collated, converted to
tensors and validated, every impression once, in the order of a real plan. `python -m tests.benchmarks.data_reader`
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from gem.data.store import FeatureStore
from gem.training import data
from gem.training.data import RankShare, StoreReader
from gem.training.plan import plan_epoch
from tests.unit.data.random_store import Shape, write_store

MAX_HISTORY = 512  # of the model; nothing here is longer, so an impression reads all that is known
BATCH = 4096  # impressions of one rank's batch in a large run
SMALL_BATCH = 512  # the default of TrainConfig
# 20 events a day on top of 5 to 385 before it: an impression in the middle of the day reads about 200.
BUSY = Shape(num_users=20_000, num_ads=50_000, num_days=1, num_shards=4, past=190, daily=20, shown=10, step_ms=1000)
# The same histories, but 2 impressions of a user in a batch: each history is carried for fewer of them.
SPARSE = Shape(num_users=20_000, num_ads=50_000, num_days=1, num_shards=4, past=190, daily=20, shown=2, step_ms=1000)
PARTS = {"collate": "collate", "check": "check_batch"}


def measure_reader(rounds: int = 3, shape: Shape = BUSY) -> dict[str, Any]:
    """Impressions a second on one core (median of `rounds`), and what was read.

    impressions_per_s, low, high: by the clock; impressions_per_cpu_s: by the time the thread was on its core, which
    other work on the machine does not take away; events_per_s; mean_history: events an impression reads;
    events_carried: events in the batches per impression (a user's are carried once a batch); rows_per_user:
    impressions of a user in a batch; shares: part -> share of the time; cache_build_s: making the mapped arrays, once
    per store; small_batch and sparse: batches of 512, and 2 impressions of a user in a batch.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            store = write_store(Path(folder) / "busy" / "store", shape)
            build_s = _timed(store.timelines)
            found, small = (_measure(store, batch, rounds) for batch in (BATCH, SMALL_BATCH))
            sparse = _measure(write_store(Path(folder) / "sparse" / "store", SPARSE), BATCH, rounds)
    finally:
        torch.set_num_threads(threads)
    speeds = ("impressions_per_s", "impressions_per_cpu_s")
    return {
        **found,
        "cache_build_s": build_s,
        "small_batch": {n: small[n] for n in ("batch", *speeds)},
        "sparse": {n: sparse[n] for n in (*speeds, "events_per_s", "rows_per_user", "events_carried")},
    }


def _measure(store: FeatureStore, batch_size: int, rounds: int) -> dict[str, Any]:
    reader = StoreReader(store, store.timelines(), store.impressions(), MAX_HISTORY)
    imp = reader.impressions
    plan = plan_epoch(imp.user, imp.day, batch_size=batch_size, window_days=1, seed=1, epoch=0)
    share = RankShare(reader)
    users = events = 0
    for index in range(len(plan)):  # also brings every page into memory
        batch = share.build(plan.batch(index))
        users, events = users + len(batch.users), events + batch.timeline.ad.numel()
    times = [_once(share, plan) for _ in range(rounds)]
    seconds, num = [wall for wall, _ in times], len(imp)
    middle = statistics.median(seconds)
    return {
        "impressions_per_s": num / middle,
        "low": num / max(seconds),
        "high": num / min(seconds),
        "impressions_per_cpu_s": num / statistics.median(cpu for _, cpu in times),
        "events_per_s": events / middle,
        "mean_history": float(reader.costs().mean() - 1),
        "events_carried": events / num,
        "rows_per_user": num / users,
        "impressions": num,
        "batch": batch_size,
        "shares": _shares(share, plan),
    }


def _timed(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def _once(share: RankShare, plan: Any) -> tuple[float, float]:
    """Seconds by the clock and on the core."""
    start, on_core = time.perf_counter(), time.thread_time()
    for index in range(len(plan)):
        share.build(plan.batch(index))
    return time.perf_counter() - start, time.thread_time() - on_core


def _shares(share: RankShare, plan: Any) -> dict[str, float]:
    """Share of the time by part, from one more reading with a clock around each."""
    spent = dict.fromkeys([*PARTS, "entities"], 0.0)
    with _clocked(data, PARTS, spent), _clocked(type(share.reader.store.users), {"entities": "rows"}, spent):
        total, _ = _once(share, plan)
    spent["collate"] -= spent["entities"]  # users and ads are gathered within it
    spent["impressions"] = total - sum(spent.values())
    return {part: round(seconds / total, 3) for part, seconds in spent.items()}


@contextmanager
def _clocked(owner: Any, names: dict[str, str], spent: dict[str, float]) -> Iterator[None]:
    """Add the time spent in functions of `owner` (part -> name) to `spent`."""
    kept = {name: getattr(owner, name) for name in names.values()}

    def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args)
            finally:
                spent[part] += time.perf_counter() - start

        return call

    for part, name in names.items():
        setattr(owner, name, timed(part, kept[name]))
    try:
        yield
    finally:
        for name, function in kept.items():
            setattr(owner, name, function)


if __name__ == "__main__":
    print(json.dumps(measure_reader(), indent=2))
