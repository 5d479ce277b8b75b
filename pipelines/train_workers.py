"""What runs inside the Ray Train workers: the jobs of one stage, one after the other, on all ranks.

Small students are trained in one worker group, so that the cost of starting workers is paid once.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gem.config import ModelConfig, TrainConfig, TransferConfig

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from gem.data.store import FeatureStore, Impressions
    from gem.training.loop import Trained

PROGRESS = "progress.json"
PEER_LOST = ("Connection reset by peer", "Connection closed by peer")  # of gloo, when another rank has ended
PEER_LOST_S = 5.0  # in which the one who ended it, or Ray, ends this rank too


@dataclass(frozen=True)
class TrainTask:
    """One model of a stage, as plain values that travel to the workers.

    group "" = all surfaces. start_from: name of an earlier task of the stage whose weights it starts from.
    """

    name: str
    model: ModelConfig
    train: TrainConfig
    group: str = ""
    transfer: TransferConfig | None = None
    start_from: str = ""


@dataclass(frozen=True)
class WorkerGroup:
    """What every worker needs to know. Paths are visible from all workers."""

    store: str
    out: str  # rank 0 writes <name>.safetensors and <name>.json here
    checkpoints: str
    tasks: tuple[TrainTask, ...]
    knowledge: str = ""
    teacher_hash: str = ""
    threads: int = 1

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> WorkerGroup:
        tasks = tuple(
            TrainTask(
                t["name"], ModelConfig(**t["model"]), TrainConfig(**t["train"]), t["group"],
                TransferConfig(**t["transfer"]) if t["transfer"] else None, t["start_from"],
            )
            for t in raw["tasks"]
        )  # fmt: skip
        return cls(**{**raw, "tasks": tasks})


def train_worker(raw: dict[str, Any]) -> None:
    """Entry point of one Ray Train worker (process group: gloo on CPU)."""
    import ray.train
    import torch

    from pipelines.quiet import install_filters

    install_filters()
    group = WorkerGroup.from_dict(raw)
    torch.set_num_threads(group.threads)
    try:
        run_tasks(group)
    except RuntimeError as error:
        if any(said in str(error) for said in PEER_LOST):
            # Not this rank's error: where the group was stopped or another rank failed, that is what should be read.
            time.sleep(PEER_LOST_S)
        raise
    ray.train.report({})


def run_tasks(group: WorkerGroup) -> None:
    """Train every task. Needs an initialised process group; collective."""
    import numpy as np
    import torch.distributed as dist

    from gem.data.store import FeatureStore
    from gem.training.data import StoreReader
    from gem.training.loop import Job, train

    store = FeatureStore.open(Path(group.store), verify=False)  # the driver has verified it
    split = store.split
    timelines = store.timelines()
    impressions = store.impressions([*split.train_days, split.validation_day])
    knowledge = _knowledge(group, store, impressions)
    for number, task in enumerate(group.tasks):
        if (Path(group.out) / f"{task.name}.json").exists():
            continue  # finished before a restart of the workers
        in_group = rows_of_group(store, impressions, task.group)
        is_train = impressions.day < len(split.train_days)
        rows, validation = np.flatnonzero(in_group & is_train), np.flatnonzero(in_group & ~is_train)
        reader = StoreReader(store, timelines, impressions, task.model.max_history, knowledge, task.model.align)
        folder = Path(group.checkpoints) / task.name
        start = _weights(group, task.start_from)
        job = Job(task.name, task.model, task.train, rows, task.transfer, checkpoint_dir=folder, start_from=start)

        def report(done: int, total: int, figures: dict[str, float], task: TrainTask = task, at: int = number) -> None:
            if dist.get_rank() == 0:
                _write_progress(group, task, at, (done, total), figures)

        trained = train(job, store.schema, reader, report)
        if dist.get_rank() == 0:
            _finish(group, task, store, reader, trained, rows, validation)
        dist.barrier()


def rows_of_group(store: FeatureStore, impressions: Impressions, group: str) -> NDArray[np.bool_]:
    """Mask [N] of the impressions on the surfaces of a vertical model's group; "" = all."""
    import numpy as np

    if not group:
        return np.ones(len(impressions), bool)
    index = store.schema.surface_groups.index(group)
    mask: NDArray[np.bool_] = np.asarray(store.schema.group_of_surface)[impressions.surface] == index
    return mask


