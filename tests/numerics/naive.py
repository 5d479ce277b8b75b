"""What naive versions of a block are made of: its weights in float64, the plainest functions, finite differences."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

Array = np.ndarray
Weights = dict[str, Array]


def weights(module: nn.Module, prefix: str = "") -> Weights:
    """float64 values of all parameters whose names begin with `prefix`, which is cut off."""
    state = {k.removeprefix(prefix): v for k, v in module.state_dict().items() if k.startswith(prefix)}
    return {k: v.double().numpy() for k, v in state.items()}


def part(w: Weights, prefix: str) -> Weights:
    return {k.removeprefix(prefix): v for k, v in w.items() if k.startswith(prefix)}


def linear(w: Weights, name: str, x: Array) -> Array:
    """W x + b of one vector."""
    out = w[f"{name}.weight"] @ x
    return out + w[f"{name}.bias"] if f"{name}.bias" in w else out


def layer_norm(x: Array, weight: Array, bias: Array) -> Array:
    return (x - x.mean()) / math.sqrt(x.var() + 1e-5) * weight + bias


def norm(w: Weights, name: str, x: Array) -> Array:
    return layer_norm(x, w[f"{name}.weight"], w[f"{name}.bias"])


def gelu(x: Array) -> Array:
    return np.array([0.5 * v * (1 + math.erf(v / math.sqrt(2))) for v in x])


def sigmoid(x: Array) -> Array:
    return np.array([1 / (1 + math.exp(-v)) for v in x])


def loud(module: nn.Module, std: float = 0.5, seed: int = 0) -> nn.Module:
    """The module with random weights everywhere, also where it starts at zero or one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(std * torch.randn(p.shape, generator=generator))
    return module


def doubles(*shape: int) -> Tensor:
    """Random float64 values that ask for a gradient."""
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def check_gradients(module: nn.Module, call: Callable[..., Tensor], *given: Tensor) -> None:
    """Gradients of `call(run, *given)` are finite differences, for the given tensors and every weight of the module.

    `run` stands for the module: `call` hands it whatever it takes. Outputs are mixed into two at random: as telling as
    each by itself, and far quicker.
    """
    module.double()
    named = {k: (0.5 * torch.randn_like(p)).requires_grad_() for k, p in module.named_parameters()}

    def flat(*values: Tensor) -> Tensor:
        own = dict(zip(named, values[len(given) :], strict=True))
        out = call(lambda *args: torch.func.functional_call(module, own, args), *values[: len(given)])
        mix = torch.randn(out.numel(), 2, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
        return out.flatten() @ mix

    assert torch.autograd.gradcheck(flat, (*given, *named.values()))
