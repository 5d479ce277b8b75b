"""Running a worker group on Ray Train from the driver, with progress and a resource check before."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gem.errors import TrainingError
from pipelines.cluster import Cluster
from pipelines.console import Console
from pipelines.train_workers import PROGRESS, WorkerGroup, train_worker

MAX_FAILURES = 2  # worker groups restarted from the last checkpoint


def fit(cluster: Cluster, console: Console, group: WorkerGroup, num_workers: int, run_dir: Path) -> dict[str, Any]:
    """Train all tasks of the group on `num_workers` Ray Train workers; returns name -> result JSON.

    Raises TrainingError with the first worker's error, or before the start if the CPUs do not suffice.
    """
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    cluster.ray()
    cluster.check_cpus(num_workers, 1)
    for folder in (group.out, group.checkpoints):
        Path(folder).mkdir(parents=True, exist_ok=True)
    trainer = TorchTrainer(
        train_worker,
        train_loop_config=group.to_dict(),
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=num_workers, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(
            # A new name for every attempt: Ray silently resumes a run of the same name. Our own checkpoints resume.
            name=f"{run_dir.name}-{os.getpid()}-{os.urandom(4).hex()}",
            storage_path=str(run_dir.absolute()),
            failure_config=FailureConfig(max_failures=MAX_FAILURES),
        ),
    )
    with _watch(console, Path(group.checkpoints) / PROGRESS):
        try:
            with _no_placement_group_cleaner(cluster.owned), _interruptible():
                trainer.fit()
        except Exception as error:
            raise TrainingError(_first_error(error)) from error
    return {t.name: json.loads((Path(group.out) / f"{t.name}.json").read_text()) for t in group.tasks}


@contextmanager
def _no_placement_group_cleaner(own_cluster: bool) -> Iterator[None]:
    """Leave out Ray Train's placement-group cleaner on a runtime that ends with this process.

    It asks the dashboard for the state of the driver, and our own runtime has none: a thread of it dies with a
    traceback in every run. What it would clean up goes with the runtime.
    """
    import ray.train.v2.api.data_parallel_trainer as trainers
    from ray.train.v2._internal.execution.callback import RayTrainCallback

    name = "PlacementGroupCleanerCallback"
    original = getattr(trainers, name, None)
    if not own_cluster or original is None:
        yield
        return
    setattr(trainers, name, RayTrainCallback)
    try:
        yield
    finally:
        setattr(trainers, name, original)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Keep Ctrl-C an interrupt. Ray Train's own handler ends the process with status 0, and stays after the run."""
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    except SystemExit:
        raise KeyboardInterrupt from None
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, before)


def _first_error(error: Exception) -> str:
    """The workers' own error, without Ray's wrapping."""
    failures = getattr(error, "worker_failures", None) or {}
    for rank, failure in sorted(failures.items()):
        return f"worker {rank} failed: {type(failure).__name__}: {failure}"
    return f"training failed: {type(error).__name__}: {error}"


@contextmanager
def _watch(console: Console, file: Path) -> Iterator[None]:
    """Show what rank 0 writes about its progress; Ray Train's `fit` blocks meanwhile."""
    stop = threading.Event()
    file.unlink(missing_ok=True)

    def run() -> None:
        shown: dict[str, Any] = {}
        console.line("starting workers")
        while not stop.wait(0.5) and not shown:
            shown = _read(file)
        while not stop.is_set():
            name = shown["name"]
            with console.progress(f"{name} ({shown['number'] + 1}/{shown['of']})", shown["total"], "steps") as bar:
                while not stop.wait(0.5) and shown["name"] == name:
                    bar.update(shown["done"], f"loss {shown['loss']:.4f}  {shown['rows_per_s']:,.0f} rows/s")
                    shown = _read(file) or shown

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(timeout=5)


def _read(file: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(file.read_text())
        return found
    except (OSError, ValueError):
        return {}
