"""Platt calibration: recovers a known distortion, shrinks small groups, refuses nonsense."""

import json
import math

import numpy as np
import pytest

from gem.errors import DataError
from gem.metrics import PlattCalibration, auc, calibration, normalized_entropy


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def world(rng, num_rows=40_000, slope=0.5, shift=-1.0, groups=(0.4, -0.4)):
    x = rng.normal(-2, 1, num_rows)
    group = rng.integers(0, len(groups), num_rows)
    true = slope * x + shift + np.array(groups)[group]
    return x, (rng.random(num_rows) < sigmoid(true)).astype(int), group, true


def test_recovers_slope_and_shifts(rng):
    x, y, group, _ = world(rng)
    fit = PlattCalibration.fit(x, y, group)
    assert fit.slope == pytest.approx(0.5, abs=0.06)
    assert fit.shift + fit.group_shift["0"] == pytest.approx(-0.6, abs=0.12)
    assert fit.shift + fit.group_shift["1"] == pytest.approx(-1.4, abs=0.12)
    assert (fit.rows, fit.reason) == (40_000, "")


def test_heals_calibration_on_rows_it_has_not_seen(rng):
    x, y, group, true = world(rng)
    fit = PlattCalibration.fit(x[:20_000], y[:20_000], group[:20_000])
    test = slice(20_000, None)
    before, after = sigmoid(x[test]), sigmoid(fit.apply(x[test], group[test]))
    assert calibration(y[test], before).value > 1.1
    assert calibration(y[test], after).value == pytest.approx(1.0, abs=0.06)
    best = normalized_entropy(y[test], sigmoid(true[test])).value
    assert normalized_entropy(y[test], after).value == pytest.approx(best, abs=0.002)


def test_sum_of_predictions_equals_sum_of_labels_on_the_fitted_rows(rng):
    x, y, group, _ = world(rng, 3000)
    assert sigmoid(PlattCalibration.fit(x, y).apply(x)).sum() == pytest.approx(y.sum(), rel=1e-4)
    fit = PlattCalibration.fit(x, y, group)
    assert sigmoid(fit.apply(x, group)).sum() == pytest.approx(y.sum(), rel=0.01)


def test_fit_is_a_minimum_of_the_stated_losses(rng):
    """Against the losses written out row by row: every small move makes them larger."""
    x, y, group, _ = world(rng, 2000, groups=(0.3, 0.0, -0.5))
    fit = PlattCalibration.fit(x, y, group, ridge=20.0)

    def loss(slope, shift, shifts):
        z = slope * x + shift + np.array(shifts)[group]
        data = sum(math.log1p(math.exp(-v)) if t else math.log1p(math.exp(v)) for v, t in zip(z, y, strict=True))
        return data + 0.5 * (slope - 1) ** 2 + 10.0 * sum(s * s for s in shifts)

    none, shifts = [0.0] * 3, [fit.group_shift[k] for k in "012"]
    for step in (1e-3, -1e-3):
        best = loss(fit.slope, fit.shift, none)
        assert loss(fit.slope + step, fit.shift, none) > best
        assert loss(fit.slope, fit.shift + step, none) > best
        best = loss(fit.slope, fit.shift, shifts)
        for g in range(3):
            assert loss(fit.slope, fit.shift, [s + step * (k == g) for k, s in enumerate(shifts)]) > best


def test_a_small_group_stays_near_the_global_fit(rng):
    x, y, _, _ = world(rng, 5000, groups=(0.0,))
    group = np.zeros(5000, dtype=int)
    group[:8] = 1
    y[:8] = 1  # eight lucky rows must not promise much to the whole group
    fit = PlattCalibration.fit(x, y, group)
    assert 0 < fit.group_shift["1"] < 0.5
    assert abs(fit.group_shift["0"]) < 0.05
    free = PlattCalibration.fit(x, y, group, ridge=1e-6)
    assert free.group_shift["1"] - free.group_shift["0"] > 3


def test_order_within_a_group_is_kept_even_for_a_reversed_model(rng):
    x, y, group, _ = world(rng, 4000, slope=-0.7)
    fit = PlattCalibration.fit(x, y, group)
    assert fit.slope == pytest.approx(0.05)
    one = group == 0
    assert auc(y[one], sigmoid(fit.apply(x[one], 0))).value == pytest.approx(auc(y[one], sigmoid(x[one])).value)
    assert calibration(y, sigmoid(fit.apply(x, group))).value == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize(("rows", "positives"), [(0, 0), (199, 50), (1000, 0), (1000, 19), (1000, 1000)])
def test_identity_when_there_is_too_little(rows, positives):
    y = np.arange(rows) < positives
    fit = PlattCalibration.fit(np.linspace(-3, 3, rows), y.astype(int), np.zeros(rows, dtype=int))
    assert "identity" in fit.reason and str(rows) in fit.reason
    assert fit.apply([0.3, -2.0], [0, 9]).tolist() == [0.3, -2.0]


def test_separable_labels_stay_finite():
    x = np.linspace(-4, 4, 400)
    fit = PlattCalibration.fit(x, (x > 0).astype(int), np.arange(400) % 3)
    assert np.isfinite(fit.apply(x)).all() and fit.slope > 1


def test_apply_forms_agree(rng):
    x, y, group, _ = world(rng, 3000)
    names = np.array(["feed", "stories"])[group]
    fit = PlattCalibration.fit(x, y, names)
    rows = fit.apply(x[:4], names[:4])
    assert [fit.apply(v, str(n)).item() for v, n in zip(x[:4], names[:4], strict=True)] == rows.tolist()
    assert fit.apply_probability(sigmoid(x[:4]), names[:4]) == pytest.approx(sigmoid(rows), abs=1e-12)
    assert fit.apply(x[:4], "never seen").tolist() == fit.apply(x[:4]).tolist()
    assert PlattCalibration().apply_probability([0.0, 1.0]) == pytest.approx([1e-7, 1 - 1e-7])


def test_json_round_trip_gives_equal_numbers(rng):
    x, y, group, _ = world(rng, 3000)
    fit = PlattCalibration.fit(x, y, group)
    again = PlattCalibration.from_dict(json.loads(json.dumps(fit.to_dict())))
    assert again == fit and (again.apply(x, group) == fit.apply(x, group)).all()


def test_bad_input_is_refused(rng):
    x, y, group, _ = world(rng, 300)
    with pytest.raises(DataError, match="NaN or infinite"):
        PlattCalibration.fit(np.where(x > 0, np.nan, x), y, group)
    with pytest.raises(DataError, match="above 0"):
        PlattCalibration.fit(x, y, group, ridge=0.0)
    with pytest.raises(DataError, match="one per label"):
        PlattCalibration.fit(x, y, group[:5])
    raw = PlattCalibration().to_dict()
    with pytest.raises(DataError, match="allowed"):
        PlattCalibration.from_dict({**raw, "extra": 1})
    with pytest.raises(DataError, match="positive slope"):
        PlattCalibration.from_dict({**raw, "slope": -1.0})
    with pytest.raises(DataError, match="positive slope"):
        PlattCalibration.from_dict({**raw, "shift": float("nan")})
