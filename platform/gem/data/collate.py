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

IntArray = NDArray[np.int64]


class EntitySource(Protocol):
    """Encoded features of users or ads by entity index (see `gem.data.store.EntityTable`)."""

    def rows(self, idx: IntArray) -> EntityRows: ...


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


def collate(
    users: EntitySource, ads: EntitySource, timelines: TimelineSource, rows: ImpressionRows, max_history: int
) -> Batch:
    """Build the batch of these impressions, reordered so that a user's impressions are neighbours.

    Of each user only events in [smallest cut - max_history, largest cut) are carried. Event and
    candidate ads are gathered into one table of distinct ads.
    """
    order = np.argsort(rows.user, kind="stable")
    user_idx, user_of = np.unique(rows.user[order], return_inverse=True)
    cut = rows.cut[order]
    low, high = _event_ranges(user_idx.size, user_of, cut, max_history)
    base = timelines.offsets[user_idx]
    lengths = high - low
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    events = np.repeat(base + low - offsets[:-1], lengths) + np.arange(offsets[-1])

    ads_all = np.concatenate([rows.ad[order], timelines.ad[events].astype(np.int64)])
    ad_idx, ad_of = np.unique(ads_all, return_inverse=True)
    num = order.size
    at = torch.from_numpy(order)
    return Batch(
        users=users.rows(user_idx),
        ads=ads.rows(ad_idx),
        context=take_rows(rows.context, at),
        timeline=TimelineRows(
            offsets=torch.from_numpy(offsets),
            ad=torch.from_numpy(ad_of[num:]),
            kind=_long(timelines.kind[events]),
            flags=_long(timelines.flags[events]),
            surface=_long(timelines.surface[events]),
            dwell=_long(timelines.dwell[events]),
            time_ms=_long(timelines.time_ms[events]),
        ),
        user_of=torch.from_numpy(user_of),
        ad_of=torch.from_numpy(ad_of[:num]),
        cut=torch.from_numpy(cut - low[user_of]),
        time_ms=_long(rows.time_ms[order]),
        surface=_long(rows.surface[order]),
        labels=torch.from_numpy(rows.labels[order]),
        mask=torch.from_numpy(rows.mask[order]),
        impression_id=_long(rows.impression_id[order]),
    )


def _event_ranges(num_users: int, user_of: IntArray, cut: IntArray, max_history: int) -> tuple[IntArray, IntArray]:
    """Per user the event range [low, high) that any of its impressions may read."""
    first = np.full(num_users, np.iinfo(np.int64).max)
    last = np.zeros(num_users, np.int64)
    np.minimum.at(first, user_of, cut)
    np.maximum.at(last, user_of, cut)
    return np.maximum(first - max_history, 0), last


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
