"""Wukong layers against loops in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from gem.model.wukong import FactorizationMachineBlock, WukongLayer


def parameters(module: torch.nn.Module) -> dict[str, np.ndarray]:
    return {k: v.detach().double().numpy() for k, v in module.state_dict().items()}


def layer_norm(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    return (x - x.mean()) / math.sqrt(x.var() + 1e-5) * weight + bias


def gelu(x: np.ndarray) -> np.ndarray:
    return np.array([0.5 * v * (1 + math.erf(v / math.sqrt(2))) for v in x])


def naive_fmb(w: dict[str, np.ndarray], x: np.ndarray, num_out: int) -> np.ndarray:
    """One impression: tokens [n, D] -> [num_out, D]. Pairwise dot products first, the long way round."""
    n, dim = x.shape
    y = np.array(
        [w["projection"][i] + np.tanh(w["attend.weight"] @ x[i] + w["attend.bias"]) / math.sqrt(n) for i in range(n)]
    )
    pairs = np.array([[sum(x[i, d] * x[j, d] for d in range(dim)) for j in range(n)] for i in range(n)])
    crossed = (pairs @ y).reshape(-1)
    hidden = gelu(w["mlp.1.weight"] @ layer_norm(crossed, w["mlp.0.weight"], w["mlp.0.bias"]) + w["mlp.1.bias"])
    return (w["mlp.3.weight"] @ hidden + w["mlp.3.bias"]).reshape(num_out, dim)


def naive_layer(layer: WukongLayer, x: np.ndarray) -> np.ndarray:
    w = parameters(layer)
    fmb = naive_fmb({k.removeprefix("fmb."): v for k, v in w.items()}, x, layer.fmb.num_out)
    compressed = [sum(w["lcb.weight"][o, i] * x[i] for i in range(len(x))) for o in range(w["lcb.weight"].shape[0])]
    rows = [*fmb, *compressed]
    if "residual.weight" in w:
        residual = [sum(w["residual.weight"][o, i] * x[i] for i in range(len(x))) for o in range(len(rows))]
    else:
        residual = list(x)
    return np.array([layer_norm(a + b, w["norm.weight"], w["norm.bias"]) for a, b in zip(rows, residual, strict=True)])


@pytest.mark.parametrize(("num_in", "num_fmb", "num_lcb"), [(7, 3, 2), (5, 3, 2), (1, 1, 1)])
def test_layer_is_the_paper_equation(num_in: int, num_fmb: int, num_lcb: int) -> None:
    torch.manual_seed(num_in)
    layer = WukongLayer(num_in, num_fmb, num_lcb, 6, FactorizationMachineBlock(num_in, num_fmb, 6, 4, 10))
    for p in layer.parameters():
        torch.nn.init.normal_(p, std=0.4)
    x = torch.randn(5, num_in, 6)
    expected = np.array([naive_layer(layer, row) for row in x.double().numpy()])
    np.testing.assert_allclose(layer(x).detach().numpy(), expected, atol=1e-5)


def test_rows_do_not_see_each_other_and_none_is_fine() -> None:
    layer = WukongLayer(4, 2, 2, 6, FactorizationMachineBlock(4, 2, 6, 3, 8))
    x = torch.randn(6, 4, 6)
    torch.testing.assert_close(layer(x)[2:3], layer(x[2:3]), atol=1e-6, rtol=0)
    assert layer(x[:0]).shape == (0, 4, 6)
