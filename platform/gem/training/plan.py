"""Which impressions are trained when: a pure function of (data, seed, epoch), independent of ranks.

A plan is a list of *global* batches of whole users inside a window of days, windows in time order.
Each rank takes its share of every global batch, so that two ranks train on exactly the rows of one,
every impression is seen once per epoch, and a position in the plan is an exact place to resume from.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gem.errors import TrainingError

IntArray = NDArray[np.integer]


@dataclass(frozen=True)
class BatchPlan:
    """rows: impression positions, batch after batch; bounds [num_batches + 1] cut them into batches."""

    rows: IntArray
    bounds: NDArray[np.int64]

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
    window = (day.astype(np.int32) - int(day.min())) // window_days
    by_window = _stable_order(window)
    counts = np.bincount(window)
    rows: list[IntArray] = []
    sizes: list[NDArray[np.int64]] = []
    for at in np.split(by_window, np.cumsum(counts)[:-1]):
        if at.size:
            ordered, cuts = _window_batches(user[at], rng, batch_size)
            rows.append(at[ordered])
            sizes.append(cuts)
    bounds = np.concatenate([[0], np.cumsum(np.concatenate(sizes))])
    narrow = np.int32 if user.size < 2**31 else np.int64  # a plan per epoch is kept: half the memory
    return BatchPlan(np.concatenate(rows, dtype=narrow), bounds)


def _window_batches(
    user: IntArray, rng: np.random.Generator, batch_size: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Order of the rows of one window, and how many of them each batch takes."""
    by_user = _stable_order(user)
    ordered = user[by_user]
    first = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    counts = np.diff(first, append=user.size)
    # A very active user is split into runs of at most half a batch, each placed on its own.
    longest = max(batch_size // 2, 1)
    pieces = -(-counts // longest)
    run = np.arange(int(pieces.sum())) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    starts = np.repeat(first, pieces) + run * longest
    lengths = np.diff(starts, append=user.size)
    sequence = np.argsort(rng.permutation(starts.size))
    lengths, starts = lengths[sequence], starts[sequence]
    ends = np.cumsum(lengths)
    at = np.repeat(starts - (ends - lengths), lengths) + np.arange(user.size)
    # Each batch takes as many runs as fit.
    bounds = [0]
    while bounds[-1] < user.size:
        bounds.append(int(ends[np.searchsorted(ends, bounds[-1] + batch_size, side="right") - 1]))
    return by_user[at], np.diff(bounds)


def _stable_order(values: IntArray) -> NDArray[np.int64]:
    """Stable sorting permutation; nothing is sorted that is in order already."""
    if bool((values[1:] >= values[:-1]).all()):
        return np.arange(values.size)
    return np.argsort(values, kind="stable")


def deal(user: IntArray, cost: IntArray, world: int) -> NDArray[np.int64]:
    """The rank of every row of a global batch [n]: whole users, so that the ranks' summed `cost` is balanced.

    Users in order of falling cost, each to the rank with the least so far: the fullest and the emptiest rank differ by
    at most one user. A rank gets no rows when there are fewer users than ranks.
    """
    _, code = np.unique(user, return_inverse=True)
    per_user = np.bincount(code, weights=cost)
    owner = np.zeros(per_user.size, np.int64)
    loads = [(0.0, rank) for rank in range(world)]
    for place in np.argsort(-per_user, kind="stable").tolist():  # per user, not per row
        load, rank = loads[0]
        owner[place] = rank
        heapq.heapreplace(loads, (load + per_user[place], rank))
    return owner[code]


def remaining(plan: BatchPlan, start: int) -> Iterator[tuple[int, IntArray]]:
    """(index, rows) of the batches from position `start` on."""
    for index in range(start, len(plan)):
        yield index, plan.batch(index)
