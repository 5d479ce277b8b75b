"""The calibration layer of a bundle: Platt scaling with one shift per group, shrunk to the global one.

    logit' = slope * logit + shift + shift_of[group]

Fitted on the validation day by Newton steps on the log loss (Platt 1999): first slope and shift over all
rows, so that the sum of predictions equals the sum of labels, then every group's shift around that with a
ridge penalty (a normal prior): a group with few rows stays at the global fit. Fitting both at once would
make the global shift the mean over groups, whatever their size, and a small group would pull it along.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from gem.errors import DataError
from gem.metrics.metric import Floats, Ints, check_labels
from gem.metrics.ne import P_FLOOR

MIN_ROWS = 200
MIN_OF_EACH_LABEL = 20
MIN_SLOPE = 0.05  # a slope below would forget the order of the model or turn it round
_MAX_STEPS = 50


@dataclass(frozen=True)
class PlattCalibration:
    """A monotone map of logits; the identity by default. `reason` says why nothing was fitted."""

    slope: float = 1.0
    shift: float = 0.0
    group_shift: Mapping[str, float] = field(default_factory=dict)
    rows: int = 0  # fitted on
    reason: str = "identity"

    @classmethod
    def fit(
        cls, logit: ArrayLike, y: ArrayLike, group: ArrayLike | None = None, ridge: float = 20.0
    ) -> PlattCalibration:
        """Fit on logits [N], labels [N] and groups [N] (text or integers).

        Args:
            ridge: above 0; a group whose sum of p (1 - p) equals it is shrunk by about half.

        Returns the identity, with the reason, below MIN_ROWS rows or MIN_OF_EACH_LABEL of either label.
        Raises DataError for NaN or infinite logits, labels other than 0/1 or lengths that differ.
        """
        if not ridge > 0:
            raise DataError(f"ridge: got {ridge}; allowed: above 0")
        labels = check_labels(y)
        x = _check_logits(logit, labels.shape[0])
        names, codes = _groups(group, labels.shape[0])
        positives = int(labels.sum())
        if labels.shape[0] < MIN_ROWS or min(positives, labels.shape[0] - positives) < MIN_OF_EACH_LABEL:
            got = f"{labels.shape[0]} rows, {positives} positive"
            return cls(reason=f"identity: {got}; needs {MIN_ROWS} rows and {MIN_OF_EACH_LABEL} of each label")
        slope, shift = _fit_global(x, labels)
        if slope < MIN_SLOPE:
            slope, shift = _fit_global(x, labels, fixed_slope=MIN_SLOPE)
        shifts = _fit_groups(slope * x + shift, labels, codes, len(names), ridge)
        return cls(slope, shift, {n: float(v) for n, v in zip(names, shifts, strict=True)}, labels.shape[0], "")

    def shrunk(self, logit: ArrayLike, noise: float) -> PlattCalibration:
        """The same layer with its mean shift on the fitted rows [N] pulled towards none.

        noise: standard deviation of what moves a whole day's log odds and is gone the next day. A shift seen on
        one day is bias plus that noise (and sampling error); the positive-part James-Stein estimate of the bias
        keeps max(0, 1 - (noise² + se²) / shift²) of it.
        """
        x = np.asarray(logit, dtype=np.float64)
        if self.rows == 0 or x.size == 0 or noise <= 0:
            return self
        centre = float(x.mean())
        seen = self.slope * centre + self.shift - centre
        p = _sigmoid(x)
        variance = noise**2 + 1.0 / max(float((p * (1.0 - p)).sum()), 1e-9)
        kept = max(0.0, 1.0 - variance / seen**2) if seen else 0.0
        return dataclasses.replace(self, shift=self.shift - (1.0 - kept) * seen)

    def apply(self, logit: ArrayLike, group: ArrayLike | str | int | None = None) -> Floats:
        """Calibrated logits, in the shape of `logit` (float64). A group never seen gets the global shift.

        `group` is one value for all rows or one per row. Use `apply_probability` for probabilities.
        """
        x = np.asarray(logit, dtype=np.float64)
        return np.asarray(self.slope * x + self.shift + self._shift_of(group), dtype=np.float64)

    def apply_probability(self, p: ArrayLike, group: ArrayLike | str | int | None = None) -> Floats:
        """Calibrated probabilities of probabilities, through the logit (clipped at P_FLOOR)."""
        clipped = np.clip(np.asarray(p, dtype=np.float64), P_FLOOR, 1.0 - P_FLOOR)
        return _sigmoid(self.apply(np.log(clipped) - np.log1p(-clipped), group))

    def _shift_of(self, group: ArrayLike | str | int | None) -> Floats:
        if group is None:
            return np.zeros(())
        names, codes = np.unique(np.asarray(group).astype(str), return_inverse=True)
        table = np.array([self.group_shift.get(str(name), 0.0) for name in names], dtype=np.float64)
        return np.asarray(table[codes].reshape(np.shape(group)), dtype=np.float64)

    def to_dict(self) -> dict[str, Any]:
        """JSON form, read back by `from_dict` to equal numbers."""
        return {
            "kind": "platt",
            "slope": self.slope,
            "shift": self.shift,
            "group_shift": dict(self.group_shift),
            "rows": self.rows,
            "reason": self.reason,
        }

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> PlattCalibration:
        """Raises DataError for another kind, missing or unknown keys, or a slope that is not positive and finite."""
        keys = set(cls().to_dict())
        if set(raw) != keys or raw["kind"] != "platt":
            raise DataError(f"calibration: got keys {sorted(raw)}, kind {raw.get('kind')!r}; allowed: {sorted(keys)}")
        shifts = {str(k): float(v) for k, v in raw["group_shift"].items()}
        out = cls(float(raw["slope"]), float(raw["shift"]), shifts, int(raw["rows"]), str(raw["reason"]))
        if not (out.slope > 0 and np.isfinite([out.slope, out.shift, *shifts.values()]).all()):
            raise DataError(f"calibration: got {out}; allowed: a positive slope, all numbers finite; fit it again")
        return out


def _sigmoid(x: Floats) -> Floats:
    return np.asarray(0.5 * (1.0 + np.tanh(0.5 * x)), dtype=np.float64)


def _check_logits(logit: ArrayLike, num_rows: int) -> Floats:
    x = np.asarray(logit, dtype=np.float64)
    if x.shape != (num_rows,):
        raise DataError(f"logits: got shape {x.shape}, labels have ({num_rows},); pass one per label")
    if not np.isfinite(x).all():
        raise DataError(f"logits: {int((~np.isfinite(x)).sum())} are NaN or infinite; allowed: finite numbers")
    return x


def _groups(group: ArrayLike | None, num_rows: int) -> tuple[list[str], Ints]:
    if group is None:
        return [], np.zeros(num_rows, dtype=np.int64)
    raw = np.asarray(group)
    if raw.shape != (num_rows,):
        raise DataError(f"groups: got shape {raw.shape}, labels have ({num_rows},); pass one per label")
    names, codes = np.unique(raw.astype(str), return_inverse=True)
    return [str(n) for n in names], codes.astype(np.int64).reshape(-1)


def _fit_global(x: Floats, y: Floats, fixed_slope: float | None = None) -> tuple[float, float]:
    """Slope and shift of least log loss, by Newton steps that are halved until the loss falls.

    A faint pull of the slope to 1 keeps separable labels finite. Convex, so a slope held at its bound is the
    bounded optimum.
    """
    theta = np.array([1.0 if fixed_slope is None else fixed_slope, 0.0])
    pull = np.array([1.0, 0.0])
    free = slice(0 if fixed_slope is None else 1, 2)

    def loss(t: Floats) -> float:
        z = t[0] * x + t[1]
        return float((np.logaddexp(0.0, z) - y * z).sum() + 0.5 * (t[0] - 1.0) ** 2)

    now = loss(theta)
    for _ in range(_MAX_STEPS):
        p = _sigmoid(theta[0] * x + theta[1])
        w = p * (1.0 - p)
        gradient = np.array([(p - y) @ x, (p - y).sum()]) + pull * (theta - 1.0)
        hessian = np.array([[w @ (x * x), w @ x], [w @ x, w.sum()]]) + np.diag(pull + 1e-9)
        step = np.zeros(2)
        step[free] = np.linalg.solve(hessian[free, free], gradient[free])
        scale = 1.0
        while loss(theta - scale * step) > now and scale > 1e-6:
            scale *= 0.5
        if scale <= 1e-6 or float(np.abs(scale * step).max()) < 1e-10:
            break
        theta = theta - scale * step
        now = loss(theta)
    return float(theta[0]), float(theta[1])


def _fit_groups(z: Floats, y: Floats, codes: Ints, num_groups: int, ridge: float) -> Floats:
    """[G] shifts of least log loss + ridge / 2 * shift^2, around globally calibrated logits z (all groups at once)."""
    shift = np.zeros(num_groups)
    for _ in range(_MAX_STEPS if num_groups else 0):
        p = _sigmoid(z + shift[codes])
        gradient = np.bincount(codes, weights=p - y, minlength=num_groups) + ridge * shift
        curvature = np.bincount(codes, weights=p * (1.0 - p), minlength=num_groups) + ridge
        step = np.clip(gradient / curvature, -1.0, 1.0)
        shift = shift - step
        if float(np.abs(step).max()) < 1e-10:
            break
    return shift
