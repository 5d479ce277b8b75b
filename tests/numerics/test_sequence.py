"""Reading the timeline against loops in float64: attention over [cut - max_history, cut)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from gem.data.batch import Batch
from gem.model.packing import GAP_BUCKETS, pack
from gem.model.sequence import EventEncoder, TimelineReader, flag_bits
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


def naive_attention(
    reader: TimelineReader, batch: Batch, n: int, query: np.ndarray, events: np.ndarray, max_history: int
) -> np.ndarray:
    """One query [D] of impression n -> [D], with loops over heads and events."""
    w = {k: v.detach().double().numpy() for k, v in reader.state_dict().items()}
    q = w["query.weight"] @ query + w["query.bias"]
    keys, values, gaps = [w["nothing"][:DIM]], [w["nothing"][DIM:]], [-1]
    for e in visible_events(batch, n, max_history):
        both = w["key_value.weight"] @ events[e] + w["key_value.bias"]
        keys.append(both[:DIM])
        values.append(both[DIM:])
        gaps.append(gap_bucket(int(batch.time_ms[n]) - int(batch.timeline.time_ms[e])))
    out = np.zeros(DIM)
    size = DIM // HEADS
    for h in range(HEADS):
        part = slice(h * size, (h + 1) * size)
        scores = [
            q[part] @ k[part] / math.sqrt(size) + (0.0 if gap < 0 else w["gap_bias.weight"][gap, h])
            for k, gap in zip(keys, gaps, strict=True)
        ]
        weights = np.exp(np.array(scores) - max(scores))
        out[part] = sum(p * v[part] for p, v in zip(weights / weights.sum(), values, strict=True))
    return w["out.weight"] @ out + w["out.bias"]


@pytest.mark.parametrize("max_history", [1, 5, 20])
@pytest.mark.parametrize("name", WORLDS)
def test_reader_is_softmax_attention_over_the_visible_events(name: str, max_history: int) -> None:
    batch = batch_of(name)
    torch.manual_seed(0)
    reader = TimelineReader(DIM, HEADS)
    torch.nn.init.normal_(reader.gap_bias.weight)
    torch.nn.init.normal_(reader.nothing)
    queries = 2 * torch.randn(len(batch), QUERIES, DIM)
    events = 2 * torch.randn(batch.timeline.ad.numel(), DIM)
    got = reader(queries, events, pack(batch, max_history))
    expected = np.array(
        [
            [
                naive_attention(reader, batch, n, q, events.double().numpy(), max_history)
                for q in queries[n].double().numpy()
            ]
            for n in range(len(batch))
        ]
    )
    np.testing.assert_allclose(got.detach().numpy(), expected, atol=2e-5)


def test_worlds_hold_the_awkward_histories() -> None:
    seen = {len(visible_events(batch_of("mixed"), n, 5)) for n in range(len(batch_of("mixed")))}
    assert {0, 1, 5} <= seen
    assert batch_of("no events at all").timeline.ad.numel() == 0
    assert max(int(c) for c in batch_of("long").cut) > 20


@pytest.mark.parametrize("name", WORLDS)
def test_every_parameter_gets_a_gradient_even_without_events(name: str) -> None:
    """DDP waits for all of them: a parameter outside the graph stops training at the next step."""
    batch = batch_of(name)
    schema = WORLDS[name].schema
    reader, encoder = TimelineReader(DIM, HEADS), EventEncoder(schema, DIM)
    packing = pack(batch, 5)
    events = encoder(batch, torch.randn(len(batch.ads), DIM))
    read = reader(torch.randn(len(batch), QUERIES, DIM), events, packing)
    read.sum().backward()
    for module in (reader, encoder):
        for parameter, value in module.named_parameters():
            assert value.grad is not None, parameter
            assert torch.isfinite(value.grad).all(), parameter


def test_flag_bits() -> None:
    assert flag_bits(torch.tensor([0, 1, 2, 5]), 3).tolist() == [[0, 0, 0], [1, 0, 0], [0, 1, 0], [1, 0, 1]]
    assert flag_bits(torch.tensor([1 << 15]), 16)[0, 15] == 1


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
