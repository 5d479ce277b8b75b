"""Checks between the passes of preprocess that look at the data set as a whole, before any model is trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gem.data.days import DAY_MS, HOUR_MS, Split, day_number, day_text, local_ms
from gem.data.spec import DatasetSpec
from gem.errors import DataError

MAX_CONFLICT_SHARE = 0.01  # of impressions; true repeats of a log line agree in ad and time

Ints = npt.NDArray[np.integer[Any]]


def count_conflicts(keys: Sequence[Ints], values: Sequence[Ints]) -> int:
    """Rows beyond the first of each `keys` tuple whose group disagrees in any of `values`; all arrays [N].

    With keys (user, duplicate key) and values (ad, time): rows that would be dropped as repeats of another
    impression than they are.
    """
    if not len(keys[0]):
        return 0
    order = np.lexsort(tuple(reversed(tuple(keys))))
    new = np.ones(len(order), np.bool_)
    new[1:] = np.logical_or.reduce([k[order[1:]] != k[order[:-1]] for k in keys])
    starts = np.flatnonzero(new)
    sizes = np.diff(np.append(starts, len(order)))
    differ = np.zeros(len(starts), np.bool_)
    for value in values:
        ordered = value[order]
        differ |= np.minimum.reduceat(ordered, starts) != np.maximum.reduceat(ordered, starts)
    return int((sizes[differ] - 1).sum())


def check_distinct(spec: DatasetSpec, shards: Sequence[Mapping[str, Any]]) -> None:
    """Refuse a duplicate key that is shared by different impressions (a request id, times in whole seconds)."""
    conflicts = sum(int(s["conflicts"]) for s in shards)
    rows = sum(int(s["impressions"]) + int(s["duplicates"]) for s in shards)
    if not rows or conflicts <= MAX_CONFLICT_SHARE * rows:
        return
    imp = spec.impressions
    named = imp.duplicate_key or ([imp.id] if imp.id else [imp.user, imp.ad, imp.time.column])
    raise DataError(
        f"impressions: {conflicts} of {rows} rows have the same {' + '.join(named)} as an impression of another ad or "
        f"another time, and would be lost as its duplicates (allowed: {MAX_CONFLICT_SHARE:.0%}). It does not identify "
        "an impression (is it the id of a request?): leave out impressions.id, or name columns that do in "
        "impressions.duplicate_key"
    )


def check_settled(spec: DatasetSpec, split: Split, log_end_ms: Mapping[str, int]) -> None:
    """Refuse a test day on which a label with a log of its own cannot be settled for any impression."""
    for task, label in spec.labels.items():
        if not label.table or label.complete or label.window_hours is None:
            continue
        settled_ms = np.array([log_end_ms[task] - int(label.window_hours * HOUR_MS)], np.int64)
        last_day = int(local_ms(settled_ms, spec.impressions.zone)[0] // DAY_MS)
        if last_day >= day_number(split.test_day):
            continue
        raise DataError(
            f"labels.{task}: no impression of the test day {split.test_day} is settled: its window is "
            f"{label.window_hours:g} h and its log ends too early. The last day with settled outcomes is "
            f"{day_text(last_day)}: choose data.test_day no later than that, or set labels.{task}.complete: true if "
            "the log was waited for and holds every outcome"
        )
