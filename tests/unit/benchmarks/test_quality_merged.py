"""The naive merge of surfaces must not see a trace of where an impression was shown."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from gem.training.data import StoreReader
from tests.benchmarks.quality_data import MergedReader
from tests.unit.model.synthetic import MODEL, World, make_world

WORLD = make_world(3)
AT = np.arange(len(WORLD.impressions))


def read(world: World, kind: type[StoreReader]) -> dict[str, torch.Tensor]:
    reader = kind(world, world.timelines, world.impressions, MODEL.max_history)  # type: ignore[arg-type]
    batch = reader.batch(AT)
    out = {"impression": batch.surface, "event": batch.timeline.surface, "past": batch.past}
    return out | {f"context {name}": ids for name, ids in batch.context.ids.items()}


def test_batches_are_equal_whatever_the_surfaces_are() -> None:
    surfaces = np.unique(WORLD.impressions.surface)
    assert surfaces.size > 1
    turned = {int(s): int(t) for s, t in zip(surfaces, np.roll(surfaces, 1), strict=True)}
    moved = np.vectorize(turned.__getitem__)(WORLD.impressions.surface).astype(WORLD.impressions.surface.dtype)
    other = replace(WORLD, impressions=replace(WORLD.impressions, surface=moved))
    plain = read(WORLD, StoreReader), read(other, StoreReader)
    assert not torch.equal(plain[0]["impression"], plain[1]["impression"])
    assert not torch.equal(plain[0]["past"], plain[1]["past"])
    merged = read(WORLD, MergedReader), read(other, MergedReader)
    assert all(torch.equal(merged[0][name], merged[1][name]) for name in merged[0])
