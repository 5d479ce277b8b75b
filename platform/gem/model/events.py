"""Event encoding: once per event, whichever impressions read it.

Legend: T events, A distinct ads, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gem.data.batch import Batch
from gem.data.schema import DWELL_BUCKETS, Schema

MAX_FLAG_ROWS = 1024  # so many combinations of flags are tabulated; beyond, bits are multiplied out


class EventEncoder(nn.Module):
    """Event = what was shown + what kind of event + what the user did + where + how long.

        x = W·ad + emb_kind + Σ_flags emb_flag + emb_surface + emb_dwell   [T, D]

    Sums over few distinct values are made once per value and gathered. Mixing in time comes later.
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
        t = batch.timeline
        num_surfaces = self.surface.num_embeddings
        action = self.kind.weight[:, None, None] + self.surface.weight[:, None] + self.dwell.weight
        code = (t.kind * num_surfaces + t.surface) * DWELL_BUCKETS + t.dwell
        x = F.embedding(t.ad, self.ad(ad_vectors_AD)) + F.embedding(code, action.flatten(0, 2))
        return x + self._flags(t.flags)

    def _flags(self, flags_T: Tensor) -> Tensor:
        num, dtype = max(self.num_flags, 1), self.flag.weight.dtype
        if 1 << num > MAX_FLAG_ROWS:
            out: Tensor = self.flag(flag_bits(flags_T, num).to(dtype))
            return out
        every = torch.arange(1 << num, device=flags_T.device)
        return F.embedding(flags_T & ((1 << num) - 1), self.flag(flag_bits(every, num).to(dtype)))


def flag_bits(flags: Tensor, num_flags: int) -> Tensor:
    """Bit masks [T] -> [T, num_flags] float zeros and ones."""
    return ((flags.unsqueeze(1) >> torch.arange(num_flags, device=flags.device)) & 1).float()
