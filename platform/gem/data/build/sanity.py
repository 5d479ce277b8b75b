"""Checks between the passes of preprocess that look at the data set as a whole, before any model is trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gem.data.days import DAY_MS, HOUR_MS, Split, day_number, day_text, local_ms
from gem.data.spec import DatasetSpec
from gem.errors import DataError

MAX_CONFLICT_SHARE = 0.01  # of impressions; true repeats of a log line agree in ad and time


def check_distinct(
    spec: DatasetSpec, shards: Sequence[Mapping[str, Any]], parent: Mapping[str, Any] | None = None
) -> None:
    """Refuse a duplicate key that is shared by different impressions (a request id, times in whole seconds).

    Rows of the store before count too (`parent`, its manifest): a few late rows say little alone.
    """
    parts = [*shards, {**parent["rows"], "duplicates": parent["duplicates"]}] if parent else shards
    conflicts = sum(int(s["conflicts"]) for s in parts)
    rows = sum(int(s["impressions"]) + int(s["duplicates"]) + int(s["conflicts"]) for s in parts)
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
