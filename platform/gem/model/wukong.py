"""Wukong layers (arXiv 2403.02545): stacked factorization machines on tokens.

Legend: N impressions, n tokens, D width, k rank of the optimised factorization machine.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


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
        lcb = self.lcb(x_NnD.transpose(1, 2)).transpose(1, 2)
        residual = (
            self.residual(x_NnD.transpose(1, 2)).transpose(1, 2) if isinstance(self.residual, nn.Linear) else x_NnD
        )
        out: Tensor = self.norm(torch.cat([self.fmb(x_NnD), lcb], dim=1) + residual)
        return out
