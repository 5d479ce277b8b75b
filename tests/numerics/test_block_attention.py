"""Causal attention of events inside their blocks, with positions in log time, against loops and complex numbers."""

from __future__ import annotations

import cmath
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from gem.config import ModelConfig
from gem.data.batch import Batch
from gem.model.block_attention import BlockAttention, event_blocks, rotate
from gem.model.levels import MemoryPlan, plan_memory
from tests.numerics.naive import Array, check_gradients, doubles, linear, loud, norm, weights
from tests.numerics.test_levels import tokens_of
from tests.unit.model.synthetic import MODEL, World, make_world

WORLD = make_world(4, num_users=5, num_impressions=20, events_per_user=60)
FLAT = replace(MODEL, event_attention=True, block=4, max_history=20)
DEEP = replace(FLAT, num_levels=2, window=3, max_history=40)


def batch_of(config: ModelConfig, world: World = WORLD) -> Batch:
    return world.batch(np.arange(len(world.impressions)), config.max_history, config.align)


def turned(x: Array, position: float) -> Array:
    """A head's vector with pair (x_f, x_{f + d/2}) as a complex number, turned by 4^-f · position."""
    half, out = len(x) // 2, x.copy()
    for f in range(half):
        z = complex(x[f], x[f + half]) * cmath.exp(1j * position / 4**f)
        out[f], out[f + half] = z.real, z.imag
    return out


def naive_block_attention(module: nn.Module, heads: int, plan: MemoryPlan, memory: Array, block: int) -> Array:
    """What is added to every memory token [M, D]: an event sees its block up to itself, a summary nothing."""
    w, tokens, dim = weights(module), tokens_of(plan), memory.shape[1]
    row_of = {(t.user, t.number): row for row, t in enumerate(tokens) if t.level == 0}
    out, size = np.zeros_like(memory), dim // heads
    for (user, number), row in row_of.items():
        begin = number // block * block
        rows = [row_of[user, j] for j in range(begin, number + 1)]
        minutes = [(int(plan.time_ms[r]) - int(plan.time_ms[rows[0]])) / 60_000 for r in rows]
        both = [linear(w, "qkv", norm(w, "norm", memory[r])) for r in rows]
        read = np.zeros(dim)
        for h in range(heads):
            own = slice(h * size, (h + 1) * size)
            q = turned(both[-1][:dim][own], math.log1p(minutes[-1]))
            keys = [turned(b[dim : 2 * dim][own], math.log1p(m)) for b, m in zip(both, minutes, strict=True)]
            scores = np.array([q @ k / math.sqrt(size) for k in keys])
            shares = np.exp(scores - scores.max())
            read[own] = sum(s * b[2 * dim :][own] for s, b in zip(shares / shares.sum(), both, strict=True))
        out[row] = linear(w, "out", read)
    return out


@pytest.mark.parametrize(("config", "dim", "heads"), [(FLAT, 8, 2), (DEEP, 8, 1), (DEEP, 6, 2)])
def test_events_attend_to_earlier_ones_of_their_block(config: ModelConfig, dim: int, heads: int) -> None:
    plan = plan_memory(batch_of(config), config)
    attention, memory = loud(BlockAttention(dim, heads)), torch.randn(plan.num_tokens, dim)
    got = attention(memory, event_blocks(plan, config.block)).detach().numpy()
    expected = naive_block_attention(attention, heads, plan, memory.double().numpy(), config.block)
    np.testing.assert_allclose(got, expected, atol=3e-5)
    summaries = [row for row, t in enumerate(tokens_of(plan)) if t.level > 0]
    assert not got[summaries].any()
    assert len(summaries) > 0 or config.num_levels == 1


def test_turning_keeps_lengths_and_depends_on_distances_only() -> None:
    q, k = torch.randn(1, 2, 1, 6, dtype=torch.float64), torch.randn(1, 2, 1, 6, dtype=torch.float64)
    at = torch.tensor([[0.5, 3.0]], dtype=torch.float64)
    torch.testing.assert_close(rotate(q, at).norm(dim=-1), q.norm(dim=-1))
    near, far = ((rotate(q, at + s) * rotate(k, at + 1.5 + s)).sum(-1) for s in (0.0, 7.0))
    torch.testing.assert_close(near, far)
    assert not torch.allclose(near, (q * k).sum(-1))


def test_a_later_event_moves_no_earlier_one() -> None:
    """Neither its content nor its time."""
    plan = plan_memory(batch_of(FLAT), FLAT)
    blocks = event_blocks(plan, FLAT.block)
    attention, memory = loud(BlockAttention(8, 2)), torch.randn(plan.num_tokens, 8)
    before, full = attention(memory, blocks), int((blocks.there.sum(1) == FLAT.block).nonzero()[0])
    rows = blocks.rows[full].tolist()
    changed, time = memory.clone(), plan.time_ms.clone()
    changed[rows[2]] += 1
    time[rows[2]] += 40 * 60_000
    after = attention(changed, event_blocks(replace(plan, time_ms=time), FLAT.block))
    moved = (before != after).any(1).nonzero().flatten().tolist()
    assert moved == sorted(rows[2:])


def test_jagged_is_padded() -> None:
    """All users at once give what each user alone gives, in a batch of equal, padded blocks of its own."""
    plan = plan_memory(batch_of(DEEP), DEEP)
    attention, memory = loud(BlockAttention(8, 2)), torch.randn(plan.num_tokens, 8)
    together, met = attention(memory, event_blocks(plan, DEEP.block)), 0
    for user in range(len(WORLD.users.side_rows)):
        at = np.flatnonzero(WORLD.impressions.user == user)
        if not at.size:
            continue
        alone = plan_memory(WORLD.batch(at, DEEP.max_history, DEEP.align), DEEP)
        mine = torch.nonzero(plan.user_of == met).flatten()
        own = attention(memory[mine], event_blocks(alone, DEEP.block))
        torch.testing.assert_close(own, together[mine], atol=1e-6, rtol=1e-6)
        met += 1
    assert met == int(plan.user_of.max()) + 1 > 2


def test_gradients_are_finite_differences() -> None:
    config = replace(FLAT, block=3, max_history=4)
    batch = WORLD.batch([int(np.argmax(WORLD.impressions.cut))], config.max_history, config.align)
    plan = plan_memory(batch, config)
    blocks = event_blocks(plan, config.block)
    assert blocks.rows.shape[0] > 1 and bool(blocks.position.any())
    check_gradients(BlockAttention(4, 2), lambda run, memory: run(memory, blocks), doubles(plan.num_tokens, 4))


def test_without_events_nothing_is_added_but_every_weight_has_a_gradient() -> None:
    world = make_world(1, events_per_user=0)
    plan = plan_memory(batch_of(FLAT, world), FLAT)
    attention = BlockAttention(8, 2)
    out = attention(torch.zeros(0, 8), event_blocks(plan, FLAT.block))
    assert out.shape == (0, 8)
    out.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in attention.parameters())
