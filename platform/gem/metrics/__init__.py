"""How good is a prediction: NE, AUC, gAUC, calibration, with intervals over users; and the calibration layer."""

from gem.metrics.auc import auc, gauc
from gem.metrics.bootstrap import METRICS, bootstrap_metrics, paired_difference
from gem.metrics.calibration import calibration, calibration_curve, expected_calibration_error
from gem.metrics.evaluate import evaluate, evaluate_by
from gem.metrics.metric import Metric
from gem.metrics.ne import NEState, normalized_entropy
from gem.metrics.recalibration import PlattCalibration

__all__ = [
    "METRICS",
    "Metric",
    "NEState",
    "PlattCalibration",
    "auc",
    "bootstrap_metrics",
    "calibration",
    "calibration_curve",
    "evaluate",
    "evaluate_by",
    "expected_calibration_error",
    "gauc",
    "normalized_entropy",
    "paired_difference",
]
