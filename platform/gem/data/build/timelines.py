"""Canonical events to sorted timelines, and impressions to cuts (contract 2).

An event may be read by an impression only if it was *known* strictly before the impression's time:
the cut is the number of such events of that user. Nothing here loops over users.
Letters: E events, N impressions, U users.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gem.errors import DataError

Ints = npt.NDArray[np.integer]
I64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

_MIX = np.uint64(0x9E3779B97F4A7C15)


class Packing:
    """(group, time) pairs as one int64 whose order is that of the pairs.

    Made for the pairs of `time`; other times compare rightly too: they are cut to just outside the range.
    Where group and time range need more than 63 bits together, times are replaced by their ranks.
    """

    def __init__(self, time: Ints, num_groups: int) -> None:
        low, high = (int(time.min()), int(time.max())) if len(time) else (0, 0)
        self._ranks: I64 | None = None
        if (high - low + 3) * (num_groups + 1) >= 2**63:
            self._ranks = np.unique(time).astype(np.int64)
            low, high = 0, len(self._ranks)
        self._low, self._span = low - 1, high - low + 3

    def pack(self, group: Ints, time: Ints) -> I64:
        """[N] int64 codes; group must be 0 <= group < num_groups (or is compared only with its own codes)."""
        value: I64 = time.astype(np.int64) if self._ranks is None else np.searchsorted(self._ranks, time, side="left")
        inside = np.clip(value - self._low, 0, self._span - 1)
        out: I64 = group.astype(np.int64) * self._span + inside
        return out


def timeline_order(user: Ints, known_ms: Ints, time_ms: Ints, ties: Sequence[Ints] = ()) -> I64:
    """Permutation [E] that sorts events by (user, known_ms, time_ms, *ties).

    Give enough ties and the result does not depend on the order of the input.
    """
    return grouped_order((user,), known_ms, (time_ms, *ties))


def grouped_order(groups: Sequence[Ints], time: Ints, ties: Sequence[Ints] = ()) -> I64:
    """Permutation [E] by (group, time, *ties) or (partition, group, time, *ties); groups are not negative."""
    order, tied = order_and_ties(groups, time)
    return in_order_of(ties, order, tied)


@dataclass(frozen=True)
class Tied:
    """Places in an order whose rows share group and time with a neighbour, and which of them belong together."""

    place: I64
    run: I64


def order_and_ties(groups: Sequence[Ints], time: Ints) -> tuple[I64, Tied]:
    """A permutation [E] by (*groups, time), and where in it rows stand that share all of these.

    The first of two groups is a partition: few numbers, whatever they are. Partitions are told apart first by a radix
    sort, so that each is small when it is sorted.
    """
    if not len(time):
        return np.zeros(0, np.int64), Tied(np.zeros(0, np.int64), np.zeros(0, np.int64))
    if len(groups) == 1:
        return _ordered(groups[0], time)
    rank = _ranks(groups[0])
    rough = np.argsort(rank, kind="stable")  # 16 bits: NumPy sorts them by radix
    bounds = np.cumsum(np.bincount(rank)).tolist()
    order, places, runs, start = np.empty(len(time), np.int64), [], [], 0
    for end in bounds:
        rows = rough[start:end]
        inner, same = _ordered(groups[1][rows], time[rows])
        order[start:end] = rows[inner]
        places.append(same.place + start)
        runs.append(same.run + start)  # a run's number is below the rows before it: no two partitions share one
        start = end
    return order, Tied(np.concatenate(places), np.concatenate(runs))


def in_order_of(ties: Sequence[Ints], order: I64, tied: Tied) -> I64:
    """`order` with tied rows sorted by `ties` within their run; changed in place."""
    if len(tied.place):
        rows = order[tied.place]
        order[tied.place] = rows[np.lexsort((*(t[rows] for t in reversed(tuple(ties))), tied.run))]
    return order


def _ordered(group: Ints, time: Ints) -> tuple[I64, Tied]:
    if not len(time):
        return np.zeros(0, np.int64), Tied(np.zeros(0, np.int64), np.zeros(0, np.int64))
    code = Packing(time, int(group.max()) + 1).pack(group, time)
    order: I64 = np.argsort(code)
    code = code[order]
    same = code[1:] == code[:-1]
    place = np.flatnonzero(np.append(same, False) | np.append(False, same))
    run = np.cumsum(np.diff(code[place], prepend=code[place[:1]]) != 0)
    return order, Tied(place, run)


def _ranks(values: Ints) -> npt.NDArray[np.int16] | npt.NDArray[np.int32]:
    """Rank of each partition among the distinct ones, as the smallest integers that hold them."""
    low, high = int(values.min()), int(values.max())
    if high - low > 2**20:  # one far-away partition, such as "before"
        far = values == low
        low = int(values[~far].min()) - 1
        values = np.where(far, low, values)
        if high - low > 2**20:
            return np.unique(values, return_inverse=True)[1].reshape(-1).astype(np.int32)
    if high - low < 2**15:
        return (values - low).astype(np.int16)
    return (values - low).astype(np.int32)


def repeated(keys: Sequence[Ints]) -> Bools:
    """Mask [E]: rows that may share their `keys` tuple with another row. Few other rows are marked too."""
    mixed = np.zeros(len(keys[0]), np.uint64)
    for key in keys:
        mixed = (mixed ^ key.astype(np.int64).view(np.uint64)) * _MIX
        mixed ^= mixed >> np.uint64(29)
    ordered = np.sort(mixed)
    again = ordered[1:][ordered[1:] == ordered[:-1]]
    if not len(again):
        return np.zeros(len(mixed), np.bool_)
    out: Bools = is_in(pa.array(mixed), pa.array(np.unique(again)))
    return out


def rank_in_run(*keys: Ints) -> I64:
    """Position of every row within its run of equal neighbouring `keys`, [E] from 0."""
    starts, lengths = runs(*keys)
    out: I64 = np.arange(len(keys[0])) - np.repeat(starts, lengths)
    return out


def runs(*keys: Ints) -> tuple[I64, I64]:
    """(first row, length) of every run of rows with equal `keys`."""
    size = len(keys[0])
    new = np.ones(size, np.bool_)
    if size:
        np.not_equal(keys[0][1:], keys[0][:-1], out=new[1:])
        for key in keys[1:]:
            new[1:] |= key[1:] != key[:-1]
    starts = np.flatnonzero(new)
    return starts, np.diff(starts, append=size)


def user_offsets(user: Ints, num_users: int) -> I64:
    """Start of every user's events in an array sorted by user, [E] -> [U + 1]."""
    out: I64 = np.searchsorted(user, np.arange(num_users + 1)).astype(np.int64)
    return out


