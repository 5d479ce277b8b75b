"""Negative downsampling: train on a share of the rows without a positive label, each counting for those left out.

    weight of a row with a positive label:     1, all of them are kept
    weight of a kept row without one:          negatives of the log / negatives kept

Which are kept is a hash of (impression id, seed): the same in every epoch, on every rank and after a restart. Given
how many are kept, every set of so many is equally likely: weighted sums over kept rows are unbiased for sums over all
(Horvitz and Thompson 1952). The weights add up to the number of all rows, so the base rate is that of the log and
nothing has to be corrected in serving, as it is with unweighted samples (He et al. 2014, section 6.3).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gem.config import TrainConfig
from gem.data.hashing import rehash64
from gem.data.store import Impressions
from gem.errors import TrainingError

IntArray = NDArray[np.integer]


@dataclass(frozen=True)
class Sample:
    """The rows to train, and what they stand for."""

    rows: IntArray  # positions of impressions, in the order they were given
    weight: float  # of a row without a positive label; 1 if all are kept
    of: int  # rows that were drawn from

    @property
    def stands_for(self) -> float:
        """Rows of the log for each row that is trained: the mean weight."""
        return self.of / max(self.rows.size, 1)


def sample_rows(impressions: Impressions, rows: IntArray, train: TrainConfig) -> Sample:
    """Keep all of `rows` with a positive label and a share `train.negative_keep` of the others.

    Raises TrainingError if there are rows without a positive label and not one of them is kept.
    """
    if train.negative_keep == 1.0:
        return Sample(rows, 1.0, int(rows.size))
    positive = (impressions.labels[rows] > 0).any(1)
    hashes = rehash64(impressions.impression_id[rows].astype(np.uint64), train.seed)
    lucky = (hashes >> np.uint64(11)).astype(np.float64) * 2.0**-53 < train.negative_keep
    negatives, kept = int((~positive).sum()), int((lucky & ~positive).sum())
    if negatives and not kept:
        raise TrainingError(
            f"negative_keep {train.negative_keep:g} keeps none of {negatives} rows without a positive label; "
            "set a larger share or train on more rows"
        )
    return Sample(rows[positive | lucky], negatives / max(kept, 1) if negatives else 1.0, int(rows.size))
