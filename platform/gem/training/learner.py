"""One training step on one rank: lookup, forward, guard, backward, guard, update.

Tables are updated inside a backward pass of their own (fused row-wise AdaGrad); dense weights by AdamW
after a global gradient clip. Nothing is updated unless losses and gradients of all ranks are finite.
Losses are sums divided by the global number of rows (of the log, see gem.training.sampling), so the update does
not depend on the number of ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gem.config import TrainConfig
from gem.data.batch import Batch
from gem.data.schema import Schema
from gem.errors import TrainingError
from gem.model.gem import TrunkModel
from gem.training.objective import task_losses
from gem.training.sharding import ShardedTables
from gem.transfer.distillation import DistillationHead


class Objective(nn.Module):
    """Model plus training-only heads: batch -> summed losses [K + 1] (last: distillation)."""

    def __init__(self, model: TrunkModel, distill: DistillationHead | None) -> None:
        super().__init__()
        self.model, self.distill = model, distill

    def forward(self, batch: Batch, emb: dict[str, Tensor]) -> Tensor:
        out = self.model(batch, emb)
        losses = task_losses(out.logits, batch.labels, batch.mask, self.model.schema)
        extra = losses.new_zeros(1)
        if self.distill is not None:
            extra = self.distill.loss(out.representation, batch.soft["p"], batch.soft["known"]).view(1)
        return torch.cat([losses, extra])


@dataclass(frozen=True)
class StepReport:
    """What one step did on this rank."""

    step: int
    losses: tuple[float, ...]  # per row, this rank's rows; last is distillation
    grad_norm: float
    rows: int
    skipped: bool


class Learner:
    """Everything that changes during training, on one rank."""

    MAX_SKIPPED = 10  # non-finite steps in a row before training stops

    def __init__(self, schema: Schema, model: TrunkModel, tables: ShardedTables, config: TrainConfig, total_steps: int,
                 distill: DistillationHead | None = None) -> None:  # fmt: skip
        self.schema, self.config, self.tables = schema, config, tables
        self.total_steps = total_steps
        self.objective = Objective(model, distill)
        # One rank has nobody to average with: its gradients need no buckets.
        alone = dist.get_world_size() == 1
        self.parallel = self.objective if alone else DistributedDataParallel(self.objective)
        decay, plain = split_decay(self.objective)
        self.optimizer = torch.optim.AdamW(
            [{"params": decay, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}],
            lr=config.lr_dense,
            fused=True,  # one pass over all weights: the loop over them costs more than its arithmetic
        )
        self.step_index = 0
        self.skipped_in_a_row = 0

    @property
    def model(self) -> TrunkModel:
        return self.objective.model

    def step(self, batch: Batch, global_rows: float) -> StepReport:
        """Train on this rank's share of a global batch that stands for `global_rows` impressions. Collective."""
        scale = dist.get_world_size() / max(global_rows, 1)
        factor = lr_factor(self.step_index, self.total_steps, self.config.warmup_share)
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.lr_dense * factor
        self.tables.set_lr(self.config.lr_sparse * factor)
        found = self.tables.lookup(batch.lookups())
        emb = {field: rows.detach().requires_grad_() for field, rows in found.items()}
        losses = self.parallel(batch, emb)
        if not _all_ranks(bool(torch.isfinite(losses).all())):
            return self._skip(batch, losses)
        self.optimizer.zero_grad(set_to_none=True)
        (losses.sum() * scale).backward()
        norm = nn.utils.clip_grad_norm_(self.objective.parameters(), self.config.clip_norm)
        gradients = {f: torch.zeros_like(e) if e.grad is None else e.grad for f, e in emb.items()}
        # A sum is finite only if all of it is; it costs a tenth of looking at every number.
        sums = torch.stack([norm, *(g.sum() for g in gradients.values())])
        if not _all_ranks(bool(torch.isfinite(sums).all())):
            return self._skip(batch, losses)
        self.optimizer.step()
        # Only now, since this backward pass is what updates the tables.
        torch.autograd.backward([found[f] for f in gradients], list(gradients.values()))
        self.step_index += 1
        self.skipped_in_a_row = 0
        per_row = tuple((losses.detach() / max(len(batch), 1)).tolist())
        return StepReport(self.step_index, per_row, float(norm), len(batch), skipped=False)

    def _skip(self, batch: Batch, losses: Tensor) -> StepReport:
        """A non-finite loss or gradient on any rank: no rank steps; too many in a row stop training."""
        self.step_index += 1
        self.skipped_in_a_row += 1
        if self.skipped_in_a_row > self.MAX_SKIPPED:
            raise TrainingError(
                f"{self.skipped_in_a_row} steps in a row had a non-finite loss or gradient (losses "
                f"{losses.detach().tolist()}); lower train.lr_dense or train.lr_sparse, or look for NaN inputs"
            )
        return StepReport(self.step_index, tuple(losses.detach().tolist()), math.nan, len(batch), skipped=True)


def lr_factor(step: int, total_steps: int, warmup_share: float, floor: float = 0.1) -> float:
    """Linear warm-up over `warmup_share` of all steps, then linear decay to `floor`."""
    warmup = max(int(total_steps * warmup_share), 1)
    if step < warmup:
        return (step + 1) / warmup
    rest = (step - warmup) / max(total_steps - warmup, 1)
    return max(1.0 - (1.0 - floor) * rest, floor)


def split_decay(module: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Matrices get weight decay; biases, norms and single vectors do not."""
    decay = [p for p in module.parameters() if p.ndim >= 2]
    plain = [p for p in module.parameters() if p.ndim < 2]
    return decay, plain


def _all_ranks(ok: bool) -> bool:
    flag = torch.tensor([1.0 if ok else 0.0])
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag.item())
