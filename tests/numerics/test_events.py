"""Encoding of events against loops in float64, with no flags, with few and with many."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from gem.model.events import EventEncoder, distinct, flag_bits
from tests.numerics.naive import check_gradients, doubles, linear, loud, weights
from tests.unit.model.synthetic import make_world

WORLD = make_world(0)
BATCH = WORLD.batch(np.arange(len(WORLD.impressions)), 20)


@pytest.mark.parametrize("num_flags", [0, 2, 16])
def test_an_event_is_the_sum_of_its_parts(num_flags: int) -> None:
    flags = torch.randint(0, 1 << num_flags, BATCH.timeline.flags.shape, generator=torch.Generator().manual_seed(1))
    t = replace(BATCH.timeline, flags=flags)
    encoder = loud(EventEncoder(replace(WORLD.schema, flags=tuple(f"f{i}" for i in range(num_flags))), 6))
    ads = torch.randn(len(BATCH.ads), 6)
    got, w = encoder(replace(BATCH, timeline=t), ads), weights(encoder)
    for e in range(t.ad.numel()):
        x = linear(w, "ad", ads[t.ad[e]].double().numpy())
        for name in ("kind", "surface", "dwell"):
            x = x + w[f"{name}.weight"][int(getattr(t, name)[e])]
        for f in range(num_flags):
            if int(flags[e]) & 1 << f:
                x = x + w["flag.weight"][:, f]
        np.testing.assert_allclose(got[e].detach().numpy(), x, atol=1e-5)


def test_gradients_are_finite_differences() -> None:
    batch = WORLD.batch([int(np.argmax(WORLD.impressions.cut))], 4)
    assert batch.timeline.ad.numel() == 4
    check_gradients(EventEncoder(WORLD.schema, 2), lambda run, ads: run(batch, ads), doubles(len(batch.ads), 2))


def test_every_parameter_gets_a_gradient_even_without_events() -> None:
    world = make_world(1, events_per_user=0)
    batch = world.batch(np.arange(len(world.impressions)))
    encoder = EventEncoder(world.schema, 6)
    encoder(batch, torch.randn(len(batch.ads), 6)).sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in encoder.parameters())


def test_flag_bits() -> None:
    assert flag_bits(torch.tensor([0, 1, 2, 5]), 3).tolist() == [[0, 0, 0], [1, 0, 0], [0, 1, 0], [1, 0, 1]]
    assert flag_bits(torch.tensor([1 << 15]), 16)[0, 15] == 1


@pytest.mark.parametrize("bound", [50, 1 << 40])
def test_distinct_values_and_their_places(bound: int) -> None:
    """By marks in a table and, where that would be large, by sorting."""
    values = torch.tensor([7, 3, 49, 3, 7, 0])
    found, place = distinct(values, bound)
    assert found.tolist() == [0, 3, 7, 49] and torch.equal(found[place], values)
    assert [t.numel() for t in distinct(values[:0], bound)] == [0, 0]
