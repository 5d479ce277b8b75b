"""InterFormer layers (arXiv 2411.09852), amortised: sequence and cross-feature parts inform each other in every layer.

    sequence   M' = M + W2 (g(user) ⊙ GELU(W1 LN(M)))           personalised feed-forward (PFFN), once per token
               M' = M' + BlockAttention(M')                      optional, events of a block
    cross      CLS = [candidate ‖ W_c X],  S = [read(CLS) ‖ read(PMA seeds) ‖ recent events]
               S_sum = S ⊙ σ(W_g [S ‖ candidate])                selective gating
    interact   X' = Wukong([X ‖ S_sum])

The paper's PFFN multiplies the sequence of *one* impression by a matrix made of X_sum = f(X). Here a timeline is shared
by all impressions of a user, so its modulation g may depend on the user's tokens only; f(user)·S has the factorised
form W2 diag(g(user)) W1. What depends on the impression travels the other way, in the queries: they read keys and
values of the whole visible memory in every layer, and nothing is pooled away before.

Legend: N impressions, U users, M memory tokens, n tokens, D width, Q queries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gem.config import ModelConfig
from gem.model.block_attention import BlockAttention, EventBlocks
from gem.model.levels import MemoryPlan
from gem.model.reader import TimelineReader

NUM_SUMMARY = 2  # queries per layer that come from the tokens, beside the candidate's own


@dataclass
class Timeline:
    """What the sequence part of a layer reads beside the memory: the plan, and blocks if events attend."""

    plan: MemoryPlan
    blocks: EventBlocks | None


class PersonalFFN(nn.Module):
    """PFFN: out = W2 (g(user) ⊙ GELU(W1 LN(M))) with g = 1 + tanh(W_g user), [M, D] -> [M, D]."""

    def __init__(self, dim: int, user_width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.down = nn.Linear(dim, dim)
        self.gate = nn.Linear(user_width, dim)
        self.up = nn.Linear(dim, dim)

    def forward(self, memory_MD: Tensor, user_U: Tensor, user_of_M: Tensor) -> Tensor:
        """user_U [U, width] flat tokens of the users; user_of_M [M] the user of each memory token."""
        gate = 1 + torch.tanh(self.gate(user_U))
        out: Tensor = self.up(F.gelu(self.down(self.norm(memory_MD))) * F.embedding(user_of_M, gate))
        return out


class SequenceLayer(nn.Module):
    """One step of the memory: PFFN if the cross-feature part informs it, attention inside blocks if asked for."""

    def __init__(self, config: ModelConfig, user_width: int) -> None:
        super().__init__()
        self.ffn = PersonalFFN(config.dim, user_width) if config.interleaving == "both" else None
        self.attention = BlockAttention(config.dim, config.num_heads) if config.event_attention else None

    def forward(self, memory: Tensor, user_U: Tensor, timeline: Timeline) -> Tensor:
        """[M, D] -> [M, D]."""
        if self.ffn is not None:
            memory = memory + self.ffn(memory, user_U, timeline.plan.user_of)
        if self.attention is not None and timeline.blocks is not None:
            memory = memory + self.attention(memory, timeline.blocks)
        return memory


class RecentEvents(nn.Module):
    """The newest events as tokens of their own, [N, R, D]; a learned token where there are fewer."""

    def __init__(self, dim: int, num: int) -> None:
        super().__init__()
        self.missing = nn.Parameter(torch.randn(num, dim) * 0.02)
        self.map = nn.Linear(dim, dim)

    def forward(self, memory: Tensor, recent: Tensor) -> Tensor:
        """recent [N, R] memory rows, -1 where there is none."""
        missing = self.missing.expand(recent.shape[0], -1, -1)
        if memory.shape[0] == 0:
            found: Tensor = self.map(missing * 0 + memory.sum())
        else:
            found = F.embedding(recent.clamp(min=0), self.map(memory))
        return torch.where((recent >= 0).unsqueeze(2), found, missing)


class SequenceReading(nn.Module):
    """S_sum [N, Q, D] = gate([CLS ‖ PMA ‖ recent]); with `use_tokens` CLS holds queries made of the tokens."""

    def __init__(self, config: ModelConfig, num_tokens: int, use_tokens: bool) -> None:
        super().__init__()
        dim = config.dim
        self.reader = TimelineReader(dim, config.num_heads)
        self.summarise = nn.Linear(num_tokens, NUM_SUMMARY, bias=False) if use_tokens else None
        self.seeds = nn.Parameter(torch.randn(config.num_pma, dim)) if config.num_pma else None
        self.recent = RecentEvents(dim, config.num_recent) if config.num_recent else None
        self.gate = nn.Linear(2 * dim, dim)
        self.num_out = 1 + (NUM_SUMMARY if use_tokens else 0) + config.num_pma + config.num_recent

    def forward(self, tokens: Tensor, candidate: Tensor, memory: Tensor, plan: MemoryPlan) -> Tensor:
        """tokens [N, n, D], candidate [N, D], memory [M, D] -> [N, num_out, D]."""
        queries = [candidate.unsqueeze(1)]
        if self.summarise is not None:
            queries.append(torch.bmm(self.summarise.weight.expand(candidate.shape[0], -1, -1), tokens))
        if self.seeds is not None:
            queries.append(self.seeds.expand(candidate.shape[0], -1, -1))
        read = self.reader(torch.cat(queries, dim=1), memory, plan.packing)
        if self.recent is not None:
            read = torch.cat([read, self.recent(memory, plan.recent)], dim=1)
        gate = torch.sigmoid(self.gate(torch.cat([read, candidate.unsqueeze(1).expand_as(read)], dim=2)))
        out: Tensor = read * gate
        return out
