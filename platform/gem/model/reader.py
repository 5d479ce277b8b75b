"""Reading a memory: attention of an impression's queries over the tokens before its cut.

Legend: N impressions, Q queries per impression, M memory tokens, D width, H heads; P, I, L as in `packing`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gem.model.packing import GAP_BUCKETS, Packing


class TimelineReader(nn.Module):
    """Multi-head attention over the visible memory.

        A = softmax(Q Kᵀ/√d + b[head, gap bucket]);  out = A V      [N, Q, D]

    A learned "nothing" key is always visible, so that an empty history is a value and not a NaN.
    Bias b depends on log2 of the elapsed seconds: a position in log time, relative to the impression.
    """

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query = nn.Linear(dim, dim)
        self.key_value = nn.Linear(dim, 2 * dim)
        self.nothing = nn.Parameter(torch.randn(2 * dim) * 0.02)
        self.gap_bias = nn.Embedding(GAP_BUCKETS, num_heads)
        nn.init.zeros_(self.gap_bias.weight)
        self.out = nn.Linear(dim, dim)

    def forward(self, queries: Tensor, memory: Tensor, packing: Packing) -> Tensor:
        """queries [N, Q, D], memory [M, D] -> [N, Q, D]."""
        num_queries, dim = queries.shape[1:]
        found = zip(
            packing.blocks,
            packing.gather_impressions(self.query(queries) * (dim // self.num_heads) ** -0.5),
            packing.gather_events(self.key_value(memory)),
            packing.lookup_gaps(self.gap_bias),
            strict=True,
        )
        parts = []
        for block, q_PIQD, kv_PLD, bias_PILH in found:
            (p, i), length = block.impressions.shape, block.events.shape[1]
            q = q_PIQD.reshape(p, i * num_queries, self.num_heads, -1).transpose(1, 2)
            both = torch.cat([self.nothing.expand(p, 1, -1), kv_PLD], dim=1)
            k, v = both.view(p, length + 1, 2, self.num_heads, -1).permute(2, 0, 3, 1, 4)
            bias = bias_PILH.permute(0, 3, 1, 2).masked_fill(~block.visible.unsqueeze(1), float("-inf"))
            # Written out: with a learned bias PyTorch's kernel does the same, and wants the bias once per query.
            scores = (q @ k.transpose(2, 3)).view(p, self.num_heads, i, num_queries, length + 1)
            weights = torch.softmax(scores + F.pad(bias, (1, 0)).unsqueeze(3), dim=4)
            read = weights.view(p, self.num_heads, i * num_queries, length + 1) @ v
            parts.append(read.transpose(1, 2).reshape(p, i, num_queries, dim))
        out: Tensor = self.out(packing.scatter(parts))
        return out
