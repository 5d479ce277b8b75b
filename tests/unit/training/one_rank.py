"""A learner in a process group of one, over plain tables with a plain AdaGrad: no TorchRec, no second process."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gem.config import TrainConfig
from gem.data.batch import Batch
from gem.data.schema import Schema
from gem.model.gem import build_model
from gem.model.tables import PlainTables
from gem.training.learner import Learner
from tests.unit.model.synthetic import MODEL, World


class FakeTables:
    """What `Learner` and checkpoints need of `ShardedTables`; updated inside the backward pass, as those are."""

    def __init__(self, schema: Schema, dim: int) -> None:
        self.schema = schema
        self.plain = PlainTables(schema, dim)
        self.sums = {name: torch.zeros(rows) for name, rows in schema.tables().items()}
        self.rates: list[float] = []
        for table in self.plain.tables.values():
            table.weight.register_post_accumulate_grad_hook(self._update)

    def _update(self, weight: Tensor) -> None:
        with torch.no_grad():
            name = next(n for n in self.sums if self.plain._weight(n) is weight)
            self.sums[name] += (weight.grad**2).mean(1)
            weight -= self.rates[-1] * weight.grad / (self.sums[name].sqrt() + 1e-8).unsqueeze(1)
        weight.grad = None

    def lookup(self, ids: dict[str, Tensor]) -> dict[str, Tensor]:
        return self.plain(ids)

    def set_lr(self, lr: float) -> None:
        self.rates.append(lr)

    def weights(self) -> dict[str, Tensor]:
        return {k: v.clone() for k, v in self.plain.weights().items()}

    def moments(self) -> dict[str, Tensor]:
        return {k: v.clone() for k, v in self.sums.items()}

    def load(self, weights: dict[str, Tensor], moments: dict[str, Tensor] | None = None) -> None:
        self.plain.load_weights(weights)
        if moments is not None:
            self.sums = {k: v.clone() for k, v in moments.items()}


def make_learner(world: World, total_steps: int = 10, seed: int = 1) -> Learner:
    tables = FakeTables(world.schema, MODEL.dim)
    config = TrainConfig(lr_dense=1e-2, lr_sparse=0.1)
    return Learner(world.schema, build_model(world.schema, MODEL, seed), tables, config, total_steps)  # type: ignore[arg-type]


def everything(learner: Learner) -> dict[str, Tensor]:
    """All that a step may change, copied."""
    out = {f"dense.{k}": v.clone() for k, v in learner.objective.state_dict().items()}
    out |= {f"table.{k}": v for k, v in learner.tables.weights().items()}
    out |= {f"moment.{k}": v for k, v in learner.tables.moments().items()}
    for name, p in learner.objective.named_parameters():
        out |= {f"adam.{k}.{name}": torch.as_tensor(v).clone() for k, v in learner.optimizer.state.get(p, {}).items()}
    return out


def batches(world: World, count: int) -> list[Batch]:
    parts = np.array_split(np.arange(len(world.impressions)), count)
    return [world.batch(at) for at in parts]
