"""Which of several rows with one key stays, which are plain repeats and which contradict it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gem.data.build.timelines import Bools, Ints, repeated


@dataclass(frozen=True)
class Duplicates:
    """keep [E]: one row of every key. conflict [E]: rows that were dropped though they say something else."""

    keep: Bools
    conflict: Bools

    @property
    def num_dropped(self) -> int:
        return int((~self.keep).sum())


def find_duplicates(keys: Sequence[Ints], ties: Sequence[Ints], values: Sequence[Ints]) -> Duplicates:
    """Of rows with equal `keys` the smallest by `ties` stays (then by position); all arrays [E].

    A dropped row that differs from the kept one in any of `values` is a conflict: one key, two payloads.
    """
    size = len(keys[0])
    keep, conflict = np.ones(size, np.bool_), np.zeros(size, np.bool_)
    rows = np.flatnonzero(repeated(keys)) if size else np.zeros(0, np.int64)
    if not len(rows):
        return Duplicates(keep, conflict)
    mine = [k[rows] for k in keys]
    order = np.lexsort((*(t[rows] for t in reversed(tuple(ties))), *reversed(mine)))
    new = np.ones(len(order), np.bool_)
    new[1:] = np.logical_or.reduce([k[order[1:]] != k[order[:-1]] for k in mine])
    ordered = rows[order]
    first = ordered[np.flatnonzero(new)[np.cumsum(new) - 1]]
    keep[ordered] = new
    if values:
        conflict[ordered] = np.logical_or.reduce([v[ordered] != v[first] for v in values]) & ~new
    return Duplicates(keep, conflict)
