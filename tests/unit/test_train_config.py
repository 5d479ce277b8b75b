"""What training settings are refused before anything is trained."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest

from gem.config import RunConfig, TrainConfig, apply_overrides
from gem.errors import ConfigError


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"epochs": 0}, "epochs: got 0; allowed: 1 and more; set train.epochs (or student_train, finetune)"),
        ({"batch_impressions": 0}, "batch_impressions: got 0; allowed: 1 and more"),
        ({"window_days": 0}, "window_days: got 0; allowed: 1 and more"),
        ({"num_workers": 0}, "num_workers: got 0; allowed: 1 and more"),
        ({"checkpoint_every_steps": -5}, "checkpoint_every_steps: got -5; allowed: 0 and more"),
        ({"lr_dense": -1e-3}, "lr_dense: got -0.001; allowed: 0 and more"),
        ({"lr_sparse": math.nan}, "lr_sparse: got nan; allowed: 0 and more"),
        ({"lr_sparse": math.inf}, "lr_sparse: got inf; allowed: 0 and more"),
        ({"weight_decay": -1.0}, "weight_decay: got -1.0; allowed: 0 and more"),
        ({"seed": -1}, "seed: got -1; allowed: 0 and more"),
        ({"warmup_share": 1.0}, "warmup_share: got 1.0; allowed: 0 and more, below 1"),
        ({"warmup_share": math.nan}, "warmup_share: got nan"),
        ({"clip_norm": 0.0}, "clip_norm: got 0.0; allowed: above 0 (inf clips nothing)"),
        ({"negative_keep": 1.5}, "negative_keep: got 1.5; allowed: above 0, at most 1"),
    ],
)
def test_impossible_values_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        replace(TrainConfig(), **fields)


def test_every_part_is_checked_and_odd_values_are_not_refused() -> None:
    for part in ("train", "student_train", "finetune"):
        with pytest.raises(ConfigError, match="batch_impressions: got 0"):
            apply_overrides(RunConfig(), [f"{part}.batch_impressions=0"])
    odd = TrainConfig(lr_dense=0.0, lr_sparse=0.0, clip_norm=math.inf, warmup_share=0.0, seed=0)
    assert odd.epochs == 1
