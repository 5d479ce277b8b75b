"""Pooling over the events an impression may see, without a grid.

Legend: N impressions, U users, T events, V visible (impression, event) pairs, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from gem.data.batch import Batch


def visible_range(batch: Batch, max_history: int) -> tuple[Tensor, Tensor]:
    """Event rows [first, end) that each impression may read: the newest `max_history` before its cut. [N], [N]."""
    start = batch.timeline.offsets[batch.user_of]
    return start + (batch.cut - max_history).clamp(min=0), start + batch.cut


def visible_mean(events_TD: Tensor, batch: Batch, max_history: int) -> Tensor:
    """Mean over the visible events of every impression, [T, D] -> [N, D]; an empty history gives zeros.

        out_n = (c[end_n] - c[first_n]) / max(end_n - first_n, 1),   c = prefix sums of the events, c[0] = 0

    One pass over the T events, however many impressions read them. Prefix sums run through all users of a batch:
    in float64, what cancels between them is below the precision of float32 events.
    """
    first, end = visible_range(batch, max_history)
    prefix = F.pad(events_TD.double().cumsum(0), (0, 0, 1, 0))
    total = prefix.index_select(0, end) - prefix.index_select(0, first)
    return (total / (end - first).clamp(min=1).unsqueeze(1)).to(events_TD.dtype)


def visible_pairs(batch: Batch, max_history: int) -> tuple[Tensor, Tensor]:
    """All (impression, event) pairs that may be read, by impression: impression rows [V] and event rows [V]."""
    first, end = visible_range(batch, max_history)
    length = end - first
    before = length.cumsum(0) - length
    impression = torch.repeat_interleave(torch.arange(len(batch), device=length.device), length)
    event = (first - before)[impression] + torch.arange(impression.numel(), device=length.device)
    return impression, event
