"""Stages that make models: pretrain (the foundation model) and distill (all vertical models together)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gem.config import RunConfig
from gem.data.store import FeatureStore
from gem.lineage.bundle import BundleInfo, Parents, save_bundle, store_files
from pipelines.console import Stage
from pipelines.loop import MODEL_CODE, Loop, code_key, plain
from pipelines.stage import StageResult
from pipelines.train_workers import TrainTask, WorkerGroup
from pipelines.training import fit

BUNDLES = "bundles"
SHARED = "shared-student"


def pretrain(loop: Loop) -> StageResult:
    """Train the foundation model on all surfaces."""
    config = loop.config
    name = loop.model_name()

    def build(out: Path, stage: Stage) -> dict[str, Any]:
        store = FeatureStore.open(loop.store)
        tasks = (TrainTask(name, config.model, config.train),)
        group = _worker_group(loop, out, "pretrain", tasks, config.train.num_workers)
        results = fit(loop.cluster, loop.console, group, config.train.num_workers, out / "ray")
        _save(loop, group, out, results, loop.parents(store.hash))
        return _close(out, group, results)

    parts = {
        "store": loop.done["preprocess"].key, "model": plain(config.model), "train": plain(config.train),
        "code": code_key(MODEL_CODE),
    }  # fmt: skip
    return loop.stage("pretrain", parts, build)


def distill(loop: Loop) -> StageResult:
    """Train the vertical models with the teacher's knowledge: a shared student on all surfaces, then one for each.

    The shared student gives small surfaces what the others teach; it is a start, not a model that is served.
    """
    config = loop.config

    def build(out: Path, stage: Stage) -> dict[str, Any]:
        store = FeatureStore.open(loop.store)
        teacher_hash = loop.done["pretrain"].record["bundles"][loop.model_name()]
        tasks = student_tasks(config, {loop.model_name(g): g for g in store.schema.surface_groups})
        distils = config.transfer.enabled
        group = _worker_group(loop, out, "distill", tasks, config.student_train.num_workers, teacher_hash * distils)
        results = fit(loop.cluster, loop.console, group, config.student_train.num_workers, out / "ray")
        teacher = (teacher_hash, bundle_path(loop, "pretrain", loop.model_name())) if distils else None
        _save(loop, group, out, results, loop.parents(store.hash, teacher))
        return _close(out, group, results)

    parts = {
        "knowledge": loop.done["generate-knowledge"].key, "student": plain(config.student),
        "train": plain(config.student_train), "finetune": plain(config.finetune), "transfer": plain(config.transfer),
        "code": code_key(MODEL_CODE),
    }  # fmt: skip
    return loop.stage("distill", parts, build)


def student_tasks(config: RunConfig, groups: Mapping[str, str]) -> tuple[TrainTask, ...]:
    """The shared student, then a vertical model per group (name -> surface group) that starts from it."""
    transfer = config.transfer if config.transfer.enabled else None
    shared = TrainTask(SHARED, config.student, config.student_train, transfer=transfer)
    return (shared, *(TrainTask(n, config.student, config.finetune, g, transfer, SHARED) for n, g in groups.items()))


def bundle_path(loop: Loop, stage: str, name: str) -> Path:
    """Folder of a bundle that a finished stage made."""
    return loop.done[stage].path / BUNDLES / name


def _worker_group(
    loop: Loop, out: Path, stage: str, tasks: tuple[TrainTask, ...], workers: int, teacher_hash: str = ""
) -> WorkerGroup:
    # Checkpoints outlive an interrupted build: they stand outside its folder, under the same key.
    checkpoints = (loop.root / "checkpoints" / f"{stage}-{out.name.split('-')[1]}").absolute()
    return WorkerGroup(
        store=str(loop.store.absolute()),
        out=str(checkpoints / "finished"),
        checkpoints=str(checkpoints),
        tasks=tasks,
        knowledge=str(loop.done["generate-knowledge"].path.absolute()) if teacher_hash else "",
        teacher_hash=teacher_hash,
        threads=max((os.cpu_count() or 1) // workers, 1),
    )


def _save(loop: Loop, group: WorkerGroup, out: Path, results: Mapping[str, Any], parents: Parents) -> None:
    """Write a bundle per trained model from what rank 0 left behind; adds its hash to the results."""
    from safetensors.torch import load_file

    schema = FeatureStore.open(loop.store, verify=False).schema
    for task in group.tasks:
        if task.name == SHARED:
            continue
        result = results[task.name]
        info = BundleInfo(
            name=task.name, kind="vertical" if task.group else "foundation", group=task.group, schema=schema,
            config=loop.config, calibration=result["calibration"], metrics=result["record"], parents=parents,
        )  # fmt: skip
        weights = load_file(str(Path(group.out) / f"{task.name}.safetensors"))
        result["hash"] = save_bundle(out / BUNDLES / task.name, info, weights, store_files(loop.store))


def _close(out: Path, group: WorkerGroup, results: Mapping[str, Any]) -> dict[str, Any]:
    """The stage record; working files go."""
    shutil.rmtree(out / "ray", ignore_errors=True)
    shutil.rmtree(group.checkpoints, ignore_errors=True)
    records = {name: r["record"] for name, r in results.items()}
    rows = sum(r["train_rows"] for r in records.values())
    seconds = sum(r["train_seconds"] for r in records.values())
    waited = max(r["data_wait_share"] for r in records.values())
    fullest = max(r["tokens_max_over_mean"] for r in records.values())
    return {
        "rows_in": rows,
        "rows_out": rows,
        "quarantined": 0,
        "bundles": {name: r["hash"] for name, r in results.items() if "hash" in r},
        "train": records,
        "rows_per_s": round(sum(r["train_rows"] for r in records.values()) / max(seconds, 1e-9), 1),
        "data_wait_share": waited,
        "tokens_max_over_mean": fullest,
        "tokens_max_over_mean_worst": max(r["tokens_max_over_mean_worst"] for r in records.values()),
        "headline": f"waited {waited:.1%} for data, tokens max/mean {fullest:.2f}",
    }
