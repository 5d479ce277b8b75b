"""From rows of a feature store (or of one serving request) to a `Batch`.

The same function serves training, evaluation and serving, so that a served score cannot differ from an
offline one by its inputs. Each user's timeline enters a batch once, however many impressions it has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gem.data.batch import Batch, EntityRows, TimelineRows
from gem.errors import JaggedError

IntArray = NDArray[np.integer]  # any width; what leaves here is int64
DENSE = 64  # a table over all ads is used while there are at most so many ads for every look-up


class EntitySource(Protocol):
    """Encoded features of users or ads by entity index (see `gem.data.store.EntityTable`)."""

    def rows(self, idx: NDArray[np.integer]) -> EntityRows: ...


class TimelineSource(Protocol):
    """All users' events, flat, with `offsets` [num_users + 1] (see `gem.data.store.Timelines`)."""

    offsets: NDArray[np.int64]
    ad: NDArray[np.int32]
    kind: NDArray[np.uint8]
    flags: NDArray[np.uint16]
    surface: NDArray[np.int16]
    dwell: NDArray[np.uint8]
    time_ms: NDArray[np.int64]


@dataclass
class ImpressionRows:
    """N impressions by entity index. `cut` counts from the user's first event in the timelines."""

    user: IntArray
    ad: IntArray
    time_ms: IntArray
    cut: IntArray
    surface: IntArray
    context: EntityRows
    labels: NDArray[np.float32]  # [N, K]
    mask: NDArray[np.float32]  # [N, K]
    impression_id: IntArray
    past: NDArray[np.float32]  # [N, M, S], see `gem.data.past`


def collate(
    users: EntitySource,
    ads: EntitySource,
    timelines: TimelineSource,
    rows: ImpressionRows,
    max_history: int,
    align: int = 1,
) -> Batch:
    """Build the batch of these impressions, reordered so that a user's impressions are neighbours.

    Of each user only events in [smallest cut - max_history, largest cut) are carried, the first moved back to a
    multiple of `align` (see `ModelConfig.align`). Event and candidate ads are gathered into one table of distinct
    ads. Raises JaggedError for a cut beyond the timeline.
    """
    rows = _by_user(rows)
    cut = rows.cut.astype(np.int64)
    starts = _starts(rows.user)
    user_idx, counts = rows.user[starts], np.diff(starts, append=cut.size)
    low, high = _event_ranges(cut, starts, max_history, align)
    base = timelines.offsets[user_idx]
    _check_ranges(user_idx, high, timelines.offsets[user_idx + 1] - base)
    lengths = high - low
    offsets = np.zeros(lengths.size + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    events = np.repeat(base + low - offsets[:-1], lengths)
    events += np.arange(events.size)

    num = cut.size
    ad_idx, ad_of = _distinct(np.concatenate([rows.ad.astype(np.int32), timelines.ad.take(events)]))
    return Batch(
        users=users.rows(user_idx),
        ads=ads.rows(ad_idx),
        context=rows.context,
        timeline=TimelineRows(
            offsets=torch.from_numpy(offsets),
            first=torch.from_numpy(low),
            ad=_long(ad_of[num:]),
            kind=_long(timelines.kind.take(events)),
            flags=_long(timelines.flags.take(events)),
            surface=_long(timelines.surface.take(events)),
            dwell=_long(timelines.dwell.take(events)),
            time_ms=_long(timelines.time_ms.take(events)),
        ),
        user_of=torch.from_numpy(np.repeat(np.arange(user_idx.size), counts)),
        ad_of=_long(ad_of[:num]),
        cut=torch.from_numpy(cut - np.repeat(low, counts)),
        time_ms=_long(rows.time_ms),
        surface=_long(rows.surface),
        labels=torch.from_numpy(rows.labels.copy()),
        mask=torch.from_numpy(rows.mask.copy()),
        impression_id=_long(rows.impression_id),
        past=torch.from_numpy(rows.past),
    )


def _by_user(rows: ImpressionRows) -> ImpressionRows:
    """The rows in user order, equal users in the order they came; the same object if they stand so already."""
    if not bool((rows.user[1:] < rows.user[:-1]).any()):
        return rows
    order = np.argsort(rows.user, kind="stable")
    return ImpressionRows(
        user=rows.user[order],
        ad=rows.ad[order],
        time_ms=rows.time_ms[order],
        cut=rows.cut[order],
        surface=rows.surface[order],
        context=take_rows(rows.context, torch.from_numpy(order)),
        labels=rows.labels[order],
        mask=rows.mask[order],
        impression_id=rows.impression_id[order],
        past=rows.past[order],
    )


def _starts(values: IntArray) -> NDArray[np.int64]:
    """Where the runs of equal values begin, in values that are sorted."""
    if not values.size:
        return np.zeros(0, np.int64)
    return np.concatenate([[0], np.flatnonzero(values[1:] != values[:-1]) + 1])


def _event_ranges(
    cut: NDArray[np.int64], starts: NDArray[np.int64], max_history: int, align: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Per user the event range [low, high) that any of its impressions may read."""
    if not starts.size:
        return starts, starts
    low = np.maximum(np.minimum.reduceat(cut, starts) - max_history, 0)
    return low // align * align, np.maximum.reduceat(cut, starts)


def _check_ranges(user: IntArray, high: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
    """Refuse a cut beyond the user's timeline: it would read the next user's events."""
    bad = np.flatnonzero(high > lengths)
    if bad.size:
        raise JaggedError(
            f"cut: {int(high[bad[0]])} events asked of user {int(user[bad[0]])}, whose timeline has "
            f"{int(lengths[bad[0]])}; a cut counts events of the timeline, preprocess again"
        )


def _distinct(values: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The distinct values, sorted, and for each value its place among them; values are >= 0.

    Marks in a table over all possible values cost less than sorting unless these are very many more.
    """
    bound = int(values.max()) + 1 if values.size else 0
    if values.size and int(values.min()) < 0:
        raise JaggedError(f"ad: entity index {int(values.min())}; allowed are indices from 0, preprocess again")
    if bound > DENSE * values.size:
        found, place = np.unique(values, return_inverse=True)
        return found, place.astype(np.int32)
    marks = np.zeros(bound, np.bool_)
    marks[values] = True
    found = np.flatnonzero(marks).astype(np.int32)
    places = np.empty(bound, np.int32)
    places[found] = np.arange(found.size, dtype=np.int32)
    return found, places.take(values)


def take_rows(rows: EntityRows, at: Tensor) -> EntityRows:
    """Select entities of an `EntityRows` by position; multi-valued fields stay jagged."""
    ids: dict[str, Tensor] = {}
    offsets: dict[str, Tensor] = {}
    for name, values in rows.ids.items():
        if name not in rows.offsets:
            ids[name] = values[at]
            continue
        start = rows.offsets[name][at]
        lengths = rows.offsets[name][at + 1] - start
        new = torch.zeros(at.numel() + 1, dtype=torch.int64)
        torch.cumsum(lengths, 0, out=new[1:])
        ids[name] = values[torch.repeat_interleave(start - new[:-1], lengths) + torch.arange(int(new[-1]))]
        offsets[name] = new
    return EntityRows(ids=ids, offsets=offsets, numeric=rows.numeric[at], vectors=rows.vectors[at])


def _long(values: NDArray[np.generic]) -> Tensor:
    return torch.from_numpy(values.astype(np.int64))
