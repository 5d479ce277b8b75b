"""A small generated world, its feature store and two vertical bundles, all made by the real code.

The weights are random but not small, and the calibration is not the identity, so that a wrong input, a
wrong row or a forgotten layer changes the scores.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from gem.config import DataConfig, ModelConfig, RunConfig, WorldConfig
from gem.data.spec import DatasetSpec, load_spec
from gem.data.store import FeatureStore
from gem.data.world.generator import generate
from gem.lineage.bundle import BundleInfo, Parents, save_bundle, store_files
from gem.metrics.recalibration import PlattCalibration
from gem.model.ranker import Ranker
from pipelines.distribute import in_process
from pipelines.preprocess import build_store
from serving.fleet import ServedModel

ROOT = Path(__file__).resolve().parents[3]
WORLD = WorldConfig(num_users=60, num_ads=80, num_days=5, num_impressions=3000, num_organic_events=3000, seed=3)
STUDENT = ModelConfig(
    dim=8, num_layers=1, num_heads=2, max_history=16, window=3, block=4, num_fmb=3, num_lcb=3, rank=3, mlp_hidden=16
)  # most of a history is read through summaries


@dataclass(frozen=True)
class Tiny:
    """Paths of the world: raw tables, store, and one bundle per surface group with its hash."""

    raw: Path
    store_path: Path
    models: tuple[ServedModel, ...]
    spec: DatasetSpec

    @property
    def store(self) -> FeatureStore:
        return FeatureStore.open(self.store_path)

    def raw_impressions(self, day: str) -> pa.Table:
        """Raw impression rows of a day as the log has them, with a user, one row per impression id."""
        files = sorted(self.raw.glob(f"impressions-{day}-*.parquet"))
        table = pa.concat_tables([pq.read_table(f) for f in files])
        first = np.unique(table["impression_id"].to_numpy(), return_index=True)[1]
        table = table.take(pa.array(np.sort(first)))
        return table.filter(table["user_id"].is_valid())


def build_tiny(folder: Path) -> Tiny:
    """About two seconds."""
    generate(WORLD, folder / "raw")
    spec = load_spec(ROOT / "pipelines/datasets/generated.yaml")
    surfaces = spec.surfaces.model_copy(update={"min_rows": 100})
    spec = spec.model_copy(update={"surfaces": surfaces})
    config = replace(RunConfig(), data=DataConfig(num_shards=2, world=WORLD), student=STUDENT)
    config = replace(config, transfer=replace(config.transfer, enabled=False))
    build_store(config, spec, (folder / "raw", folder / "store"), lambda _: None, in_process)
    store = FeatureStore.open(folder / "store")
    models = tuple(save_random(folder, store, config, group) for group in store.schema.surface_groups)
    return Tiny(folder / "raw", folder / "store", models, spec)


def save_random(
    folder: Path, store: FeatureStore, config: RunConfig, group: str, parents: Parents | None = None
) -> ServedModel:
    """One vertical bundle with random weights, saved and ready to be loaded by hash."""
    schema = store.schema
    seed = list(schema.surface_groups).index(group) + 1
    generator = torch.Generator().manual_seed(seed)
    state = Ranker(schema, config.student, seed=seed).state_dict()
    weights = {k: v * 25 if k.startswith("tables.") else _louder(v, generator) for k, v in state.items()}
    calibration = {
        task.name: PlattCalibration(0.8 + 0.1 * k, -0.2, {s: 0.1 * c for c, s in enumerate(schema.surfaces)}).to_dict()
        for k, task in enumerate(schema.tasks)
    }
    given = parents or Parents(
        data=store.hash, data_path=str(store.path), commit="0" * 40, lock="1" * 64, code="2" * 64
    )
    info = BundleInfo(f"tiny-vm-{group}", "vertical", group, schema, config, calibration, {}, given)
    path = folder / "bundles" / f"{info.name}-{seed}"
    digest = save_bundle(path, info, weights, store_files(store.path))
    return ServedModel(info.name, str(seed), str(path), digest, str(store.path))


def _louder(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if not value.is_floating_point():
        return value
    return value + 0.1 * torch.randn(value.shape, generator=generator)


def sampled(table: pa.Table, count: int, seed: int = 0) -> Iterator[dict[str, object]]:
    """Random rows of a table as dicts."""
    rows = np.random.default_rng(seed).permutation(table.num_rows)[:count]
    yield from table.take(pa.array(rows)).to_pylist()
