"""The value every metric returns, and the checks every metric makes on its input."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gem.errors import DataError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Metric:
    """A number with its 95 % interval, or None and the reason why there is none. Never NaN or infinite."""

    value: float | None
    low: float | None = None
    high: float | None = None
    reason: str = ""

    def __post_init__(self) -> None:
        for name in ("value", "low", "high"):
            number = getattr(self, name)
            if number is not None and not math.isfinite(number):
                raise DataError(f"metric {name}: got {number}; allowed: a finite number or None with a reason")

    def to_dict(self) -> dict[str, float | str | None]:
        """JSON form; `reason` only where there is one."""
        out: dict[str, float | str | None] = {"value": self.value, "low": self.low, "high": self.high}
        return {**out, "reason": self.reason} if self.reason else out

    @classmethod
    def from_dict(cls, raw: Mapping[str, object]) -> Metric:
        def number(name: str) -> float | None:
            value = raw.get(name)
            return float(value) if isinstance(value, int | float) else None

        return cls(number("value"), number("low"), number("high"), str(raw.get("reason", "")))


def check_labels(y: ArrayLike) -> Floats:
    """[N] labels as float64. DataError unless one-dimensional and all 0 or 1."""
    out = np.asarray(y, dtype=np.float64)
    if out.ndim != 1:
        raise DataError(f"labels: got shape {out.shape}; allowed: one dimension [N]; pass one task at a time")
    bad = (out != 0.0) & (out != 1.0)
    if bad.any():
        at = int(np.argmax(bad))
        raise DataError(
            f"labels: {int(bad.sum())} values are neither 0 nor 1 (first {out[at]} at row {at}); "
            "drop the rows whose outcome is unknown (mask 0) before measuring"
        )
    return out


def check_probabilities(p: ArrayLike, num_rows: int) -> Floats:
    """[N] probabilities as float64. DataError for NaN, infinities, values outside [0, 1] or another length."""
    out = np.asarray(p, dtype=np.float64)
    if out.shape != (num_rows,):
        raise DataError(f"predictions: got shape {out.shape}, labels have ({num_rows},); pass one per label")
    bad = ~((out >= 0.0) & (out <= 1.0))
    if bad.any():
        at = int(np.argmax(bad))
        raise DataError(
            f"predictions: {int(bad.sum())} values are not probabilities (first {out[at]} at row {at}); "
            "allowed: finite, 0 to 1; pass probabilities, not logits, and look for a diverged model"
        )
    return out


def check_pair(y: ArrayLike, p: ArrayLike) -> tuple[Floats, Floats]:
    """Checked labels and probabilities, [N] float64 each."""
    labels = check_labels(y)
    return labels, check_probabilities(p, labels.shape[0])


def user_codes(user: ArrayLike, num_rows: int) -> tuple[Ints, int]:
    """[N] dense codes 0..U-1 of the users and U. Users may be integers or text."""
    raw = np.asarray(user)
    if raw.shape != (num_rows,):
        raise DataError(f"users: got shape {raw.shape}, labels have ({num_rows},); pass one user per label")
    names, codes = np.unique(raw, return_inverse=True)
    return codes.astype(np.int64, copy=False).reshape(-1), int(names.shape[0])


def single_class_reason(num_rows: int, positives: float) -> str:
    """Why nothing can be ranked or normalised, or an empty string when both classes are there."""
    if num_rows == 0:
        return "no rows"
    if positives <= 0:
        return f"no positive label among {num_rows} rows"
    if positives >= num_rows:
        return f"no negative label among {num_rows} rows"
    return ""
