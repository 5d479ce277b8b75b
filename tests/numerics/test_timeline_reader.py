"""Reading a memory against loops in float64: attention over the visible events, and over events and summaries."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from gem.data.batch import Batch
from gem.model.levels import plan_memory
from gem.model.packing import GAP_BUCKETS, pack
from gem.model.reader import TimelineReader
from tests.numerics.naive import Array, Weights, check_gradients, doubles, linear, loud, weights
from tests.numerics.test_levels import naive_reads
from tests.unit.model.synthetic import MODEL, make_world

HEADS, DIM, QUERIES = 2, 8, 3
WORLDS = {
    "mixed": make_world(0),
    "no events at all": make_world(1, events_per_user=0),
    "one event at most": make_world(2, events_per_user=1),
    "one impression": make_world(3, num_impressions=1),
    "long": make_world(4, num_users=5, num_impressions=40, events_per_user=90),
}


def batch_of(name: str) -> Batch:
    world = WORLDS[name]
    return world.batch(np.arange(len(world.impressions)), 20)


def visible_events(batch: Batch, n: int, max_history: int) -> range:
    """Rows of the batch's events that impression n may read."""
    start, cut = int(batch.timeline.offsets[batch.user_of[n]]), int(batch.cut[n])
    return range(start + max(cut - max_history, 0), start + cut)


def gap_bucket(elapsed_ms: int) -> int:
    return min(int(math.log2(1 + max(elapsed_ms / 1000, 0))), GAP_BUCKETS - 1)


def naive_attention(w: Weights, heads: int, query: Array, seen: Array, elapsed_ms: list[int]) -> Array:
    """One query [D] over the tokens it sees [L, D] and how old they are -> [D], with loops over heads and tokens."""
    dim = len(query)
    q = linear(w, "query", query)
    keys, values, gaps = [w["nothing"][:dim]], [w["nothing"][dim:]], [-1]
    for token, elapsed in zip(seen, elapsed_ms, strict=True):
        both = linear(w, "key_value", token)
        keys.append(both[:dim])
        values.append(both[dim:])
        gaps.append(gap_bucket(elapsed))
    out, size = np.zeros(dim), dim // heads
    for h in range(heads):
        own = slice(h * size, (h + 1) * size)
        scores = [
            q[own] @ k[own] / math.sqrt(size) + (0.0 if gap < 0 else w["gap_bias.weight"][gap, h])
            for k, gap in zip(keys, gaps, strict=True)
        ]
        shares = np.exp(np.array(scores) - max(scores))
        out[own] = sum(p * v[own] for p, v in zip(shares / shares.sum(), values, strict=True))
    return linear(w, "out", out)


@pytest.mark.parametrize("max_history", [1, 5, 20])
@pytest.mark.parametrize("name", WORLDS)
def test_reader_is_softmax_attention_over_the_visible_events(name: str, max_history: int) -> None:
    batch = batch_of(name)
    reader = loud(TimelineReader(DIM, HEADS), 0.6)
    queries, events = 2 * torch.randn(len(batch), QUERIES, DIM), 2 * torch.randn(batch.timeline.ad.numel(), DIM)
    got = reader(queries, events, pack(batch, max_history)).detach().numpy()
    w, x, now = weights(reader), events.double().numpy(), batch.time_ms.tolist()
    for n in range(len(batch)):
        rows = list(visible_events(batch, n, max_history))
        ages = [now[n] - int(batch.timeline.time_ms[e]) for e in rows]
        expected = [naive_attention(w, HEADS, q, x[rows], ages) for q in queries[n].double().numpy()]
        np.testing.assert_allclose(got[n], expected, atol=3e-5)


@pytest.mark.parametrize(("levels", "block"), [(2, 3), (3, 2)])
def test_reader_over_events_and_summaries(levels: int, block: int) -> None:
    """The tokens an impression reads are found by walking back through its events."""
    config = replace(MODEL, num_levels=levels, block=block, window=4, max_history=50)
    world = WORLDS["long"]
    batch = world.batch(np.arange(40), config.max_history, config.align)
    plan = plan_memory(batch, config)
    reader = loud(TimelineReader(DIM, HEADS), 0.6)
    queries, memory = torch.randn(40, 1, DIM), 2 * torch.randn(plan.num_tokens, DIM)
    got = reader(queries, memory, plan.packing).detach().numpy()
    w, x, first, kinds = weights(reader), memory.double().numpy(), batch.timeline.first, set()
    for n in range(40):
        u = int(batch.user_of[n])
        seen = naive_reads(int(batch.cut[n] + first[u]), config)
        rows = [int(plan.levels[k].offsets[u] - plan.levels[k].low[u]) + number for k, number in seen]
        last = [int(batch.timeline.offsets[u] - first[u]) + (number + 1) * block**k - 1 for k, number in seen]
        ages = [int(batch.time_ms[n] - batch.timeline.time_ms[e]) for e in last]
        expected = naive_attention(w, HEADS, queries[n, 0].double().numpy(), x[rows], ages)
        np.testing.assert_allclose(got[n, 0], expected, atol=3e-5)
        kinds |= {k for k, _ in seen}
    assert kinds == set(range(levels))


def test_gradients_are_finite_differences() -> None:
    """For queries, memory and every weight, over an empty, a short and a cut history."""
    world = WORLDS["mixed"]
    cut = world.impressions.cut
    batch = world.batch([int(np.flatnonzero(cut == 0)[0]), int(np.flatnonzero(cut == 1)[0]), int(np.argmax(cut))], 3)
    packing = pack(batch, 3)
    check_gradients(
        TimelineReader(4, 2),
        lambda run, queries, memory: run(queries, memory, packing),
        doubles(len(batch), 2, 4),
        doubles(batch.timeline.ad.numel(), 4),
    )


def test_worlds_hold_the_awkward_histories() -> None:
    seen = {len(visible_events(batch_of("mixed"), n, 5)) for n in range(len(batch_of("mixed")))}
    assert {0, 1, 5} <= seen
    assert batch_of("no events at all").timeline.ad.numel() == 0
    assert max(int(c) for c in batch_of("long").cut) > 20


@pytest.mark.parametrize("name", WORLDS)
def test_every_parameter_gets_a_gradient_even_without_events(name: str) -> None:
    """DDP waits for all of them: a parameter outside the graph stops training at the next step."""
    batch = batch_of(name)
    reader = TimelineReader(DIM, HEADS)
    memory = torch.randn(batch.timeline.ad.numel(), DIM)
    reader(torch.randn(len(batch), QUERIES, DIM), memory, pack(batch, 5)).sum().backward()
    for parameter, value in reader.named_parameters():
        assert value.grad is not None, parameter
        assert torch.isfinite(value.grad).all(), parameter


@pytest.mark.parametrize("seed", range(5))
def test_packing_places_every_impression_and_visible_event_once(seed: int) -> None:
    world = make_world(seed, num_users=30, num_impressions=150, events_per_user=70)
    batch = world.batch(np.arange(150), 40)
    packing = pack(batch, MODEL.max_history)
    placed = torch.cat([b.impressions[b.impression_mask] for b in packing.blocks])
    assert sorted(placed.tolist()) == list(range(150))
    for block in packing.blocks:
        for p, i in block.impression_mask.nonzero().tolist():
            n = int(block.impressions[p, i])
            assert block.events[p][block.visible[p, i]].tolist() == list(visible_events(batch, n, MODEL.max_history))
        assert not block.visible[~block.impression_mask].any()
    assert len(packing.blocks) <= 16
