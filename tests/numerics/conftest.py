"""Every test of numerics draws the same random numbers, whichever tests run before it."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    torch.manual_seed(0)
