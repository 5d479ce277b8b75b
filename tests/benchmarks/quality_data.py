"""The data of the quality benchmark: feature stores built once and kept, their days as positions.

Letters: N impressions (training days, then the validation day, then the test day), K tasks.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gem.config import DataConfig, ModelConfig, RunConfig, config_hash
from gem.data.batch import Batch
from gem.data.days import Split
from gem.data.past import EVERYTHING, SURFACE, past_matches
from gem.data.schema import NUM_RESERVED, Schema
from gem.data.spec import load_spec
from gem.data.store import FeatureStore, Impressions, Timelines
from gem.data.world.generator import generate
from gem.errors import StoreError
from gem.model.calibration import Outcomes
from gem.training.data import IntArray, StoreReader
from pipelines.distribute import in_process
from pipelines.preprocess import build_store
from pipelines.provenance import ROOT, code_hash

KUAIRAND, GENERATED = "kuairand", "generated"
SPECS = ROOT / "pipelines" / "datasets"
KUAIRAND_DAYS = DataConfig(dataset=KUAIRAND, validation_day="2022-05-05", test_day="2022-05-06")
VALIDATION, TEST = "validation", "test"


def prepare_store(data: DataConfig, raw: Path | None, out: Path, say: Callable[[str], None]) -> Path:
    """The finished store of this data below `out`; built where code, configuration or raw files are new.

    raw: folder of the tables; None for the generated world, which is written first.
    """
    files = [] if raw is None else sorted(p for p in raw.iterdir() if p.is_file())
    parts = [(p.name, p.stat().st_size, int(p.stat().st_mtime)) for p in files]
    code = code_hash(["platform/gem/data", f"pipelines/datasets/{data.dataset}.yaml"])
    folder = out / f"{data.dataset}-{config_hash({'data': dataclasses.asdict(data), 'raw': parts, 'code': code})[:12]}"
    try:
        FeatureStore.open(folder / "store", verify=False)
        return folder / "store"
    except StoreError:
        shutil.rmtree(folder, ignore_errors=True)
    say(f"building the {data.dataset} store")
    folder.mkdir(parents=True)
    if raw is None:
        raw = folder / "raw"
        raw.mkdir()
        generate(data.world, raw)
    spec = load_spec(SPECS / f"{data.dataset}.yaml")
    build_store(RunConfig(data=data), spec, (raw, folder / "store"), lambda _: None, in_process)
    return folder / "store"


@dataclass(frozen=True)
class Days:
    """An opened store: all impressions, and where the days of the split are among them."""

    store: FeatureStore
    timelines: Timelines
    impressions: Impressions
    train: IntArray
    validation: IntArray
    test: IntArray

    @property
    def schema(self) -> Schema:
        return self.store.schema

    @property
    def split(self) -> Split:
        return self.store.split

    def at(self, day: str) -> IntArray:
        """Positions of the validation or the test day."""
        return self.validation if day == VALIDATION else self.test

    def outcomes(self, at: IntArray) -> Outcomes:
        """Labels, masks, surfaces and days of these impressions."""
        imp = self.impressions
        return Outcomes(imp.labels[at], imp.mask[at], imp.surface[at].astype(np.int64), imp.day[at].astype(np.int64))

    def on_surface(self, at: IntArray, surface: str) -> NDArray[np.bool_]:
        """Which of these impressions are on the surface."""
        return np.asarray(self.impressions.surface[at] == self.schema.surfaces.index(surface))

    def train_rows(self, surface: str = "") -> IntArray:
        """Training positions, all or one surface's."""
        return self.train[self.on_surface(self.train, surface)] if surface else self.train

    def reader(self, model: ModelConfig, merged: bool = False) -> StoreReader:
        """Batches for this model; `merged`: without any trace of the surface."""
        kind = MergedReader if merged else StoreReader
        return kind(self.store, self.timelines, self.impressions, model.max_history, align=model.align)


class MergedReader(StoreReader):
    """All surfaces thrown together: every impression and event is said to be on one and the same surface."""

    def batch(self, at: IntArray) -> Batch:
        out = super().batch(at)
        out.surface = torch.full_like(out.surface, NUM_RESERVED)
        out.timeline.surface = torch.full_like(out.timeline.surface, NUM_RESERVED)
        if "surface" in out.context.ids:
            out.context.ids["surface"] = torch.full_like(out.context.ids["surface"], NUM_RESERVED)
        matches = past_matches(self.store.schema)
        out.past[:, matches.index(SURFACE)] = out.past[:, matches.index(EVERYTHING)]
        return out


@lru_cache(maxsize=2)
def open_days(path: Path) -> Days:
    """The store at `path`; kept open for the next run in the same process."""
    store = FeatureStore.open(path, verify=False)
    split = store.split
    imp = store.impressions([*split.train_days, split.validation_day, split.test_day])
    num_train = len(split.train_days)
    parts = [np.flatnonzero(imp.day < num_train), *(np.flatnonzero(imp.day == num_train + i) for i in (0, 1))]
    return Days(store, store.timelines(), imp, *parts)


def fingerprint(value: Any) -> str:
    """Short hash of plain JSON values."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:20]
