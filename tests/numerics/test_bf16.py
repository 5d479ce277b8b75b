"""The networks under bfloat16 autocast against float32: what is scored and what is learned stay close.

bfloat16 has 8 significant bits: a unit in the last place is 2^-8 = 0.4 % of a value, and errors add up over layers.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from gem.config import ModelConfig
from gem.model.gem import build_model
from gem.model.tables import PlainTables
from gem.training.objective import task_losses
from tests.unit.model.synthetic import MODEL, make_world

WORLD = make_world(0, num_users=30, num_impressions=256, events_per_user=60)
BATCH = WORLD.batch(np.arange(256), max_history=32)
GEM = replace(MODEL, dim=16, max_history=32)
CONFIGS = {
    "gem": GEM,
    "gem without counts": replace(GEM, counts=False),
    "gem over a pyramid": replace(GEM, num_layers=3, window=8, block=4, num_levels=2, event_attention=True),
    "pooled": replace(GEM, interleaving="pooled"),
    **{arch: replace(GEM, arch=arch) for arch in ("lr", "dlrm", "dcnv2", "din", "wukong")},
}
LOGIT_TOLERANCE = 0.03  # root mean square difference over the spread of the float32 logits; measured 0.002 to 0.015
COSINE = 0.99  # of the gradients of each parameter; measured above 0.998
NEGLIGIBLE = 1e-5  # of the norm of all gradients: such as are 0 but for rounding have no direction


def outcome(config: ModelConfig, bf16: bool) -> tuple[torch.Tensor, float, dict[str, torch.Tensor]]:
    """(logits [N, K], loss per row, gradient of every parameter) of the network with some noise on its weights."""
    model = build_model(WORLD.schema, config, seed=1)
    tables = PlainTables(WORLD.schema, config.dim, seed=1)
    noise = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in [*model.parameters(), *tables.parameters()]:
            p.add_(0.1 * torch.randn(p.shape, generator=noise))
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        logits = model(BATCH, tables(BATCH.lookups())).logits
    losses = task_losses(logits.float(), BATCH.labels, BATCH.mask, WORLD.schema) / len(BATCH)
    losses.sum().backward()
    named = [*model.named_parameters(prefix="dense"), *tables.named_parameters(prefix="tables")]
    return logits.detach().float(), float(losses.detach().sum()), {n: p.grad for n, p in named if p.grad is not None}


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a * b).double().sum() / (a.double().norm() * b.double().norm()))


@pytest.mark.parametrize("name", CONFIGS)
def test_bf16_is_close_to_fp32(name: str) -> None:
    (want, loss, gradients), (got, low_loss, low) = (outcome(CONFIGS[name], bf16) for bf16 in (False, True))
    spread = want.std(0)
    assert spread.min() > 0.05  # it is no constant
    assert bool(torch.isfinite(got).all())
    assert not torch.equal(want, got)  # bfloat16 was used at all
    assert ((got - want).square().mean(0).sqrt() / spread).max() < LOGIT_TOLERANCE
    assert low_loss == pytest.approx(loss, rel=0.01)
    assert low.keys() == gradients.keys()
    assert all(bool(torch.isfinite(g).all()) for g in low.values())
    norms = {n: float(g.norm()) for n, g in gradients.items()}
    whole = float(np.sqrt(sum(x * x for x in norms.values())))
    tell = {n for n, x in norms.items() if x > NEGLIGIBLE * whole}
    assert len(tell) > 0.8 * len(norms)
    off = {n: c for n in tell if (c := cosine(gradients[n], low[n])) < COSINE}
    assert not off
