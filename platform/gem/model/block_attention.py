"""Causal self-attention of events inside fixed blocks of a timeline, with log-time rotary positions.

Sliding windows make an event depend on its neighbours' neighbours; fixed blocks (GEM's block attention) cost O(T·B) and
keep every event's encoding a function of its own block, and so the same for all impressions and batches.

    A = softmax(rot(q_i)·rot(k_j)/√d), j ≤ i in the same block;   rot turns pair f by ω_f · log(1 + (t - t_0)/τ)

t_0 is the time of the block's first event, τ one minute (ROTE-like, arXiv 2602.10016; ours anchors at the block, so
that later events cannot move a position).

Legend: c blocks, B events per block, H heads, d head width, D width, M memory tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gem.model.levels import MemoryPlan

TAU_MS = 60_000.0


@dataclass
class EventBlocks:
    """rows [c, B] memory rows (0 where padded), there [c, B], position [c, B] log minutes since the block began."""

    rows: Tensor
    there: Tensor
    position: Tensor


def event_blocks(plan: MemoryPlan, block: int) -> EventBlocks:
    """Level 0 of the memory in blocks. Its first token of every user lies at a block's start (see `plan_memory`)."""
    level = plan.levels[0]
    counts = level.high - level.low
    num = (counts + block - 1) // block
    user = torch.repeat_interleave(torch.arange(num.numel(), device=num.device), num)
    number = torch.arange(user.numel(), device=num.device) - (torch.cumsum(num, 0) - num)[user]
    inside = number.unsqueeze(1) * block + torch.arange(block, device=num.device)
    there = inside < counts[user].unsqueeze(1)
    rows = torch.where(there, level.offsets[user].unsqueeze(1) + inside, 0)
    if plan.num_tokens == 0:
        return EventBlocks(rows, there, torch.zeros(rows.shape, device=rows.device))
    time = plan.time_ms[rows]
    elapsed = torch.where(there, time - time[:, :1], 0).clamp(min=0).float()
    return EventBlocks(rows, there, torch.log1p(elapsed / TAU_MS))


def rotate(x_cBHd: Tensor, position_cB: Tensor) -> Tensor:
    """Turn pairs (x_f, x_{f + d/2}) by ω_f · position, ω_f = 4^-f."""
    half = x_cBHd.shape[-1] // 2
    omega = 4.0 ** -torch.arange(half, device=x_cBHd.device, dtype=x_cBHd.dtype)
    angle = (position_cB.to(x_cBHd.dtype).unsqueeze(-1) * omega).unsqueeze(2)
    cos, sin = torch.cos(angle), torch.sin(angle)
    a, b, rest = x_cBHd[..., :half], x_cBHd[..., half : 2 * half], x_cBHd[..., 2 * half :]
    return torch.cat([a * cos - b * sin, a * sin + b * cos, rest], dim=-1)


class BlockAttention(nn.Module):
    """Memory [M, D] -> what is added to it [M, D]: zero for summaries, attention inside the block for events."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, memory: Tensor, blocks: EventBlocks) -> Tensor:
        (c, block), dim = blocks.rows.shape, memory.shape[1]
        if c == 0:
            # The empty sum keeps the parameters in the graph: DDP waits for a gradient of every one.
            nothing: Tensor = self.out(self.qkv(self.norm(memory.new_zeros(1, dim)))[:, :dim])
            return torch.zeros_like(memory) + 0 * nothing
        qkv = F.embedding(blocks.rows, self.qkv(self.norm(memory))).view(c, block, 3, self.num_heads, -1)
        q, k = rotate(qkv[:, :, 0], blocks.position), rotate(qkv[:, :, 1], blocks.position)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), qkv[:, :, 2].transpose(1, 2)
        read = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed = self.out(read.transpose(1, 2).reshape(c, block, -1)[blocks.there])
        out: Tensor = torch.zeros_like(memory).index_copy(0, blocks.rows[blocks.there], mixed)
        return out
