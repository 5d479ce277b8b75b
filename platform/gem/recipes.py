"""Complete, named run configurations. A recipe is a function that returns a whole `RunConfig`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from gem.config import DataConfig, ModelConfig, RunConfig, TrainConfig, WorldConfig
from gem.errors import ConfigError, suggest

STUDENT = ModelConfig(
    dim=16,
    num_layers=1,
    num_heads=2,
    max_history=64,
    num_fmb=4,
    num_lcb=4,
    rank=4,
    mlp_hidden=64,
    representation_dim=16,
)


def default() -> RunConfig:
    """Minutes on a laptop: what `make pipeline` runs, on the generated world and on real data alike."""
    return RunConfig(recipe="default", student=STUDENT)


def tiny() -> RunConfig:
    """Seconds: a very small world and model, for tests of the machinery. Its quality means nothing."""
    model = dataclasses.replace(STUDENT, max_history=16, mlp_hidden=32)
    train = TrainConfig(batch_impressions=512, checkpoint_every_steps=5)
    world = WorldConfig(num_users=200, num_ads=100, num_days=5, num_impressions=6000, num_organic_events=6000)
    return RunConfig(
        recipe="tiny",
        data=DataConfig(num_shards=2, world=world),
        model=model,
        student=dataclasses.replace(model, dim=8),
        train=train,
        student_train=train,
        finetune=dataclasses.replace(train, lr_dense=4e-4, lr_sparse=0.02),
    )


RECIPES: dict[str, Callable[[], RunConfig]] = {"default": default, "tiny": tiny}


def recipe(name: str) -> RunConfig:
    """The recipe of that name; ConfigError names the nearest one."""
    if name not in RECIPES:
        raise ConfigError(f'no recipe "{name}".{suggest(name, RECIPES)} Allowed: {sorted(RECIPES)}')
    return RECIPES[name]()
