"""Side towers: the features of a user, an ad or a context become a few tokens of width D."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gem.data.batch import EntityRows
from gem.data.schema import Side


def mean_pool(values: Tensor, offsets: Tensor) -> Tensor:
    """Mean over each jagged row: values [V, D], offsets [B + 1] -> [B, D]; empty rows give zeros."""
    lengths = offsets[1:] - offsets[:-1]
    row_of = torch.repeat_interleave(torch.arange(lengths.numel(), device=values.device), lengths)
    sums = values.new_zeros(lengths.numel(), values.shape[1]).index_add(0, row_of, values)
    return sums / lengths.clamp(min=1).unsqueeze(1)


class SideTower(nn.Module):
    """One side of an impression -> tokens.

    The first field (the entity's own id, or the surface) keeps a token of its own; the other fields,
    numbers and vectors are concatenated and compressed into `num_tokens - 1` tokens:

        h = GELU(W1 LN([emb_1 … emb_F ‖ numeric ‖ vectors]))                [B, 2 D]
        tokens = [emb_0 ‖ reshape(W2 h)]                                    [B, num_tokens, D]

    `encode` gives [emb_0 ‖ h], which is all that an event needs of its ad; `tokens` goes on from there.
    """

    def __init__(self, side: Side, dim: int, num_tokens: int) -> None:
        super().__init__()
        self.names = tuple(f.name for f in side.fields)
        self.num_tokens, self.dim = num_tokens, dim
        width = (len(self.names) - 1) * dim + 2 * len(side.numeric) + sum(w for _, w in side.vectors)
        self.compress = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * dim), nn.GELU()) if width else None
        self.expand = nn.Linear(2 * dim, dim * (num_tokens - 1)) if width else None
        self.width = 3 * dim if width else dim  # of what `encode` gives

    def forward(self, rows: EntityRows, emb: dict[str, Tensor]) -> Tensor:
        """emb: field -> looked-up rows ([B, D], or [V, D] for multi-valued fields) -> [B, num_tokens, D]."""
        return self.tokens(self.encode(rows, emb))

    def encode(self, rows: EntityRows, emb: dict[str, Tensor]) -> Tensor:
        """-> [B, width]."""
        pooled = [mean_pool(emb[n], rows.offsets[n]) if n in rows.offsets else emb[n] for n in self.names]
        if self.compress is None:
            return pooled[0]
        rest = torch.cat([*pooled[1:], rows.numeric, rows.vectors], dim=1)
        return torch.cat([pooled[0], self.compress(rest)], dim=1)

    def tokens(self, encoded: Tensor) -> Tensor:
        """[B, width] -> [B, num_tokens, D]."""
        if self.expand is None:
            return encoded.unsqueeze(1).expand(-1, self.num_tokens, -1)
        rest = self.expand(encoded[:, self.dim :]).view(-1, self.num_tokens - 1, self.dim)
        return torch.cat([encoded[:, : self.dim].unsqueeze(1), rest], dim=1)


class CreativeToken(nn.Module):
    """Frozen representations of an ad's creative (text, image, video) -> one token by a learned projection.

        token = W2 GELU(W1 LN(v)),  v [A, E] all vectors side by side

    The vectors themselves are inputs: no gradient reaches what made them.
    """

    def __init__(self, side: Side, dim: int) -> None:
        super().__init__()
        width = sum(w for _, w in side.vectors)
        self.project = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, vectors_AE: Tensor) -> Tensor:
        """[A, E] -> [A, 1, D]."""
        out: Tensor = self.project(vectors_AE)
        return out.unsqueeze(1)
