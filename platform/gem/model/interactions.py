"""Interactions of the published baselines: what stands between the inputs and the heads.

Each is a module `forward(encoded) -> flat [N, width]` with an attribute `width`, made by
`Interaction(num_tokens, config)`. Activations are GELU, as everywhere in the trunk.

Legend: N impressions, n tokens, m = n + 1 tokens with the history's, T events, V visible (impression, event) pairs,
D width, H hidden width, r rank.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gem.config import ModelConfig
from gem.model.history import visible_mean, visible_pairs
from gem.model.inputs import Encoded
from gem.model.wukong import FactorizationMachineBlock, WukongLayer


class Interaction(nn.Module):
    """Base of all: a module that knows its output width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width


class WithHistoryToken(nn.Module):
    """The history as one more token: h = LN(mean of the visible events); [X ‖ h], [N, n + 1, D]."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)

    def forward(self, encoded: Encoded) -> Tensor:
        """-> [N, n + 1, D]; an empty history is the mean zero."""
        mean = visible_mean(encoded.events, encoded.batch, encoded.max_history)
        return torch.cat([encoded.tokens, self.norm(mean).unsqueeze(1)], dim=1)


class DotInteraction(Interaction):
    """DLRM (arXiv 1906.00091): dot products of all pairs of vectors, beside the dense vector.

        d = MLP(flatten X) [N, D];   Z = [X ‖ d] [N, m + 1, D];   flat = [d ‖ (Z_i · Z_j / √D)_{i<j}]

    The paper's bottom MLP reads the numbers alone. Here numbers and frozen vectors already lie in the tokens (the
    towers put them there), so it reads the tokens; first-order information reaches the top MLP through d. The top
    MLP is that of the heads. 1/√D keeps the products of normalised tokens near one.
    """

    def __init__(self, num_tokens: int, config: ModelConfig) -> None:
        num, dim = num_tokens + 1, config.dim
        super().__init__(dim + (num + 1) * num // 2)
        self.tokens = WithHistoryToken(dim)
        self.bottom = nn.Sequential(
            nn.Linear(num * dim, config.mlp_hidden), nn.GELU(), nn.Linear(config.mlp_hidden, dim)
        )

    def forward(self, encoded: Encoded) -> Tensor:
        """-> [N, D + (m + 1) m / 2]."""
        x_NmD = self.tokens(encoded)
        dense = self.bottom(x_NmD.flatten(1))
        z = torch.cat([x_NmD, dense.unsqueeze(1)], dim=1)
        dots = z @ z.transpose(1, 2) / z.shape[2] ** 0.5
        i, j = torch.triu_indices(z.shape[1], z.shape[1], 1, device=z.device)
        return torch.cat([dense, dots[:, i, j]], dim=1)


class CrossLayer(nn.Module):
    """One layer of DCNv2's cross network: x' = x₀ ⊙ (W x + b) + x.

    W is whole, or U Vᵀ of rank r·D where that has fewer weights than W: `rank` counts tokens, of which x holds m.
    """

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.mix: nn.Module = nn.Linear(width, width)
        if 2 * rank < width:
            self.mix = nn.Sequential(nn.Linear(width, rank, bias=False), nn.Linear(rank, width))

    def forward(self, x0: Tensor, x: Tensor) -> Tensor:
        """[N, W], [N, W] -> [N, W]."""
        mixed: Tensor = self.mix(x)
        return x0 * mixed + x


class CrossNetwork(Interaction):
    """DCNv2 (arXiv 2008.13535), parallel form: cross network beside a deep tower, both on the flat tokens.

    x₀ = flatten X;   x_{l+1} = x₀ ⊙ (W x_l + b) + x_l, `num_layers` times;   flat = [x_L ‖ MLP(x₀)]
    """

    def __init__(self, num_tokens: int, config: ModelConfig) -> None:
        wide, hidden = (num_tokens + 1) * config.dim, config.mlp_hidden
        super().__init__(wide + hidden)
        self.tokens = WithHistoryToken(config.dim)
        self.cross = nn.ModuleList(CrossLayer(wide, config.rank * config.dim) for _ in range(config.num_layers))
        self.deep = nn.Sequential(
            nn.Linear(wide, hidden), nn.GELU(), nn.Dropout(config.dropout), nn.Linear(hidden, hidden), nn.GELU()
        )

    def forward(self, encoded: Encoded) -> Tensor:
        """-> [N, m D + hidden]."""
        x0 = x = self.tokens(encoded).flatten(1)
        for layer in self.cross:
            x = layer(x0, x)
        return torch.cat([x, self.deep(x0)], dim=1)


class TargetAttention(Interaction):
    """DIN (arXiv 1706.06978): the candidate weighs every visible event, without softmax.

        a(q, k) = v · PReLU(W [k ‖ q ‖ k − q ‖ k ⊙ q] + b) + c;   h = Σ_visible a(q, k_t) k_t / √max_history
        flat = [X ‖ h]

    q is the ad's vector, k_t an event's encoding. The whole history up to `max_history` is read one by one. Only
    visible pairs are computed, and the parts of W that meet k or q alone once per event and impression. Without
    softmax the sum grows with the history, as in the paper; the constant keeps it near the size of a token.
    """

    def __init__(self, num_tokens: int, config: ModelConfig) -> None:
        super().__init__((num_tokens + 1) * config.dim)
        self.hidden = nn.Linear(4 * config.dim, config.dim)
        self.activation = nn.PReLU(config.dim)
        self.score = nn.Linear(config.dim, 1)

    def forward(self, encoded: Encoded) -> Tensor:
        """-> [N, (n + 1) D]."""
        pairs = visible_pairs(encoded.batch, encoded.max_history)
        history = self.read(encoded.candidate, encoded.events, pairs) / max(encoded.max_history, 1) ** 0.5
        return torch.cat([encoded.tokens.flatten(1), history], dim=1)

    def read(self, query_ND: Tensor, events_TD: Tensor, pairs: tuple[Tensor, Tensor]) -> Tensor:
        """Weighted sums of the events, [N, D]; pairs: impression rows [V], event rows [V]."""
        w_key, w_query, w_minus, w_times = self.hidden.weight.chunk(4, dim=1)
        n, t = pairs
        dim = query_ND.shape[1]
        keys = torch.cat([events_TD, F.linear(events_TD, w_key + w_minus)], dim=1)
        queries = torch.cat([query_ND, F.linear(query_ND, w_query - w_minus, self.hidden.bias)], dim=1)
        k_VD, key_VH = keys.index_select(0, t).split(dim, dim=1)
        q_VD, query_VH = queries.index_select(0, n).split(dim, dim=1)
        weight = self.score(self.activation(F.linear(k_VD * q_VD, w_times) + key_VH + query_VH))
        return torch.zeros_like(query_ND).index_add(0, n, (weight * k_VD).to(query_ND.dtype))


class WukongStack(Interaction):
    """Wukong alone (arXiv 2403.02545): `num_layers` layers on the tokens; no timeline is read but for its mean."""

    def __init__(self, num_tokens: int, config: ModelConfig) -> None:
        num_out, dim = config.num_fmb + config.num_lcb, config.dim
        super().__init__(num_out * dim)
        self.tokens = WithHistoryToken(dim)
        self.layers = nn.ModuleList()
        for num_in in [num_tokens + 1] + [num_out] * (config.num_layers - 1):
            block = FactorizationMachineBlock(num_in, config.num_fmb, dim, config.rank, config.mlp_hidden)
            self.layers.append(WukongLayer(num_in, config.num_fmb, config.num_lcb, dim, block))

    def forward(self, encoded: Encoded) -> Tensor:
        """-> [N, (n_F + n_L) D]."""
        x: Tensor = self.tokens(encoded)
        for layer in self.layers:
            x = layer(x)
        return x.flatten(1)
