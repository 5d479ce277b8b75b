"""Event encoding: once per event, whichever impressions read it.

Legend: T events, A distinct ads, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gem.data.batch import Batch
from gem.data.schema import DWELL_BUCKETS, Schema

DENSE, MIN_MARKS = 16, 1 << 19  # a table of marks is used up to so many places per value, or in all


class EventEncoder(nn.Module):
    """Event = what was shown + what kind of event + what the user did + where + how long.

        x = W·ad + emb_kind + Σ_flags emb_flag + emb_surface + emb_dwell   [T, D]

    Everything but the ad takes few distinct values together: the sum is made once for each and gathered. Mixing in time
    comes later.
    """

    def __init__(self, schema: Schema, dim: int) -> None:
        super().__init__()
        self.num_flags = len(schema.flags)
        self.ad = nn.Linear(dim, dim)
        self.kind = nn.Embedding(len(schema.kinds) + 1, dim)
        self.flag = nn.Linear(max(self.num_flags, 1), dim, bias=False)
        self.surface = nn.Embedding(len(schema.surfaces), dim)
        self.dwell = nn.Embedding(DWELL_BUCKETS, dim)

    def forward(self, batch: Batch, ad_vectors_AD: Tensor) -> Tensor:
        """ad_vectors [A, D] -> events [T, D]."""
        actions_CD, code_T = self._actions(batch)
        return F.embedding(batch.timeline.ad, self.ad(ad_vectors_AD)) + F.embedding(code_T, actions_CD)

    def _actions(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Vectors [C, D] of the combinations of kind, surface, dwell and flags that occur, and which each event is."""
        t, num_surfaces, num_bits = batch.timeline, self.surface.num_embeddings, max(self.num_flags, 1)
        flags = t.flags & ((1 << num_bits) - 1)
        packed = ((t.kind * num_surfaces + t.surface) * DWELL_BUCKETS + t.dwell << num_bits) | flags
        found, code = distinct(packed, self.kind.num_embeddings * num_surfaces * DWELL_BUCKETS << num_bits)
        rest, bits = found >> num_bits, flag_bits(found, num_bits).to(self.flag.weight.dtype)
        place = rest // DWELL_BUCKETS
        vectors = self.kind(place // num_surfaces) + self.surface(place % num_surfaces)
        return vectors + self.dwell(rest % DWELL_BUCKETS) + self.flag(bits), code


def distinct(values: Tensor, bound: int) -> tuple[Tensor, Tensor]:
    """The distinct values [C], rising, and for each value [T] its place; values lie in [0, bound).

    Marks in a table cost less than sorting, while there are not very many more places than values.
    """
    if bound > max(DENSE * values.numel(), MIN_MARKS):
        found, place = torch.unique(values, return_inverse=True)
        return found, place
    marks = torch.zeros(bound, dtype=torch.bool, device=values.device)
    marks[values] = True
    found = torch.nonzero(marks).squeeze(1)
    places = torch.empty(bound, dtype=torch.int64, device=values.device)
    places[found] = torch.arange(found.numel(), device=values.device)
    return found, places[values]


def flag_bits(flags: Tensor, num_flags: int) -> Tensor:
    """Bit masks [T] -> [T, num_flags] float zeros and ones."""
    return ((flags.unsqueeze(1) >> torch.arange(num_flags, device=flags.device)) & 1).float()
