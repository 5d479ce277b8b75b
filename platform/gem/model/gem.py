"""The foundation model and its small siblings: one trunk, one size dial (`ModelConfig`).

    towers -> tokens X0 ; timeline -> events E (once per event)
    layer l:  S = gate(read(queries(X, ad), E)) ;  X = Wukong([X ‖ S])       (InterFormer, arXiv 2411.09852)
    heads:    logits [N, K] from flatten(X), plus a shallow path from X0

Legend: N impressions, U users, A distinct ads, T events, D width, K tasks, R representation width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gem.config import ModelConfig
from gem.data.batch import Batch
from gem.data.schema import Schema
from gem.model.packing import Packing, pack
from gem.model.sequence import EventEncoder, MatchCounts, TimelineReader
from gem.model.towers import SideTower
from gem.model.wukong import FactorizationMachineBlock, WukongLayer

USER_TOKENS, AD_TOKENS, CONTEXT_TOKENS, MATCH_TOKENS = 4, 4, 3, 3
NUM_SUMMARY = 2  # queries per layer that come from the tokens, beside the candidate's own


@dataclass
class Output:
    """logits [N, K]: task k's logit, conditional on its `given` task; representation [N, R]."""

    logits: Tensor
    representation: Tensor


class InterFormerLayer(nn.Module):
    """Read the timeline with queries made of the tokens, then let tokens and readings interact.

    Reading: queries = [candidate ‖ LCE(X)], gated: S = r ⊙ sigmoid(W [r ‖ candidate]).
    The whole timeline up to the cut is read in every layer; nothing is pooled away before.
    """

    def __init__(self, num_in: int, config: ModelConfig) -> None:
        super().__init__()
        self.reader = TimelineReader(config.dim, config.num_heads)
        self.summarise = nn.Linear(num_in, NUM_SUMMARY, bias=False)
        self.gate = nn.Linear(2 * config.dim, config.dim)
        num_tokens = num_in + NUM_SUMMARY + 1
        fmb = FactorizationMachineBlock(num_tokens, config.num_fmb, config.dim, config.rank, config.mlp_hidden)
        self.interact = WukongLayer(num_tokens, config.num_fmb, config.num_lcb, config.dim, fmb)

    def forward(self, tokens: Tensor, candidate: Tensor, events: Tensor, packing: Packing) -> Tensor:
        """tokens [N, n, D], candidate [N, D], events [T, D] -> [N, n_F + n_L, D]."""
        summary = self.summarise(tokens.transpose(1, 2)).transpose(1, 2)
        queries = torch.cat([candidate.unsqueeze(1), summary], dim=1)
        read = self.reader(queries, events, packing)
        gate = torch.sigmoid(self.gate(torch.cat([read, candidate.unsqueeze(1).expand_as(read)], dim=2)))
        out: Tensor = self.interact(torch.cat([tokens, read * gate], dim=1))
        return out


class GEM(nn.Module):
    """Dense network over looked-up embeddings. It needs neither TorchRec nor FBGEMM."""

    def __init__(self, schema: Schema, config: ModelConfig) -> None:
        super().__init__()
        self.schema, self.config = schema, config
        dim, num_tasks = config.dim, len(schema.tasks)
        self.user = SideTower(schema.user, dim, USER_TOKENS)
        self.ad = SideTower(schema.ad, dim, AD_TOKENS)
        self.context = SideTower(schema.context, dim, CONTEXT_TOKENS)
        self.ad_vector = nn.Sequential(nn.Linear(AD_TOKENS * dim, dim), nn.LayerNorm(dim))
        self.events = EventEncoder(schema, dim)
        self.matches = MatchCounts(schema, dim, MATCH_TOKENS)
        num_tokens = USER_TOKENS + AD_TOKENS + CONTEXT_TOKENS + MATCH_TOKENS
        self.norm = nn.LayerNorm(dim)
        self.shallow = nn.Linear(num_tokens * dim, num_tasks)
        num_out = config.num_fmb + config.num_lcb
        sizes = [num_tokens] + [num_out] * config.num_layers
        self.layers = nn.ModuleList(InterFormerLayer(sizes[i], config) for i in range(config.num_layers))
        self.represent = nn.Sequential(
            nn.Linear(num_out * dim, config.mlp_hidden), nn.GELU(), nn.Dropout(config.dropout),
            nn.Linear(config.mlp_hidden, config.representation_dim), nn.GELU(),
        )  # fmt: skip
        self.head = nn.Linear(config.representation_dim, num_tasks)
        # Surface-specific bias and scale per task: one trunk, a head for every surface.
        self.surface_head = nn.Embedding(len(schema.surfaces), num_tasks)
        nn.init.zeros_(self.surface_head.weight)

    def forward(self, batch: Batch, emb: dict[str, Tensor]) -> Output:
        """emb: field -> looked-up rows for `batch.lookups()`; returns an `Output` for N impressions."""
        packing = pack(batch, self.config.max_history)
        ads = self.ad(batch.ads, emb)
        ad_vectors = self.ad_vector(ads.flatten(1))
        events = self.events(batch, ad_vectors)
        parts = [
            self.user(batch.users, emb)[batch.user_of],
            ads[batch.ad_of],
            self.context(batch.context, emb),
            self.matches(batch, packing),
        ]
        tokens = self.norm(torch.cat(parts, dim=1))
        shallow = self.shallow(tokens.flatten(1))
        candidate = ad_vectors[batch.ad_of]
        for layer in self.layers:
            tokens = layer(tokens, candidate, events, packing)
        representation = self.represent(tokens.flatten(1))
        logits = self.head(representation) + shallow + self.surface_head(batch.surface)
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


def build_model(schema: Schema, config: ModelConfig, seed: int = 0) -> GEM:
    """The dense network with weights that depend on (schema, config, seed) only."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return GEM(schema, config)
