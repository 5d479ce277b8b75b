"""Batches for training and scoring, cut from the arrays of a feature store."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from gem.data.batch import Batch, check_batch
from gem.data.collate import ImpressionRows, collate
from gem.data.store import FeatureStore, Impressions, Timelines
from gem.training.plan import deal

IntArray = NDArray[np.integer]


@dataclass
class Knowledge:
    """Teacher output aligned with `Impressions`: p [N, K], known [N]."""

    p: NDArray[np.float32]
    known: NDArray[np.float32]


@dataclass
class StoreReader:
    """Turns positions in `impressions` into batches. One per process; arrays are shared, not copied."""

    store: FeatureStore
    timelines: Timelines
    impressions: Impressions
    max_history: int
    knowledge: Knowledge | None = None
    align: int = 1  # see `ModelConfig.align`
    negative_weight: float = 1.0  # in training, of rows without a positive label (see gem.training.sampling)
    rows_of: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        schema = self.store.schema
        self.rows_of = {f.name: f.rows for side in (schema.user, schema.ad, schema.context) for f in side.fields}

    def batch(self, at: IntArray) -> Batch:
        """Collate and validate the impressions at these positions; the batch has them in user order."""
        imp = self.impressions
        user = imp.user[at]
        order = np.argsort(user, kind="stable")
        at, user = at[order], user[order]
        rows = ImpressionRows(
            user=user, ad=imp.ad[at], time_ms=imp.time_ms[at], cut=imp.cut[at], surface=imp.surface[at],
            context=imp.context_rows(at), labels=imp.labels.take(at, axis=0), mask=imp.mask.take(at, axis=0),
            impression_id=imp.impression_id[at], past=self.store.past.at(imp.ad[at], imp.surface[at], imp.time_ms[at]),
        )  # fmt: skip
        out = collate(self.store.users, self.store.ads, self.timelines, rows, self.max_history, self.align)
        if self.knowledge is not None:
            out.soft = {
                "p": torch.from_numpy(self.knowledge.p[at]),
                "known": torch.from_numpy(self.knowledge.known[at]),
            }
        if self.negative_weight != 1.0:
            self._weigh(out)
        check_batch(out, self.rows_of)
        return out

    def _weigh(self, batch: Batch) -> None:
        weight = torch.where((batch.labels > 0).any(1), 1.0, self.negative_weight)
        batch.mask = batch.mask * weight.unsqueeze(1)
        if batch.soft:
            batch.soft["known"] = batch.soft["known"] * weight

    def placeholder(self, at: IntArray) -> Batch:
        """The batch of these impressions with nothing to learn from it, for a rank without a share."""
        out = self.batch(at)
        out.mask = torch.zeros_like(out.mask)
        if out.soft:
            out.soft["known"] = torch.zeros_like(out.soft["known"])
        return out

    def costs(self, at: IntArray | None = None) -> NDArray[np.int64]:
        """Tokens of each impression (all if None): 1 + events it reads, for balancing ranks."""
        cut = self.impressions.cut if at is None else self.impressions.cut[at]
        return 1 + np.minimum(cut, self.max_history).astype(np.int64)


@dataclass
class RankShare:
    """This rank's part of every global batch, and how evenly the batches were dealt.

    `build` is called once for every global batch, in order; all ranks deal alike and so know all loads.
    """

    reader: StoreReader
    rank: int = 0
    world: int = 1
    max_over_mean: list[float] = field(default_factory=list)  # tokens of the fullest rank over the mean, per batch

    def build(self, at: IntArray) -> Batch:
        """The batch of this rank's rows of the global batch `at` (positions in the reader's impressions)."""
        if self.world == 1:
            self.max_over_mean.append(1.0)
            return self.reader.batch(at)
        cost = self.reader.costs(at)
        owner = deal(self.reader.impressions.user[at], cost, self.world)
        loads = np.bincount(owner, weights=cost, minlength=self.world)
        self.max_over_mean.append(float(loads.max() / loads.mean()))
        mine = at[owner == self.rank]
        # Every step is collective: a rank without rows takes part in it all the same.
        return self.reader.batch(mine) if mine.size else self.reader.placeholder(at[:1])


class Prefetch:
    """Build batches in a background thread, a few ahead; counts the time the trainer waited.

    An exception in the thread is raised in the consumer. `waited_s` over the run's time is the share of
    step time spent waiting for data. To be read once; `close` ends the thread.
    """

    def __init__(self, build: Callable[[IntArray], Batch], rows: Iterator[IntArray], depth: int = 3) -> None:
        self.waited_s = 0.0
        self._queue: queue.Queue[Batch | BaseException | None] = queue.Queue(maxsize=depth)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(build, rows), daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Batch]:
        try:
            while True:
                start = time.perf_counter()
                item = self._queue.get()
                self.waited_s += time.perf_counter() - start
                if item is None:
                    return
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            self.close()

    def close(self) -> None:
        """End the thread, also in the middle; it stops after the batch it builds."""
        self._stop.set()

    def _run(self, build: Callable[[IntArray], Batch], rows: Iterator[IntArray]) -> None:
        last: BaseException | None = None
        try:
            for at in rows:
                if not self._put(build(at)):
                    return
        except BaseException as e:
            last = e
        self._put(last)

    def _put(self, item: Batch | BaseException | None) -> bool:
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=0.2)
                return True
            except queue.Full:
                continue
        return False
