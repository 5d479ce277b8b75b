"""Published rankers in the same trunk: same tables, towers, event encoder and heads, another interaction between.

What differs between two of them, or from GEM, is therefore the interaction and nothing else. Logistic regression
alone goes past towers and heads.

Legend: N impressions, D width of an embedding row, K tasks, R representation width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gem.config import ModelConfig
from gem.data.batch import Batch
from gem.data.schema import Schema
from gem.errors import ConfigError
from gem.model.heads import Heads, Output
from gem.model.inputs import Inputs
from gem.model.interactions import CrossNetwork, DotInteraction, Interaction, TargetAttention, WukongStack
from gem.model.towers import mean_pool

MakeInteraction = Callable[[int, ModelConfig], Interaction]  # (number of tokens, config)


class LogisticRegression(nn.Module):
    """Linear in the one-hot features, the numbers and the frozen vectors; no timeline.

        logit_k = b_k + Σ_fields emb_f[:, k] + Σ_sides w_kᵀ [numbers ‖ missing flags ‖ vectors]

    The first K columns of an embedding row are its weights for the K tasks (multi-valued fields: their mean), the
    representation is the sum of the rows, cut or padded to R. Raises ConfigError if a row has fewer than K columns.
    """

    def __init__(self, schema: Schema, config: ModelConfig) -> None:
        super().__init__()
        num_tasks = len(schema.tasks)
        if config.dim < num_tasks:
            raise ConfigError(
                f"model.dim: logistic regression keeps one weight per task in an embedding row, got {config.dim} "
                f"columns for {num_tasks} tasks; allowed: {num_tasks} and more; set model.dim={-(-num_tasks // 4) * 4}"
            )
        self.schema, self.config, self.num_tasks = schema, config, num_tasks
        sides = (schema.user, schema.ad, schema.context)
        self.names = tuple(tuple(f.name for f in side.fields) for side in sides)
        self.bias = nn.Parameter(torch.zeros(num_tasks))
        width = sum(2 * len(side.numeric) + sum(w for _, w in side.vectors) for side in sides)
        self.linear = nn.Linear(width, num_tasks, bias=False) if width else None
        if self.linear is not None:
            nn.init.zeros_(self.linear.weight)

    def forward(self, batch: Batch, emb: dict[str, Tensor]) -> Output:
        """emb: field -> looked-up rows for `batch.lookups()`; returns an `Output` for N impressions."""
        total = torch.zeros(len(batch), self.config.dim, device=batch.user_of.device)
        numbers = []
        sides = ((batch.users, batch.user_of), (batch.ads, batch.ad_of), (batch.context, None))
        for (rows, of), names in zip(sides, self.names, strict=True):
            found = [mean_pool(emb[n], rows.offsets[n]) if n in rows.offsets else emb[n] for n in names]
            parts = [*([torch.stack(found).sum(0)] if found else []), rows.numeric, rows.vectors]
            parts = parts if of is None else [p.index_select(0, of) for p in parts]
            total = total + parts[0] if found else total
            numbers += parts[-2:]
        logits = self.bias + total[:, : self.num_tasks]
        if self.linear is not None:
            logits = logits + self.linear(torch.cat(numbers, dim=1))
        representation = F.pad(total, (0, self.config.representation_dim - self.config.dim))
        return Output(logits=logits, representation=representation)


class TrunkBaseline(nn.Module):
    """Inputs -> interaction -> heads."""

    def __init__(self, schema: Schema, config: ModelConfig, interaction: MakeInteraction) -> None:
        super().__init__()
        self.schema, self.config = schema, config
        self.inputs = Inputs(schema, config)
        self.interact = interaction(self.inputs.num_tokens, config)
        self.heads = Heads(schema, config, self.interact.width)

    def forward(self, batch: Batch, emb: dict[str, Tensor]) -> Output:
        """emb: field -> looked-up rows for `batch.lookups()`; returns an `Output` for N impressions."""
        flat = self.interact(self.inputs(batch, emb))
        out: Output = self.heads(flat, batch.surface)
        return out


class DLRM(TrunkBaseline):
    """Pairwise dot products of the tokens: see `DotInteraction`."""

    def __init__(self, schema: Schema, config: ModelConfig) -> None:
        super().__init__(schema, config, DotInteraction)


class DCNv2(TrunkBaseline):
    """Cross network beside a deep tower: see `CrossNetwork`."""

    def __init__(self, schema: Schema, config: ModelConfig) -> None:
        super().__init__(schema, config, CrossNetwork)


class DIN(TrunkBaseline):
    """Target attention over the whole visible history: see `TargetAttention`."""

    def __init__(self, schema: Schema, config: ModelConfig) -> None:
        super().__init__(schema, config, TargetAttention)


class Wukong(TrunkBaseline):
    """Stacked factorization machines on tokens: see `WukongStack`."""

    def __init__(self, schema: Schema, config: ModelConfig) -> None:
        super().__init__(schema, config, WukongStack)


BASELINES: dict[str, type[LogisticRegression] | type[TrunkBaseline]] = {
    "lr": LogisticRegression,
    "dlrm": DLRM,
    "dcnv2": DCNv2,
    "din": DIN,
    "wukong": Wukong,
}
