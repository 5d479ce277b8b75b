"""A training worker that dies is replaced by Ray Train, and the new group goes on from the last checkpoint."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file

from gem.config import TrainConfig
from gem.errors import TrainingError
from pipelines.cluster import Cluster
from pipelines.console import Console
from pipelines.train_workers import TrainTask, WorkerGroup
from pipelines.training import fit
from tests.unit.serving.tiny import STUDENT, Tiny, build_tiny

NAME = "tiny-gem"
TRAIN = TrainConfig(batch_impressions=16, checkpoint_every_steps=2)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return build_tiny(tmp_path_factory.mktemp("tiny"))


def group_of(tiny: Tiny, folder: Path, train: TrainConfig = TRAIN) -> WorkerGroup:
    tasks = (TrainTask(NAME, replace(STUDENT, max_history=8), train),)
    return WorkerGroup(str(tiny.store_path), str(folder / "finished"), str(folder / "checkpoints"), tasks)


class Killer(threading.Thread):
    """Ends one worker of this runtime with SIGKILL as soon as `ready()`; `killed` is its pid."""

    def __init__(self, ready: Callable[[], bool]) -> None:
        super().__init__(daemon=True)
        self.ready, self.killed, self.step = ready, 0, ""
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.02):
            if not self.ready():
                continue
            workers = training_workers()
            if workers:
                self.killed = workers[-1].pid
                workers[-1].kill()
                return


def training_workers() -> list[psutil.Process]:
    """Ray Train's worker processes among the descendants of this process."""
    found = []
    for process in psutil.Process(os.getpid()).children(recursive=True):
        try:
            if any("RayTrainWorker" in word for word in process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return sorted(found, key=lambda p: p.pid)


def test_training_goes_on_from_the_checkpoint(ray_session: Any, tiny: Tiny, tmp_path: Path) -> None:
    group = group_of(tiny, tmp_path)
    folder = Path(group.checkpoints) / NAME
    killer = Killer(lambda: any(folder.glob("step-*")))
    on_ctrl_c = signal.getsignal(signal.SIGINT)
    killer.start()
    try:
        results = fit(Cluster(), Console(), group, 2, tmp_path / "ray")
    finally:
        killer.over.set()
        killer.join(10)
    assert signal.getsignal(signal.SIGINT) is on_ctrl_c, "Ray Train's handler does not stay behind"
    assert killer.killed and not psutil.pid_exists(killer.killed)
    figures = results[NAME]["record"]
    assert 0 < figures["resumed_from_step"] < figures["steps"], "it went on, it did not begin again"
    assert figures["resumed_from_step"] % TRAIN.checkpoint_every_steps == 0 and figures["skipped_steps"] == 0
    weights = load_file(str(Path(group.out) / f"{NAME}.safetensors"))
    assert weights and all(bool(w.isfinite().all()) for w in weights.values())


def test_an_error_in_a_worker_is_one_short_sentence(
    ray_session: Any, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelines.training.MAX_FAILURES", 0)
    group = replace(group_of(tiny, tmp_path), store=str(tmp_path / "gone"))
    with pytest.raises(TrainingError) as caught:
        fit(Cluster(), Console(), group, 1, tmp_path / "ray")
    said = str(caught.value)
    assert said.startswith("worker 0 failed: StoreError: ") and "gone" in said and "\n" not in said, said
