"""One trial: a lightweight variant, trained by the loop's own training code, scored on the validation day.

Light in two ways: the model has the size of the recipe's student (but for the fields the sweep varies),
and only a share of the users is read, for training and validation alike. The test day is never opened.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gem.config import ModelConfig, RunConfig, TrainConfig, apply_overrides
from gem.errors import TrainingError
from tuning.judgement import PARTS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from gem.training.data import StoreReader

VALIDATION_ROWS = 50_000  # at most so many (whole users) are scored per report


@dataclass(frozen=True)
class TrialJob:
    """What all trials of a sweep share, as plain values that travel to the workers."""

    store: str  # absolute path, visible from all workers
    config: dict[str, Any]  # RunConfig.to_dict()
    settings: list[dict[str, Any]]  # trial number -> {config path: value}
    users: float  # share of the users that is read
    seed: int  # of that share
    scratch: str  # folder for checkpoints; the driver removes it, also after a killed worker


Report = Callable[[dict[str, float]], None]


def run_trial(config: dict[str, Any], job: TrialJob) -> None:
    """Entry point of one Ray Tune trial. config: {"number": position in job.settings}."""
    import torch
    from ray import tune

    from pipelines.quiet import install_filters

    install_filters()
    torch.set_num_threads(1)  # one CPU per trial, whatever the machine has
    train_variant(job, job.settings[config["number"]], tune.report)


def train_variant(job: TrialJob, setting: Mapping[str, Any], report: Report) -> None:
    """Train one variant and call `report` after each part of the data.

    A report has: ne (first task), ne_<task>, percent (of the training rows), step, steps, rows, validation_rows,
    rows_per_s. `ne` is NaN, and the last report, if the model's scores are no longer finite.
    Raises TrainingError for data that cannot be judged. Owns a process group of one for its time.
    """
    import torch.distributed as dist

    from gem.data.store import FeatureStore
    from gem.training.data import StoreReader
    from gem.training.loop import Job, train

    config = apply_overrides(RunConfig.from_dict(job.config), [f"{p}={v}" for p, v in setting.items()])
    store = FeatureStore.open(Path(job.store), verify=False)  # the driver has verified it
    split = store.split
    impressions = store.impressions([*split.train_days, split.validation_day])
    is_train = impressions.day < len(split.train_days)
    rows, validation = select_rows(impressions.user, is_train, job.users, job.seed)
    model, training = light_model(config, setting), config.train
    reader = StoreReader(store, store.timelines(), impressions, model.max_history, align=model.align)
    judge = Judge(reader, model, validation)
    # A store in memory instead of an address: nothing outside this process takes part, no port is needed.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with tempfile.TemporaryDirectory(dir=job.scratch, ignore_cleanup_errors=True) as folder:
            training = light_training(training, plan_steps(reader, training, rows))
            watch = Watch(judge, Path(folder), report)
            job_of_trial = Job("trial", model, training, rows, checkpoint_dir=Path(folder))
            with contextlib.suppress(Diverged):
                done = train(job_of_trial, store.schema, reader, watch)
                watch.last(done.weights, done.record)
    finally:
        dist.destroy_process_group()  # the process may get another trial


def light_model(config: RunConfig, setting: Mapping[str, Any]) -> ModelConfig:
    """The student's size with the varied `model.` fields at the values tried."""
    fields = {p.removeprefix("model."): v for p, v in setting.items() if p.startswith("model.")}
    return dataclasses.replace(config.student, **fields)


def light_training(train: TrainConfig, steps: int) -> TrainConfig:
    """The training config with a checkpoint after each part of the data, to be scored."""
    return dataclasses.replace(train, num_workers=1, checkpoint_every_steps=max(math.ceil(steps / PARTS), 1))


def plan_steps(reader: StoreReader, train: TrainConfig, rows: NDArray[np.int64]) -> int:
    """How many steps training on `rows` takes."""
    from gem.training.plan import plan_epoch
    from gem.training.sampling import sample_rows

    rows = sample_rows(reader.impressions, rows, train).rows
    user, day = reader.impressions.user[rows].astype("int64"), reader.impressions.day[rows].astype("int64")
    common = {"batch_size": train.batch_impressions, "window_days": train.window_days, "seed": train.seed}
    return sum(len(plan_epoch(user, day, epoch=epoch, **common)) for epoch in range(train.epochs))


