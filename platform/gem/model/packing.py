"""Packing: jagged users into a few dense blocks of similar size.

Attention over jagged timelines on CPU is fastest as dense attention inside length buckets. A `Block`
holds users whose history lengths and impression counts are alike; all its tensors are index grids, so
that every layer gathers once and scatters once.

Legend: P users of a block, I impressions per user (padded), L events per user (padded).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gem.data.batch import Batch

GROWTH = 4  # sizes within this factor share a block: at most 4x padding, few blocks
GAP_BUCKETS = 24  # half-octaves would be finer; octaves of seconds reach half a year


@dataclass
class Block:
    """Users of similar size as index grids into a batch; padded cells point at row 0 and are masked."""

    impressions: Tensor  # [P, I] int64 impression rows, 0 where padded
    impression_mask: Tensor  # [P, I] bool
    events: Tensor  # [P, L] int64 event rows, 0 where padded
    visible: Tensor  # [P, I, L] bool: the event lies in the newest `max_history` before the cut
    gap: Tensor  # [P, I, L] int64 bucket of log2 seconds between event and impression


@dataclass
class Packing:
    """All blocks of a batch. Gathers and scatters run once over all blocks: one backward, not one a block."""

    blocks: list[Block]
    num_impressions: int

    def gather_events(self, values: Tensor) -> list[Tensor]:
        """[T, ...] -> per block [P, L, ...]; a batch without any event gives zeros."""
        if values.shape[0] == 0:
            # The empty sum keeps `values` in the graph: DDP waits for a gradient of every parameter.
            nothing = values.sum()
            return [values.new_zeros(*b.events.shape, *values.shape[1:]) + nothing for b in self.blocks]
        return _gather(values, [b.events for b in self.blocks])

    def gather_impressions(self, values: Tensor) -> list[Tensor]:
        """[N, ...] -> per block [P, I, ...]."""
        return _gather(values, [b.impressions for b in self.blocks])

    def lookup_gaps(self, table: nn.Embedding) -> list[Tensor]:
        """Rows of a small table for every (impression, event): per block [P, I, L, width]."""
        return _gather(table.weight, [b.gap for b in self.blocks])

    def scatter(self, parts: list[Tensor]) -> Tensor:
        """Block results [P, I, ...] back to impressions [N, ...]."""
        index = torch.cat([b.impressions[b.impression_mask] for b in self.blocks])
        values = torch.cat([p[b.impression_mask] for p, b in zip(parts, self.blocks, strict=True)])
        out = values.new_zeros(self.num_impressions, *values.shape[1:])
        return out.index_copy(0, index, values)


def _gather(values: Tensor, grids: list[Tensor]) -> list[Tensor]:
    found = values.index_select(0, torch.cat([g.flatten() for g in grids]))
    parts = found.split([g.numel() for g in grids])
    return [p.view(*g.shape, *values.shape[1:]) for p, g in zip(parts, grids, strict=True)]


def pack(batch: Batch, max_history: int) -> Packing:
    """Group a batch's users into blocks. Impressions of one user must be neighbours (as `collate` does)."""
    num_users = len(batch.users)
    device = batch.user_of.device
    counts = torch.bincount(batch.user_of, minlength=num_users)
    starts = torch.cumsum(counts, 0) - counts
    lengths = batch.timeline.offsets[1:] - batch.timeline.offsets[:-1]
    key = size_class(counts) * 64 + size_class(lengths)
    blocks = []
    for k in torch.unique(key).tolist():
        users = torch.nonzero(key == k).squeeze(1)
        grid_i = torch.arange(int(counts[users].max()), device=device)
        grid_l = torch.arange(max(int(lengths[users].max()), 1), device=device)
        impression_mask = grid_i < counts[users, None]
        event_mask = grid_l < lengths[users, None]
        impressions = torch.where(impression_mask, starts[users, None] + grid_i, 0)
        events = torch.where(event_mask, batch.timeline.offsets[users, None] + grid_l, 0)
        cut = batch.cut[impressions].unsqueeze(2)
        visible = (
            (grid_l < cut) & (grid_l >= cut - max_history) & event_mask.unsqueeze(1) & impression_mask.unsqueeze(2)
        )
        gap = gap_bucket(batch.time_ms[impressions], batch.timeline.time_ms, events)
        blocks.append(Block(impressions, impression_mask, events, visible, gap))
    return Packing(blocks, len(batch))


def size_class(sizes: Tensor) -> Tensor:
    """Class of each size [n]: sizes of a class differ by at most the factor GROWTH."""
    return torch.ceil(torch.log(sizes.clamp(min=1).double()) / torch.log(torch.tensor(float(GROWTH)))).long()


def gap_bucket(now_PI: Tensor, time_M: Tensor, rows_PL: Tensor) -> Tensor:
    """Buckets [P, I, L] of log2(1 + seconds) from the tokens' times [M] (ms), by rows [P, L], to `now` (ms)."""
    if time_M.numel() == 0:
        return torch.zeros(*now_PI.shape, rows_PL.shape[1], dtype=torch.int64, device=now_PI.device)
    seconds = (now_PI.unsqueeze(2) - time_M[rows_PL].unsqueeze(1)).clamp(min=0).float() / 1000
    return torch.log2(1 + seconds).long().clamp(max=GAP_BUCKETS - 1)
