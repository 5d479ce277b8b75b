"""Normalized entropy (He et al. 2014, "Practical Lessons from Predicting Clicks on Ads at Facebook", eq. 1).

NE = mean log loss / entropy of the base rate. 1 = no better than always saying the base rate; lower is
better. Unless a base rate is given, it is that of the rows measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from gem.errors import DataError
from gem.metrics.metric import Floats, Metric, check_pair, single_class_reason

P_FLOOR = 1e-7  # probabilities are clipped to [P_FLOOR, 1 - P_FLOOR] in the log loss: one sure error stays finite


def log_loss(y: Floats, p: Floats) -> Floats:
    """[N] log loss in nats of checked labels and probabilities; p is clipped at P_FLOOR."""
    clipped = np.clip(p, P_FLOOR, 1.0 - P_FLOOR)
    return np.asarray(-np.where(y > 0, np.log(clipped), np.log1p(-clipped)), dtype=np.float64)


def entropy(rate: float) -> float:
    """Entropy in nats of a coin with 0 < rate < 1."""
    return -(rate * math.log(rate) + (1.0 - rate) * math.log1p(-rate))


def normalized_entropy(y: ArrayLike, p: ArrayLike, base_rate: float | None = None) -> Metric:
    """NE of probabilities p [N] for labels y [N].

    Args:
        base_rate: what the denominator predicts; default the mean of y. Give one to compare windows.

    Raises:
        DataError: labels not 0/1, p not in [0, 1], or a base rate not strictly between 0 and 1.
    """
    return NEState().add(y, p).value(base_rate)


@dataclass(frozen=True)
class NEState:
    """Sums that give NE and calibration; `add` and `merge` return a new state, in any order the same result.

    Adding the parts of a data set and merging equals measuring the whole (up to float64 rounding).
    """

    rows: int = 0
    positives: float = 0.0
    loss: float = 0.0  # sum of log losses, nats
    predicted: float = 0.0  # sum of p

    def add(self, y: ArrayLike, p: ArrayLike) -> NEState:
        """State with the rows y [N], p [N] added. Raises DataError as `normalized_entropy` does."""
        labels, probs = check_pair(y, p)
        return self.merge(
            NEState(
                rows=labels.shape[0],
                positives=float(labels.sum()),
                loss=float(log_loss(labels, probs).sum()),
                predicted=float(probs.sum()),
            )
        )

    def merge(self, other: NEState) -> NEState:
        """State of both parts together."""
        return NEState(
            self.rows + other.rows,
            self.positives + other.positives,
            self.loss + other.loss,
            self.predicted + other.predicted,
        )

    def value(self, base_rate: float | None = None) -> Metric:
        """NE of everything added, or None with the reason."""
        if base_rate is None:
            reason = single_class_reason(self.rows, self.positives)
            if reason:
                return Metric(None, reason=reason)
            base_rate = self.positives / self.rows
        elif not 0.0 < base_rate < 1.0:
            raise DataError(f"base rate: got {base_rate}; allowed: strictly between 0 and 1, or None")
        elif self.rows == 0:
            return Metric(None, reason="no rows")
        return Metric(self.loss / self.rows / entropy(base_rate))

    def calibration(self) -> Metric:
        """Sum of predictions over sum of labels, or None with the reason."""
        if self.positives <= 0:
            return Metric(None, reason=single_class_reason(self.rows, self.positives))
        return Metric(self.predicted / self.positives)

    def to_dict(self) -> dict[str, float]:
        return {"rows": self.rows, "positives": self.positives, "loss": self.loss, "predicted": self.predicted}

    @classmethod
    def from_dict(cls, raw: dict[str, float]) -> NEState:
        return cls(int(raw["rows"]), float(raw["positives"]), float(raw["loss"]), float(raw["predicted"]))
