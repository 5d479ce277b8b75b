"""The quality benchmark's arithmetic, against curves and noise that are known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from gem.metrics import Metric, normalized_entropy, paired_difference
from tests.benchmarks.harness import Claim
from tests.benchmarks.quality_stats import (
    EXTRAPOLATED,
    INTERPOLATED,
    LOWER_BOUND,
    NOT_REACHED,
    Curve,
    best_of,
    compute_multiplier,
    difference,
    excess_ratio,
    interval,
    itself,
    mean_metric,
    measured,
    noise_floor,
    per_seed,
    relative_gain,
    reverse_multiplier,
)

FLOPS = (1e9, 1e10, 1e11, 1e12)


def on_line(level: float, fall: float, flops: tuple[float, ...] = FLOPS) -> Curve:
    return Curve(flops, tuple(level - fall * math.log10(f) for f in flops))


def world(num_users: int = 400, rows: int = 12, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(user, y, logit): users differ, and rows of a user."""
    rng = np.random.default_rng(seed)
    user = np.repeat(np.arange(num_users), rows)
    logit = rng.normal(size=num_users)[user] + rng.normal(size=user.size) - 0.5
    return user, (rng.random(user.size) < sigmoid(logit)).astype(float), logit


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def noisy(logit: np.ndarray, sd: float, seeds: range) -> list[np.ndarray]:
    """Runs whose whole logits are shifted by a draw of their own: seed noise that no user averages away."""
    return [sigmoid(logit + sd * np.random.default_rng(s).normal()) for s in seeds]


# Compute multipliers: parallel lines a factor apart


def test_parallel_curves_have_their_factor_as_multiplier() -> None:
    theirs, ours = on_line(1.2, 0.03), on_line(1.2 - 0.03 * math.log10(5), 0.03)
    assert compute_multiplier(ours, theirs, 2) == (pytest.approx(5), INTERPOLATED)


def test_multiplier_is_interpolated_on_log_compute() -> None:
    ours = Curve((1e9, 1e11), (0.9, 0.8))
    theirs = Curve((1e10, 1e12), (0.95, 0.85))
    needed, how = ours.reach(0.85)
    assert (needed, how) == (pytest.approx(10), INTERPOLATED)
    assert compute_multiplier(ours, theirs, 1)[0] == pytest.approx(100)


def test_a_smallest_size_that_is_better_already_gives_a_lower_bound() -> None:
    ours, theirs = on_line(1.0, 0.02), on_line(1.2, 0.02)
    assert compute_multiplier(ours, theirs, 3) == (pytest.approx(1000), LOWER_BOUND)


def test_a_curve_that_ends_above_is_extrapolated_on_its_line() -> None:
    ours, theirs = on_line(1.2, 0.03, FLOPS[:3]), on_line(1.2, 0.03)
    value, how = compute_multiplier(ours, theirs, 3)
    assert (value, how) == (pytest.approx(1.0), EXTRAPOLATED)


def test_a_curve_that_does_not_fall_never_arrives() -> None:
    ours, theirs = Curve(FLOPS, (0.9, 0.91, 0.92, 0.93)), on_line(1.2, 0.05)
    assert compute_multiplier(ours, theirs, 3) == (0.0, NOT_REACHED)
    assert reverse_multiplier(theirs, ours, 3) == (math.inf, NOT_REACHED)


def test_extrapolation_never_claims_less_than_the_largest_size() -> None:
    bent = Curve(FLOPS, (0.9, 0.8, 0.85, 0.85))  # its line is below its last point
    assert bent.reach(0.79)[0] >= 12


def test_reverse_multiplier_of_parallel_curves() -> None:
    theirs, ours = on_line(1.2, 0.03), on_line(1.2 - 0.03 * math.log10(5), 0.03)
    assert reverse_multiplier(ours, theirs, 1) == (pytest.approx(5), INTERPOLATED)
    value, how = reverse_multiplier(ours, theirs, 3)
    assert (value, how) == (pytest.approx(5), EXTRAPOLATED)


def test_line_finds_level_fall_and_fit() -> None:
    level, fall, fit = on_line(1.1, 0.04).line()
    assert (level, fall, fit) == (pytest.approx(1.1), pytest.approx(0.04), pytest.approx(1.0))


def test_curves_are_sorted_by_compute() -> None:
    assert Curve.of([3.0, 1.0], [0.8, 0.9]) == Curve((1.0, 3.0), (0.9, 0.8))


# Intervals


def test_one_seed_and_no_seed_noise_is_the_paired_bootstrap() -> None:
    user, y, logit = world(200)
    a, b = sigmoid(logit), sigmoid(0.5 * logit)
    arms = [measured(user, y, [p]) for p in (a, b)]
    found = interval(arms, "ne", difference, 200, seed=3)
    expected = paired_difference(user, y, a, b, "ne", num_bootstrap=200, seed=3)
    assert found.value == pytest.approx(expected.value)
    assert found.low == pytest.approx(expected.low, abs=1e-3)
    assert found.high == pytest.approx(expected.high, abs=1e-3)


