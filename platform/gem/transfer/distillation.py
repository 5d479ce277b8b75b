"""Auxiliary-head distillation (ExFM, arXiv 2502.17494 §3.3).

The serving head learns from ground truth only. A second head on the student's representation learns the
teacher's soft labels; its gradient reaches the shared trunk, so knowledge arrives without the
teacher's bias on the served probabilities. The head is not part of the exported model.

    L = L_s(y_S, y) + w · BCE(y_D, min(α·p_teacher, 1))         (ExFM eq. 3-5)
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gem.config import TransferConfig
from gem.errors import DataError


class DistillationHead(nn.Module):
    """Representation [N, R] -> teacher-facing logits [N, K], with the gradient into the trunk scaled."""

    def __init__(self, representation_dim: int, num_tasks: int, config: TransferConfig) -> None:
        super().__init__()
        self.config = config
        self.mlp = nn.Sequential(
            nn.Linear(representation_dim, representation_dim), nn.GELU(), nn.Linear(representation_dim, num_tasks)
        )

    def loss(self, representation: Tensor, soft: Tensor, known: Tensor) -> Tensor:
        """Weighted sum over rows of the cross-entropy to the teacher.

        soft [N, K]: teacher probabilities (entire space); known [N]: weight of the row, 0 where the teacher did not
        score it.
        """
        if bool(((soft < 0) | (soft > 1) | ~torch.isfinite(soft))[known > 0].any()):
            raise DataError("knowledge: soft labels must lie in [0, 1]; regenerate the knowledge records")
        scaled = scale_gradient(representation, self.config.gradient_scale)
        target = (self.config.label_scale * torch.nan_to_num(soft)).clamp(max=1.0)
        loss = F.binary_cross_entropy_with_logits(self.mlp(scaled), target, reduction="none").sum(1)
        return self.config.distill_weight * (loss * known).sum()


def scale_gradient(x: Tensor, scale: float) -> Tensor:
    """Identity forward, gradient times `scale` backward."""
    return x * scale + (x * (1 - scale)).detach()
