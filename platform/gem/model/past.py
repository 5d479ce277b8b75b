"""Past counts as tokens: how an ad, its advertiser and its surface have done with all users, before the day.

    n_k   log1p of the number of events of kind k
    l_k   log((n_k + s·G_k) / (Σ_k n_k + s)) - log G_k          share of the kind against that over all events
    l_kf  log((c_kf + s·g_kf) / (n_k + s)) - log g_kf            rate of flag f against that over all events

with G, g the shares over every event so far (match "everything") and s pseudo-events: smoothed rates as lifts, so that
an ad nobody has met is 0, and a day on which everything is clicked more moves nothing but the first match.

Legend: N impressions, M matches, K kinds, F flags, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gem.data.past import past_matches
from gem.data.schema import Schema

PSEUDO_EVENTS = 10.0
FLOOR = 1e-4  # of a share over all events: one that has hardly been seen says nothing
MAX_LIFT = 4.0


class PastTokens(nn.Module):
    """Counts [N, M, S] -> tokens [N, num_tokens, D]. No gradient flows into the counts."""

    def __init__(self, schema: Schema, dim: int, num_tokens: int) -> None:
        super().__init__()
        self.num_kinds, self.num_flags = max(len(schema.kinds), 1), len(schema.flags)
        self.num_tokens, self.dim = num_tokens, dim
        width = len(past_matches(schema)) * self.num_kinds * (2 + self.num_flags)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * dim), nn.GELU(), nn.Linear(2 * dim, num_tokens * dim))

    def forward(self, past: Tensor) -> Tensor:
        out: Tensor = self.mlp(self.features(past))
        return out.view(-1, self.num_tokens, self.dim)

    def features(self, past: Tensor) -> Tensor:
        """[N, M, S] -> [N, M · K · (2 + F)]."""
        c = past.view(past.shape[0], past.shape[1], self.num_kinds, 1 + self.num_flags)
        kinds_NMK, every = c[..., 0], c[:, :1]
        total = kinds_NMK.sum(2, keepdim=True)
        share = every[..., 0] / every[..., 0].sum(2, keepdim=True).clamp(min=1)
        rate = every[..., 1:] / every[..., :1].clamp(min=1)
        parts = [torch.log1p(kinds_NMK), _lift(kinds_NMK, total, share)]
        if self.num_flags:
            parts.append(_lift(c[..., 1:], c[..., :1], rate).flatten(2))
        # Against themselves all events have no lift: the first match shows its plain log shares instead.
        for part, plain in zip(parts[1:], (share, rate), strict=False):
            part[:, :1] = torch.log(plain.clamp(min=FLOOR)).flatten(2) / MAX_LIFT
        return torch.cat(parts, dim=2).flatten(1)


def _lift(count: Tensor, of: Tensor, share: Tensor) -> Tensor:
    """Log of the smoothed share `count / of` against `share`; 0 where `share` is below FLOOR."""
    known = share > FLOOR
    base = torch.where(known, share, 1.0)
    lift = torch.log((count + PSEUDO_EVENTS * base) / (of + PSEUDO_EVENTS)) - torch.log(base)
    return torch.where(known, lift, 0.0).clamp(-MAX_LIFT, MAX_LIFT)
