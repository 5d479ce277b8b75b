"""The benchmark's Polars program is an independent reading of the raw files: timelines and cuts must be the same."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest

from gem.config import DataConfig, RunConfig
from gem.data.store import FeatureStore
from pipelines.distribute import in_process
from pipelines.preprocess import build_store
from tests.benchmarks.data_equal import differences
from tests.benchmarks.data_polars import build
from tests.benchmarks.data_world import World, spec, write_world

# Times on the full minute: events become known at the very time of an impression, and at midnight.
WORLD = World(events=3000, users=60, impressions=900, days=5, ads=40, longest=400, step_ms=60_000)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("agree")
    write_world(WORLD, root / "raw")
    build(root / "raw", root / "hand")
    config = RunConfig(data=replace(DataConfig(), num_shards=3))
    build_store(config, spec(), (root / "raw", root / "ours" / "store"), lambda _: None, in_process)
    return root / "hand", root / "ours" / "store"


def test_timelines_and_cuts_are_those_of_the_polars_program(both: tuple[Path, Path]) -> None:
    assert differences(*both) == []
    manifest = FeatureStore.open(both[1]).manifest
    assert manifest["duplicates"] > 0 and sum(manifest["quarantined"]["events"].values()) > 0  # there is work to do


@pytest.mark.parametrize(("kind", "column"), [("impressions", "cut"), ("timelines", "time_ms"), ("timelines", "user")])
def test_one_wrong_value_is_found(both: tuple[Path, Path], tmp_path: Path, kind: str, column: str) -> None:
    hand = _copy(both[0], tmp_path)
    path = sorted((hand / kind).rglob("*.parquet"))[1]
    frame = pl.read_parquet(path)
    value = pl.when(pl.int_range(pl.len()) == 7).then(pl.col(column) - 1).otherwise(pl.col(column))
    frame.with_columns(value.cast(frame[column].dtype)).write_parquet(path)
    found = differences(hand, both[1])
    assert found and json.dumps(found).count(path.parent.name.removeprefix("day=")) >= 1


def _copy(source: Path, target: Path) -> Path:
    for path in source.rglob("*.parquet"):
        copy = target / "hand" / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    return target / "hand"
