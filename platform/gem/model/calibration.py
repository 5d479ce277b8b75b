"""From raw logits to calibrated entire-space probabilities, the same way offline and in serving."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gem.data.schema import Schema
from gem.metrics.recalibration import PlattCalibration

Floats = NDArray[np.float64]


def fit_calibration(
    schema: Schema, logits: NDArray[np.float32], labels: NDArray[np.float32], mask: NDArray[np.float32],
    surface: NDArray[np.int64],
) -> dict[str, PlattCalibration]:  # fmt: skip
    """One Platt layer per task, with a shift per surface; conditional tasks are fitted where their
    condition happened. logits, labels, mask [N, K]; labels are entire-space; surface codes [N]."""
    names = [t.name for t in schema.tasks]
    out: dict[str, PlattCalibration] = {}
    for k, task in enumerate(schema.tasks):
        use = mask[:, k] > 0
        if task.given is not None:
            given = names.index(task.given)
            use &= (mask[:, given] > 0) & (labels[:, given] > 0)
        out[task.name] = PlattCalibration.fit(logits[use, k], labels[use, k], surface_names(schema, surface[use]))
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
