"""Which impressions are trained when: a pure function of (data, seed, epoch), independent of ranks.

A plan is a list of *global* batches of whole users inside a window of days, windows in time order.
Each rank takes its share of every global batch, so that two ranks train on exactly the rows of one,
every impression is seen once per epoch, and a position in the plan is an exact place to resume from.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gem.errors import TrainingError

IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class BatchPlan:
    """rows: impression positions, batch after batch; bounds [num_batches + 1] cut them into batches."""

    rows: IntArray
    bounds: IntArray

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def batch(self, index: int) -> IntArray:
        """Impression positions of one global batch; a user's rows are neighbours."""
        return self.rows[self.bounds[index] : self.bounds[index + 1]]


def plan_epoch(user: IntArray, day: IntArray, *, batch_size: int, window_days: int, seed: int, epoch: int) -> BatchPlan:
    """Order impressions into global batches of about `batch_size` rows.

    user, day [N]: entity index and day number of each impression. Within a window of `window_days`
    days, users come in random order, each with all its rows of that window; a user with more rows than half
    a batch is split into several runs.
    """
    if batch_size < 1 or window_days < 1:
        raise TrainingError(f"batch_size and window_days must be >= 1, got {batch_size} and {window_days}")
    if user.size == 0:
        raise TrainingError("no impressions to train on: check the split and the spec")
    rng = np.random.default_rng([seed, epoch])
    rows: list[IntArray] = []
    sizes: list[int] = []
    first = int(day.min())
    for window in range(first, int(day.max()) + 1, window_days):
        at = np.flatnonzero((day >= window) & (day < window + window_days))
        if at.size:
            ordered, cuts = _window_batches(user[at], rng, batch_size)
            rows.append(at[ordered])
            sizes += cuts
    return BatchPlan(np.concatenate(rows), np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64))


def _window_batches(user: IntArray, rng: np.random.Generator, batch_size: int) -> tuple[IntArray, list[int]]:
    _, code, counts = np.unique(user, return_inverse=True, return_counts=True)
    # A very active user is split into runs of at most half a batch, each placed on its own.
    run = np.empty(user.size, np.int64)
    by_user = np.argsort(code, kind="stable")
    within = np.arange(user.size) - np.repeat(np.cumsum(counts) - counts, counts)
    run[by_user] = within // max(batch_size // 2, 1)
    _, unit = np.unique(code * (int(run.max()) + 1) + run, return_inverse=True)
    position = rng.permutation(int(unit.max()) + 1)[unit]
    ordered = np.lexsort((run, position))
    cuts: list[int] = []
    size = 0
    for n in np.bincount(position).tolist():
        if size + n > batch_size and size:
            cuts.append(size)
            size = 0
        size += n
    return ordered, [*cuts, size]


def rank_share(rows: IntArray, user: IntArray, cost: IntArray, rank: int, world: int) -> IntArray:
    """This rank's rows of a global batch: whole users, dealt so that the summed `cost` is balanced.

    rows: positions of the batch; user, cost [N] over all impressions (cost e.g. 1 + events read).
    Users are dealt in order of falling cost, back and forth over the ranks. A rank gets no rows when there
    are fewer users than ranks.
    """
    if world == 1:
        return rows
    _, code = np.unique(user[rows], return_inverse=True)
    per_user = np.bincount(code, weights=cost[rows].astype(np.float64))
    order = np.argsort(-per_user, kind="stable")
    lap, place = np.divmod(np.arange(order.size), world)
    owner = np.empty(order.size, np.int64)
    owner[order] = np.where(lap % 2 == 0, place, world - 1 - place)
    mine: IntArray = rows[owner[code] == rank]
    return mine


def remaining(plan: BatchPlan, start: int) -> Iterator[tuple[int, IntArray]]:
    """(index, rows) of the batches from position `start` on."""
    for index in range(start, len(plan)):
        yield index, plan.batch(index)