def select_rows(
    user: NDArray[np.int32], is_train: NDArray[np.bool_], share: float, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Positions of the training and the validation impressions of a random `share` of the users.

    user, is_train [N]. The same users for every trial of a sweep; validation is cut to `VALIDATION_ROWS` by leaving
    out whole users. Raises TrainingError if one of the two would be empty.
    """
    import numpy as np

    ticket = np.random.default_rng(seed).random(int(user.max()) + 1 if user.size else 0)[user]
    rows = np.flatnonzero(is_train & (ticket < share))
    candidates = int((~is_train).sum())
    kept = min(share, VALIDATION_ROWS / candidates) if candidates else share
    validation = np.flatnonzero(~is_train & (ticket < kept))
    for name, found in (("training", rows), ("validation", validation)):
        if not found.size:
            raise TrainingError(
                f"no {name} impressions among {share:.0%} of the users; read more of them with --users (at most 1)"
            )
    return rows, validation


class Diverged(Exception):
    """The model's scores are no longer finite; this has been reported, and training on would be in vain."""


class Judge:
    """Scores weights on the validation rows: {"ne": of the first task, "ne_<task>": of each}."""

    def __init__(self, reader: StoreReader, model: ModelConfig, validation: NDArray[np.int64]) -> None:
        from gem.metrics.metric import single_class_reason
        from gem.model.ranker import Ranker

        self.reader, self.validation = reader, validation
        self.ranker = Ranker(reader.store.schema, model)
        self.tasks = [t.name for t in reader.store.schema.tasks]
        known = reader.impressions.mask[validation, 0] > 0
        reason = single_class_reason(int(known.sum()), float(reader.impressions.labels[validation, 0][known].sum()))
        if reason:
            raise TrainingError(
                f"task {self.tasks[0]} cannot be judged on the validation day {reader.store.split.validation_day}: "
                f"{reason}; read more users (--users) or take another day (--set data.validation_day=...)"
            )

    def __call__(self, weights: dict[str, Any]) -> dict[str, float]:
        import numpy as np
        import torch

        from gem.metrics import normalized_entropy
        from gem.model.heads import log_probabilities
        from gem.training.predict import predict

        self.ranker.load_state_dict(weights)
        logits = predict(self.ranker, self.reader, self.validation).logits
        if not np.isfinite(logits).all():
            return {"ne": math.nan}
        p = log_probabilities(torch.from_numpy(logits), self.reader.store.schema).exp().numpy()
        labels, mask = (a[self.validation] for a in (self.reader.impressions.labels, self.reader.impressions.mask))
        out: dict[str, float] = {}
        for k, task in enumerate(self.tasks):
            known = mask[:, k] > 0
            value = normalized_entropy(labels[known, k], p[known, k]).value
            if value is not None:
                out[f"ne_{task}"] = value
        return {"ne": out[f"ne_{self.tasks[0]}"], **out}


class Watch:
    """Follows the training through its checkpoints: a new one is scored and reported.

    It is told of every tenth step, so a report comes up to ten steps after the part it is about; `step` and
    `percent` are those of the weights that were scored.
    """

    def __init__(self, judge: Judge, folder: Path, report: Report) -> None:
        self.judge, self.folder, self.report = judge, folder, report
        self.seen = 0
        self.figures: dict[str, float] = {}

    def __call__(self, done: int, total: int, figures: dict[str, float]) -> None:
        from gem.training.checkpoint import newest_valid

        self.figures = figures
        found = newest_valid(self.folder)
        if found is None:
            return
        path, meta = found
        step = int(meta["position"]["step"])
        if self.seen < step < total:
            self._send(checkpoint_weights(path), step, total)

    def last(self, weights: dict[str, Any], record: Mapping[str, Any]) -> None:
        """Report the finished model."""
        self.figures = {"rows_per_s": float(record["rows_per_s"])}
        self._send(weights, int(record["steps"]), int(record["steps"]))

    def _send(self, weights: dict[str, Any], step: int, total: int) -> None:
        self.seen = step
        found = self.judge(weights)
        self.report({
            **found, "step": step, "steps": total, "percent": 100 * step // total,
            "validation_rows": int(self.judge.validation.size), "rows_per_s": self.figures.get("rows_per_s", 0.0),
        })  # fmt: skip
        if not math.isfinite(found["ne"]):
            raise Diverged


def checkpoint_weights(path: Path) -> dict[str, Any]:
    """State dict of a `Ranker` from a checkpoint of the training loop."""
    from safetensors.torch import load_file

    from gem.model.ranker import ranker_weights

    tensors = load_file(str(path / "state.safetensors"))
    dense, table = "dense.model.", "table."
    return ranker_weights(
        {k.removeprefix(dense): v for k, v in tensors.items() if k.startswith(dense)},
        {k.removeprefix(table): v for k, v in tensors.items() if k.startswith(table)},
    )
