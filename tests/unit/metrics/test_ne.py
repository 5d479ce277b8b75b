"""Normalized entropy against hand-made numbers, its invariants, and the mergeable state."""

import math

import numpy as np
import pytest

from gem.errors import DataError
from gem.metrics import Metric, NEState, calibration, normalized_entropy


def naive_ne(y, p):
    loss = -sum(math.log(b) if a else math.log(1 - b) for a, b in zip(y, p, strict=True)) / len(y)
    rate = sum(y) / len(y)
    return loss / -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))


def test_base_rate_predictor_has_ne_one():
    y = np.array([1, 0, 0, 0, 1, 0, 0, 0, 0, 0])
    assert normalized_entropy(y, np.full(10, 0.2)).value == pytest.approx(1.0, abs=1e-12)


def test_ne_by_hand():
    # log losses: -ln 0.8, -ln 0.6; entropy of 1/2 is ln 2
    expected = (-math.log(0.8) - math.log(0.6)) / 2 / math.log(2)
    assert normalized_entropy([1, 0], [0.8, 0.4]).value == pytest.approx(expected, abs=1e-12)


def test_ne_equals_naive_loop(rng):
    y, p = (rng.random(500) < 0.1).astype(int), rng.random(500)
    assert normalized_entropy(y, p).value == pytest.approx(naive_ne(y.tolist(), p.tolist()), rel=1e-12)


def test_ne_with_a_given_base_rate_changes_only_the_denominator():
    y, p = [1, 0, 0, 0], [0.5, 0.1, 0.1, 0.1]
    loss = -(math.log(0.5) + 3 * math.log(0.9)) / 4
    entropy = -(0.1 * math.log(0.1) + 0.9 * math.log(0.9))
    assert normalized_entropy(y, p, base_rate=0.1).value == pytest.approx(loss / entropy, abs=1e-12)


def test_sure_and_wrong_stays_finite():
    value = normalized_entropy([1, 0], [0.0, 1.0]).value
    assert value == pytest.approx(-math.log(1e-7) / math.log(2), rel=1e-6)


def test_float32_probabilities_are_summed_in_float64():
    n = 2_000_000
    p = np.full(n, 0.1, dtype=np.float32)
    y = np.zeros(n, dtype=np.int8)
    y[: n // 10] = 1
    assert calibration(y, p).value == pytest.approx(float(np.float32(0.1)) * 10, rel=1e-10)


@pytest.mark.parametrize("cuts", [[1], [0, 7, 7, 300], [100, 200, 499]])
def test_merge_of_parts_equals_the_whole(rng, cuts):
    y, p = (rng.random(500) < 0.2).astype(int), rng.random(500)
    parts = [NEState().add(a, b) for a, b in zip(np.split(y, cuts), np.split(p, cuts), strict=True)]
    merged = NEState()
    for part in reversed(parts):
        merged = part.merge(merged)
    whole = NEState().add(y, p)
    assert merged.rows == whole.rows == 500
    assert merged.value().value == pytest.approx(whole.value().value, rel=1e-13)
    assert merged.calibration().value == pytest.approx(whole.calibration().value, rel=1e-13)
    assert merged.value().value == pytest.approx(naive_ne(y.tolist(), p.tolist()), rel=1e-12)
    assert NEState.from_dict(merged.to_dict()) == merged


@pytest.mark.parametrize(("y", "words"), [([], "no rows"), ([0, 0], "no positive"), ([1, 1], "no negative")])
def test_undefined_is_none_with_the_reason(y, words):
    got = normalized_entropy(y, [0.5] * len(y))
    assert got.value is None and words in got.reason


@pytest.mark.parametrize(
    ("y", "p", "words"),
    [
        ([0, 2], [0.1, 0.1], "neither 0 nor 1"),
        ([0, -1], [0.1, 0.1], "neither 0 nor 1"),
        ([0.0, float("nan")], [0.1, 0.1], "neither 0 nor 1"),
        ([0, 1], [0.1, float("nan")], "not probabilities"),
        ([0, 1], [float("inf"), 0.1], "not probabilities"),
        ([0, 1], [0.1, 1.01], "not probabilities"),
        ([0, 1], [0.1], "one per label"),
        ([[0, 1]], [[0.1, 0.2]], "one task at a time"),
    ],
)
def test_bad_input_is_refused(y, p, words):
    with pytest.raises(DataError, match=words):
        normalized_entropy(y, p)


@pytest.mark.parametrize("rate", [0.0, 1.0, float("nan")])
def test_bad_base_rate_is_refused(rate):
    with pytest.raises(DataError, match="base rate"):
        normalized_entropy([0, 1], [0.1, 0.2], base_rate=rate)


def test_a_metric_is_never_nan():
    with pytest.raises(DataError, match="finite number or None"):
        Metric(float("nan"))
    assert Metric.from_dict(Metric(0.5, 0.4, 0.6).to_dict()) == Metric(0.5, 0.4, 0.6)
    assert Metric.from_dict(Metric(None, reason="no rows").to_dict()) == Metric(None, reason="no rows")
