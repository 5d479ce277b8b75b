"""Distillation by an auxiliary head: the loss by hand, and what its gradient may and may not reach."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from gem.config import TransferConfig
from gem.errors import DataError
from gem.model.gem import build_model
from gem.model.tables import PlainTables
from gem.training.learner import Objective
from gem.transfer.distillation import DistillationHead, scale_gradient
from tests.unit.model.synthetic import MODEL, make_world

CONFIG = TransferConfig(distill_weight=0.7, label_scale=1.5, gradient_scale=0.5)


def head(config: TransferConfig = CONFIG) -> DistillationHead:
    torch.manual_seed(0)
    return DistillationHead(8, 2, config)


def test_loss_is_the_weighted_cross_entropy_of_known_rows() -> None:
    model = head()
    x, soft = torch.randn(3, 8), torch.tensor([[0.2, 0.01], [0.9, 0.5], [0.3, 0.3]])
    known = torch.tensor([1.0, 1.0, 0.0])
    expected = 0.0
    for row in range(2):
        for logit, p in zip(model.mlp(x[row]).tolist(), soft[row].tolist(), strict=True):
            target, q = min(1.5 * p, 1.0), 1 / (1 + math.exp(-logit))
            expected -= 0.7 * (target * math.log(q) + (1 - target) * math.log(1 - q))
    assert model.loss(x, soft, known).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -0.01, 1.01])
def test_soft_labels_outside_zero_and_one_are_refused_where_known(bad: float) -> None:
    soft = torch.tensor([[0.2, 0.3], [0.5, bad]])
    with pytest.raises(DataError, match=r"soft labels must lie in \[0, 1\]; regenerate"):
        head().loss(torch.randn(2, 8), soft, torch.ones(2))


def test_rows_the_teacher_did_not_see_may_hold_anything_and_teach_nothing() -> None:
    model = head()
    x = torch.randn(3, 8, requires_grad=True)
    soft = torch.tensor([[0.2, 0.3], [float("nan"), 0.1], [float("inf"), -7.0]])
    loss = model.loss(x, soft, torch.tensor([1.0, 0.0, 0.0]))
    loss.backward()
    assert torch.isfinite(loss)
    assert x.grad is not None
    assert x.grad[0].any()
    assert not x.grad[1:].any()
    nothing = model.loss(x, soft, torch.zeros(3))
    assert nothing.item() == 0.0


def test_scale_gradient() -> None:
    for scale in (0.0, 0.25, 1.0, 3.0):
        x = torch.tensor([1.0, -2.0], requires_grad=True)
        y = scale_gradient(x, scale)
        torch.testing.assert_close(y, x)
        (y * torch.tensor([1.0, 10.0])).sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == pytest.approx([scale, 10 * scale])


def test_gradient_into_the_trunk_is_scaled_and_into_the_head_is_not() -> None:
    def gradients(scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(1)
        x, model = torch.randn(4, 8, requires_grad=True), head(replace(CONFIG, gradient_scale=scale))
        model.loss(x, torch.full((4, 2), 0.3), torch.ones(4)).backward()
        assert x.grad is not None
        assert model.mlp[0].weight.grad is not None
        return x.grad, model.mlp[0].weight.grad

    (half_x, half_w), (full_x, full_w) = gradients(0.5), gradients(1.0)
    torch.testing.assert_close(half_x * 2, full_x)
    torch.testing.assert_close(half_w, full_w)
    assert not gradients(0.0)[0].any()


def test_the_served_head_learns_from_ground_truth_only() -> None:
    """The teacher reaches trunk and tables, and nothing that turns a representation into a served logit."""
    world = make_world(0)
    batch = world.batch(np.arange(60))
    batch.soft = {"p": torch.rand(60, 2), "known": torch.ones(60)}
    tables = PlainTables(world.schema, MODEL.dim)
    objective = Objective(build_model(world.schema, MODEL), head())
    losses = objective(batch, tables(batch.lookups()))
    assert losses.shape == (3,)
    losses[-1].backward()
    served_only = ("model.heads.head.", "model.heads.shallow.", "model.heads.surface_head.", "model.heads.adapter.")
    reached = dict(objective.named_parameters())
    for part in served_only:
        served = [n for n in reached if n.startswith(part)]
        assert served, part
        assert not any(reached[n].grad is not None and reached[n].grad.any() for n in served)
    for name in (
        "distill.mlp.0.weight",
        "model.heads.represent.0.weight",
        "model.layers.0.reading.reader.query.weight",
    ):
        assert reached[name].grad is not None, name
        assert reached[name].grad.any(), name
    assert tables.tables["ad_id"].weight.grad.any()


def test_without_a_teacher_the_extra_loss_is_zero() -> None:
    world = make_world(0)
    batch = world.batch([0, 1, 2])
    objective = Objective(build_model(world.schema, MODEL), None)
    losses = objective(batch, PlainTables(world.schema, MODEL.dim)(batch.lookups()))
    assert losses.shape == (3,)
    assert losses[-1].item() == 0.0
    assert not any(name.startswith("distill") for name, _ in objective.named_parameters())
