"""The causal pyramid over a timeline: newest events as they are, older ones in summaries of growing span.

    level 0   m = LN(x + MLP(x))                        for events in some impression's window
    level k   x_a = W [Σ_b softmax_b(s·x_b) x_b ‖ mean_b x_b],  b over the B tokens below
              m = LN(x_a + MLP_k(x_a) + level_k)        MLP_k is twice as wide: fewer, wider tokens

All levels are extracted in parallel from the same events; a summary holds only events of its own block, hence no
impression can see past its cut through it (`gem.model.levels` says who reads what). Cost per old event: one gather and
one pooling; the MLPs run on windows and summaries only.

Legend: T events, M memory tokens, m tokens of a level, B children, S seeds, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gem.config import ModelConfig
from gem.model.levels import MemoryPlan

SEEDS = 2


class BlockSummary(nn.Module):
    """Pooling by multi-head attention of learned seeds over the tokens of a block, beside their mean."""

    def __init__(self, dim: int, num_seeds: int = SEEDS) -> None:
        super().__init__()
        self.seeds = nn.Linear(dim, num_seeds)
        self.out = nn.Linear((num_seeds + 1) * dim, dim)

    def forward(self, x_mBD: Tensor) -> Tensor:
        """[m, B, D] -> [m, D]."""
        weights_mSB = torch.softmax(self.seeds(x_mBD).transpose(1, 2), dim=2)
        pooled = torch.cat([(weights_mSB @ x_mBD).flatten(1), x_mBD.mean(1)], dim=1)
        out: Tensor = self.out(pooled)
        return out


class Pyramid(nn.Module):
    """Events [T, D] -> memory [M, D] in the order of `MemoryPlan.levels`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        dim, above = config.dim, range(1, config.num_levels)
        self.mlps = nn.ModuleList([_mlp(dim, 2 * dim), *(_mlp(dim, 4 * dim) for _ in above)])
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(config.num_levels))
        self.summaries = nn.ModuleList(BlockSummary(dim) for _ in above)
        self.level = nn.Embedding(config.num_levels, dim)
        nn.init.zeros_(self.level.weight)

    def forward(self, events: Tensor, plan: MemoryPlan) -> Tensor:
        parts = []
        below = events
        for k, level in enumerate(plan.levels):
            # Level 0 takes rows of the events, level 1 pools events, level k pools the summaries below.
            x = events[level.rows] if k == 0 else self.summaries[k - 1](below[level.children])
            below = x if k else events
            parts.append(self.norms[k](x + self.mlps[k](x) + self.level.weight[k]))
        return torch.cat(parts)


def _mlp(dim: int, hidden: int) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))
