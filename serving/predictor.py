"""The network of a bundle, loaded strictly, with its calibration layer. Same functions as offline evaluation."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from gem.data.batch import Batch
from gem.errors import BundleError
from gem.lineage.bundle import Bundle
from gem.model.calibration import calibrated_probabilities, calibration_from_dict
from gem.model.ranker import Ranker


class Predictor:
    """Batch -> calibrated entire-space probabilities. Raises BundleError if a weight or layer does not fit."""

    def __init__(self, bundle: Bundle) -> None:
        info = bundle.info
        self.schema = info.schema
        self.config = info.config.student if info.kind == "vertical" else info.config.model
        self._model = Ranker(self.schema, self.config).eval()
        bundle.load_into(self._model)
        tasks = [t.name for t in self.schema.tasks]
        if set(info.calibration) != set(tasks):
            raise BundleError(
                f"bundle {bundle.path}: calibrates {sorted(info.calibration)}, the model predicts {tasks}; "
                "evaluate and save it again"
            )
        self._calibration = calibration_from_dict(info.calibration)

    @torch.inference_mode()
    def predict(self, batch: Batch) -> NDArray[np.float64]:
        """[N, K] in the order of the batch's impressions."""
        logits = self._model(batch).logits.numpy()
        return calibrated_probabilities(self.schema, logits, batch.surface.numpy(), self._calibration)
