"""What one forward pass costs, counted while it runs: FLOPs by module, and bytes kept for the backward pass.

A FLOP is one multiplication or one addition of a matrix product, convolution or attention (two per weight and row);
element-wise work, normalisation, softmax and lookups are not counted, as is usual. A training step counts as
`TRAINING_FACTOR` forward passes: the backward pass has two products for every one of the forward pass.

Counting by running holds for every architecture. A network too large to be run stands on the meta device: its
floats have shapes and no values, while everything the batch decides (lengths, masks, indices) is real, on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from gem.data.batch import Batch

M = TypeVar("M", bound=nn.Module)
TRAINING_FACTOR = 3
aten = torch.ops.aten


@dataclass(frozen=True)
class Counted:
    """Forward FLOPs by module path ("" is the model itself; every path without what lies below it), and the bytes
    of tensors that autograd keeps for the backward pass (0 if not asked for)."""

    flops_of: dict[str, int]
    saved_bytes: int = 0

    @property
    def flops(self) -> int:
        return sum(self.flops_of.values())


def measured_flops(model: nn.Module, batch: Batch, emb: dict[str, Tensor]) -> int:
    """Forward FLOPs of one real batch, padding included. Training: times `TRAINING_FACTOR`."""
    return count(model, batch, emb).flops


def count(model: nn.Module, batch: Batch, emb: dict[str, Tensor], memory: bool = False) -> Counted:
    """Run `model(batch, emb)` once and count. Weights and `emb` may be on the meta device, the batch never is.

    memory: count also what autograd keeps (then the pass runs with gradients).
    """
    counter = FlopCounterMode(display=False, custom_mapping=_OWN)
    keeper = _Kept({p.untyped_storage()._cdata for p in model.parameters()})
    with ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(memory))
        if memory:
            stack.enter_context(saved_tensors_hooks(keeper.keep, lambda kept: kept))
        stack.enter_context(counter)
        if any(t.is_meta for t in [*model.parameters(), *emb.values()]):
            stack.enter_context(_RealIndices())
        out = model(batch, emb)
    del out  # with it goes the graph, and what it kept
    return Counted(_exclusive(counter.get_flop_counts(), type(model).__name__), keeper.num_bytes)


def on_meta(build: Callable[[], M]) -> M:
    """What `build` makes, with its floats on the meta device: no memory is taken, no number drawn."""
    with _MetaFloats():
        return build()


class _Kept:
    """Adds up the storages autograd keeps, each once; parameters are there anyway."""

    def __init__(self, known: set[int]) -> None:
        self.known, self.num_bytes = known, 0
        self.held: list[torch.UntypedStorage] = []

    def keep(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.known:
            self.known.add(storage._cdata)
            self.held.append(storage)  # so that no later storage takes its address
            self.num_bytes += storage.nbytes()
        return tensor


class _RealIndices(TorchDispatchMode):
    """Operations on real tensors run; those that meet a meta tensor only work out shapes.

    Whole numbers are never made on the meta device: they come from the batch, and what indexes must have a value.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        flat, tree = tree_flatten((tuple(args), dict(kwargs or {})))
        if not any(isinstance(t, Tensor) and t.is_meta for t in flat):
            return self.made(func, args, dict(kwargs or {}))
        if func.overloadpacket is aten.index:
            args = (args[0], _without_masks(args[1]), *args[2:])
            flat, tree = tree_flatten((tuple(args), dict(kwargs or {})))
        flat = [t.to("meta") if isinstance(t, Tensor) else t for t in flat]
        args, named = tree_unflatten(flat, tree)
        return func(*args, **named)

    def made(self, func: Any, args: Sequence[Any], named: dict[str, Any]) -> Any:
        """The result of an operation without meta tensors: a real one, but for floats to be made on meta."""
        if named.get("device") == torch.device("meta"):
            out = func(*args, **named)
            if out.is_floating_point():
                return out
            named["device"] = torch.device("cpu")
        return func(*args, **named)


class _MetaFloats(_RealIndices):
    """Floats are made on the meta device: the weights of a module that is being built."""

    def made(self, func: Any, args: Sequence[Any], named: dict[str, Any]) -> Any:
        if func.overloadpacket in _MAKERS:
            named["device"] = torch.device("meta")
        return super().made(func, args, named)


_MAKERS = (aten.empty, aten.zeros, aten.ones, aten.full, aten.randn, aten.rand)


def _without_masks(index: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Masks among the indices become positions: how many rows a mask keeps is data."""
    out: list[Tensor | None] = []
    for part in index:
        out += part.nonzero(as_tuple=True) if part is not None and part.dtype == torch.bool else [part]
    return out


def _exclusive(counts: Mapping[str, Mapping[Any, int]], root: str) -> dict[str, int]:
    """Module path -> FLOPs of its own, from the counter's sums, which hold everything below a module."""
    total = {name: sum(ops.values()) for name, ops in counts.items()}
    whole = total.pop("Global", 0)
    paths = {name.removeprefix(root).lstrip("."): n for name, n in total.items()}
    paths[""] = whole
    own = dict(paths)
    for path, flops in paths.items():
        if path:
            parent = path
            while parent:
                parent = parent.rpartition(".")[0]
                if parent in own:
                    own[parent] -= flops
                    break
    return {path: flops for path, flops in own.items() if flops}


def _attention(query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Q Kᵀ and A V. The counter of PyTorch 2.13 knows the GPU kernels and misses the one of the CPU."""
    return int(sdpa_flop_count(query, key, value))


def _matrix_vector(matrix: Any, vector: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return 2 * int(matrix[0]) * int(matrix[1])


_OWN: dict[Any, Callable[..., int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten.mv: _matrix_vector,
}
