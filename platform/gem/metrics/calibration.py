"""Does a probability of p happen p of the time? Ratio, curve and expected calibration error."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from gem.errors import DataError
from gem.metrics.metric import Metric, check_pair, single_class_reason


def calibration(y: ArrayLike, p: ArrayLike) -> Metric:
    """Sum of predictions over sum of labels; 1 is right, above 1 promises too much. None without a positive."""
    labels, probs = check_pair(y, p)
    positives = float(labels.sum())
    if positives <= 0:
        return Metric(None, reason=single_class_reason(labels.shape[0], positives))
    return Metric(float(probs.sum()) / positives)


def calibration_curve(y: ArrayLike, p: ArrayLike, num_bins: int = 20) -> list[dict[str, float]]:
    """Bins of about equal size by predicted probability, lowest first.

    Equal predictions are never split over bins, so a constant predictor gives one bin.

    Returns:
        One dict per bin: `p` mean prediction, `y` share of positives, `n` rows.
    """
    if num_bins < 1:
        raise DataError(f"num_bins: got {num_bins}; allowed: 1 or more")
    labels, probs = check_pair(y, p)
    num_rows = labels.shape[0]
    if num_rows == 0:
        return []
    order = np.argsort(probs, kind="stable")
    ranked, outcome = probs[order], labels[order]
    cuts = np.searchsorted(ranked, ranked[(np.arange(num_bins) * num_rows) // num_bins], side="left")
    starts = np.unique(cuts)
    count = np.diff(np.append(starts, num_rows))
    mean_p = np.add.reduceat(ranked, starts) / count
    mean_y = np.add.reduceat(outcome, starts) / count
    return [{"p": float(a), "y": float(b), "n": int(c)} for a, b, c in zip(mean_p, mean_y, count, strict=True)]


def expected_calibration_error(y: ArrayLike, p: ArrayLike, num_bins: int = 20) -> Metric:
    """Row-weighted mean of |share of positives - mean prediction| over the bins of `calibration_curve`."""
    bins = calibration_curve(y, p, num_bins)
    if not bins:
        return Metric(None, reason="no rows")
    total = sum(b["n"] for b in bins)
    return Metric(sum(b["n"] * abs(b["y"] - b["p"]) for b in bins) / total)
