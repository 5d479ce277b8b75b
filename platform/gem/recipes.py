"""Complete, named run configurations. A recipe is a function that returns a whole `RunConfig`.

One dial of sizes, nano to xl. Figures are those of the foundation model as `python -m pipelines cost RECIPE` prints
them for the planned data: timelines as long as the model reads, 4 impressions a user (xl: 16), a quarter of the ads
distinct. "Tokens" are n_F + n_L, what a layer hands to the next; nearly all weights lie in the two matrices of every
FMB, tokens x rank x hidden and hidden x n_F x width. From nano to xl FLOPs and parameters grow some 50,000 times. The
small recipes pass over their data three times (`TrainConfig.fresh_tables`).
"""

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


def nano() -> RunConfig:
    """Seconds of training on a laptop, on a small generated world: every part is there and none is large.

    width 8, 1 layer of 4 tokens, history 32: 23 k dense parameters, 61 kFLOP forward per impression
    """
    model = ModelConfig(
        dim=8, num_layers=1, num_heads=2, max_history=32, num_fmb=2, num_lcb=2, rank=4, mlp_hidden=32,
        representation_dim=8,
    )  # fmt: skip
    train = TrainConfig(epochs=3, batch_impressions=128)
    world = WorldConfig(num_users=600, num_ads=300, num_days=5, num_impressions=20_000, num_organic_events=30_000)
    return RunConfig(
        recipe="nano",
        data=DataConfig(num_shards=2, world=world),
        model=model,
        student=dataclasses.replace(model, max_history=16, mlp_hidden=16),
        train=train,
        student_train=dataclasses.replace(train, epochs=1),
        finetune=dataclasses.replace(train, epochs=1, lr_dense=4e-4, lr_sparse=0.02),
    )


def small() -> RunConfig:
    """Half the default's width and history, on the same world.

    width 16, 2 layers of 8 tokens, history 64: 77 k dense parameters, 290 kFLOP forward per impression
    """
    model = dataclasses.replace(STUDENT, num_layers=2)
    student = dataclasses.replace(STUDENT, dim=8, max_history=32, mlp_hidden=32, representation_dim=8)
    return RunConfig(recipe="small", model=model, student=student, train=TrainConfig(epochs=3))


def default() -> RunConfig:
    """Minutes on a laptop: what `make pipeline` runs, on the generated world and on real data alike.

    width 32, 2 layers of 8 tokens, history 128 (the newest 32 events one by one, older ones in blocks of 8):
    258 k dense parameters, 1.22 MFLOP forward per impression
    """
    return RunConfig(recipe="default", student=STUDENT, train=TrainConfig(epochs=3))


def medium() -> RunConfig:
    """Hours on a workstation, for data of millions of impressions.

    width 64, 3 layers of 32 tokens, history 512 (the newest 128 events one by one, older ones in blocks of 16):
    4.0 M dense parameters, 20 MFLOP forward per impression
    """
    model = ModelConfig(
        dim=64, num_layers=3, num_heads=4, max_history=512, window=128, block=16, num_fmb=16, num_lcb=16, rank=16,
        mlp_hidden=512, representation_dim=64,
    )  # fmt: skip
    train = TrainConfig(batch_impressions=1024, lr_dense=1e-3)
    return RunConfig(recipe="medium", model=model, student=dataclasses.replace(STUDENT, max_history=128), train=train)


def large() -> RunConfig:
    """One machine with some GPUs, for data of hundreds of millions of impressions.

    width 128, 4 layers of 48 tokens, history 2048 (the newest 256 events one by one, older ones in blocks of 16):
    26 M dense parameters, 212 MFLOP forward per impression
    """
    model = ModelConfig(
        dim=128, num_layers=4, num_heads=8, max_history=2048, window=256, block=16, num_pma=2, num_recent=4,
        num_fmb=24, num_lcb=24, rank=24, mlp_hidden=1024, representation_dim=128,
    )  # fmt: skip
    train = TrainConfig(batch_impressions=8192, lr_dense=6e-4, num_workers=8, checkpoint_every_steps=1000)
    student = ModelConfig(max_history=256)
    student_train = dataclasses.replace(train, batch_impressions=4096, lr_dense=1e-3)
    finetune = dataclasses.replace(student_train, batch_impressions=1024, lr_dense=3e-4, lr_sparse=0.02)
    return RunConfig(
        recipe="large", model=model, student=student, train=train, student_train=student_train, finetune=finetune
    )


def xl() -> RunConfig:
    """Planned for 64 GPUs of 80 GB and 2.1 billion table rows; costed on the meta device, never trained here.

    width 256, 8 layers of 128 tokens, history 4096 (the newest 256 events one by one, older ones in blocks of 16):
    964 M dense parameters, 3.3 GFLOP forward per impression

    A rank holds 2.1 G rows / 64 x (256 + 1 moment) x 4 B = 34 GB of tables, 964 M / 64 x 16 B = 0.24 GB of the dense
    part, and 512 impressions x 25 MB of activations and looked-up rows = 13 GB: 48 GB with the blocks FSDP gathers.
    """
    model = ModelConfig(
        dim=256, num_layers=8, num_heads=8, max_history=4096, window=256, block=16, num_pma=4, num_recent=8,
        num_fmb=64, num_lcb=64, rank=64, mlp_hidden=4096, representation_dim=512,
    )  # fmt: skip
    train = TrainConfig(batch_impressions=32_768, lr_dense=3e-4, num_workers=64, checkpoint_every_steps=1000)
    student = ModelConfig(
        dim=64, num_layers=2, num_heads=4, max_history=512, window=128, block=16, num_fmb=16, num_lcb=16, rank=16,
        mlp_hidden=512, representation_dim=64,
    )  # fmt: skip
    student_train = dataclasses.replace(train, lr_dense=1e-3)
    finetune = dataclasses.replace(student_train, batch_impressions=8192, lr_dense=3e-4, lr_sparse=0.02)
    return RunConfig(
        recipe="xl", model=model, student=student, train=train, student_train=student_train, finetune=finetune
    )


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


SIZES = (nano, small, default, medium, large, xl)  # the dial, in order
RECIPES: dict[str, Callable[[], RunConfig]] = {make.__name__: make for make in (*SIZES, tiny)}


def recipe(name: str) -> RunConfig:
    """The recipe of that name; ConfigError names the nearest one."""
    if name not in RECIPES:
        raise ConfigError(f'no recipe "{name}".{suggest(name, RECIPES)} Allowed: {sorted(RECIPES)}')
    return RECIPES[name]()
