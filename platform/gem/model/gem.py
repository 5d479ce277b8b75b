"""The foundation model and its small siblings: one trunk, one size dial (`ModelConfig`).

    towers -> tokens X ; timeline -> memory M (once per user, `gem.model.pyramid`)
    layer l:  M = sequence(M, user) ;  S_sum = reading(X, M) ;  X = Wukong([X ‖ S_sum]) + cross-layer attention
    heads:    logits [N, K] from flatten(X), plus a shallow path from the first X

Legend: N impressions, U users, M memory tokens, D width, K tasks, R representation width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from gem.config import ModelConfig
from gem.data.batch import Batch
from gem.data.schema import Schema
from gem.model.baselines import BASELINES, LogisticRegression, TrunkBaseline
from gem.model.block_attention import event_blocks
from gem.model.heads import Heads, Output
from gem.model.history import visible_mean
from gem.model.inputs import USER_TOKENS, Encoded, Inputs
from gem.model.interformer import SequenceLayer, SequenceReading, Timeline
from gem.model.levels import plan_memory
from gem.model.pyramid import Pyramid
from gem.model.wukong import CrossLayerAttention, FactorizationMachineBlock, WukongLayer


class InterFormerLayer(nn.Module):
    """One layer: step the memory, read it, let tokens and readings interact, look back at earlier layers."""

    def __init__(self, num_in: int, first: bool, config: ModelConfig) -> None:
        super().__init__()
        reads = config.interleaving in ("one_way", "both")
        self.sequence = SequenceLayer(config, USER_TOKENS * config.dim) if config.interleaving != "pooled" else None
        self.reading = SequenceReading(config, num_in, use_tokens=True) if reads else None
        num_tokens = num_in + (0 if self.reading is None else self.reading.num_out)
        fmb = FactorizationMachineBlock(num_tokens, config.num_fmb, config.dim, config.rank, config.mlp_hidden)
        self.interact = WukongLayer(num_tokens, config.num_fmb, config.num_lcb, config.dim, fmb)
        self.look_back = CrossLayerAttention(config.dim) if config.cross_layer and not first else None

    def forward(
        self, history: list[Tensor], memory: Tensor, encoded: Encoded, timeline: Timeline | None
    ) -> tuple[Tensor, Tensor]:
        """history: outputs of all layers so far, first the input tokens; -> (tokens [N, n_F + n_L, D], memory)."""
        tokens = history[-1]
        if self.look_back is not None:
            tokens = self.look_back(tokens, history[:-1])
        if self.sequence is not None and timeline is not None:
            memory = self.sequence(memory, encoded.user.flatten(1), timeline)
        if self.reading is not None and timeline is not None:
            tokens = torch.cat([tokens, self.reading(tokens, encoded.candidate, memory, timeline.plan)], dim=1)
        return self.interact(tokens), memory


class GEM(nn.Module):
    """Dense network over looked-up embeddings. It needs neither TorchRec nor FBGEMM."""

    def __init__(self, schema: Schema, config: ModelConfig) -> None:
        super().__init__()
        self.schema, self.config = schema, config
        dim = config.dim
        self.inputs = Inputs(schema, config)
        num_tokens = self.inputs.num_tokens + int(config.interleaving == "pooled")
        self.pyramid = Pyramid(config) if config.interleaving != "pooled" else None
        num_out = config.num_fmb + config.num_lcb
        sizes = [num_tokens] + [num_out] * config.num_layers
        self.layers = nn.ModuleList(InterFormerLayer(sizes[i], i == 0, config) for i in range(config.num_layers))
        # "separate": both parts run alone and meet in the head.
        separate = config.interleaving == "separate"
        self.late = SequenceReading(config, num_out, use_tokens=False) if separate else None
        width = (num_out + (0 if self.late is None else self.late.num_out)) * dim
        self.heads = Heads(schema, config, width, shallow=num_tokens * dim)

    def forward(self, batch: Batch, emb: dict[str, Tensor]) -> Output:
        """emb: field -> looked-up rows for `batch.lookups()`; returns an `Output` for N impressions."""
        encoded = self.inputs(batch, emb)
        first = encoded.tokens
        if self.pyramid is None:
            mean = visible_mean(encoded.events, batch, self.config.max_history)
            first = torch.cat([first, mean.unsqueeze(1)], dim=1)
        memory, timeline = self._remember(encoded)
        outputs = [first]
        for layer in self.layers:
            tokens, memory = layer(outputs, memory, encoded, timeline)
            outputs.append(tokens)
        last = outputs[-1]
        if self.late is not None and timeline is not None:
            last = torch.cat([last, self.late(last, encoded.candidate, memory, timeline.plan)], dim=1)
        out: Output = self.heads(last.flatten(1), batch.surface, first.flatten(1))
        return out

    def _remember(self, encoded: Encoded) -> tuple[Tensor, Timeline | None]:
        """The memory before the first layer, and how it is laid out; nothing where histories are pooled."""
        if self.pyramid is None:
            return encoded.events, None
        plan = plan_memory(encoded.batch, self.config)
        blocks = event_blocks(plan, self.config.block) if self.config.event_attention else None
        return self.pyramid(encoded.events, plan), Timeline(plan, blocks)


TrunkModel = GEM | TrunkBaseline | LogisticRegression
BUILDERS: dict[str, Callable[[Schema, ModelConfig], TrunkModel]] = {"gem": GEM, **BASELINES}


def build_model(schema: Schema, config: ModelConfig, seed: int = 0) -> TrunkModel:
    """The dense network of `config.arch` with weights that depend on (schema, config, seed) only."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return BUILDERS[config.arch](schema, config)