def _weights(group: WorkerGroup, name: str) -> Any:
    """What an earlier task of this stage left behind, or None."""
    from safetensors.torch import load_file

    return load_file(str(Path(group.out) / f"{name}.safetensors")) if name else None


def _knowledge(group: WorkerGroup, store: FeatureStore, impressions: Impressions) -> Any:
    from gem.training.data import Knowledge
    from gem.transfer.knowledge import read_records

    if not group.knowledge:
        return None
    found = read_records(Path(group.knowledge), store.schema, impressions.impression_id, group.teacher_hash)
    return Knowledge(found.p, found.known)


def _finish(
    group: WorkerGroup,
    task: TrainTask,
    store: FeatureStore,
    reader: Any,
    trained: Trained,
    rows: NDArray[np.int64],
    validation: NDArray[np.int64],
) -> None:
    """Rank 0: calibrate on the validation day and write what a bundle needs; the JSON comes last."""
    from safetensors.torch import save_file

    from gem.model.calibration import calibration_to_dict, day_noise, fit_calibration
    from gem.model.ranker import Ranker, num_parameters
    from gem.training.predict import predict

    model = Ranker(store.schema, task.model)
    model.load_state_dict(trained.weights)
    imp = reader.impressions
    scores = predict(model, reader, validation)
    noise = day_noise(store.schema, _outcomes(imp, rows))
    calibration = fit_calibration(store.schema, scores.logits, _outcomes(imp, validation), noise)
    out = Path(group.out)
    save_file(trained.weights, str(out / f"{task.name}.safetensors"))
    result = {
        "calibration": calibration_to_dict(calibration),
        "record": {
            **trained.record,
            "parameters": num_parameters(model),
            "measured_on": store.split.validation_day,
            "tasks": _measured(store, imp.take(validation), scores.logits, calibration),
        },
        "day_noise": noise,
    }
    beside = out / f".{task.name}.json"
    beside.write_text(json.dumps(result))
    beside.rename(out / f"{task.name}.json")


def _measured(store: FeatureStore, impressions: Impressions, logits: Any, calibration: Any) -> dict[str, Any]:
    """Metrics on the validation day by task; calibration is flattered, since the layer was fitted there."""
    from gem.metrics.evaluate import evaluate
    from gem.model.calibration import calibrated_probabilities

    p = calibrated_probabilities(store.schema, logits, impressions.surface.astype("int64"), calibration)
    out: dict[str, Any] = {}
    for k, task in enumerate(store.schema.tasks):
        use = impressions.mask[:, k] > 0
        found = evaluate(impressions.user[use], impressions.labels[use, k], p[use, k], num_bootstrap=0)
        out[task.name] = {name: m.value for name, m in found.items()} | {"rows": int(use.sum())}
    return out


def _outcomes(impressions: Impressions, at: NDArray[np.int64]) -> Any:
    from gem.model.calibration import Outcomes

    return Outcomes(
        impressions.labels[at], impressions.mask[at], impressions.surface[at].astype("int64"),
        impressions.day[at].astype("int64"),
    )  # fmt: skip


def _write_progress(
    group: WorkerGroup, task: TrainTask, number: int, steps: tuple[int, int], figures: dict[str, float]
) -> None:
    beside = Path(group.checkpoints) / f".{PROGRESS}.{os.getpid()}"
    beside.parent.mkdir(parents=True, exist_ok=True)
    what = {"name": task.name, "number": number, "of": len(group.tasks), "done": steps[0], "total": steps[1], **figures}
    beside.write_text(json.dumps(what))
    beside.rename(Path(group.checkpoints) / PROGRESS)
