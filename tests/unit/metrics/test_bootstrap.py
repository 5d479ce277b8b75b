"""The resampling arithmetic against copying rows, and the intervals against a simulation."""

import time

import numpy as np
import pytest

from gem.errors import DataError
from gem.metrics import (
    METRICS,
    auc,
    bootstrap_metrics,
    calibration,
    evaluate,
    evaluate_by,
    gauc,
    normalized_entropy,
    paired_difference,
)
from gem.metrics.bootstrap import UserSums, multiplicities


def log(rng, num_users=30, num_rows=400, levels=20):
    user = rng.integers(0, num_users, num_rows)
    p = rng.integers(1, levels, num_rows) / levels
    return user, (rng.random(num_rows) < p * 0.6).astype(int), p


def copied(user, y, p, multiplicity):
    """The same resample made the slow way: every row of user u written m_u times, each copy a user of its own."""
    rows, names = [], []
    for u, times in enumerate(multiplicity):
        for k in range(int(times)):
            mine = np.flatnonzero(user == u)
            rows += mine.tolist()
            names += [f"{u}-{k}"] * len(mine)
    return names, y[rows], p[rows]


@pytest.mark.parametrize("levels", [3, 20, 100_000])
def test_resample_equals_copied_rows(rng, levels):
    user, y, p = log(rng, levels=levels)
    sums = UserSums(user, 30, y.astype(float), p)
    for m in multiplicities(30, 5, seed=3):
        names, y_c, p_c = copied(user, y, p, m)
        expected = [normalized_entropy(y_c, p_c), auc(y_c, p_c), gauc(names, y_c, p_c), calibration(y_c, p_c)]
        assert sums.measure(m) == pytest.approx([e.value for e in expected], rel=1e-11)


def test_interval_equals_percentiles_of_copied_rows(rng):
    user, y, p = log(rng)
    user[:30] = np.arange(30)  # every user occurs, so user number = code
    got = bootstrap_metrics(user, y, p, num_bootstrap=40, seed=11)
    slow = [normalized_entropy(*copied(user, y, p, m)[1:]).value for m in multiplicities(30, 40, seed=11)]
    assert (got["ne"].low, got["ne"].high) == pytest.approx(tuple(np.percentile(slow, [2.5, 97.5])), rel=1e-11)


def test_whole_sample_values_equal_the_plain_metrics(rng):
    user, y, p = log(rng)
    got = bootstrap_metrics(user, y, p, num_bootstrap=0)
    plain = {
        "ne": normalized_entropy(y, p),
        "auc": auc(y, p),
        "gauc": gauc(user, y, p),
        "calibration": calibration(y, p),
    }
    assert {k: m.value for k, m in got.items()} == pytest.approx({k: m.value for k, m in plain.items()}, rel=1e-12)
    assert all(m.low is None and m.high is None for m in got.values())


def test_multiplicities_draw_as_many_users_as_there_are():
    draws = list(multiplicities(50, 20, seed=0))
    assert all(m.sum() == 50 for m in draws)
    assert np.mean(draws) == 1.0 and np.var(draws) == pytest.approx(1 - 1 / 50, abs=0.1)
    assert all((a == b).all() for a, b in zip(draws, multiplicities(50, 20, seed=0), strict=True))


def test_interval_covers_the_truth_about_95_of_100_times(rng):
    """Users differ, so rows are correlated: 120 simulated logs, calibration of the true-rate predictor is 1."""
    hits = naive_hits = 0
    for trial in range(120):
        rate = rng.beta(2, 6, size=80)  # each user's own click rate, mean 0.25
        user = np.repeat(np.arange(80), 12)
        y = (rng.random(960) < rate[user]).astype(int)
        p = np.full(960, 0.25)
        m = bootstrap_metrics(user, y, p, num_bootstrap=100, seed=trial)["calibration"]
        rows = bootstrap_metrics(np.arange(960), y, p, num_bootstrap=100, seed=trial)["calibration"]
        hits += m.low <= 1.0 <= m.high
        naive_hits += rows.low <= 1.0 <= rows.high
    assert 105 <= hits <= 120  # 95 % of 120 = 114, sd 2.4; percentile intervals are a little short
    assert naive_hits < hits - 5  # resampling rows, not users, is too sure of itself