def test_value_is_the_mean_over_seeds() -> None:
    user, y, logit = world(100)
    runs = noisy(logit, 0.3, range(3))
    arm = measured(user, y, runs)
    each = [normalized_entropy(y, p).value for p in runs]
    assert per_seed(arm, "ne") == pytest.approx(each)
    assert mean_metric(arm, "ne") == pytest.approx(np.mean(each))
    assert interval([arm], "ne", itself, 0).value == pytest.approx(np.mean(each))


def test_seed_noise_widens_the_interval_as_its_variance_says() -> None:
    """Two arms of equal skill and known seed noise: variance = that of users (one seed) + both arms' of seeds."""
    user, y, logit = world()
    quiet = [measured(user, y, noisy(logit, 0.0, range(1))), measured(user, y, noisy(0.97 * logit, 0.0, range(1)))]
    loud = [measured(user, y, noisy(logit, 0.4, range(8))), measured(user, y, noisy(0.97 * logit, 0.4, range(8, 16)))]
    users_only, both = (interval(arms, "ne", difference, 600) for arms in (quiet, loud))
    seeds = [np.std(per_seed(arm, "ne")) for arm in loud]
    width = both.high - both.low
    sd = math.sqrt(((users_only.high - users_only.low) / 3.92) ** 2 + seeds[0] ** 2 + seeds[1] ** 2)
    assert width > 2 * (users_only.high - users_only.low)
    assert width / 3.92 == pytest.approx(sd, rel=0.35)  # not normal: eight seeds of a squared shift


def test_intervals_cover_a_true_difference_of_zero_about_nineteen_times_in_twenty() -> None:
    missed = 0
    for trial in range(40):
        user, y, logit = world(80, 6, seed=100 + trial)
        arms = [measured(user, y, noisy(logit, 0.3, range(s, s + 5))) for s in (10 * trial, 1000 + 10 * trial)]
        found = interval(arms, "ne", difference, 100, seed=trial)
        missed += not found.low <= 0 <= found.high
    assert missed <= 6


def test_users_are_resampled_whole() -> None:
    """Copies of a user's rows add no knowledge: the interval stays, where one over rows would shrink to a third."""
    user, y, logit = world(150, 2)
    p = sigmoid(0.5 * logit)
    once = interval([measured(user, y, [p])], "ne", itself, 300)
    many = interval([measured(np.tile(user, 9), np.tile(y, 9), [np.tile(p, 9)])], "ne", itself, 300)
    assert many.high - many.low == pytest.approx(once.high - once.low, rel=1e-6)


def test_arms_on_other_rows_are_refused() -> None:
    user, y, logit = world(50)
    half = user < 25
    arms = [measured(user, y, [sigmoid(logit)]), measured(user[half], y[half], [sigmoid(logit[half])])]
    with pytest.raises(ValueError, match="different rows"):
        interval(arms, "ne", difference, 5)


def test_an_infinite_end_is_no_interval() -> None:
    user, y, logit = world(50)
    arm = measured(user, y, [sigmoid(logit)])
    found = interval([arm], "ne", lambda ne: 1.0 if abs(ne[0] - mean_metric(arm, "ne")) < 1e-12 else math.inf, 20)
    assert found == Metric(1.0, reason="interval unbounded")


# Statistics and choices


def test_statistics() -> None:
    assert relative_gain(np.array([0.9, 1.0])) == pytest.approx(0.1)
    assert excess_ratio(np.array([0.85, 0.9, 0.8])) == pytest.approx(0.5)
    assert math.isnan(excess_ratio(np.array([0.85, 0.8, 0.8])))


def test_best_is_the_lowest_known_validation_ne() -> None:
    assert best_of({"a": 0.9, "b": 0.8, "c": math.nan}) == "b"
    with pytest.raises(ValueError, match="no trial"):
        best_of({"a": math.nan})


def test_noise_floor_is_the_sample_standard_deviation() -> None:
    assert noise_floor([1.0, 2.0, 3.0]) == pytest.approx(1.0)
    assert noise_floor([1.0]) is None


@pytest.mark.parametrize(
    ("by", "sense", "low", "met"),
    [("low", ">", 0.01, True), ("low", ">", -0.01, False), ("low", ">", 0.0, False), ("low", ">", None, False)],
)
def test_a_claim_may_be_about_the_end_of_its_interval(by: str, sense: str, low: float | None, met: bool) -> None:
    assert Claim("x", 0.05, 0, sense, low=low, high=0.1, by=by).met is met
    assert not Claim("x", None, 0, sense).met
