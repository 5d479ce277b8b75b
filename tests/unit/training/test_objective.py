"""Loss: entire-space cross-entropy by hand; masked rows count for nothing; the sure and wrong still learn."""

from __future__ import annotations

import math

import pytest
import torch

from gem.training.objective import task_losses
from tests.unit.model.synthetic import make_schema

SCHEMA = make_schema()


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_losses_are_the_entire_space_cross_entropy() -> None:
    logits = torch.tensor([[0.3, -1.0], [-2.0, 0.5], [1.2, 2.0], [0.0, 0.0]])
    labels = torch.tensor([[1.0, 1.0], [0.0, 0.0], [1.0, 0.0], [1.0, 0.0]])
    mask = torch.tensor([[1.0, 1.0], [1.0, 1.0], [1.0, 1.0], [1.0, 0.0]])
    click = conversion = 0.0
    for (a, b), (y, c), (m, k) in zip(logits.tolist(), labels.tolist(), mask.tolist(), strict=True):
        p, q = sigmoid(a), sigmoid(a) * sigmoid(b)
        click -= m * (y * math.log(p) + (1 - y) * math.log(1 - p))
        conversion -= k * (c * math.log(q) + (1 - c) * math.log(1 - q))
    got = task_losses(logits, labels, mask, SCHEMA)
    assert got.tolist() == pytest.approx([click, conversion], rel=1e-5)


def test_masked_rows_give_neither_loss_nor_gradient() -> None:
    logits = torch.tensor([[0.3, -1.0], [40.0, -40.0]], requires_grad=True)
    mask = torch.tensor([[1.0, 1.0], [0.0, 0.0]])
    task_losses(logits, torch.zeros(2, 2), mask, SCHEMA).sum().backward()
    assert logits.grad[0].abs().min() > 0
    assert not logits.grad[1].any()


def test_rows_add_up() -> None:
    """Sums, not means: parts of a batch on two ranks add to the whole."""
    torch.manual_seed(0)
    logits, labels, mask = torch.randn(9, 2), (torch.rand(9, 2) > 0.5).float(), torch.ones(9, 2)
    parts = [task_losses(logits[s], labels[s], mask[s], SCHEMA) for s in (slice(0, 4), slice(4, 9), slice(0, 0))]
    torch.testing.assert_close(sum(parts), task_losses(logits, labels, mask, SCHEMA))


@pytest.mark.parametrize("logit", [10.0, 17.0, 30.0, 90.0])
def test_a_sure_and_wrong_model_still_gets_a_gradient(logit: float) -> None:
    logits = torch.tensor([[logit, logit]], requires_grad=True)
    losses = task_losses(logits, torch.zeros(1, 2), torch.ones(1, 2), SCHEMA)
    assert losses[0].item() == pytest.approx(logit, rel=1e-3)
    assert losses[1].item() == pytest.approx(logit - math.log(2), rel=1e-3)
    losses.sum().backward()
    assert logits.grad[0].tolist() == pytest.approx([1.5, 0.5], rel=1e-3)


def test_an_unknown_conversion_teaches_the_click_head_only() -> None:
    logits = torch.zeros(1, 2, requires_grad=True)
    task_losses(logits, torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 0.0]]), SCHEMA).sum().backward()
    assert logits.grad.tolist() == [[-0.5, 0.0]]
