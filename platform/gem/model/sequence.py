"""The user timeline: event encoding (once per event) and reading (per impression, up to its cut).

Legend: T events, N impressions, Q queries per impression, D width, H heads.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gem.data.batch import Batch
from gem.data.schema import DWELL_BUCKETS, NUM_RESERVED, Schema
from gem.model.packing import GAP_BUCKETS, Block, Packing


class EventEncoder(nn.Module):
    """Event = what was shown + what kind of event + what the user did + where + how long.

        e = LN(x + MLP(x)),   x = W_ad·ad + emb_kind + Σ_flags emb_flag + emb_surface + emb_dwell   [T, D]

    It does not know the impression, hence it is computed once for all impressions of a user.
    """

    def __init__(self, schema: Schema, dim: int) -> None:
        super().__init__()
        self.num_flags = len(schema.flags)
        self.ad = nn.Linear(dim, dim)
        self.kind = nn.Embedding(len(schema.kinds) + 1, dim)
        self.flag = nn.Linear(max(self.num_flags, 1), dim, bias=False)
        self.surface = nn.Embedding(len(schema.surfaces), dim)
        self.dwell = nn.Embedding(DWELL_BUCKETS, dim)
        self.mlp = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.norm = nn.LayerNorm(dim)

    def forward(self, batch: Batch, ad_vectors: Tensor) -> Tensor:
        """ad_vectors [A, D] -> events [T, D]."""
        t = batch.timeline
        x = self.ad(ad_vectors)[t.ad] + self.kind(t.kind) + self.surface(t.surface) + self.dwell(t.dwell)
        x = x + self.flag(flag_bits(t.flags, max(self.num_flags, 1)))
        out: Tensor = self.norm(x + self.mlp(x))
        return out


def flag_bits(flags: Tensor, num_flags: int) -> Tensor:
    """Bit masks [T] -> [T, num_flags] float zeros and ones."""
    return ((flags.unsqueeze(1) >> torch.arange(num_flags, device=flags.device)) & 1).float()


def one_number(rows: Tensor, hashes: int) -> Tensor:
    """Rows of an open vocabulary, [A * hashes] -> [A]: equal where all rows are, reserved rows as they are."""
    rows_AK = rows.view(-1, hashes)
    mixed = torch.zeros_like(rows_AK[:, 0])
    for k in range(hashes):
        mixed = mixed * 0x5851F42D4C957F2D + rows_AK[:, k]  # modulo 2^64
    return torch.where(rows_AK[:, 0] < NUM_RESERVED, rows_AK[:, 0], (mixed & ((1 << 62) - 1)) | (1 << 62))


class TimelineReader(nn.Module):
    """Multi-head attention of an impression's queries over its user's events before the cut.

        A = softmax(Q Kᵀ/√d + b[head, gap bucket]);  out = A V      [N, Q, D]

    A learned "nothing" key is always visible, so that an empty history is a value and not a NaN.
    Bias b depends on log2 of the elapsed seconds (recency), as in ROTE-like log-time positions.
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

    def forward(self, queries: Tensor, events: Tensor, packing: Packing) -> Tensor:
        """queries [N, Q, D], events [T, D] -> [N, Q, D]."""
        num_queries, dim = queries.shape[1:]
        found = zip(
            packing.blocks,
            packing.gather_impressions(self.query(queries)),
            packing.gather_events(self.key_value(events)),
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
            bias = F.pad(bias, (1, 0)).repeat_interleave(num_queries, dim=2)
            read = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
            parts.append(read.transpose(1, 2).reshape(p, i, num_queries, dim))
        out: Tensor = self.out(packing.scatter(parts))
        return out


class MatchCounts(nn.Module):
    """Hard search: how often, how recently and with what outcome has this user met what the candidate is?

    For every single-valued ad field, the surface, the ad itself and "anything", counts of event kinds and
    flags among the visible events that share the candidate's value, in nested windows of elapsed time and for
    the newest match alone:

        c[m, w, s] = Σ_{visible t, t in w} [value_m(t) = value_m(candidate)] · signal_s(t)

    given as log1p(c) and as c / (c[m, w, any] + 4), mapped to `num_tokens` tokens. (The hard search of SIM,
    arXiv 2006.05639, as counts.) No gradient flows into the counts. A value of an open vocabulary matches where all
    its rows do.
    """

    MAX_FIELDS = 6
    GAPS = (GAP_BUCKETS, 17, 13)  # any age; below 2^17 s = 36 hours; below 2^13 s = 2.3 hours

    def __init__(self, schema: Schema, dim: int, num_tokens: int) -> None:
        super().__init__()
        single = [f for f in schema.ad.fields if (f.hashes or not f.multi) and f.name != "ad_id"]
        single.sort(key=lambda f: -f.rows)
        self.fields = tuple(f.name for f in single[: self.MAX_FIELDS])
        self.hashes = tuple(f.hashes for f in single[: self.MAX_FIELDS])
        # Data without any event has one kind that never occurs: tokens of their bias alone.
        self.num_kinds, self.num_flags = max(len(schema.kinds), 1), len(schema.flags)
        self.num_tokens, self.dim = num_tokens, dim
        width = 2 * (len(self.fields) + 3) * (len(self.GAPS) + 1) * (self.num_kinds + self.num_flags)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * dim), nn.GELU(), nn.Linear(2 * dim, num_tokens * dim))

    def forward(self, batch: Batch, packing: Packing) -> Tensor:
        """-> tokens [N, num_tokens, D]."""
        out: Tensor = self.mlp(self.counts(batch, packing))
        return out.view(-1, self.num_tokens, self.dim)

    @torch.no_grad()
    def counts(self, batch: Batch, packing: Packing) -> Tensor:
        """-> [N, 2 · matches · windows · signals] features."""
        t = batch.timeline
        kinds = F.one_hot(t.kind, self.num_kinds + 1)[:, 1:].float()
        signals = torch.cat([kinds, flag_bits(t.flags, self.num_flags)], dim=1)
        ids = [batch.ads.ids[f] for f in self.fields]
        ids = [one_number(v, k) if k else v for v, k in zip(ids, self.hashes, strict=True)]
        values = torch.stack(ids, 1) if ids else None
        parts = []
        for block, signal_PLS in zip(packing.blocks, packing.gather_events(signals), strict=True):
            match_MPIL = torch.stack(self._matches(batch, block, values))
            newest = match_MPIL & (match_MPIL.flip(3).cumsum(3).flip(3) == 1)
            windows = [match_MPIL & (block.gap < g) for g in self.GAPS] + [newest]
            counts = torch.stack([w.float() @ signal_PLS for w in windows], dim=1)  # [M, W, P, I, S]
            parts.append(counts.permute(2, 3, 0, 1, 4).flatten(2))
        counts = packing.scatter(parts).view(len(batch), -1, self.num_kinds + self.num_flags)
        total = counts[..., : self.num_kinds].sum(2, keepdim=True)
        return torch.cat([torch.log1p(counts), counts / (total + 4)], dim=2).flatten(1)

    def _matches(self, batch: Batch, block: Block, values: Tensor | None) -> list[Tensor]:
        """Masks [P, I, L], one per kind of match."""
        t, seen = batch.timeline, block.visible
        if t.ad.numel() == 0:
            return [seen] * (len(self.fields) + 3)
        event_ad, own_ad = t.ad[block.events], batch.ad_of[block.impressions]
        own_surface = batch.surface[block.impressions].unsqueeze(2)
        masks = [seen, seen & (t.surface[block.events].unsqueeze(1) == own_surface)]
        masks.append(seen & (event_ad.unsqueeze(1) == own_ad.unsqueeze(2)))
        if values is not None:
            event_values, own_values = values[event_ad].unsqueeze(1), values[own_ad].unsqueeze(2)
            equal = (event_values == own_values) & (own_values >= NUM_RESERVED) & seen.unsqueeze(3)
            masks += list(equal.unbind(3))
        return masks
