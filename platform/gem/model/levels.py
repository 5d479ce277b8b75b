"""Which tokens of a user's timeline each impression reads: newest events one by one, older ones as summaries.

A token of level k stands for B^k consecutive events, [a·B^k, (a + 1)·B^k) counted from the user's first event ever.
Blocks lie at fixed places in the timeline, so that all impressions of a user share them, and an impression reads
a summary only if all of its events come before the cut:

    level k reads [s_k, e_k),  e_0 = cut,  e_{k+1} = s_k,  s_k = ⌊(e_k - window·B^k) / B^(k+1)⌋·B^(k+1)

down to `max_history` events before the cut (moved back to a whole block of the last level). Nothing is read twice and
nothing between is left out.

Legend: U users, N impressions, M memory tokens of all levels, P users of a block, I impressions, L tokens per user.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gem.config import ModelConfig
from gem.data.batch import Batch
from gem.errors import JaggedError
from gem.model.packing import Block, Packing, gap_bucket, size_class


@dataclass
class Level:
    """Tokens built at one level: of user u the numbers [low, high), in rows offsets[u] … of the memory."""

    low: Tensor  # [U] int64
    high: Tensor  # [U]
    offsets: Tensor  # [U] first row in the memory
    rows: Tensor  # [m] level 0: event rows; above: unused, see `children`
    children: Tensor  # [m, B] level 1: event rows; above: rows relative to the level below; level 0: empty
    user_of: Tensor  # [m]


@dataclass
class MemoryPlan:
    """The memory of a batch: levels one after the other, and how impressions read it."""

    levels: list[Level]
    packing: Packing  # blocks whose `events` are memory rows
    recent: Tensor  # [N, R] memory rows of the newest events, newest first; -1 where there is none
    time_ms: Tensor  # [M] of a token's last event
    user_of: Tensor  # [M]

    @property
    def num_tokens(self) -> int:
        return int(self.time_ms.numel())


def plan_memory(batch: Batch, config: ModelConfig) -> MemoryPlan:
    """Lay out the memory of a batch. Raises JaggedError if its timelines are not cut at `config.align`."""
    t = batch.timeline
    if bool((t.first % config.align != 0).any()):
        raise JaggedError(
            f"timeline.first: got {t.first[t.first % config.align != 0][:4].tolist()}; allowed: multiples of "
            f"{config.align}; collate with align=config.align"
        )
    starts, ends = _reads(batch, config)
    reads = [_range(batch.user_of, s // d, e // d, len(batch.users)) for s, e, d in _spans(starts, ends, config)]
    if config.event_attention:
        reads[0] = (reads[0][0] // config.block * config.block, reads[0][1])
    levels = _levels(batch, config, _builds(reads, config.block))
    user_of = torch.cat([level.user_of for level in levels])
    time_ms = torch.cat([_times(batch, level, config.block**k) for k, level in enumerate(levels)])
    packing = _pack(batch, (starts, ends), (reads, levels), time_ms, config)
    return MemoryPlan(levels, packing, _recent(batch, levels[0], starts[0], config.num_recent), time_ms, user_of)


def _spans(starts: list[Tensor], ends: list[Tensor], config: ModelConfig) -> list[tuple[Tensor, Tensor, int]]:
    return [(s, e, config.block**k) for k, (s, e) in enumerate(zip(starts, ends, strict=True))]


def _reads(batch: Batch, config: ModelConfig) -> tuple[list[Tensor], list[Tensor]]:
    """Per level the events [s_k, e_k) of every impression [N], counted from the user's first event ever."""
    end = batch.cut + batch.timeline.first[batch.user_of]
    last = config.block ** (config.num_levels - 1)
    low = (end - config.max_history).clamp(min=0) // last * last
    starts, ends = [], []
    for k in range(config.num_levels):
        ends.append(end)
        step = config.block ** (k + 1)
        end = (
            low
            if k == config.num_levels - 1
            else torch.maximum((end - config.window * config.block**k).clamp(min=0) // step * step, low)
        )
        starts.append(end)
    return starts, ends


def _range(user_of: Tensor, low: Tensor, high: Tensor, num_users: int) -> tuple[Tensor, Tensor]:
    """Per user the smallest and largest bound over its impressions."""
    least = torch.full((num_users,), torch.iinfo(torch.int64).max, device=low.device)
    least = least.scatter_reduce(0, user_of, low, "amin")
    most = torch.zeros(num_users, dtype=torch.int64, device=low.device).scatter_reduce(0, user_of, high, "amax")
    return torch.minimum(least, most), most


def _builds(reads: list[tuple[Tensor, Tensor]], block: int) -> list[tuple[Tensor, Tensor]]:
    """Per level the tokens to build: those read, and from level 1 on the children of those above."""
    builds = list(reads)
    for k in range(len(reads) - 2, 0, -1):
        low, high = builds[k]
        above_low, above_high = builds[k + 1][0] * block, builds[k + 1][1] * block
        some, own = above_high > above_low, high > low
        low = torch.where(some, torch.where(own, torch.minimum(low, above_low), above_low), low)
        high = torch.where(some, torch.where(own, torch.maximum(high, above_high), above_high), high)
        builds[k] = (low, high)
    return builds


def _levels(batch: Batch, config: ModelConfig, builds: list[tuple[Tensor, Tensor]]) -> list[Level]:
    t, base = batch.timeline, 0
    levels: list[Level] = []
    inside = torch.arange(config.block, device=t.first.device)
    for k, (low, high) in enumerate(builds):
        count = high - low
        offsets = base + torch.cumsum(count, 0) - count
        user_of = torch.repeat_interleave(torch.arange(low.numel(), device=low.device), count)
        number = torch.arange(user_of.numel(), device=low.device) + base - offsets[user_of] + low[user_of]
        if k <= 1:
            rows = (t.offsets[:-1] - t.first)[user_of] + number * config.block**k
        else:
            below = levels[k - 1]
            rows = (below.offsets - below.low)[user_of] + number * config.block - int(_base(levels[: k - 1]))
        children = rows.unsqueeze(1) + inside if k else rows.new_zeros(0, config.block)
        levels.append(Level(low, high, offsets, rows, children, user_of))
        base += user_of.numel()
    return levels


def _base(levels: list[Level]) -> int:
    return sum(level.user_of.numel() for level in levels)


def _times(batch: Batch, level: Level, span: int) -> Tensor:
    """[m] time of each token's last event."""
    t, u = batch.timeline, level.user_of
    number = level.low[u] + torch.arange(u.numel(), device=u.device) - (level.offsets - level.offsets[:1])[u]
    return t.time_ms[t.offsets[u] - t.first[u] + (number + 1) * span - 1]


def _recent(batch: Batch, level: Level, start: Tensor, num: int) -> Tensor:
    """[N, num] memory rows of the newest events before each cut."""
    u = batch.user_of
    back = torch.arange(1, num + 1, device=u.device)
    at = (batch.cut + batch.timeline.first[u]).unsqueeze(1) - back
    row = (level.offsets - level.low)[u].unsqueeze(1) + at
    return torch.where(at >= start.unsqueeze(1), row, -1)


def _pack(
    batch: Batch,
    bounds: tuple[list[Tensor], list[Tensor]],
    tokens: tuple[list[tuple[Tensor, Tensor]], list[Level]],
    time_ms: Tensor,
    config: ModelConfig,
) -> Packing:
    """Users of similar size into blocks; a block's tokens are those of level 0, then of level 1, …"""
    (starts, ends), (reads, levels) = bounds, tokens
    num_users, device = len(batch.users), batch.user_of.device
    counts = torch.bincount(batch.user_of, minlength=num_users)
    first = torch.cumsum(counts, 0) - counts
    sizes = torch.stack([high - low for low, high in reads])  # [levels, U]
    key = size_class(counts) * 64 + size_class(sizes.sum(0))
    blocks = []
    for k in torch.unique(key).tolist():
        users = torch.nonzero(key == k).squeeze(1)
        grid_i = torch.arange(int(counts[users].max()), device=device)
        mask = grid_i < counts[users, None]
        impressions = torch.where(mask, first[users, None] + grid_i, 0)
        rows, seen = [], []
        for n, (level, (low, _)) in enumerate(zip(levels, reads, strict=True)):
            grid = torch.arange(max(int(sizes[n, users].max()), 1 - n), device=device)
            there = grid < sizes[n, users, None]
            number = low[users, None] + grid
            rows.append(torch.where(there, (level.offsets - level.low)[users, None] + number, 0))
            span = config.block**n
            s, e = (starts[n][impressions] // span).unsqueeze(2), (ends[n][impressions] // span).unsqueeze(2)
            at = number.unsqueeze(1)
            seen.append((at >= s) & (at < e) & there.unsqueeze(1) & mask.unsqueeze(2))
        events = torch.cat(rows, 1)
        gap = gap_bucket(batch.time_ms[impressions], time_ms, events)
        blocks.append(Block(impressions, mask, events, torch.cat(seen, 2), gap))
    return Packing(blocks, len(batch))
