"""The pyramid against recursion in float64: a summary is made of its own events, and of nothing else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from gem.config import ModelConfig
from gem.data.batch import Batch
from gem.model.levels import plan_memory
from gem.model.pyramid import BlockSummary, Pyramid
from tests.numerics.naive import Array, Weights, check_gradients, doubles, gelu, linear, loud, norm, part, weights
from tests.numerics.test_levels import Token, events_of, tokens_of
from tests.unit.model.synthetic import MODEL, make_world

WORLD = make_world(10, num_users=6, num_impressions=16, events_per_user=90)
CONFIGS = [
    replace(MODEL, num_levels=1, max_history=20),
    replace(MODEL, num_levels=2, block=3, window=4, max_history=20),
    replace(MODEL, num_levels=3, block=2, window=3, max_history=20),
]


def naive_summary(w: Weights, x: Array) -> Array:
    """Tokens of a block [B, D] -> [D]: one weighted mean a seed, then the plain mean."""
    pooled = []
    for seed in range(len(w["seeds.weight"])):
        scores = [linear(w, "seeds", token)[seed] for token in x]
        shares = np.exp(np.array(scores) - max(scores))
        total = np.zeros(x.shape[1])
        for share, token in zip(shares / shares.sum(), x, strict=True):
            total += share * token
        pooled.append(total)
    return linear(w, "out", np.concatenate([*pooled, sum(x) / len(x)]))


def naive_pooled(w: Weights, token: Token, events: Array, block: int) -> Array:
    """A token before its MLP; `events` are all events of its user from the first one on."""
    if token.level == 0:
        return events[token.number]
    below = [Token(token.user, token.level - 1, token.number * block + b) for b in range(block)]
    children = np.array([naive_pooled(w, child, events, block) for child in below])
    return naive_summary(part(w, f"summaries.{token.level - 1}."), children)


def naive_memory(module: nn.Module, batch: Batch, config: ModelConfig, events: Array) -> Array:
    """The memory [M, D] token by token."""
    w, t, out = weights(module), batch.timeline, []
    for token in tokens_of(plan_memory(batch, config)):
        start, end = t.offsets[token.user : token.user + 2].tolist()
        older = np.full((int(t.first[token.user]), events.shape[1]), np.nan)  # not in the batch: never read
        x = naive_pooled(w, token, np.concatenate([older, events[start:end]]), config.block)
        mlp = part(w, f"mlps.{token.level}.")
        x = x + linear(mlp, "3", gelu(linear(mlp, "1", norm(mlp, "0", x)))) + w["level.weight"][token.level]
        out.append(norm(w, f"norms.{token.level}", x))
    return np.array(out).reshape(-1, events.shape[1])


def batch_of(config: ModelConfig) -> Batch:
    return WORLD.batch(np.arange(len(WORLD.impressions)), config.max_history, config.align)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.num_levels} levels")
def test_memory_is_events_and_summaries_of_summaries(config: ModelConfig) -> None:
    batch = batch_of(config)
    assert (batch.timeline.first > 0).any(), "some histories begin before the batch"
    pyramid, events = loud(Pyramid(config)), torch.randn(batch.timeline.ad.numel(), config.dim)
    got = pyramid(events, plan_memory(batch, config))
    expected = naive_memory(pyramid, batch, config, events.double().numpy())
    np.testing.assert_allclose(got.detach().numpy(), expected, atol=2e-5)
    assert expected.std(0).mean() > 0.1


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.num_levels} levels")
def test_a_token_depends_on_its_own_events_only(config: ModelConfig) -> None:
    batch = batch_of(config)
    plan = plan_memory(batch, config)
    pyramid, events = loud(Pyramid(config)), torch.randn(batch.timeline.ad.numel(), config.dim, requires_grad=True)
    memory = pyramid(events, plan)
    tokens = tokens_of(plan)
    for row in range(0, len(tokens), 7):
        (gradient,) = torch.autograd.grad(memory[row].square().sum() + memory[row, 0], events, retain_graph=True)
        assert gradient.any(1).nonzero().flatten().tolist() == events_of(plan, tokens[row])


def test_gradients_are_finite_differences() -> None:
    config = replace(MODEL, dim=2, num_levels=3, block=2, window=1, max_history=12)
    batch = WORLD.batch([int(np.argmax(WORLD.impressions.cut))], config.max_history, config.align)
    plan = plan_memory(batch, config)
    assert {t.level for t in tokens_of(plan)} == {0, 1, 2}
    # LayerNorm of two numbers is +-1 wherever they differ: only with a third is there something to learn.
    config = replace(config, dim=3, num_heads=1)
    check_gradients(Pyramid(config), lambda run, x: run(x, plan), doubles(batch.timeline.ad.numel(), 3))


@pytest.mark.parametrize("num_seeds", [1, 3])
def test_a_block_is_pooled_whatever_its_order(num_seeds: int) -> None:
    summary, x = loud(BlockSummary(5, num_seeds)), torch.randn(7, 4, 5)
    got = summary(x)
    expected = [naive_summary(weights(summary), block) for block in x.double().numpy()]
    np.testing.assert_allclose(got.detach().numpy(), expected, atol=1e-5)
    torch.testing.assert_close(summary(x[:, [2, 0, 3, 1]]), got, atol=1e-5, rtol=0)
    assert summary(x[:0]).shape == (0, 5)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.num_levels} levels")
def test_without_events_there_is_no_memory_but_every_weight_has_a_gradient(config: ModelConfig) -> None:
    world = make_world(1, events_per_user=0)
    batch = world.batch(np.arange(9), config.max_history, config.align)
    pyramid = Pyramid(config)
    memory = pyramid(torch.zeros(0, config.dim), plan_memory(batch, config))
    assert memory.shape == (0, config.dim)
    memory.sum().backward()
    assert all(p.grad is not None for p in pyramid.parameters())
