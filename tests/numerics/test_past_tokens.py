"""Past counts as tokens: features against loops in float64, and what they do not depend on."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from gem.data.past import past_matches
from gem.model.past import FLOOR, MAX_LIFT, PSEUDO_EVENTS, PastTokens
from tests.numerics.naive import Array, check_gradients, gelu, linear, loud, weights
from tests.unit.model.synthetic import make_schema

SCHEMA = make_schema()
KINDS, FLAGS, MATCHES = len(SCHEMA.kinds), len(SCHEMA.flags), len(past_matches(SCHEMA))


def naive_lift(count: float, of: float, share: float) -> float:
    if share <= FLOOR:
        return 0.0
    smoothed = (count + PSEUDO_EVENTS * share) / (of + PSEUDO_EVENTS)
    return max(-MAX_LIFT, min(MAX_LIFT, math.log(smoothed / share)))


def naive_features(past: Array) -> list[float]:
    """Counts [M, K, 1 + F] of one impression; the first match is every event."""
    every, out = past[0], []
    num_kinds, width = every.shape
    total = max(every[:, 0].sum(), 1)
    shares = [every[k, 0] / total for k in range(num_kinds)]
    rates = [[every[k, f] / max(every[k, 0], 1) for f in range(1, width)] for k in range(num_kinds)]
    for m, match in enumerate(past):
        out += [math.log1p(match[k, 0]) for k in range(num_kinds)]
        for k in range(num_kinds):
            own = naive_lift(match[k, 0], match[:, 0].sum(), shares[k])
            out.append(math.log(max(shares[k], FLOOR)) / MAX_LIFT if m == 0 else own)
        for k in range(num_kinds):
            for f in range(1, width):
                own = naive_lift(match[k, f], match[k, 0], rates[k][f - 1])
                out.append(math.log(max(rates[k][f - 1], FLOOR)) / MAX_LIFT if m == 0 else own)
    return out


def random_counts(num: int, flags: int = FLAGS, matches: int = MATCHES, seed: int = 0) -> torch.Tensor:
    """Flags never outnumber events, no match outnumbers everything; some impressions come before any event."""
    rng = np.random.default_rng(seed)
    every = rng.integers(0, 5000, (num, 1, KINDS, 1)) * (rng.random((num, 1, 1, 1)) < 0.8)
    own = np.floor(every * rng.random((num, matches, KINDS, 1)) ** 8)
    own[:, :1] = every
    bits = np.floor(own * rng.random((num, matches, KINDS, flags)) ** 4)
    return torch.from_numpy(np.concatenate([own, bits], 3).reshape(num, matches, -1).astype(np.float32))


@pytest.mark.parametrize("flags", [2, 0])
def test_features_are_smoothed_lifts(flags: int) -> None:
    schema = replace(SCHEMA, flags=SCHEMA.flags[:flags])
    past = random_counts(40, flags)
    got = PastTokens(schema, 8, 2).features(past).numpy()
    expected = [naive_features(p.reshape(MATCHES, KINDS, 1 + flags)) for p in past.double().numpy()]
    np.testing.assert_allclose(got, expected, atol=2e-5)
    assert np.isfinite(got).all() and np.abs(got).max() > 1


def test_tokens_are_an_mlp_of_the_features_and_counts_take_no_gradient() -> None:
    module, past = loud(PastTokens(SCHEMA, 4, 2), 0.2), random_counts(6)
    got, w = module(past), weights(module, "mlp.")
    for n in range(6):
        features = module.features(past)[n].double().numpy()
        expected = linear(w, "2", gelu(linear(w, "0", features))).reshape(2, 4)
        np.testing.assert_allclose(got[n].detach().numpy(), expected, atol=2e-5)
    assert not module.features(past).requires_grad
    tiny, counts = PastTokens(replace(SCHEMA, flags=()), 1, 1), random_counts(2, 0).double()
    check_gradients(tiny, lambda run: run(counts))


def test_an_ad_nobody_has_met_has_no_lift() -> None:
    past = random_counts(20)
    past[:, 1:] = 0
    features = PastTokens(SCHEMA, 8, 2).features(past).view(20, MATCHES, -1)
    assert features[:, 1:].abs().max() < 1e-6  # and no count: the log of one plus none
    assert features[:, 0].any(1).all()


def test_a_day_on_which_all_is_clicked_twice_as_often_moves_the_first_match_only() -> None:
    past = random_counts(30).view(30, MATCHES, KINDS, 1 + FLAGS)
    past[..., 0] += 50
    past[..., 1:] = past[..., :1] * (0.1 + 0.3 * torch.rand(30, MATCHES, KINDS, FLAGS))
    twice = past.clone()
    twice[..., 1:] *= 2
    module = PastTokens(SCHEMA, 8, 2)
    before, after = (module.features(p.flatten(2)).view(30, MATCHES, -1) for p in (past, twice))
    torch.testing.assert_close(before[:, 1:], after[:, 1:], atol=1e-5, rtol=0)
    moved = after[:, 0, -KINDS * FLAGS :] - before[:, 0, -KINDS * FLAGS :]
    torch.testing.assert_close(moved, torch.full_like(moved, math.log(2) / MAX_LIFT), atol=1e-5, rtol=0)