def test_paired_difference_is_sharper_than_two_intervals(rng):
    user = rng.integers(0, 500, 6000)
    p = rng.beta(1, 8, 6000)
    y = (rng.random(6000) < p).astype(int)
    worse = np.clip(p * np.exp(rng.normal(0, 0.3, 6000)), 0, 1)
    gap = paired_difference(user, y, p, worse, "ne")
    assert gap.value == pytest.approx(normalized_entropy(y, p).value - normalized_entropy(y, worse).value, abs=1e-12)
    assert gap.low < gap.value < gap.high < 0  # p is better, resolved
    a, b = (bootstrap_metrics(user, y, q)["ne"] for q in (p, worse))
    assert gap.high - gap.low < 0.7 * np.hypot(a.high - a.low, b.high - b.low)
    back = paired_difference(user, y, worse, p, "ne")
    assert (back.value, back.low, back.high) == pytest.approx((-gap.value, -gap.high, -gap.low))


def test_same_predictions_have_no_difference(rng):
    user, y, p = log(rng)
    for name in METRICS:
        got = paired_difference(user, y, p, p, name, num_bootstrap=10)
        assert (got.value, got.low, got.high) == (0.0, 0.0, 0.0)


def test_undefined_and_bad_input(rng):
    user, y, p = log(rng)
    none = bootstrap_metrics(user, np.zeros_like(y), p, num_bootstrap=10)
    assert all(m.value is None and "no positive" in m.reason for m in none.values())
    assert all(m.reason == "no rows" for m in evaluate([], [], []).values())
    one = bootstrap_metrics(np.zeros(400), y, p, num_bootstrap=10)["auc"]
    assert one.value is not None and one.low is None and "one user" in one.reason
    assert "no negative" in paired_difference(user, np.ones_like(y), p, p).reason
    with pytest.raises(DataError, match='Did you mean "gauc"'):
        paired_difference(user, y, p, p, "gaucc")
    with pytest.raises(DataError, match="not probabilities"):
        paired_difference(user, y, p, np.where(p > 0.5, np.nan, p))


def test_a_rare_label_gets_a_value_without_an_interval():
    y = np.zeros(40, dtype=int)
    y[0] = 1  # about 37 % of resamples miss the only positive user entirely; 63 % have it
    user = np.arange(40)
    assert bootstrap_metrics(user, y, np.linspace(0.9, 0.1, 40))["auc"].low is not None
    one_user = np.where(np.arange(40) == 0, 0, 1)  # two users, one all positive, the other all negative
    got = bootstrap_metrics(one_user, y, np.linspace(0.9, 0.1, 40), num_bootstrap=200)["auc"]
    assert got.value == 1.0 and (got.low is None) == ("most resamples" in got.reason)


def test_evaluate_by_surface_equals_evaluating_the_rows_alone(rng):
    user, y, p = log(rng)
    surface = np.array(["feed", "stories"])[rng.integers(0, 2, 400)]
    got = evaluate(user, y, p, surface, num_bootstrap=20, seed=5)
    rows = surface == "feed"
    assert set(got) == {*METRICS, *(f"{s}/{m}" for s in ("feed", "stories") for m in METRICS)}
    assert got["feed/gauc"] == evaluate(user[rows], y[rows], p[rows], num_bootstrap=20, seed=5)["gauc"]
    assert evaluate_by(surface, user, y, p, num_bootstrap=20, seed=5)["stories"]["ne"] == got["stories/ne"]
    with pytest.raises(DataError, match="four equal"):
        evaluate_by(surface[:3], user, y, p)


def test_two_hundred_resamples_of_100k_rows_take_seconds(rng):
    user = rng.integers(0, 20_000, 100_000)
    p = rng.beta(1, 12, 100_000)
    y = (rng.random(100_000) < p).astype(np.int8)
    start = time.process_time()
    evaluate(user, y, p.astype(np.float32), num_bootstrap=200)
    assert time.process_time() - start < 5.0
