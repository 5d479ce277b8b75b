"""The dial of sizes: complete, in order, and as large as their docstrings say."""

from __future__ import annotations

import dataclasses
import itertools
import re

import pytest

from gem.config import ModelConfig, RunConfig
from gem.data.schema import Schema
from gem.errors import ConfigError
from gem.model.cost import Cost, Workload, cost
from gem.model.planned import LARGE_WORKLOAD, generated_schema, large_schema
from gem.recipes import RECIPES, SIZES, default, recipe, xl

UNITS = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9}
FIGURES = re.compile(r"([\d.]+) ([kMG]?) dense parameters,\s+([\d.]+) ([kMG]?)FLOP forward per impression")


def planned(config: RunConfig, model: ModelConfig) -> Cost:
    large = config.recipe == "xl"
    schema: Schema = large_schema() if large else generated_schema(config.data.world)
    work = LARGE_WORKLOAD if large else Workload()
    return cost(schema, model, dataclasses.replace(work, history=model.max_history))


@pytest.fixture(scope="module")
def costs() -> dict[str, Cost]:
    return {make.__name__: planned(make(), make().model) for make in SIZES}


def test_every_recipe_knows_its_name_and_comes_back_from_json() -> None:
    for name, make in RECIPES.items():
        config = make()
        assert config.recipe == name == recipe(name).recipe
        assert RunConfig.from_dict(config.to_dict()) == config


def test_sizes_follow_each_other(costs: dict[str, Cost]) -> None:
    found = list(costs.values())
    for small, large in itertools.pairwise(found):
        assert large.dense_parameters >= 3 * small.dense_parameters
        assert large.forward_flops >= 3 * small.forward_flops


def test_docstrings_tell_the_size(costs: dict[str, Cost]) -> None:
    for make in SIZES:
        said = FIGURES.search(make.__doc__ or "")
        assert said, f"{make.__name__}: no figures in its docstring"
        parameters, flops = float(said[1]) * UNITS[said[2]], float(said[3]) * UNITS[said[4]]
        assert parameters == pytest.approx(costs[make.__name__].dense_parameters, rel=0.1), make.__name__
        assert flops == pytest.approx(costs[make.__name__].forward_flops, rel=0.1), make.__name__


def test_students_are_a_fraction_of_their_teacher(costs: dict[str, Cost]) -> None:
    for make in (default, xl):
        config = make()
        student = planned(config, config.student)
        assert student.forward_flops < costs[make.__name__].forward_flops / 3, make.__name__


def test_heads_divide_the_width_and_batches_the_ranks() -> None:
    for make in RECIPES.values():
        config = make()
        for model in (config.model, config.student):
            assert model.dim % model.num_heads == 0
        for train in (config.train, config.student_train, config.finetune):
            assert train.batch_impressions % train.num_workers == 0


def test_unknown_recipe() -> None:
    with pytest.raises(ConfigError, match=r'no recipe "medum"\. Did you mean "medium"\?'):
        recipe("medum")
