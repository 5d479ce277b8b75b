"""Scoring many impressions offline."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from gem.model.ranker import Ranker
from gem.training.data import IntArray, StoreReader


@dataclass
class Scores:
    """Row-aligned with the scored positions: logits [N, K] (conditional), representation [N, R]."""

    logits: NDArray[np.float32]
    representation: NDArray[np.float32]


@torch.inference_mode()
def predict(model: Ranker, reader: StoreReader, at: IntArray, batch_size: int = 4096) -> Scores:
    """Score the impressions at positions `at`; users stay together, the answer is in the order of `at`."""
    was_training = model.training
    model.eval()
    by_user = np.argsort(reader.impressions.user[at], kind="stable")
    num_tasks, width = len(model.schema.tasks), model.config.representation_dim
    out = Scores(np.zeros((at.size, num_tasks), np.float32), np.zeros((at.size, width), np.float32))
    for start in range(0, at.size, batch_size):
        positions = by_user[start : start + batch_size]
        # A batch keeps rows of equal users in order, and these rows are sorted by user already.
        result = model(reader.batch(at[positions]))
        out.logits[positions] = result.logits.numpy()
        out.representation[positions] = result.representation.numpy()
    model.train(was_training)
    return out
