"""The pure parts of the loop: which models are trained, what a summary counts, who becomes champion, what is named."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gem.config import GateConfig, ModelConfig, RunConfig, TrainConfig, TransferConfig
from gem.errors import ConfigError, GateError, GemError, TrainingError
from gem.lineage.gates import GateRecord, TaskScore
from gem.recipes import tiny
from pipelines.closing import history_histogram, next_commands
from pipelines.cluster import Cluster, result_of
from pipelines.console import Console
from pipelines.loop import Loop, ended, facts, load_dataset
from pipelines.model_stages import SHARED, student_tasks
from pipelines.promote import promote
from pipelines.stage import StageResult
from pipelines.train_workers import WorkerGroup

NAME = "own-gem"


class Recorder:
    """A registry that remembers what it was asked, with at most one champion per model."""

    def __init__(self, champion: str = "", refuses: str = "") -> None:
        self.champion_hash, self.refuses = champion, refuses
        self.promoted: list[tuple[str, str, str | None]] = []
        self.ends: list[tuple[str, str]] = []

    def start_child(self, parent: str, name: str) -> str:
        return f"run-{name}"

    def register(self, bundle: Path, bundle_hash: str, run_id: str, dataset: str) -> Any:
        return SimpleNamespace(version="7", run_id=run_id)

    def champion(self, name: str) -> Any:
        return SimpleNamespace(version="6", bundle_hash=self.champion_hash) if self.champion_hash else None

    def promote(self, name: str, version: str, expected: str | None, decision: Any, who: str) -> None:
        if self.refuses:
            raise GateError(self.refuses)
        self.promoted.append((name, version, expected))

    def log_metrics(self, run_id: str, metrics: Any) -> None:
        pass

    def end(self, run_id: str, status: str = "FINISHED") -> None:
        self.ends.append((run_id, status))


def record(bundle_hash: str, ne: float, rows: str = "rows", calibration: float = 1.0) -> dict[str, Any]:
    return GateRecord(NAME, bundle_hash, rows, {"click": TaskScore(ne, calibration, 0.7, 1000)}).to_dict()


def decided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, result: dict[str, Any], registry: Recorder
) -> dict[str, Any]:
    """What the promote stage says of one model with this evaluation."""
    monkeypatch.setattr("pipelines.promote.results_of", lambda stage: {NAME: result})
    spec: Any = SimpleNamespace(name="own")
    loop = Loop(RunConfig(gates=GateConfig()), spec, tmp_path, tmp_path, Console(), Cluster(), registry, "parent")  # type: ignore[arg-type]
    loop.done = {
        "pretrain": StageResult("pretrain", tmp_path, "k", False, 1.0, {"bundles": {NAME: "new"}}),
        "distill": StageResult("distill", tmp_path, "k", False, 1.0, {"bundles": {}}),
        "evaluate": StageResult("evaluate", tmp_path, "k", False, 1.0, {}),
    }
    loop.runs_of["pretrain"] = "run-pretrain"
    out = promote(loop)
    assert (out["rows_in"], out["rows_out"]) == (1, int(out["models"][NAME]["promoted"]))
    assert registry.ends == [("run-promote", "FINISHED")] and out["seconds"] >= 0
    model: dict[str, Any] = out["models"][NAME]
    assert (model["version"], model["run_id"], model["hash"]) == ("7", "run-pretrain", "new")
    return model


def test_a_first_good_model_becomes_champion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Recorder()
    model = decided(tmp_path, monkeypatch, {"gate": record("new", 0.9)}, registry)
    assert model["promoted"] and registry.promoted == [(NAME, "7", None)]


@pytest.mark.parametrize(
    ("result", "promoted", "says"),
    [
        ({"gate": record("new", 1.1)}, False, "refused: click NE 1.1000, must be below 1"),
        ({"gate": record("new", 0.9, calibration=1.3)}, False, "refused: click calibration 1.300"),
        ({"gate": record("new", 0.9), "champion": record("old", 0.8)}, False, "refused: click NE +12.50% against"),
        ({"gate": record("new", 0.8), "champion": record("old", 0.9)}, True, "click NE -11.11% against the champion"),
        ({"gate": record("new", 0.9), "champion": record("old", 0.8, rows="other")}, True,
         "not compared with the champion: the champion's data have other rows"),
        ({"gate": record("new", 0.9), "champion": None, "champion_note": "its store is gone"}, True,
         "not compared with the champion: its store is gone"),
        ({"gate": record("new", 1.1), "champion": None, "champion_note": "its store is gone"}, False,
         "not compared with the champion: its store is gone"),
    ],
)  # fmt: skip
def test_gates_decide_beside_a_champion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, result: dict[str, Any], promoted: bool, says: str
) -> None:
    registry = Recorder("old")
    model = decided(tmp_path, monkeypatch, result, registry)
    assert model["promoted"] is promoted
    assert any(reason.startswith(says) for reason in model["reasons"]), model["reasons"]
    assert registry.promoted == ([(NAME, "7", "6")] if promoted else [])


def test_the_champion_itself_is_not_promoted_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Recorder("new")
    model = decided(tmp_path, monkeypatch, {"gate": record("new", 5.0)}, registry)
    assert model["promoted"] and model["reasons"] == ["it is the champion already"] and not registry.promoted


def test_a_lost_race_is_a_refusal_not_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = decided(tmp_path, monkeypatch, {"gate": record("new", 0.9)}, Recorder(refuses="another was faster"))
    assert not model["promoted"] and model["reasons"] == ["refused: another was faster"]


@pytest.mark.parametrize(("error", "status"), [(KeyboardInterrupt(), "KILLED"), (GemError("x"), "FAILED")])
def test_runs_end_as_what_happened_to_them(error: BaseException, status: str) -> None:
    registry: Any = Recorder()
    with pytest.raises(type(error)), ended(registry, "run"):
        raise error
    assert registry.ends == [("run", status)]
    with ended(registry, "other"):
        pass
    assert len(registry.ends) == 1


# ---- which models ----------------------------------------------------------------------------------


def test_students_start_from_the_shared_one_and_learn_from_the_teacher() -> None:
    config = tiny()
    shared, *rest = student_tasks(config, {"d-vm-feed": "feed", "d-vm-other": "other"})
    assert (shared.name, shared.group, shared.start_from) == (SHARED, "", "")
    assert shared.train == config.student_train and shared.transfer == config.transfer
    assert [(t.name, t.group, t.start_from) for t in rest] == [
        ("d-vm-feed", "feed", SHARED), ("d-vm-other", "other", SHARED)
    ]  # fmt: skip
    assert all(t.train == config.finetune and t.model == config.student for t in (*rest,))
    alone = student_tasks(RunConfig(transfer=TransferConfig(enabled=False)), {"d-vm-feed": "feed"})
    assert {t.transfer for t in alone} == {None}


def test_worker_groups_travel_as_plain_values() -> None:
    group = WorkerGroup("s", "o", "c", student_tasks(tiny(), {"a": "b"}), "k", "hash", 3)
    assert WorkerGroup.from_dict(group.to_dict()) == group
    task = WorkerGroup.from_dict(group.to_dict()).tasks[1]
    assert isinstance(task.model, ModelConfig) and isinstance(task.train, TrainConfig)


# ---- what is said ----------------------------------------------------------------------------------


@pytest.mark.parametrize("cuts", [[0, 0, 1, 4, 5, 9, 10, 999, 1000, 9_999, 10_000, 500_000], [0, 0], [3, 10, 10]])
def test_history_histogram_counts_every_impression_once(cuts: list[int]) -> None:
    seen = SimpleNamespace(cut=np.array(cuts))
    store: Any = SimpleNamespace(days=("a", "b"), impressions=lambda days: seen)
    found = history_histogram(store)
    edges = found["edges"]
    assert edges[0] == 0 and edges == sorted(set(edges)) and edges[-1] > max(cuts) >= edges[-2]
    want = [sum(low <= c < high for c in cuts) for low, high in itertools.pairwise(edges)]
    assert found["counts"] == want and sum(want) == len(cuts)


@pytest.mark.parametrize(
    ("dataset", "folder", "served", "want"),
    [
        ("generated", "", True, ["make serve", "make lineage NAME=x-gem", "make tune"]),
        ("kuairand", "raw", True, ["make serve DATASET=kuairand", "make lineage NAME=x-gem",
                                   "make tune DATASET=kuairand DATA_DIR=raw"]),
        ("my shop.yaml", "raw", False, ["make lineage NAME=x-gem", "make tune DATASET='my shop.yaml' DATA_DIR=raw"]),
    ],
)  # fmt: skip
def test_next_commands_can_be_typed(dataset: str, folder: str, served: bool, want: list[str]) -> None:
    data = SimpleNamespace(dataset=dataset, data_dir=folder)
    loop: Any = SimpleNamespace(config=SimpleNamespace(data=data), model_name=lambda: "x-gem")
    assert next_commands(loop, served) == want


def test_facts_of_a_stage() -> None:
    assert facts({"rows_out": 12_345, "headline": "all good"}) == ["12,345 rows", "all good"]
    assert facts({"rows_out": 0}) == ["0 rows"] and facts({}) == []


@pytest.mark.parametrize(
    ("group", "name"),
    [("", "own-gem"), ("feed", "own-vm-feed"), ("Tab 1/a", "own-vm-tab-1-a"), ("///", "own-vm-group")],
)
def test_names_of_models_can_be_registered(tmp_path: Path, group: str, name: str) -> None:
    spec: Any = SimpleNamespace(name="own")
    loop = Loop(RunConfig(), spec, tmp_path, tmp_path, Console(), Cluster(), Recorder())  # type: ignore[arg-type]
    assert loop.model_name(group) == name


# ---- data sets and clusters ------------------------------------------------------------------------


def test_data_sets_by_name_and_by_file(repo_root: Path, tmp_path: Path) -> None:
    spec, folder = load_dataset(RunConfig())
    assert (spec.name, folder) == ("generated", None)
    own = replace(RunConfig().data, dataset=str(repo_root / "pipelines/datasets/kuairand.yaml"), data_dir=str(tmp_path))
    spec, folder = load_dataset(RunConfig(data=own))
    assert (spec.name, folder) == ("kuairand", tmp_path)
    with pytest.raises(ConfigError, match=r'"kuairnd" is neither a spec file nor one of .* Did you mean "kuairand"\?'):
        load_dataset(RunConfig(data=replace(own, dataset="kuairnd")))


class _FakeRay:
    """As much of Ray as a resource check and a `get` need."""

    class exceptions:  # the name Ray uses
        class RayTaskError(Exception):
            def __init__(self, cause: Exception) -> None:
                super().__init__("ray::f() (pid=1)\n  Traceback ...")
                self.cause = cause

    def __init__(self, answer: Any = None) -> None:
        self.answer = answer

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 4.0}

    def get(self, future: Any) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def test_a_worker_group_must_fit_into_the_cluster() -> None:
    cluster = Cluster()
    cluster._ray = _FakeRay()
    cluster.check_cpus(4, 1)
    cluster.check_cpus(2, 2)
    with pytest.raises(TrainingError, match=r"5 workers x 1 CPU = 5, the cluster has 4; .*num_workers=4"):
        cluster.check_cpus(5, 1)
    with pytest.raises(TrainingError, match=r"3 workers x 1\.5 CPU = 4\.5, the cluster has 4; .*num_workers=2"):
        cluster.check_cpus(3, 1.5)
    with pytest.raises(TrainingError, match="0 workers"):
        cluster.check_cpus(0, 1)


def test_errors_of_our_own_come_back_without_rays_text() -> None:
    assert result_of(_FakeRay(5), None) == 5
    wrapped = _FakeRay.exceptions.RayTaskError
    with pytest.raises(TrainingError, match=r"^plain words$"):
        result_of(_FakeRay(wrapped(TrainingError("plain words"))), None)
    with pytest.raises(wrapped, match="Traceback"):
        result_of(_FakeRay(wrapped(ValueError("a bug"))), None)
