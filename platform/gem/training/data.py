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

IntArray = NDArray[np.int64]


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
    rows_of: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        schema = self.store.schema
        self.rows_of = {f.name: f.rows for side in (schema.user, schema.ad, schema.context) for f in side.fields}

    def batch(self, at: IntArray) -> Batch:
        """Collate and validate the impressions at these positions."""
        imp = self.impressions
        rows = ImpressionRows(
            user=imp.user[at].astype(np.int64), ad=imp.ad[at].astype(np.int64), time_ms=imp.time_ms[at],
            cut=imp.cut[at].astype(np.int64), surface=imp.surface[at].astype(np.int64),
            context=imp.context_rows(at), labels=imp.labels[at], mask=imp.mask[at],
            impression_id=imp.impression_id[at],
        )  # fmt: skip
        out = collate(self.store.users, self.store.ads, self.timelines, rows, self.max_history)
        if self.knowledge is not None:
            order = np.argsort(rows.user, kind="stable")
            out.soft = {
                "p": torch.from_numpy(self.knowledge.p[at][order]),
                "known": torch.from_numpy(self.knowledge.known[at][order]),
            }
        check_batch(out, self.rows_of)
        return out

    def placeholder(self, at: IntArray) -> Batch:
        """The batch of these impressions with nothing to learn from it, for a rank without a share."""
        out = self.batch(at)
        out.mask = torch.zeros_like(out.mask)
        if out.soft:
            out.soft["known"] = torch.zeros_like(out.soft["known"])
        return out

    def costs(self) -> IntArray:
        """Work of each impression: 1 + events it reads, for balancing ranks."""
        read: IntArray = 1 + np.minimum(self.impressions.cut, self.max_history).astype(np.int64)
        return read


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
