"""One encoding of a timeline for all impressions is what one for each is, in every variant, and the future is not read.

Also that candidates do not see each other: their order and company do not matter.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from gem.data.batch import check_batch
from gem.model.ranker import Ranker
from gem.training.objective import task_losses
from tests.unit.model.synthetic import MODEL, World, changed_after, loud_ranker, make_world

PLAIN = replace(MODEL, counts=False)
CONFIGS = {
    "flat": MODEL,
    "two levels": replace(PLAIN, num_levels=2, block=3, window=4, max_history=30),
    "three levels": replace(PLAIN, num_levels=3, block=2, window=3, max_history=40),
    "attention in blocks": replace(PLAIN, event_attention=True, block=4, max_history=9),
    "attention and levels": replace(PLAIN, event_attention=True, block=4, max_history=30, window=5, num_levels=2),
    "separate": replace(PLAIN, interleaving="separate", max_history=20),
    "pooled": replace(PLAIN, interleaving="pooled", max_history=20),
    "one way": replace(PLAIN, interleaving="one_way", max_history=20),
}
NAMES = tuple(CONFIGS)
WORLD = make_world(9, num_users=6, num_impressions=16, events_per_user=90)
NUM = len(WORLD.impressions)
LONGEST = int(np.argmax(WORLD.impressions.cut))


@cache
def ranker(name: str) -> Ranker:
    return loud_ranker(WORLD.schema, CONFIGS[name], seed=3)


def logits_by_id(name: str, world: World, at: list[int] | np.ndarray) -> dict[int, torch.Tensor]:
    """impression id -> logits [K], scored in one batch."""
    config = CONFIGS[name]
    batch = world.batch(at, config.max_history, config.align)
    check_batch(batch, world.rows_of())
    with torch.inference_mode():
        return dict(zip(batch.impression_id.tolist(), ranker(name)(batch).logits, strict=True))


def assert_same(a: dict[int, torch.Tensor], b: dict[int, torch.Tensor], tolerance: float = 1e-5) -> None:
    assert a.keys() == b.keys()
    for key, value in a.items():
        torch.testing.assert_close(value, b[key], atol=tolerance, rtol=tolerance)


def truncated(world: World, n: int) -> World:
    """The world of one impression alone: the log of its user ends right before it, nobody else has events."""
    imp, t = world.impressions, world.timelines
    user, cut = int(imp.user[n]), int(imp.cut[n])
    start = int(t.offsets[user])
    kept = slice(start, start + cut)
    offsets = np.zeros_like(t.offsets)
    offsets[user + 1 :] = cut
    parts = {k: getattr(t, k)[kept] for k in ("ad", "kind", "flags", "surface", "dwell", "time_ms", "known_ms")}
    return replace(world, timelines=type(t)(offsets=offsets, **parts))


def other_ads(world: World, user: int, events: slice) -> World:
    """The same world, but these events of the user, counted from its first one, met other ads."""
    t, start = world.timelines, int(world.timelines.offsets[user])
    ad, own = t.ad.copy(), slice(start + events.start, start + events.stop)
    ad[own] = (ad[own] + 1) % 20
    return replace(world, timelines=replace(t, ad=ad))


def test_the_world_holds_the_awkward_histories() -> None:
    cut = WORLD.impressions.cut
    assert (cut == 0).any() and cut.max() > 1.5 * max(c.max_history for c in CONFIGS.values())
    assert max(np.bincount(WORLD.impressions.user[cut > 0])) > 3


@pytest.mark.parametrize("name", NAMES)
def test_many_impressions_at_once_are_many_single_ones(name: str) -> None:
    together = logits_by_id(name, WORLD, np.arange(NUM))
    single: dict[int, torch.Tensor] = {}
    for n in range(NUM):
        single |= logits_by_id(name, truncated(WORLD, n), [n])
    assert_same(together, single)
    assert torch.stack(list(together.values())).std(0).min() > 0.2, "the model is not trivial"


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_many_at_once_are_the_sum_of_single_ones(name: str) -> None:
    config = CONFIGS[name]
    model = loud_ranker(WORLD.schema, config, seed=3)
    weight = torch.linspace(-1, 1, NUM + 2000)

    def backward(world: World, at: list[int]) -> None:
        batch = world.batch(at, config.max_history, config.align)
        logits = model(batch).logits
        (logits * weight[batch.impression_id].unsqueeze(1)).sum().backward()

    def gradients() -> dict[str, torch.Tensor]:
        out = {k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None}
        model.zero_grad(set_to_none=True)
        return out

    some = list(range(0, NUM, 3))
    backward(WORLD, some)
    together = gradients()
    for n in some:
        backward(truncated(WORLD, n), [n])
    single = gradients()
    assert together.keys() == single.keys() == {k for k, _ in model.named_parameters()}
    for key, value in together.items():
        torch.testing.assert_close(value, single[key], atol=2e-5 * max(1.0, float(value.abs().max())), rtol=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_events_after_the_cut_change_nothing(name: str) -> None:
    imp = WORLD.impressions
    before = logits_by_id(name, WORLD, np.arange(NUM))
    for n in range(0, NUM, 4):
        changed, key = changed_after(WORLD, int(imp.user[n]), int(imp.cut[n])), int(imp.impression_id[n])
        after = logits_by_id(name, changed, np.arange(NUM))
        torch.testing.assert_close(before[key], after[key], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_events_before_the_cut_do_change_something(name: str) -> None:
    """The test above has power: the same change one event earlier is seen."""
    imp = WORLD.impressions
    changed = changed_after(WORLD, int(imp.user[LONGEST]), int(imp.cut[LONGEST]) - 1)
    key = int(imp.impression_id[LONGEST])
    assert (logits_by_id(name, WORLD, [LONGEST])[key] - logits_by_id(name, changed, [LONGEST])[key]).abs().max() > 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_events_older_than_the_history_change_nothing(name: str) -> None:
    """The history reaches back to a whole block; its oldest event is read."""
    imp, config = WORLD.impressions, CONFIGS[name]
    user, key = int(imp.user[LONGEST]), int(imp.impression_id[LONGEST])
    oldest = (int(imp.cut[LONGEST]) - config.max_history) // config.align * config.align
    assert oldest > 0
    at = np.flatnonzero(imp.user == user)
    before = logits_by_id(name, WORLD, at)[key]
    after = logits_by_id(name, other_ads(WORLD, user, slice(0, oldest)), at)[key]
    torch.testing.assert_close(before, after, atol=1e-6, rtol=1e-6)
    first = int(imp.cut[LONGEST]) - config.max_history
    seen = logits_by_id(name, other_ads(WORLD, user, slice(first, first + 1)), at)[key]
    assert (before - seen).abs().max() > 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_candidates_do_not_see_each_other(name: str) -> None:
    """Six ads for one user at one moment, in any order and any company, one by one too."""
    imp = WORLD.impressions.take(np.full(6, LONGEST))
    imp = replace(imp, ad=np.arange(6, dtype=np.int32) * 3, impression_id=np.arange(6))
    world = replace(WORLD, impressions=imp)
    scores = logits_by_id(name, world, np.arange(6))
    assert torch.stack(list(scores.values())).std(0).min() > 1e-2
    for at in ([5, 3, 0, 1, 4, 2], [4, 1], [2, 0, 5], *([n] for n in range(6))):
        assert_same(logits_by_id(name, world, at), {n: scores[n] for n in at}, 2e-6)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("events_per_user", [0, 1])
def test_batch_without_events_is_finite_and_trains(name: str, events_per_user: int) -> None:
    config = CONFIGS[name]
    world = make_world(2, events_per_user=events_per_user)
    batch = world.batch(np.arange(len(world.impressions)), config.max_history, config.align)
    model = loud_ranker(world.schema, config)
    task_losses(model(batch).logits, batch.labels, batch.mask, world.schema).sum().backward()
    for key, p in model.named_parameters():
        assert p.grad is not None, key
        assert torch.isfinite(p.grad).all(), key
