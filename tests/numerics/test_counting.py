"""FLOPs and kept bytes against hand counts, against PyTorch's own counter, and meta against real tensors."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

from gem.config import ModelConfig
from gem.data.batch import Batch
from gem.model.counting import Counted, count, measured_flops, on_meta
from gem.model.gem import build_model
from gem.model.heads import Output
from tests.unit.model.synthetic import MODEL, make_schema, make_world

WORLD = make_world(0)
CONFIGS = {arch: dataclasses.replace(MODEL, arch=arch) for arch in ("gem", "lr", "dlrm", "dcnv2", "din", "wukong")}
CONFIGS["gem, all parts"] = dataclasses.replace(
    MODEL, max_history=12, window=2, block=2, num_levels=2, event_attention=True, num_pma=2, num_recent=2
)
CONFIGS["gem, pooled"] = dataclasses.replace(MODEL, interleaving="pooled", counts=False, surface_adapters=False)


def inputs(config: ModelConfig, meta: bool = False) -> tuple[Batch, dict[str, Tensor]]:
    batch = WORLD.batch(np.arange(30), config.max_history, config.align)
    device = "meta" if meta else "cpu"
    ids = batch.lookups()
    return batch, {f: torch.randn(i.numel(), config.dim, device=device, requires_grad=True) for f, i in ids.items()}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_flops_are_those_of_pytorchs_counter(config: ModelConfig) -> None:
    model = build_model(WORLD.schema, config)
    batch, emb = inputs(config)
    # Attention by matrix products: the counter misses the CPU's kernel, which `count` adds by its formula.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as theirs:
        model(batch, emb)
    assert measured_flops(model, batch, emb) == theirs.get_total_flops() > 0


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_meta_counts_what_real_tensors_do(config: ModelConfig) -> None:
    real = count(build_model(WORLD.schema, config), *inputs(config), memory=True)
    model = on_meta(lambda: build_model(WORLD.schema, config))
    assert all(p.is_meta for p in model.parameters())
    meta = count(model, *inputs(config, meta=True), memory=True)
    assert meta.flops_of == real.flops_of
    # Attention without a learned bias runs in a kernel of the CPU's own, which keeps other tensors.
    assert meta.saved_bytes == pytest.approx(real.saved_bytes, rel=0.02) and real.saved_bytes > 0


class Plain(nn.Module):
    """Two linear layers on the numbers of the ads, attention between ads; no field is read."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(width, 7), nn.GELU(), nn.Linear(7, 8))
        self.vector = nn.Parameter(torch.ones(8))

    def forward(self, batch: Batch, emb: dict[str, Tensor]) -> Output:
        x = self.mlp(batch.ads.numeric)
        heads = x.view(1, -1, 2, 4).transpose(1, 2)
        read = scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).reshape(-1, 8)
        return Output(read @ self.vector, read)


def test_flops_by_hand() -> None:
    batch, _ = inputs(MODEL)
    ads, width = batch.ads.numeric.shape
    got = count(Plain(width), batch, {})
    attention = 2 * (2 * ads * ads * 4) * 2  # Q K^T and A V, 2 heads of width 4
    assert got.flops_of == {
        "mlp.0": 2 * ads * width * 7,
        "mlp.2": 2 * ads * 7 * 8,
        "": attention + 2 * ads * 8,
    }


def test_logistic_regression_by_hand() -> None:
    config = CONFIGS["lr"]
    batch, emb = inputs(config)
    widths = [s.numeric.shape[1] + s.vectors.shape[1] for s in (batch.users, batch.ads, batch.context)]
    expected = 2 * len(batch) * sum(widths) * len(WORLD.schema.tasks)
    assert measured_flops(build_model(WORLD.schema, config), batch, emb) == expected


def test_kept_bytes_by_hand() -> None:
    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 2))

        def forward(self, batch: Batch, emb: dict[str, Tensor]) -> Tensor:
            out: Tensor = self.net(emb["x"])
            return out

    batch, _ = inputs(MODEL)
    x = torch.randn(10, 4, requires_grad=True)
    # Kept: the input of each product and of the GELU; the weights are there anyway.
    assert count(Mlp(), batch, {"x": x}, memory=True).saved_bytes == 4 * 10 * (4 + 16 + 16)
    assert count(Mlp(), batch, {"x": x}).saved_bytes == 0


def test_counting_changes_nothing() -> None:
    model = build_model(WORLD.schema, MODEL)
    batch, emb = inputs(MODEL)
    before = model(batch, emb).logits
    count(model, batch, emb, memory=True)
    assert torch.is_grad_enabled() and all(p.grad is None for p in model.parameters())
    torch.testing.assert_close(model(batch, emb).logits, before, rtol=0, atol=0)


def test_nothing_is_allocated_on_meta() -> None:
    """A network of 60 G parameters would not fit; its weights are 240 GB."""
    large = dataclasses.replace(MODEL, dim=4096, mlp_hidden=200_000, num_fmb=64, num_lcb=64, representation_dim=64)
    model = on_meta(lambda: build_model(make_schema(), large))
    assert sum(p.numel() for p in model.parameters()) > 6e10


def test_sums_over_modules_are_the_total() -> None:
    batch, emb = inputs(MODEL)
    got = count(build_model(WORLD.schema, MODEL), batch, emb)
    assert isinstance(got, Counted) and got.flops == sum(got.flops_of.values())
    assert all(flops > 0 for flops in got.flops_of.values())
    assert math.isclose(got.flops, measured_flops(build_model(WORLD.schema, MODEL, seed=3), batch, emb))
