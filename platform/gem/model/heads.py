"""From tokens to logits: shared representation, per-surface adapter, one logit per task.

Legend: N impressions, R representation width, K tasks, r adapter rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gem.config import ModelConfig
from gem.data.schema import Schema

ADAPTER_RANK = 4


@dataclass
class Output:
    """logits [N, K]: task k's logit, conditional on its `given` task; representation [N, R]."""

    logits: Tensor
    representation: Tensor


class SurfaceAdapter(nn.Module):
    """What a surface does differently, on top of the shared representation x [N, R]:

        x' = x ⊙ (1 + γ_s) + β_s + B_s GELU(A_s x),   A_s [r, R], B_s [R, r]

    Norm, bias and feed-forward part of surface s. γ, β and B start at zero: every surface starts as the shared model,
    and one with few rows stays near it.
    """

    def __init__(self, num_surfaces: int, width: int, rank: int = ADAPTER_RANK) -> None:
        super().__init__()
        self.width, self.rank = width, rank
        self.affine = nn.Embedding(num_surfaces, 2 * width)
        self.down = nn.Embedding(num_surfaces, rank * width)
        self.up = nn.Embedding(num_surfaces, width * rank)
        nn.init.zeros_(self.affine.weight)
        nn.init.normal_(self.down.weight, std=width**-0.5)
        nn.init.zeros_(self.up.weight)

    def forward(self, x_NR: Tensor, surface_N: Tensor) -> Tensor:
        """[N, R] and surface codes [N] -> [N, R]."""
        scale, shift = self.affine(surface_N).chunk(2, dim=1)
        down = self.down(surface_N).view(-1, self.rank, self.width)
        up = self.up(surface_N).view(-1, self.width, self.rank)
        hidden = F.gelu(torch.bmm(down, x_NR.unsqueeze(2)))
        out: Tensor = x_NR * (1 + scale) + shift + torch.bmm(up, hidden).squeeze(2)
        return out


class Heads(nn.Module):
    """Multi-task, multi-surface heads on a flat input [N, width].

        r = GELU(W2 GELU(W1 x)),  logits = W3 adapter_s(r) + W0 x₀ + b_s

    x₀ [N, shallow] is an optional direct path (the input tokens); b_s one bias per surface and task.
    """

    def __init__(self, schema: Schema, config: ModelConfig, width: int, shallow: int = 0) -> None:
        super().__init__()
        num_tasks, num_surfaces = len(schema.tasks), len(schema.surfaces)
        self.represent = nn.Sequential(
            nn.Linear(width, config.mlp_hidden), nn.GELU(), nn.Dropout(config.dropout),
            nn.Linear(config.mlp_hidden, config.representation_dim), nn.GELU(),
        )  # fmt: skip
        self.adapter = SurfaceAdapter(num_surfaces, config.representation_dim) if config.surface_adapters else None
        self.head = nn.Linear(config.representation_dim, num_tasks)
        self.shallow = nn.Linear(shallow, num_tasks) if shallow else None
        self.surface_head = nn.Embedding(num_surfaces, num_tasks)
        nn.init.zeros_(self.surface_head.weight)

    def forward(self, flat: Tensor, surface: Tensor, shallow: Tensor | None = None) -> Output:
        """flat [N, width], surface [N], shallow [N, shallow] -> Output."""
        representation = self.represent(flat)
        own = representation if self.adapter is None else self.adapter(representation, surface)
        logits = self.head(own) + self.surface_head(surface)
        if self.shallow is not None and shallow is not None:
            logits = logits + self.shallow(shallow)
        return Output(logits=logits, representation=representation)


def log_probabilities(logits: Tensor, schema: Schema) -> Tensor:
    """log p of every task on the entire space, [N, K]: log p(cv) = log p(click) + log p(cv | click)."""
    names = [t.name for t in schema.tasks]
    own = F.logsigmoid(logits)
    columns: list[Tensor] = []
    for k, task in enumerate(schema.tasks):
        given = columns[names.index(task.given)] if task.given else 0.0
        columns.append(own[:, k] + given)
    return torch.stack(columns, dim=1)


def probabilities(output: Output, schema: Schema) -> Tensor:
    """Entire-space probabilities [N, K]."""
    return log_probabilities(output.logits, schema).exp()
