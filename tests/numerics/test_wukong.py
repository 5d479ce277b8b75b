"""Wukong layers and attention over earlier layers against loops in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from gem.model.wukong import CrossLayerAttention, FactorizationMachineBlock, WukongLayer
from tests.numerics.naive import Array, Weights, check_gradients, doubles, gelu, layer_norm, loud, part, weights


def naive_fmb(w: Weights, x: Array, num_out: int) -> Array:
    """One impression: tokens [n, D] -> [num_out, D]. Pairwise dot products first, the long way round."""
    n, dim = x.shape
    y = np.array(
        [w["projection"][i] + np.tanh(w["attend.weight"] @ x[i] + w["attend.bias"]) / math.sqrt(n) for i in range(n)]
    )
    pairs = np.array([[sum(x[i, d] * x[j, d] for d in range(dim)) for j in range(n)] for i in range(n)])
    crossed = (pairs @ y).reshape(-1)
    hidden = gelu(w["mlp.1.weight"] @ layer_norm(crossed, w["mlp.0.weight"], w["mlp.0.bias"]) + w["mlp.1.bias"])
    return (w["mlp.3.weight"] @ hidden + w["mlp.3.bias"]).reshape(num_out, dim)


def naive_layer(layer: WukongLayer, x: Array) -> Array:
    w = weights(layer)
    fmb = naive_fmb(part(w, "fmb."), x, layer.fmb.num_out)
    compressed = [sum(w["lcb.weight"][o, i] * x[i] for i in range(len(x))) for o in range(w["lcb.weight"].shape[0])]
    rows = [*fmb, *compressed]
    if "residual.weight" in w:
        residual = [sum(w["residual.weight"][o, i] * x[i] for i in range(len(x))) for o in range(len(rows))]
    else:
        residual = list(x)
    return np.array([layer_norm(a + b, w["norm.weight"], w["norm.bias"]) for a, b in zip(rows, residual, strict=True)])


def naive_look_back(w: Weights, x: Array, earlier: list[Array]) -> Array:
    """Tokens [n, D] and those of the layers before -> [n, D], token by token."""
    every, out = [h for layer in earlier for h in layer], []
    for token in x:
        q = w["query.weight"] @ token
        scores = [sum(a * b for a, b in zip(q, w["key.weight"] @ h, strict=True)) / math.sqrt(len(q)) for h in every]
        shares = [math.exp(s - max(scores)) for s in scores]
        read = np.zeros(len(token))
        for share, h in zip(shares, every, strict=True):
            read += share / sum(shares) * h
        out.append(token + w["scale"] * read)
    return np.array(out)


@pytest.mark.parametrize(("num_in", "num_fmb", "num_lcb"), [(7, 3, 2), (5, 3, 2), (1, 1, 1)])
def test_layer_is_the_paper_equation(num_in: int, num_fmb: int, num_lcb: int) -> None:
    torch.manual_seed(num_in)
    layer = WukongLayer(num_in, num_fmb, num_lcb, 6, FactorizationMachineBlock(num_in, num_fmb, 6, 4, 10))
    loud(layer, 0.4)
    x = torch.randn(5, num_in, 6)
    expected = np.array([naive_layer(layer, row) for row in x.double().numpy()])
    np.testing.assert_allclose(layer(x).detach().numpy(), expected, atol=1e-5)


@pytest.mark.parametrize("num_in", [3, 2])
def test_gradients_of_a_layer_are_finite_differences(num_in: int) -> None:
    """With and without a compressed residual."""
    layer = WukongLayer(num_in, 1, 1, 3, FactorizationMachineBlock(num_in, 1, 3, 2, 3))
    check_gradients(layer, lambda run, x: run(x), doubles(2, num_in, 3))


def test_rows_do_not_see_each_other_and_none_is_fine() -> None:
    layer = WukongLayer(4, 2, 2, 6, FactorizationMachineBlock(4, 2, 6, 3, 8))
    x = torch.randn(6, 4, 6)
    torch.testing.assert_close(layer(x)[2:3], layer(x[2:3]), atol=1e-6, rtol=0)
    assert layer(x[:0]).shape == (0, 4, 6)


@pytest.mark.parametrize("sizes", [[5], [7, 5], [7, 1, 4]])
def test_tokens_look_back_at_all_earlier_layers(sizes: list[int]) -> None:
    look_back = loud(CrossLayerAttention(6))
    x, earlier = torch.randn(4, 3, 6), [torch.randn(4, n, 6) for n in sizes]
    got, w = look_back(x, earlier), weights(look_back)
    for n in range(4):
        expected = naive_look_back(w, x[n].double().numpy(), [h[n].double().numpy() for h in earlier])
        np.testing.assert_allclose(got[n].detach().numpy(), expected, atol=1e-5)


def test_looking_back_starts_small_and_is_a_choice() -> None:
    look_back = CrossLayerAttention(6)
    x, earlier = torch.randn(4, 3, 6), [torch.ones(4, 2, 6)]
    torch.testing.assert_close(look_back(x, earlier), x + 0.1)
    with torch.no_grad():
        look_back.scale.zero_()
    assert torch.equal(look_back(x, earlier), x)


def test_gradients_of_looking_back_are_finite_differences() -> None:
    check_gradients(
        CrossLayerAttention(4), lambda run, x, a, b: run(x, [a, b]),
        doubles(2, 2, 4), doubles(2, 3, 4), doubles(2, 1, 4),
    )  # fmt: skip
