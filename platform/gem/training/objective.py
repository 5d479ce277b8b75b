"""Loss: masked binary cross-entropy per task on the entire space, summed over rows (not averaged).

Sums, divided by the global number of rows, make the loss independent of how rows lie on ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gem.data.schema import Schema
from gem.model.gem import log_probabilities


def log1mexp(log_p: Tensor) -> Tensor:
    """log(1 - exp(x)) for x < 0, stable on both ends (Mächler 2012)."""
    x = log_p.clamp(max=-1e-7)
    return torch.where(x > -0.6931472, torch.log(-torch.expm1(x)), torch.log1p(-torch.exp(x)))


def task_losses(logits: Tensor, labels: Tensor, mask: Tensor, schema: Schema) -> Tensor:
    """Summed cross-entropy per task, [K]. Labels and probabilities are entire-space (ESMM, 1804.07931)."""
    log_p = log_probabilities(logits, schema)
    loss = -(labels * log_p + (1 - labels) * log1mexp(log_p))
    return (loss * mask).sum(0)
