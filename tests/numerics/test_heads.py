"""Heads and per-surface adapters against loops in float64, and what one surface may do to another: nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from gem.model.heads import Heads, SurfaceAdapter
from tests.numerics.naive import Array, Weights, check_gradients, doubles, gelu, linear, loud, part, weights
from tests.unit.model.synthetic import MODEL, make_schema

SCHEMA = make_schema()
SURFACES = torch.tensor([3, 4, 3, 2, 0, 4])
WIDTH, SHALLOW = 10, 7


def naive_adapter(w: Weights, x: Array, surface: int) -> Array:
    """One representation [R] as its surface sees it."""
    width = len(x)
    scale, shift = w["affine.weight"][surface][:width], w["affine.weight"][surface][width:]
    rank = len(w["down.weight"][surface]) // width
    hidden = gelu(np.array([w["down.weight"][surface][i * width : (i + 1) * width] @ x for i in range(rank)]))
    out = np.zeros(width)
    for r in range(width):
        out[r] = x[r] * (1 + scale[r]) + shift[r]
        for i in range(rank):
            out[r] += w["up.weight"][surface][r * rank + i] * hidden[i]
    return out


def naive_output(heads: nn.Module, flat: Array, surface: int, shallow: Array | None = None) -> tuple[Array, Array]:
    """(logits [K], representation [R]) of one impression."""
    w = weights(heads)
    r = gelu(linear(w, "represent.3", gelu(linear(w, "represent.0", flat))))
    own = naive_adapter(part(w, "adapter."), r, surface) if "adapter.affine.weight" in w else r
    logits = linear(w, "head", own) + w["surface_head.weight"][surface]
    return logits + (0 if shallow is None else linear(w, "shallow", shallow)), r


@pytest.mark.parametrize("adapters", [True, False])
@pytest.mark.parametrize("shallow", [SHALLOW, 0])
def test_logits_are_the_equation(adapters: bool, shallow: int) -> None:
    heads = loud(Heads(SCHEMA, replace(MODEL, surface_adapters=adapters), WIDTH, shallow))
    flat, direct = torch.randn(6, WIDTH), torch.randn(6, shallow) if shallow else None
    out = heads(flat, SURFACES, direct)
    for n in range(6):
        given = None if direct is None else direct[n].double().numpy()
        logits, representation = naive_output(heads, flat[n].double().numpy(), int(SURFACES[n]), given)
        np.testing.assert_allclose(out.logits[n].detach().numpy(), logits, atol=1e-5)
        np.testing.assert_allclose(out.representation[n].detach().numpy(), representation, atol=1e-5)
    assert out.logits.shape == (6, len(SCHEMA.tasks))


@pytest.mark.parametrize("rank", [1, 3])
def test_adapter_is_the_equation(rank: int) -> None:
    adapter, x = loud(SurfaceAdapter(5, 4, rank)), torch.randn(6, 4)
    got, w = adapter(x, SURFACES), weights(adapter)
    expected = [naive_adapter(w, x[n].double().numpy(), int(SURFACES[n])) for n in range(6)]
    np.testing.assert_allclose(got.detach().numpy(), expected, atol=1e-5)
    assert adapter(x[:0], SURFACES[:0]).shape == (0, 4)


def test_gradients_are_finite_differences() -> None:
    of_few = torch.tensor([2, 0, 2])
    check_gradients(SurfaceAdapter(3, 3, 2), lambda run, x: run(x, of_few), doubles(3, 3))
    heads = Heads(SCHEMA, replace(MODEL, mlp_hidden=3, representation_dim=2, surface_adapters=False), 3, 2)

    def logits(run: nn.Module, flat: torch.Tensor, shallow: torch.Tensor) -> torch.Tensor:
        return run(flat, SURFACES[:3], shallow).logits

    check_gradients(heads, logits, doubles(3, 3), doubles(3, 2))


def test_a_fresh_adapter_is_the_identity_and_can_leave_it() -> None:
    adapter, x = SurfaceAdapter(5, 8), torch.randn(6, 8)
    out = adapter(x, SURFACES)
    assert torch.equal(out, x)
    out.square().sum().backward()
    for table in (adapter.affine, adapter.up):
        assert table.weight.grad[[0, 2, 3, 4]].any(1).all()
        assert not table.weight.grad[1].any()


def test_a_surface_with_another_adapter_moves_its_own_rows_only() -> None:
    heads = loud(Heads(SCHEMA, MODEL, WIDTH))
    flat = torch.randn(6, WIDTH)
    before = heads(flat, SURFACES)
    with torch.no_grad():
        for table in (heads.adapter.affine, heads.adapter.down, heads.adapter.up, heads.surface_head):
            table.weight[3] += 1
    after = heads(flat, SURFACES)
    assert (before.logits != after.logits).any(1).tolist() == (SURFACES == 3).tolist()
    assert torch.equal(before.representation, after.representation)  # shared by all surfaces
    heads(flat, SURFACES).logits[SURFACES == 4].sum().backward()
    for table in (heads.adapter.affine, heads.adapter.down, heads.adapter.up, heads.surface_head):
        assert table.weight.grad.any(1).nonzero().flatten().tolist() == [4]
