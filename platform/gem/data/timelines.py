"""Canonical events to sorted timelines, and impressions to cuts (contract 2).

An event may be read by an impression only if it was *known* strictly before the impression's time:
the cut is the number of such events of that user. Nothing here loops over users.
Letters: E events, N impressions, U users.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from gem.errors import DataError

Ints = npt.NDArray[np.integer]
I64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


def timeline_order(user: Ints, known_ms: Ints, time_ms: Ints, ties: Sequence[Ints] = ()) -> I64:
    """Permutation [E] that sorts events by (user, known_ms, time_ms, *ties).

    Give enough ties and the result does not depend on the order of the input.
    """
    keys = (*reversed(tuple(ties)), time_ms, known_ms, user)
    return np.lexsort(keys).astype(np.int64)


def first_of_each(keys: Sequence[Ints], ties: Sequence[Ints] = ()) -> Bools:
    """Mask [E]: True for one row of every distinct `keys` tuple, the smallest by `ties` (then by position)."""
    order = np.lexsort((*reversed(tuple(ties)), *reversed(tuple(keys))))
    keep = np.zeros(len(order), np.bool_)
    if len(order):
        new = np.ones(len(order), np.bool_)
        new[1:] = np.logical_or.reduce([k[order[1:]] != k[order[:-1]] for k in keys])
        keep[order[new]] = True
    return keep


def user_offsets(user: Ints, num_users: int) -> I64:
    """Start of every user's events in an array sorted by user, [E] -> [U + 1]."""
    out: I64 = np.searchsorted(user, np.arange(num_users + 1)).astype(np.int64)
    return out


def count_before(group: Ints, time: Ints, query_group: Ints, query_time: Ints) -> I64:
    """Rows that sort strictly before (query_group, query_time), [N]; (group, time) must be sorted.

    Times are replaced by their ranks first, so that group and time fit one int64 whatever their size.
    Raises DataError if the rows are not sorted.
    """
    distinct = np.unique(time)
    rank = np.searchsorted(distinct, time)
    span = np.int64(len(distinct) + 1)
    composite = group.astype(np.int64) * span + rank
    if len(composite) and bool((np.diff(composite) < 0).any()):
        raise DataError("events must be sorted by (user, known_ms) before cuts are taken; sort with timeline_order")
    query = query_group.astype(np.int64) * span + np.searchsorted(distinct, query_time, side="left")
    out: I64 = np.searchsorted(composite, query, side="left").astype(np.int64)
    return out


def cuts(event_user: Ints, known_ms: Ints, impression_user: Ints, time_ms: Ints) -> npt.NDArray[np.int32]:
    """Events of the impression's user with known_ms strictly before time_ms, [N] int32.

    Events are sorted by (user, known_ms). One event at the very time of the impression is not counted.
    """
    start = np.searchsorted(event_user, impression_user, side="left")
    return (count_before(event_user, known_ms, impression_user, time_ms) - start).astype(np.int32)
