"""Values that become known only after the days before were encoded: borne while they are few, else built anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gem.config import DataConfig, RunConfig
from gem.data.build import store_write
from gem.data.store import FeatureStore
from pipelines.distribute import in_process
from pipelines.preprocess import Base, build_store
from tests.unit.data.regular_log import END, LOG, at, deliver, show, write_first


def build(raw: Path, out: Path, base: Base | None = None) -> list[str]:
    said: list[str] = []
    config = RunConfig(data=DataConfig(num_shards=3))
    build_store(config, LOG.spec(), (raw, out), said.append, in_process, base)
    return said


@pytest.mark.parametrize("many", [False, True])
def test_a_surface_that_was_unknown(tmp_path: Path, many: bool) -> None:
    """Day 4 brings a surface on every row, or on one; day 6 makes day 4 a training day."""
    raw = write_first(tmp_path / "raw")
    build(raw, tmp_path / "0")
    for day in (4, 5, 6, 7):
        users = range(20)
        shows = [show(day, u, place="new" if many or (day, u) == (4, 3) else "12"[u % 2]) for u in users]
        deliver(raw, f"day{day}", shows=shows, buys=[END | {"at": at(day, 60)}])
        said = build(raw, tmp_path / f"{day}", Base(tmp_path / ("0" if day == 4 else f"{day - 1}")))
        if any("building anew" in text for text in said):
            break
    last = tmp_path / f"{day}"
    manifest: dict[str, Any] = store_write.read_manifest(last)
    if many:
        assert day == 6 and any('"surface" has values that were unknown' in text for text in said)
        assert len(manifest["windows"]) == 1
    else:
        assert day == 7 and len(manifest["windows"]) == 5
    store = FeatureStore.open(last)
    shown = store.impressions([d for d in store.days if d >= store.days[4]])
    names = {store.schema.surfaces[c] for c in shown.surface.tolist()}
    assert names == ({"new"} if many else {"feed", "stories", "<unknown>"})