def count_before(group: Ints, time: Ints, query_group: Ints, query_time: Ints) -> I64:
    """Rows that sort strictly before (query_group, query_time), [N]; (group, time) must be sorted.

    Raises DataError if the rows are not sorted.
    """
    groups = 1 + max((int(g.max()) for g in (group, query_group) if len(g)), default=0)
    packing = Packing(time, groups + 1)
    code = packing.pack(group, time)
    if len(code) and bool((code[1:] < code[:-1]).any()):
        raise DataError("events must be sorted by (user, known_ms) before cuts are taken; sort with timeline_order")
    out: I64 = np.searchsorted(code, packing.pack(query_group, query_time), side="left").astype(np.int64)
    return out


def cuts(event_user: Ints, known_ms: Ints, impression_user: Ints, time_ms: Ints) -> npt.NDArray[np.int32]:
    """Events of the impression's user with known_ms strictly before time_ms, [N] int32.

    Events are sorted by (user, known_ms). One event at the very time of the impression is not counted.
    """
    start = np.searchsorted(event_user, impression_user, side="left")
    return (count_before(event_user, known_ms, impression_user, time_ms) - start).astype(np.int32)


def numpy_of(column: pa.Array | pa.ChunkedArray) -> npt.NDArray[np.generic]:
    """A column without nulls as one NumPy array."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    out: npt.NDArray[np.generic] = array.to_numpy(zero_copy_only=False)
    return out


def codes_of(column: pa.Array | pa.ChunkedArray, keys: pa.Array) -> npt.NDArray[np.int32]:
    """Position of every value among `keys`, which hold all of them, [N]."""
    out: npt.NDArray[np.int32] = pc.index_in(column, value_set=keys).to_numpy(zero_copy_only=False)
    return out.astype(np.int32, copy=False)


def is_in(column: pa.Array | pa.ChunkedArray, values: pa.Array) -> Bools:
    """Mask [N] of the values that are among `values`."""
    out: Bools = numpy_of(pc.is_in(column, value_set=values)).astype(np.bool_)
    return out
