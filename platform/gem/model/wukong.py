"""Wukong layers (arXiv 2403.02545): stacked factorization machines on tokens.

Legend: N impressions, n tokens, D width, k rank of the optimised factorization machine.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class FactorizationMachineBlock(nn.Module):
    """FMB(X) = reshape(MLP(LN(flatten(X (Xᵀ Y))))) with Y [n, k] made attentive to the input.

    Xᵀ Y costs O(n·k·D) instead of the O(n²·D) of X Xᵀ. Y = Y₀ + tanh(MLP(compressed X)).
    """

    def __init__(self, num_in: int, num_out: int, dim: int, rank: int, hidden: int) -> None:
        super().__init__()
        self.num_out, self.rank = num_out, rank
        self.projection = nn.Parameter(torch.randn(num_in, rank) / num_in**0.5)
        self.attend = nn.Linear(dim, rank)
        self.mlp = nn.Sequential(
            nn.LayerNorm(num_in * rank), nn.Linear(num_in * rank, hidden), nn.GELU(), nn.Linear(hidden, num_out * dim)
        )

    def forward(self, x_NnD: Tensor) -> Tensor:
        """[N, n, D] -> [N, num_out, D]."""
        y_Nnk = self.projection + torch.tanh(self.attend(x_NnD)) / x_NnD.shape[1] ** 0.5
        crossed = x_NnD @ (x_NnD.transpose(1, 2) @ y_Nnk)
        out: Tensor = self.mlp(crossed.flatten(1))
        return out.view(x_NnD.shape[0], self.num_out, x_NnD.shape[2])


class WukongLayer(nn.Module):
    """X' = LN([FMB(X) ‖ LCB(X)] + R X): [N, n, D] -> [N, n_F + n_L, D].

    LCB(X) = W_L X is the linear compression block; R is the residual, linearly compressed when the
    number of tokens changes.
    """

    def __init__(self, num_in: int, num_fmb: int, num_lcb: int, dim: int, block: FactorizationMachineBlock) -> None:
        super().__init__()
        num_out = num_fmb + num_lcb
        self.fmb = block
        self.lcb = nn.Linear(num_in, num_lcb, bias=False)
        self.residual = nn.Identity() if num_in == num_out else nn.Linear(num_in, num_out, bias=False)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x_NnD: Tensor) -> Tensor:
        num_fmb = self.fmb.num_out
        # LCB and residual both mix tokens linearly: one matrix, applied without turning tokens and width around.
        mix_on = self._residual() + F.pad(self.lcb.weight, (0, 0, num_fmb, 0))
        mixed = torch.bmm(mix_on.expand(x_NnD.shape[0], -1, -1), x_NnD)
        out: Tensor = self.norm(torch.cat([mixed[:, :num_fmb] + self.fmb(x_NnD), mixed[:, num_fmb:]], dim=1))
        return out

    def _residual(self) -> Tensor:
        """R [n_F + n_L, n]."""
        if isinstance(self.residual, nn.Linear):
            return self.residual.weight
        return torch.eye(self.lcb.in_features, device=self.lcb.weight.device, dtype=self.lcb.weight.dtype)


class CrossLayerAttention(nn.Module):
    """Tokens look back at the outputs of all earlier layers (published without an equation; this form is ours):

        X' = X + α ⊙ softmax(X W_q (H W_k)ᵀ / √d) H,   H = [X⁽⁰⁾ ‖ … ‖ X⁽ˡ⁻¹⁾] along the tokens

    α [D] starts at 0.1: a layer begins close to the plain stack. Keys are narrow (d = D/2), values are H itself.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.query = nn.Linear(dim, dim // 2, bias=False)
        self.key = nn.Linear(dim, dim // 2, bias=False)
        self.scale = nn.Parameter(torch.full((dim,), 0.1))

    def forward(self, x_NnD: Tensor, earlier: list[Tensor]) -> Tensor:
        """x [N, n, D]; earlier: [N, n_i, D] outputs of earlier layers, at least one -> [N, n, D]."""
        h_NmD = torch.cat(earlier, dim=1)
        scores = self.query(x_NnD) @ self.key(h_NmD).transpose(1, 2) / self.query.out_features**0.5
        return x_NnD + self.scale * (torch.softmax(scores, dim=2) @ h_NmD)
