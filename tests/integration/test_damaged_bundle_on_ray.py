"""A bundle that was changed on disk stops the stages that read it on Ray with our own short message."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gem.config import RunConfig
from gem.data.store import FeatureStore
from gem.errors import BundleError
from gem.lineage.bundle import BundleInfo, Parents, save_bundle, store_files
from gem.metrics.recalibration import PlattCalibration
from gem.model.ranker import Ranker
from pipelines.cluster import Cluster
from pipelines.console import Console
from pipelines.evaluate import evaluate
from pipelines.generate_knowledge import generate_knowledge
from pipelines.loop import Loop
from pipelines.stage import StageResult
from tests.unit.serving.tiny import STUDENT, Tiny, build_tiny

NAME = "generated-gem"


class NoRegistry:
    """Stands where the registry of a loop stands, with no champion."""

    def champion(self, name: str) -> None:
        return None

    def start_child(self, parent: str, name: str) -> str:
        return ""

    def end(self, run_id: str, status: str = "") -> None:
        pass


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return build_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def loop(tiny: Tiny, tmp_path: Path) -> Loop:
    """A loop whose preprocess and pretrain are done: a real store and a whole foundation model."""
    store, config = tiny.store, RunConfig(model=STUDENT)
    calibration = {t.name: PlattCalibration(1.0, 0.0, dict.fromkeys(store.schema.surfaces, 0.0)).to_dict()
                   for t in store.schema.tasks}  # fmt: skip
    parents = Parents(data=store.hash, data_path=str(store.path), commit="0" * 40, lock="1" * 64, code="2" * 64)
    info = BundleInfo(NAME, "foundation", "", store.schema, config, calibration, {}, parents)
    bundle = tmp_path / "pretrain" / "bundles" / NAME
    digest = save_bundle(bundle, info, Ranker(store.schema, STUDENT).state_dict(), store_files(store.path))
    made = Loop(config, tiny.spec, tiny.raw, tmp_path / "runs", Console(), Cluster(), NoRegistry())  # type: ignore[arg-type]
    made.done = {
        "preprocess": StageResult("preprocess", tiny.store_path, "k", False, 0.0, {"store_hash": store.hash}),
        "pretrain": StageResult("pretrain", tmp_path / "pretrain", "k", False, 0.0, {"bundles": {NAME: digest}}),
        "distill": StageResult("distill", tmp_path / "distill", "k", False, 0.0, {"bundles": {}}),
    }
    return made


def turn_a_bit(loop: Loop) -> None:
    weights = loop.done["pretrain"].path / "bundles" / NAME / "weights.safetensors"
    data = bytearray(weights.read_bytes())
    data[-5] ^= 1
    weights.write_bytes(data)


def test_whole_bundles_pass(ray_session: Any, loop: Loop) -> None:
    store = FeatureStore.open(loop.store)
    assert generate_knowledge(loop).record["rows_out"] == len(store.impressions(store.days))
    assert evaluate(loop).record["rows_out"] > 0


@pytest.mark.parametrize("stage", [generate_knowledge, evaluate])
def test_damaged_bundle(ray_session: Any, loop: Loop, stage: Any) -> None:
    turn_a_bit(loop)
    with pytest.raises(BundleError) as caught:
        stage(loop)
    said = str(caught.value)
    assert "weights.safetensors" in said and "\n" not in said, said
    assert not [p for p in loop.root.glob("*/*") if p.name != ".locks"], "nothing half-made is visible"
