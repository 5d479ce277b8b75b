"""What was known strictly before each row: counts, rates and meetings, computed without a loop over rows.

Letters: N rows that ask, E entries (outcomes or events) that answer, W weights of an entry, G groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

I64 = NDArray[np.int64]
F64 = NDArray[np.float64]
STRENGTH = 10.0  # pseudo-impressions of the overall past rate in a smoothed rate


class Past:
    """E entries with a key and a place in time (ms, or the number in a timeline), sorted once by both."""

    def __init__(self, key_E: NDArray[np.integer], at_E: NDArray[np.integer]) -> None:
        self.order = np.lexsort((at_E, key_E))
        self.keys = key_E[self.order].astype(np.int64)
        self.at = at_E[self.order].astype(np.int64)
        self._times = np.unique(self.at)
        self._codes = self._code(self.keys, self.at)

    def spans(self, key_N: NDArray[np.integer], at_N: NDArray[np.integer]) -> tuple[I64, I64]:
        """For every row the sorted entries [start, stop) of its key whose place is strictly before its own."""
        start = np.searchsorted(self.keys, key_N, side="left")
        stop = np.searchsorted(self._codes, self._code(key_N, at_N), side="left")
        return start, np.maximum(stop, start)

    def sums(self, weights_EW: NDArray[np.generic], spans: tuple[I64, I64]) -> F64:
        """Sums of the entries' weights over each span, [N, W]."""
        start, stop = spans
        total = np.zeros((len(self.keys) + 1, weights_EW.shape[1]))
        np.cumsum(weights_EW[self.order], axis=0, dtype=np.float64, out=total[1:])
        out: F64 = total[stop] - total[start]
        return out

    def last(self, values_E: I64, spans: tuple[I64, I64], absent: int) -> I64:
        """The value of the last entry of each span; `absent` where the span is empty. [N]"""
        start, stop = spans
        found = values_E[self.order][np.maximum(stop - 1, 0)] if len(self.keys) else np.zeros(len(stop), np.int64)
        return np.where(stop > start, found, absent)

    def _code(self, key: NDArray[np.integer], at: NDArray[np.integer]) -> I64:
        """One number that orders by (key, place)."""
        rank = np.searchsorted(self._times, at, side="left")
        code: I64 = key.astype(np.int64) * (len(self._times) + 1) + rank
        return code


def pair(left: NDArray[np.integer], right: NDArray[np.integer], right_size: int) -> I64:
    """One key for two codes."""
    out: I64 = left.astype(np.int64) * right_size + right
    return out


@dataclass(frozen=True)
class Outcomes:
    """N impressions in any order, as rows that ask and as entries that answer once their outcome is known.

    keys: group name -> code of every impression; labels and mask are [N, K]; known_NK: when an outcome is known, ms.
    """

    time_ms: I64
    keys: dict[str, I64]
    labels: NDArray[np.float32]
    mask: NDArray[np.float32]
    known_NK: I64
    tasks: tuple[str, ...]


def past_rates(rows: Outcomes) -> tuple[NDArray[np.float32], list[str]]:
    """Smoothed rates (s + STRENGTH p0) / (n + STRENGTH) and log(1 + n), per task and group; and column names.

    s positives among the n impressions of the same group whose outcome was known strictly before this impression;
    p0 = (S + 1) / (M + 2) over all impressions known by then. The first column of a task is p0 itself.
    """
    columns: list[NDArray[np.float64]] = []
    names: list[str] = []
    everything = np.zeros(len(rows.time_ms), np.int64)
    for k, task in enumerate(rows.tasks):
        weights = np.stack([rows.mask[:, k], rows.labels[:, k] * rows.mask[:, k]], 1)
        seen, positive = _counts(everything, rows.known_NK[:, k], weights, rows.time_ms)
        prior = (positive + 1.0) / (seen + 2.0)
        columns.append(prior)
        names.append(f"{task}_rate")
        for group, key in rows.keys.items():
            seen, positive = _counts(key, rows.known_NK[:, k], weights, rows.time_ms)
            columns += [(positive + STRENGTH * prior) / (seen + STRENGTH), np.log1p(seen)]
            names += [f"{task}_rate_{group}", f"{task}_count_{group}"]
    return np.stack(columns, 1).astype(np.float32), names


def _counts(key: I64, known: I64, weights: NDArray[np.generic], time: I64) -> tuple[F64, F64]:
    past = Past(key, known)
    sums = past.sums(weights, past.spans(key, time))
    return sums[:, 0], sums[:, 1]


@dataclass(frozen=True)
class Meetings:
    """Timelines and the impressions that look back on them.

    Entries: user_E, number_E (0.. within the user's timeline), time_ms_E, weights_EW (named `weights`).
    Rows: user_N, cut_N (entries below it are known), time_ms_N. keys: group -> (codes of E, codes of N), each a pair
    (owner [V], value [V]) so that an entry or a row may have any number of codes.
    """

    user_E: NDArray[np.integer]
    number_E: I64
    time_ms_E: I64
    weights_EW: NDArray[np.float32]
    weights: Sequence[str]
    user_N: NDArray[np.integer]
    cut_N: NDArray[np.integer]
    time_ms_N: I64
    keys: dict[str, tuple[tuple[I64, I64], tuple[I64, I64]]]


def past_meetings(rows: Meetings) -> tuple[NDArray[np.float32], list[str]]:
    """How often a user met this ad (author, tag, …) before the cut, and how long ago; and column names.

    Per group: log(1 + entries), log(1 + entries with weight w) for every w, log(1 + seconds since the last one), the
    last being -1 where there is none. Rows with several codes take the sum over them, and the latest one.
    """
    columns: list[NDArray[np.float64]] = []
    names: list[str] = []
    num = len(rows.user_N)
    weights = np.concatenate([np.ones((len(rows.user_E), 1), np.float32), rows.weights_EW], 1)
    for group, ((owner_E, code_E), (owner_N, code_N)) in rows.keys.items():
        size = 1 + int(max(code_E.max(initial=0), code_N.max(initial=0)))
        past = Past(pair(rows.user_E[owner_E], code_E, size), rows.number_E[owner_E])
        spans = past.spans(pair(rows.user_N[owner_N], code_N, size), rows.cut_N[owner_N])
        sums = past.sums(weights[owner_E], spans)
        none = np.iinfo(np.int64).min
        last = np.full(num, none)
        np.maximum.at(last, owner_N, past.last(rows.time_ms_E[owner_E], spans, none))
        total = np.stack([np.bincount(owner_N, column, num) for column in sums.T], 1)
        age_s = np.where(last == none, 0, rows.time_ms_N - last) / 1000.0
        columns += [*np.log1p(total).T, np.where(last == none, -1.0, np.log1p(np.maximum(age_s, 0.0)))]
        names += [f"met_{group}", *(f"met_{group}_{w}" for w in rows.weights), f"since_{group}"]
    return np.stack(columns, 1).astype(np.float32), names
