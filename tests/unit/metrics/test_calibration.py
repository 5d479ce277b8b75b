"""Calibration ratio, curve and error on numbers worked out by hand."""

import numpy as np
import pytest

from gem.errors import DataError
from gem.metrics import calibration, calibration_curve, expected_calibration_error


def test_ratio_by_hand():
    assert calibration([1, 0, 1, 0], [0.5, 0.5, 1.0, 1.0]).value == 1.5
    assert "no positive" in calibration([0, 0], [0.5, 0.5]).reason
    assert calibration([1, 1], [0.5, 0.5]).value == 0.5  # all positive is still a ratio


def test_curve_by_hand():
    got = calibration_curve([0, 1, 0, 1, 1, 1], [0.1, 0.2, 0.3, 0.6, 0.8, 0.9], num_bins=2)
    assert got == [
        {"p": pytest.approx(0.2), "y": pytest.approx(1 / 3), "n": 3},
        {"p": pytest.approx(23 / 30), "y": 1.0, "n": 3},
    ]


def test_curve_keeps_rows_and_sums(rng):
    p = rng.integers(0, 12, 1001) / 12  # ties across bin borders
    y = (rng.random(1001) < p).astype(int)
    bins = calibration_curve(y, p, num_bins=7)
    assert sum(b["n"] for b in bins) == 1001
    assert sum(b["n"] * b["y"] for b in bins) == pytest.approx(y.sum())
    assert sum(b["n"] * b["p"] for b in bins) == pytest.approx(p.sum())
    centres = [b["p"] for b in bins]
    assert centres == sorted(set(centres))
    edges = np.cumsum([b["n"] for b in bins])[:-1]
    ranked = np.sort(p)
    assert (ranked[edges] > ranked[edges - 1]).all()  # equal predictions share a bin


def test_constant_predictor_is_one_bin():
    assert calibration_curve([0, 1, 0, 0], [0.25] * 4, num_bins=10) == [{"p": 0.25, "y": 0.25, "n": 4}]


def test_fewer_rows_than_bins_and_no_rows():
    assert [b["n"] for b in calibration_curve([0, 1], [0.1, 0.9], num_bins=20)] == [1, 1]
    assert calibration_curve([], []) == []
    with pytest.raises(DataError, match="num_bins"):
        calibration_curve([0, 1], [0.1, 0.9], num_bins=0)


def test_expected_calibration_error_by_hand():
    # bins {0.1, 0.1}: rate 1/2, off 0.4; {0.9, 0.9}: rate 1, off 0.1
    assert expected_calibration_error([0, 1, 1, 1], [0.1, 0.1, 0.9, 0.9], num_bins=2).value == pytest.approx(0.25)
    assert expected_calibration_error([], []).value is None
