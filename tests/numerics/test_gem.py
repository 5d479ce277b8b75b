"""The whole model: one batch of many impressions is what many single ones are, and the future is not read."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from gem.data.batch import check_batch
from gem.model.gem import build_model
from gem.model.heads import Output, log_probabilities, probabilities
from gem.training.objective import log_complements, task_losses
from tests.unit.model.synthetic import MODEL, World, changed_after, loud_ranker, make_schema, make_world

WORLD = make_world(0)
NUM = len(WORLD.impressions)
MODEL_OF_WORLD = loud_ranker(WORLD.schema)


def logits_by_id(world: World, at: list[int] | np.ndarray) -> dict[int, torch.Tensor]:
    """impression id -> logits [K], scored in one batch."""
    batch = world.batch(at)
    check_batch(batch, world.rows_of())
    with torch.inference_mode():
        out = MODEL_OF_WORLD(batch)
    return dict(zip(batch.impression_id.tolist(), out.logits, strict=True))


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


def test_the_model_is_not_trivial() -> None:
    got = torch.stack(list(logits_by_id(WORLD, np.arange(NUM)).values()))
    assert got.std(0).min() > 0.3


def test_many_impressions_at_once_are_many_single_ones() -> None:
    together = logits_by_id(WORLD, np.arange(NUM))
    single: dict[int, torch.Tensor] = {}
    for n in range(NUM):
        single |= logits_by_id(truncated(WORLD, n), [n])
    assert_same(together, single)


def test_gradients_of_many_at_once_are_the_sum_of_single_ones() -> None:
    model = loud_ranker(WORLD.schema, seed=3)
    weight = torch.linspace(-1, 1, NUM + 2000)

    def backward(world: World, at: list[int]) -> None:
        batch = world.batch(at)
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


@pytest.mark.parametrize("n", range(0, NUM, 5))
def test_events_after_the_cut_change_nothing(n: int) -> None:
    imp = WORLD.impressions
    changed = changed_after(WORLD, int(imp.user[n]), int(imp.cut[n]))
    before, after = logits_by_id(WORLD, np.arange(NUM)), logits_by_id(changed, np.arange(NUM))
    key = int(imp.impression_id[n])
    torch.testing.assert_close(before[key], after[key], atol=1e-6, rtol=1e-6)


def test_events_before_the_cut_do_change_something() -> None:
    """The test above has power: the same change one event earlier is seen."""
    imp = WORLD.impressions
    n = int(np.argmax(imp.cut))
    changed = changed_after(WORLD, int(imp.user[n]), int(imp.cut[n]) - 1)
    key = int(imp.impression_id[n])
    assert (logits_by_id(WORLD, [n])[key] - logits_by_id(changed, [n])[key]).abs().max() > 1e-3


def test_events_older_than_the_history_change_nothing() -> None:
    imp = WORLD.impressions
    n = int(np.argmax(imp.cut))
    t, user = WORLD.timelines, int(imp.user[n])
    assert imp.cut[n] > MODEL.max_history
    ad = t.ad.copy()
    first, last = int(t.offsets[user]), int(t.offsets[user] + imp.cut[n] - MODEL.max_history)
    ad[first:last] = (ad[first:last] + 1) % 20
    changed = replace(WORLD, timelines=replace(t, ad=ad))
    same_user = np.flatnonzero(imp.user == user)
    key = int(imp.impression_id[n])
    assert_same({key: logits_by_id(WORLD, same_user)[key]}, {key: logits_by_id(changed, same_user)[key]}, 1e-6)
    ad[last] = (ad[last] + 1) % 20
    changed = replace(WORLD, timelines=replace(t, ad=ad))
    assert (logits_by_id(WORLD, [n])[key] - logits_by_id(changed, [n])[key]).abs().max() > 1e-4


@pytest.mark.parametrize("seed", range(3))
def test_order_and_split_of_a_batch_do_not_matter(seed: int) -> None:
    rng = np.random.default_rng(seed)
    whole = logits_by_id(WORLD, np.arange(NUM))
    assert_same(whole, logits_by_id(WORLD, rng.permutation(NUM)))
    parts: dict[int, torch.Tensor] = {}
    cuts = np.sort(rng.choice(np.arange(1, NUM), 6, replace=False))
    for at in np.split(rng.permutation(NUM), cuts):
        parts |= logits_by_id(WORLD, at)
    assert_same(whole, parts)


def test_impressions_of_a_user_at_the_same_time_do_not_see_each_other() -> None:
    twice = np.array([7, 7, 7])
    batch = WORLD.batch(twice)
    with torch.inference_mode():
        out = MODEL_OF_WORLD(batch)
    torch.testing.assert_close(out.logits[0], out.logits[2])
    assert out.representation.shape == (3, MODEL.representation_dim)


@pytest.mark.parametrize("events_per_user", [0, 1])
def test_batch_without_events_is_finite_and_trains(events_per_user: int) -> None:
    world = make_world(2, events_per_user=events_per_user)
    batch = world.batch(np.arange(len(world.impressions)))
    model = loud_ranker(world.schema)
    task_losses(model(batch).logits, batch.labels, batch.mask, world.schema).sum().backward()
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        assert torch.isfinite(p.grad).all(), name


def test_weights_depend_on_the_seed_only_and_leave_the_global_generator_alone() -> None:
    schema = make_schema()
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = build_model(schema, MODEL, 7).state_dict()
    assert torch.equal(state, torch.get_rng_state())
    torch.rand(3)
    second, other = build_model(schema, MODEL, 7).state_dict(), build_model(schema, MODEL, 8).state_dict()
    assert all(torch.equal(first[k], second[k]) for k in first)
    assert any(not torch.equal(first[k], other[k]) for k in first)


LOGITS = [-90.0, -30.0, -17.0, -5.0, -1.0, 0.0, 0.5, 3.0, 15.0, 17.0, 40.0, 88.0]


def reference(a: float, b: float) -> tuple[float, float, float, float]:
    """(log p_click, log p_cv, log(1 - p_click), log(1 - p_cv)) of click logit a and conversion logit b, exactly."""
    from decimal import Decimal, localcontext

    with localcontext() as context:
        context.prec = 60  # beyond float64; 1 - 1e-40 still has 20 digits
        x, y = (Decimal(-v).exp() for v in (a, b))
        p, q = 1 / (1 + x), 1 / ((1 + x) * (1 + y))
        return float(p.ln()), float(q.ln()), float((1 - p).ln()), float((1 - q).ln())


@pytest.mark.parametrize("a", LOGITS)
def test_log_probabilities_and_complements_are_exact_everywhere(a: float) -> None:
    schema = make_schema()
    logits = torch.tensor([[a, b] for b in LOGITS])
    got = torch.cat([log_probabilities(logits, schema), log_complements(logits, schema)], 1)
    expected = np.array([reference(a, b) for b in LOGITS])
    np.testing.assert_allclose(got.numpy(), expected, rtol=3e-6, atol=1e-37)
    hot = logits.clone().requires_grad_()
    log_complements(hot, schema).sum().backward()
    # d log(1 - p_click) / da = -p_click; d log(1 - p_cv) / da = -p_cv (1 - p_click) / (1 - p_cv), by hand
    log_p, log_cv, log_not, log_not_cv = expected.T
    by_hand = -np.exp(log_p) - np.exp(log_cv + log_not - log_not_cv)
    np.testing.assert_allclose(hot.grad[:, 0].numpy(), by_hand, rtol=2e-5, atol=1e-30)
    p = probabilities(Output(logits, logits), schema)
    assert (p[:, 1] <= p[:, 0]).all()
    assert ((p >= 0) & (p <= 1)).all()
