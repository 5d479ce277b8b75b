"""Parts of an InterFormer layer against loops in float64, and the ways its two halves may inform each other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from gem.config import INTERLEAVING, ModelConfig
from gem.data.batch import Batch
from gem.errors import ConfigError
from gem.model.block_attention import event_blocks
from gem.model.gem import build_model
from gem.model.interformer import NUM_SUMMARY, PersonalFFN, RecentEvents, SequenceLayer, SequenceReading, Timeline
from gem.model.levels import MemoryPlan, plan_memory
from tests.numerics.naive import (
    Array,
    Weights,
    check_gradients,
    doubles,
    gelu,
    linear,
    loud,
    norm,
    part,
    sigmoid,
    weights,
)
from tests.numerics.test_block_attention import naive_block_attention
from tests.numerics.test_levels import naive_reads
from tests.numerics.test_timeline_reader import naive_attention
from tests.unit.model.synthetic import MODEL, loud_ranker, make_world

WORLD = make_world(0)
NUM = len(WORLD.impressions)
DEEP = replace(MODEL, num_levels=2, block=2, window=3, max_history=12, event_attention=True, num_pma=2, num_recent=3)
EMPTY = make_world(1, events_per_user=0)


def plan_of(config: ModelConfig) -> tuple[Batch, MemoryPlan]:
    batch = WORLD.batch(np.arange(NUM), config.max_history, config.align)
    return batch, plan_memory(batch, config)


def naive_ffn(w: Weights, token: Array, user: Array) -> Array:
    gate = 1 + np.tanh(linear(w, "gate", user))
    return linear(w, "up", gate * gelu(linear(w, "down", norm(w, "norm", token))))


def naive_recent(w: Weights, memory: Array, rows: list[int]) -> list[Array]:
    """One token for each of the newest events, learned ones where there are fewer."""
    return [linear(w, "map", memory[row]) if row >= 0 else w["missing"][i] for i, row in enumerate(rows)]


def naive_reading(
    module: nn.Module, inputs: tuple[Array, Array, Array], where: tuple[Batch, MemoryPlan, int], config: ModelConfig
) -> Array:
    """S_sum [Q, D] of impression n: inputs are its tokens [n, D], its candidate [D] and the memory [M, D]."""
    (tokens, candidate, memory), (batch, plan, n) = inputs, where
    w, u, t = weights(module), int(batch.user_of[n]), batch.timeline
    queries = [candidate]
    if "summarise.weight" in w:
        for mix in w["summarise.weight"]:
            queries.append(sum(a * token for a, token in zip(mix, tokens, strict=True)))
    queries += list(w.get("seeds", []))
    end = int(batch.cut[n] + t.first[u])
    seen = naive_reads(end, config)
    rows = [int(plan.levels[k].offsets[u] - plan.levels[k].low[u]) + number for k, number in seen]
    last = [int(t.offsets[u] - t.first[u]) + (number + 1) * config.block**k - 1 for k, number in seen]
    ages = [int(batch.time_ms[n] - t.time_ms[e]) for e in last]
    read = [naive_attention(part(w, "reader."), config.num_heads, q, memory[rows], ages) for q in queries]
    singles = [row for row, (k, _) in zip(rows, seen, strict=True) if k == 0][: config.num_recent]
    if config.num_recent:
        singles += [-1] * (config.num_recent - len(singles))
        read += naive_recent(part(w, "recent."), memory, singles)
    return np.array([s * sigmoid(linear(w, "gate", np.concatenate([s, candidate]))) for s in read])


def test_personal_ffn_is_the_equation() -> None:
    ffn = loud(PersonalFFN(8, 12))
    memory, user, user_of = torch.randn(9, 8), torch.randn(4, 12), torch.tensor([0, 0, 1, 3, 3, 3, 0, 1, 3])
    got, w = ffn(memory, user, user_of), weights(ffn)
    for m in range(9):
        expected = naive_ffn(w, memory[m].double().numpy(), user[user_of[m]].double().numpy())
        np.testing.assert_allclose(got[m].detach().numpy(), expected, atol=1e-5)
    other = user.clone()
    other[3] += 1
    moved = (ffn(memory, other, user_of) != got).any(1)
    assert moved.tolist() == (user_of == 3).tolist()  # a user steps its own memory only


@pytest.mark.parametrize("interleaving", ["one_way", "both"])
@pytest.mark.parametrize("attention", [True, False])
def test_a_sequence_layer_steps_the_memory(interleaving: str, attention: bool) -> None:
    config = replace(DEEP, interleaving=interleaving, event_attention=attention)
    batch, plan = plan_of(DEEP)
    layer = loud(SequenceLayer(config, 12))
    memory, user = torch.randn(plan.num_tokens, 8), torch.randn(len(batch.users), 12)
    got = layer(memory, user, Timeline(plan, event_blocks(plan, DEEP.block) if attention else None))
    expected, w = memory.double().numpy(), weights(layer)
    if interleaving == "both":
        users = user.double().numpy()[plan.user_of.numpy()]
        steps = [naive_ffn(part(w, "ffn."), m, u) for m, u in zip(expected, users, strict=True)]
        expected = expected + np.array(steps)
    if attention:
        expected = expected + naive_block_attention(layer.attention, config.num_heads, plan, expected, DEEP.block)
    np.testing.assert_allclose(got.detach().numpy(), expected, atol=3e-5)


def test_recent_events_are_tokens_of_their_own() -> None:
    recent, rows = loud(RecentEvents(8, 3)), torch.tensor([[4, 3, 2], [0, -1, -1], [-1, -1, -1]])
    memory = torch.randn(5, 8)
    got, w = recent(memory, rows), weights(recent)
    for n in range(3):
        expected = naive_recent(w, memory.double().numpy(), rows[n].tolist())
        np.testing.assert_allclose(got[n].detach().numpy(), expected, atol=1e-5)
    nothing = recent(memory[:0], torch.full((2, 3), -1))
    torch.testing.assert_close(nothing, recent.missing.expand(2, -1, -1))


@pytest.mark.parametrize("use_tokens", [True, False])
@pytest.mark.parametrize(("num_pma", "num_recent"), [(2, 3), (0, 0), (1, 0)])
def test_reading_is_gated_by_the_candidate(use_tokens: bool, num_pma: int, num_recent: int) -> None:
    config = replace(DEEP, num_pma=num_pma, num_recent=num_recent)
    batch, plan = plan_of(config)
    reading = loud(SequenceReading(config, 5, use_tokens))
    tokens, candidate, memory = torch.randn(NUM, 5, 8), torch.randn(NUM, 8), torch.randn(plan.num_tokens, 8)
    got = reading(tokens, candidate, memory, plan).detach().numpy()
    assert got.shape == (NUM, reading.num_out, 8)
    assert reading.num_out == 1 + NUM_SUMMARY * use_tokens + num_pma + num_recent
    x, q, m = (v.double().numpy() for v in (tokens, candidate, memory))
    for n in range(0, NUM, 3):
        expected = naive_reading(reading, (x[n], q[n], m), (batch, plan, n), config)
        np.testing.assert_allclose(got[n], expected, atol=3e-5)


def test_gradients_are_finite_differences() -> None:
    config = replace(DEEP, dim=2, num_heads=1, max_history=6, num_pma=1, num_recent=2)
    cut = WORLD.impressions.cut
    at = [int(np.argmax(cut)), int(np.flatnonzero(cut == 1)[0]), int(np.flatnonzero(cut == 0)[0])]
    plan = plan_memory(WORLD.batch(at, config.max_history, config.align), config)
    timeline = Timeline(plan, event_blocks(plan, config.block))
    users = int(plan.levels[0].low.numel())
    check_gradients(
        SequenceReading(config, 3, use_tokens=True),
        lambda run, tokens, candidate, memory: run(tokens, candidate, memory, plan),
        doubles(3, 3, 2), doubles(3, 2), doubles(plan.num_tokens, 2),
    )  # fmt: skip
    check_gradients(
        SequenceLayer(replace(config, dim=3), 2),
        lambda run, memory, user: run(memory, user, timeline),
        doubles(plan.num_tokens, 3), doubles(users, 2),
    )  # fmt: skip


@pytest.mark.parametrize("use_tokens", [True, False])
def test_every_parameter_gets_a_gradient_even_without_events(use_tokens: bool) -> None:
    batch = EMPTY.batch(np.arange(9), DEEP.max_history, DEEP.align)
    plan = plan_memory(batch, DEEP)
    reading, layer = SequenceReading(DEEP, 5, use_tokens), SequenceLayer(DEEP, 4)
    memory = layer(torch.zeros(0, 8), torch.randn(len(batch.users), 4), Timeline(plan, event_blocks(plan, DEEP.block)))
    reading(torch.randn(9, 5, 8), torch.randn(9, 8), memory, plan).sum().backward()
    for module in (reading, layer):
        for name, p in module.named_parameters():
            assert p.grad is not None and torch.isfinite(p.grad).all(), name


def test_ways_of_interleaving_are_different_models() -> None:
    batch = WORLD.batch(np.arange(NUM))
    logits, sizes = {}, {}
    for name in INTERLEAVING:
        ranker = loud_ranker(WORLD.schema, replace(MODEL, interleaving=name))
        with torch.inference_mode():
            logits[name] = ranker(batch).logits
        assert logits[name].std(0).min() > 0.1
        sizes[name] = sum(p.numel() for p in ranker.dense.parameters())
    for a in INTERLEAVING:
        assert all(a == b or (logits[a] - logits[b]).abs().max() > 0.1 for b in INTERLEAVING)
    assert sizes["pooled"] < sizes["separate"] < sizes["one_way"] < sizes["both"]


@pytest.mark.parametrize("interleaving", INTERLEAVING)
def test_layers_read_the_sequence_where_the_variant_says_so(interleaving: str) -> None:
    model = build_model(WORLD.schema, replace(MODEL, interleaving=interleaving)).eval()
    assert [layer.reading is not None for layer in model.layers] == [interleaving in ("one_way", "both")] * 2
    assert (model.late is not None) == (interleaving == "separate")
    steps = [layer.sequence is not None and layer.sequence.ffn is not None for layer in model.layers]
    assert steps == [interleaving == "both"] * 2


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"interleaving": "xyz"}, 'model.interleaving: got "xyz". Allowed: pooled, separate, one_way, both$'),
        ({"interleaving": "oneway"}, 'got "oneway". Did you mean "one_way"\\? Allowed: pooled'),
        ({"arch": "xyz"}, 'model.arch: got "xyz". Allowed: gem, lr, dlrm, dcnv2, din, wukong$'),
        ({"arch": "dcn"}, 'model.arch: got "dcn". Did you mean "dcnv2"\\? Allowed: gem'),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(change: dict[str, str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        build_model(WORLD.schema, replace(MODEL, **change))
