"""From raw logits to calibrated entire-space probabilities, the same way offline and in serving."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gem.data.schema import Schema
from gem.metrics.recalibration import PlattCalibration

Floats = NDArray[np.float64]


@dataclass
class Outcomes:
    """labels, mask [N, K] (entire space), surface codes [N] and day numbers [N] of scored impressions."""

    labels: NDArray[np.float32]
    mask: NDArray[np.float32]
    surface: NDArray[np.int64]
    day: NDArray[np.int64]

    def known(self, schema: Schema, k: int) -> NDArray[np.bool_]:
        """Where task k has an outcome to learn its own logit from: for conditional tasks, where the condition was."""
        use: NDArray[np.bool_] = self.mask[:, k] > 0
        given = schema.tasks[k].given
        if given is not None:
            g = [t.name for t in schema.tasks].index(given)
            use = use & (self.mask[:, g] > 0) & (self.labels[:, g] > 0)
        return use


def fit_calibration(
    schema: Schema, logits: NDArray[np.float32], outcomes: Outcomes, noise: Mapping[str, float]
) -> dict[str, PlattCalibration]:
    """One Platt layer per task from the conditional logits [N, K] of the validation day, a shift per surface.

    noise: task -> `day_noise`; how much of the day's shift is expected to be gone tomorrow.
    """
    out: dict[str, PlattCalibration] = {}
    for k, task in enumerate(schema.tasks):
        use = outcomes.known(schema, k)
        x, group = logits[use, k], surface_names(schema, outcomes.surface[use])
        out[task.name] = PlattCalibration.fit(x, outcomes.labels[use, k], group).shrunk(x, noise.get(task.name, 0.0))
    return out


MIN_DAYS, MIN_DAY_ROWS = 3, 50


def day_noise(schema: Schema, outcomes: Outcomes) -> dict[str, float]:
    """Per task, how much the log odds of its rate move from day to day, beyond sampling: a standard deviation.

    Days with few rows are left out; fewer than three days give 0 (nothing is known of the noise).
    """
    out: dict[str, float] = {}
    for k, task in enumerate(schema.tasks):
        use = outcomes.known(schema, k)
        day, y = outcomes.day[use], outcomes.labels[use, k].astype(np.float64)
        rows = np.bincount(day, minlength=1).astype(np.float64)
        positives = np.bincount(day, weights=y, minlength=1)
        keep = (rows >= MIN_DAY_ROWS) & (positives > 0) & (positives < rows)
        if int(keep.sum()) < MIN_DAYS:
            out[task.name] = 0.0
            continue
        rate = positives[keep] / rows[keep]
        log_odds = np.log(rate) - np.log1p(-rate)
        sampling = (1.0 / (rows[keep] * rate * (1.0 - rate))).mean()
        out[task.name] = float(np.sqrt(max(log_odds.var(ddof=1) - sampling, 0.0)))
    return out


def calibrated_probabilities(
    schema: Schema,
    logits: NDArray[np.float32],
    surface: NDArray[np.int64],
    calibration: Mapping[str, PlattCalibration],
) -> Floats:
    """Conditional logits [N, K] and surface codes [N] -> entire-space probabilities [N, K]."""
    names = [t.name for t in schema.tasks]
    group = surface_names(schema, surface)
    out = np.zeros(logits.shape, np.float64)
    for k, task in enumerate(schema.tasks):
        own = calibration[task.name].apply(logits[:, k].astype(np.float64), group)
        out[:, k] = np.exp(-np.logaddexp(0.0, -own))
        if task.given is not None:
            out[:, k] *= out[:, names.index(task.given)]
    return out


def surface_names(schema: Schema, surface: NDArray[np.int64]) -> NDArray[np.str_]:
    """Surface codes [N] -> readable names [N]."""
    return np.asarray(schema.surfaces, dtype=np.str_)[surface]


def calibration_to_dict(calibration: Mapping[str, PlattCalibration]) -> dict[str, Any]:
    """JSON form: task name -> layer."""
    return {name: layer.to_dict() for name, layer in calibration.items()}


def calibration_from_dict(raw: Mapping[str, Any]) -> dict[str, PlattCalibration]:
    """Read back `calibration_to_dict`. Raises DataError for a layer that is not one."""
    return {name: PlattCalibration.from_dict(layer) for name, layer in raw.items()}
