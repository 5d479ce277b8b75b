"""Sizes of a model that cannot be are refused where they are written, before any data are read."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from gem.config import ARCHS, ModelConfig, RunConfig, apply_overrides
from gem.errors import ConfigError
from gem.model import gem


def test_the_names_are_those_that_can_be_built() -> None:
    assert tuple(gem.BUILDERS) == ARCHS


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"arch": "dcn"}, 'model.arch: got "dcn". Did you mean "dcnv2"? Allowed: gem, lr'),
        ({"interleaving": "all"}, 'model.interleaving: got "all". Allowed: pooled'),
        ({"num_levels": 0}, "num_levels: got 0; allowed: 1 and more; set model.num_levels (or student.num_levels)"),
        ({"num_levels": 14}, "num_levels: got 14; allowed: 1 to 13 with blocks of 8"),
        ({"block": 0}, "block: got 0"),
        ({"window": -1}, "window: got -1; allowed: 0 and more"),
        ({"max_history": -1}, "max_history: got -1"),
        ({"num_pma": -1}, "num_pma: got -1"),
        ({"num_recent": -1}, "num_recent: got -1"),
        ({"num_recent": 33}, "num_recent: got 33; allowed: at most the window, 32"),
        ({"num_heads": 0}, "num_heads: got 0; allowed: 1 and more"),
        ({"dim": 12, "num_heads": 5}, "num_heads: got 5; allowed: divisors of dim 12: 1, 2, 3, 4, 6, 12"),
        ({"dim": 0}, "dim: got 0"),
        ({"dim": 1, "num_heads": 1}, "dim: got 1; allowed: 2 and more with cross_layer"),
        ({"num_layers": 0}, "num_layers: got 0"),
        ({"rank": 0}, "rank: got 0"),
        ({"mlp_hidden": 0}, "mlp_hidden: got 0"),
        ({"representation_dim": 0}, "representation_dim: got 0"),
        ({"num_fmb": 0, "num_lcb": 0}, "num_fmb and num_lcb: got 0"),
        ({"num_fmb": -1}, "num_fmb: got -1"),
        ({"dropout": 1.0}, "dropout: got 1.0; allowed: 0 and more, below 1"),
        ({"dropout": -0.1}, "dropout: got -0.1"),
    ],
)
def test_impossible_values_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        replace(ModelConfig(), **fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"max_history": 0}, {"window": 0, "num_recent": 0}, {"num_recent": 33, "num_levels": 1},
        {"block": 1, "num_levels": 60}, {"num_levels": 13}, {"num_fmb": 0},
        {"num_pma": 0, "num_recent": 0}, {"arch": "din", "dim": 12, "num_heads": 5},
    ],
)  # fmt: skip
def test_odd_but_possible_values_are_not(fields: dict[str, Any]) -> None:
    assert replace(ModelConfig(), **fields).align >= 1


def test_fields_that_must_fit_together_may_be_set_in_any_order() -> None:
    for overrides in (["model.num_heads=6", "model.dim=48"], ["model.dim=48", "model.num_heads=6"]):
        model = apply_overrides(RunConfig(), overrides).model
        assert (model.dim, model.num_heads) == (48, 6)
    with pytest.raises(ConfigError, match=r"num_heads: got 6; allowed: divisors of dim 32"):
        apply_overrides(RunConfig(), ["model.num_heads=6"])
    assert apply_overrides(RunConfig(), ["student.block=0", "student.block=4"]).student.block == 4
