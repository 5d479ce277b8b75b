"""One step: the learning rates it uses, and that a non-finite loss or gradient changes nothing at all."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from gem.errors import TrainingError
from gem.training.learner import lr_factor, split_decay
from tests.unit.model.synthetic import make_world
from tests.unit.training.one_rank import batches, everything, make_learner

pytestmark = pytest.mark.usefixtures("one_rank")
WORLD = make_world(0)


def test_schedule_by_hand() -> None:
    """10 steps, 20 % warm-up: 1/2, 1, then a line from 1 towards 0.1."""
    got = [lr_factor(step, 10, 0.2) for step in range(10)]
    assert got == pytest.approx([0.5, 1.0, *(1 - 0.9 * i / 8 for i in range(8))])


@pytest.mark.parametrize(("total", "share"), [(1, 0.0), (1, 1.0), (7, 0.05), (100, 0.0), (1000, 0.05), (3, 1.0)])
def test_schedule_is_positive_at_most_one_and_falls_after_the_warm_up(total: int, share: float) -> None:
    got = [lr_factor(step, total, share) for step in range(total + 5)]
    assert all(0.1 <= f <= 1 or f == pytest.approx((i + 1) / int(total * share)) for i, f in enumerate(got))
    top = got.index(max(got))
    assert got[top] == 1.0
    assert got[:top] == sorted(got[:top])
    assert got[top:] == sorted(got[top:], reverse=True)
    assert got[-1] >= 0.1 - 1e-12


def test_both_rates_follow_the_schedule() -> None:
    learner = make_learner(WORLD, total_steps=4)
    dense = []
    for batch in batches(WORLD, 4):
        learner.step(batch, len(batch))
        dense.append({g["lr"] for g in learner.optimizer.param_groups})
    factors = [lr_factor(step, 4, learner.config.warmup_share) for step in range(4)]
    assert [rate for rates in dense for rate in rates] == pytest.approx([1e-2 * f for f in factors])
    assert learner.tables.rates == pytest.approx([0.1 * f for f in factors])  # type: ignore[attr-defined]


def test_decay_falls_on_matrices_only() -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2), nn.Embedding(4, 2))
    decay, plain = split_decay(module)
    assert {id(p) for p in decay} == {id(module[0].weight), id(module[2].weight)}
    assert len(plain) == 3


def test_a_good_step_changes_tables_dense_weights_and_moments() -> None:
    learner = make_learner(WORLD)
    before = everything(learner)
    report = learner.step(batches(WORLD, 1)[0], 60)
    after = everything(learner)
    assert not report.skipped
    assert report.step == learner.step_index == 1
    assert all(math.isfinite(x) for x in (*report.losses, report.grad_norm))
    assert not torch.equal(before["table.type"], after["table.type"])
    assert not torch.equal(before["dense.model.heads.head.weight"], after["dense.model.heads.head.weight"])


def unchanged(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> bool:
    return before.keys() == after.keys() and all(torch.equal(v, after[k]) for k, v in before.items())


def test_a_batch_with_nan_changes_nothing_and_the_next_one_trains() -> None:
    learner = make_learner(WORLD)
    bad, good = batches(WORLD, 2)
    learner.step(good, len(good))
    before = everything(learner)
    bad.ads.numeric[0, 0] = float("nan")
    report = learner.step(bad, len(bad))
    assert report.skipped
    assert math.isnan(report.grad_norm)
    assert unchanged(before, everything(learner))
    assert learner.step_index == 2
    assert not learner.step(good, len(good)).skipped
    assert learner.skipped_in_a_row == 0


class BadGradient(torch.autograd.Function):
    """Finite forwards, infinite backwards."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * float("inf")


@pytest.mark.parametrize("where", ["embedding", "dense"])
def test_a_finite_loss_with_an_infinite_gradient_changes_nothing(where: str) -> None:
    """Tables are updated by a backward pass: it must not have run when the gradient is found to be bad."""
    learner = make_learner(WORLD)
    batch = batches(WORLD, 1)[0]
    learner.step(batch, len(batch))
    good = learner.parallel

    def poisoned(batch: Any, emb: dict[str, torch.Tensor]) -> torch.Tensor:
        if where == "embedding":
            # A gradient that reaches the embeddings alone.
            return good(batch, emb) + BadGradient.apply(emb["brand"]).sum()
        return good(batch, emb) + BadGradient.apply(learner.model.heads.head.bias).sum()

    before = everything(learner)
    learner.parallel = poisoned  # type: ignore[assignment]
    assert learner.step(batch, len(batch)).skipped
    assert unchanged(before, everything(learner))
    learner.parallel = good
    assert not learner.step(batch, len(batch)).skipped


def test_too_many_bad_batches_in_a_row_stop_training() -> None:
    learner = make_learner(WORLD)
    bad = batches(WORLD, 1)[0]
    bad.users.numeric[:] = float("nan")
    for _ in range(learner.MAX_SKIPPED):
        assert learner.step(bad, len(bad)).skipped
    with pytest.raises(TrainingError, match=r"11 steps in a row had a non-finite loss.*lower train\.lr_dense"):
        learner.step(bad, len(bad))


def test_gradient_is_clipped_over_all_dense_weights() -> None:
    learner = make_learner(WORLD)
    batch = batches(WORLD, 1)[0]
    report = learner.step(batch, 1)  # as if one row held the whole batch's loss
    norm = math.sqrt(sum(float((p.grad**2).sum()) for p in learner.objective.parameters() if p.grad is not None))
    assert report.grad_norm > 1.0
    assert norm == pytest.approx(learner.config.clip_norm, rel=1e-3)
