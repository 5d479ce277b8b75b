"""What every model of the trunk reads: tokens of an impression, its candidate ad, and its user's events.

Legend: N impressions, U users, A distinct ads, T events, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from gem.config import ModelConfig
from gem.data.batch import Batch
from gem.data.schema import Schema
from gem.model.events import EventEncoder
from gem.model.matches import MatchCounts
from gem.model.packing import Packing, pack
from gem.model.past import PastTokens
from gem.model.towers import CreativeToken, SideTower

USER_TOKENS, AD_TOKENS, CONTEXT_TOKENS, COUNT_TOKENS, PAST_TOKENS = 4, 4, 3, 3, 2


@dataclass
class Encoded:
    """tokens [N, n, D] (normalised), candidate [N, D], user [U, 4, D], events [T, D] before any mixing in time."""

    tokens: Tensor
    candidate: Tensor
    user: Tensor
    events: Tensor
    batch: Batch
    max_history: int

    @cached_property
    def packing(self) -> Packing:
        """Index grids of every impression and the newest `max_history` events before its cut, one by one."""
        return pack(self.batch, self.max_history)


class Inputs(nn.Module):
    """Towers of user, ad and context, a token of the creative's frozen vectors, counts, and the event encoder.

    A user and an ad are encoded once per batch, however many impressions and events refer to them.
    """

    def __init__(self, schema: Schema, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        dim = config.dim
        self.user = SideTower(schema.user, dim, USER_TOKENS)
        self.ad = SideTower(schema.ad, dim, AD_TOKENS)
        self.context = SideTower(schema.context, dim, CONTEXT_TOKENS)
        self.creative = CreativeToken(schema.ad, dim) if schema.ad.vectors else None
        self.ad_vector = nn.Sequential(nn.Linear(self.ad.width, dim), nn.LayerNorm(dim))
        self.events = EventEncoder(schema, dim)
        self.counts = MatchCounts(schema, dim, COUNT_TOKENS) if config.counts else None
        self.past = PastTokens(schema, dim, PAST_TOKENS) if config.past else None
        self.norm = nn.LayerNorm(dim)
        counted = (COUNT_TOKENS if config.counts else 0) + (PAST_TOKENS if config.past else 0)
        self.num_tokens = USER_TOKENS + AD_TOKENS + CONTEXT_TOKENS + int(self.creative is not None) + counted

    def forward(self, batch: Batch, emb: dict[str, Tensor]) -> Encoded:
        """emb: field -> looked-up rows for `batch.lookups()`."""
        user, ads = self.user(batch.users, emb), self.ad.encode(batch.ads, emb)
        # Most ads of a batch are met in events only: they need a vector, and only candidates need tokens.
        ad_vectors = self.ad_vector(ads)
        parts = [user[batch.user_of], self.ad.tokens(ads[batch.ad_of]), self.context(batch.context, emb)]
        if self.creative is not None:
            parts.append(self.creative(batch.ads.vectors[batch.ad_of]))
        if self.counts is not None:
            parts.append(self.counts(batch, self.config.max_history))
        if self.past is not None:
            parts.append(self.past(batch.past))
        return Encoded(
            tokens=self.norm(torch.cat(parts, dim=1)),
            candidate=ad_vectors[batch.ad_of],
            user=user,
            events=self.events(batch, ad_vectors),
            batch=batch,
            max_history=self.config.max_history,
        )
