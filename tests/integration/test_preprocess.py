"""Preprocess on Ray Data: the store of one process again, KuaiRand's published counts, errors unwrapped."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from gem.config import DataConfig, RunConfig
from gem.data.spec import load_spec
from gem.data.store import FeatureStore
from gem.errors import DataError
from pipelines.distribute import in_process
from pipelines.preprocess import build_store, preprocess
from tests.unit.data.toy_log import toy_rows, toy_spec, write_toy


def config(**data: Any) -> RunConfig:
    return RunConfig(data=replace(DataConfig(num_shards=2), **data))


def test_ray_and_one_process_write_the_same_store(ray_session: Any, tmp_path: Path) -> None:
    raw = write_toy(tmp_path / "raw", toy_rows())
    said: list[str] = []
    record = preprocess(config(), toy_spec(), raw, tmp_path / "ray", said.append)
    alone = build_store(config(), toy_spec(), (raw, tmp_path / "alone"), said.append, in_process)
    assert record == alone
    assert (
        FeatureStore.open(tmp_path / "ray").hash == FeatureStore.open(tmp_path / "alone").hash == record["store_hash"]
    )
    assert any("2 user shards" in line for line in said)


def test_a_broken_file_is_named_by_our_own_error(ray_session: Any, tmp_path: Path) -> None:
    raw = write_toy(tmp_path / "raw", toy_rows(num_shows=50))
    table = pq.read_table(raw / "shows-1.parquet")
    at = table.column_names.index("at")
    seconds = table.set_column(at, "at", [[t // 1000 for t in table["at"].to_pylist()]])
    pq.write_table(seconds, raw / "shows-1.parquet")
    with pytest.raises(DataError, match=r"shows-1.parquet.*1970"):
        preprocess(config(), toy_spec(), raw, tmp_path / "store", lambda _: None)


def test_kuairand_counts(ray_session: Any, kuairand_dir: Path, repo_root: Path, tmp_path: Path) -> None:
    """Counts of ../shared/data/kuairand/README.md; days are those of the log's `date` column."""
    spec = load_spec(repo_root / "pipelines" / "datasets" / "kuairand.yaml")
    record = preprocess(config(), spec, kuairand_dir, tmp_path / "store", lambda _: None)
    assert record["split"]["test_day"] == "2022-05-06" and record["split"]["validation_day"] == "2022-05-05"
    assert record["rows"]["impressions_by_day"]["2022-05-06"] == 13_561
    assert record["rows"]["raw"]["log"] == 198_895
    assert record["rows_out"] + record["duplicates"] + record["quarantined"] == 198_895
    assert 0.02 < record["duplicates"] / 198_895 < 0.03
    assert (record["rows"]["users"], record["rows"]["ads"]) == (27_285, 7_583)
    store = FeatureStore.open(tmp_path / "store")
    test = store.impressions([store.split.test_day])
    assert 0.40 < test.labels[:, 0].mean() < 0.48 and bool((test.labels[:, 1] <= test.labels[:, 0]).all())
    assert "tab1" in store.schema.surface_groups
