"""Loss: masked binary cross-entropy per task on the entire space, summed over rows (not averaged).

Sums, divided by the global number of rows, make the loss independent of how rows lie on ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from gem.data.schema import Schema
from gem.model.heads import log_probabilities


def log_complements(logits: Tensor, schema: Schema) -> Tensor:
    """log (1 - p) of every task on the entire space, [N, K], where `log_probabilities` gives log p.

        1 - p = 1 - p_given · p_own = (1 - p_given) + p_given · (1 - p_own)

    A small p is taken from 1, a large one comes from the sum in the log domain: neither value nor gradient
    vanishes where p rounds to 0 or 1.
    """
    names = [t.name for t in schema.tasks]
    log_p, log_not_own = log_probabilities(logits, schema), F.logsigmoid(-logits)
    columns: list[Tensor] = []
    for k, task in enumerate(schema.tasks):
        own = log_not_own[:, k]
        if task.given is not None:
            given = names.index(task.given)
            near_one = torch.logaddexp(columns[given], log_p[:, given] + own)
            small = torch.log1p(-log_p[:, k].clamp(max=-0.5).exp())
            own = torch.where(log_p[:, k] < -0.7, small, near_one)
        columns.append(own)
    return torch.stack(columns, dim=1)


def task_losses(logits: Tensor, labels: Tensor, mask: Tensor, schema: Schema) -> Tensor:
    """Summed cross-entropy per task, [K], of rows weighted by `mask` [N, K] (0 = outcome not known).

    Labels and probabilities are entire-space (ESMM, 1804.07931).
    """
    log_p = log_probabilities(logits, schema)
    loss = -(labels * log_p + (1 - labels) * log_complements(logits, schema))
    return (loss * mask).sum(0)
