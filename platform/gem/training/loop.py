"""The one training loop, for the foundation model and for students alike."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from gem.config import ModelConfig, TrainConfig, TransferConfig, config_hash
from gem.data.schema import Schema
from gem.errors import TrainingError
from gem.model.gem import build_model
from gem.model.ranker import ranker_weights, split_weights, weights_hash
from gem.model.tables import initial_weights
from gem.training.checkpoint import Position, load_checkpoint, save_checkpoint
from gem.training.data import IntArray, Prefetch, RankShare, StoreReader
from gem.training.learner import Learner
from gem.training.plan import BatchPlan, plan_epoch, remaining
from gem.training.sampling import Sample, sample_rows
from gem.training.sharding import ShardedTables
from gem.transfer.distillation import DistillationHead

NOT_SHAPING = ("num_workers", "checkpoint_every_steps")  # fields of TrainConfig that the weights do not depend on


@dataclass(frozen=True)
class Job:
    """One model to train: what it is, on which rows (positions in the reader's impressions)."""

    name: str
    model: ModelConfig
    train: TrainConfig
    rows: IntArray
    transfer: TransferConfig | None = None  # given: distil from the reader's knowledge
    checkpoint_dir: Path | None = None
    start_from: dict[str, Tensor] | None = None  # state dict of a `Ranker` of the same shape


@dataclass
class Trained:
    """What remains of a job on rank 0 (elsewhere `weights` is empty)."""

    weights: dict[str, Tensor]  # state dict of a `Ranker`
    record: dict[str, Any]


Progress = Callable[[int, int, dict[str, float]], None]  # (steps done, steps in all, figures)


def train(job: Job, schema: Schema, reader: StoreReader, progress: Progress | None = None) -> Trained:
    """Train one job on this rank's share. Collective: all ranks call it with the same job."""
    if _distils(job) and reader.knowledge is None:
        raise TrainingError(f"{job.name}: distillation is on but there is no knowledge; set transfer.enabled=false")
    sample = sample_rows(reader.impressions, job.rows, job.train)
    job = dataclasses.replace(job, rows=sample.rows)
    reader = dataclasses.replace(reader, negative_weight=sample.weight)
    plans = [_plan(job, reader, epoch) for epoch in range(job.train.epochs)]
    total = sum(len(p) for p in plans)
    learner = make_learner(job, schema, total)
    key = job_hash(job, schema, reader, total)
    start = Position()
    if job.checkpoint_dir is not None:
        start = load_checkpoint(job.checkpoint_dir, learner, key)
    clock = _Clock(sample)
    for epoch in range(start.epoch, len(plans)):
        first = start.batch if epoch == start.epoch else 0
        if epoch > 0 and first == 0 and job.train.fresh_tables:
            _start_tables_anew(job, learner)
        _run_epoch(job, learner, reader, plans[epoch], (epoch, first, total, key), clock, progress)
    tables = learner.tables.weights()
    weights = ranker_weights(learner.model.state_dict(), tables) if dist.get_rank() == 0 else {}
    return Trained(weights, clock.record(job, total, start))


def job_hash(job: Job, schema: Schema, reader: StoreReader, total_steps: int) -> str:
    """What a checkpoint must agree with: everything that shapes the weights, but not how many workers there are."""
    ids = np.ascontiguousarray(reader.impressions.impression_id[job.rows])
    return config_hash(
        {
            "job": [job.name, total_steps],
            "schema": schema.hash,
            "model": config_hash(job.model),
            "train": {k: v for k, v in dataclasses.asdict(job.train).items() if k not in NOT_SHAPING},
            "transfer": None if job.transfer is None else config_hash(job.transfer),
            "rows": hashlib.sha256(ids.tobytes()).hexdigest(),
            "start": "" if job.start_from is None else weights_hash(job.start_from),
        }
    )


def make_learner(job: Job, schema: Schema, total_steps: int) -> Learner:
    """Model, tables and optimizers at their starting values (a function of the job's seed)."""
    model = build_model(schema, job.model, seed=job.train.seed)
    tables = ShardedTables(schema, job.model.dim, job.train.lr_sparse, job.train.seed)
    head = None
    if job.transfer is not None and _distils(job):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(job.train.seed)
            head = DistillationHead(job.model.representation_dim, len(schema.tasks), job.transfer)
    if job.start_from is not None:
        dense, whole = split_weights(job.start_from)
        model.load_state_dict(dense)
        tables.load(whole)
    return Learner(schema, model, tables, job.train, total_steps, head)


def _start_tables_anew(job: Job, learner: Learner) -> None:
    """Tables as they were before the first pass, without memory of earlier updates (MEDA, arXiv 2305.19531).

    Rows that have met an impression know its outcome by heart: shown again, the dense part would learn to trust them
    more than it may. With new rows a second pass teaches it as the first did.
    """
    if job.start_from is not None:
        weights = split_weights(job.start_from)[1]
    else:
        weights = initial_weights(learner.schema, job.model.dim, job.train.seed)
    learner.tables.load(weights, {name: torch.zeros(len(rows)) for name, rows in weights.items()})


def _distils(job: Job) -> bool:
    return job.transfer is not None and job.transfer.enabled


def _plan(job: Job, reader: StoreReader, epoch: int) -> BatchPlan:
    imp = reader.impressions
    return plan_epoch(
        imp.user[job.rows],
        imp.day[job.rows],
        batch_size=job.train.batch_impressions,
        window_days=job.train.window_days,
        seed=job.train.seed,
        epoch=epoch,
    )


def _run_epoch(
    job: Job,
    learner: Learner,
    reader: StoreReader,
    plan: BatchPlan,
    where: tuple[int, int, int, str],
    clock: _Clock,
    progress: Progress | None,
) -> None:
    epoch, first, total, key = where
    share = RankShare(reader, dist.get_rank(), dist.get_world_size())
    feed = Prefetch(share.build, (job.rows[at] for _, at in remaining(plan, first)))
    try:
        for index, batch in zip(range(first, len(plan)), feed, strict=False):
            report = learner.step(batch, global_rows=plan.batch(index).size * clock.sample.stands_for)
            clock.step(report.rows, report.losses, report.skipped)
            if progress is not None and (learner.step_index % 10 == 0 or learner.step_index == total):
                progress(learner.step_index, total, clock.figures())
            every = job.train.checkpoint_every_steps
            if job.checkpoint_dir is not None and every and learner.step_index % every == 0:
                save_checkpoint(job.checkpoint_dir, learner, Position(epoch, index + 1, learner.step_index), key)
    finally:
        feed.close()
    clock.waited_s += feed.waited_s
    clock.max_over_mean += share.max_over_mean


class _Clock:
    """Running figures of one job on one rank."""

    def __init__(self, sample: Sample) -> None:
        self.sample = sample
        self.started = time.perf_counter()
        self.rows = self.steps = self.skipped = 0
        self.waited_s = 0.0
        self.loss: float | None = None
        self.max_over_mean: list[float] = []

    def step(self, rows: int, losses: tuple[float, ...], skipped: bool) -> None:
        self.rows, self.steps, self.skipped = self.rows + rows, self.steps + 1, self.skipped + int(skipped)
        if not skipped:
            loss = losses[0] / self.sample.stands_for  # per row of the log
            self.loss = loss if self.loss is None else 0.95 * self.loss + 0.05 * loss

    def figures(self) -> dict[str, float]:
        seconds = max(time.perf_counter() - self.started, 1e-9)
        return {"loss": self.loss or 0.0, "rows_per_s": self.rows * dist.get_world_size() / seconds}

    def record(self, job: Job, total: int, start: Position) -> dict[str, Any]:
        seconds = max(time.perf_counter() - self.started, 1e-9)
        balance = self.max_over_mean or [1.0]
        return {
            "name": job.name,
            "train_rows": int(job.rows.size),
            "log_rows": self.sample.of,  # more than are trained if negatives were left out
            "negative_keep": job.train.negative_keep,
            "negative_weight": self.sample.weight,
            "steps": total,
            "resumed_from_step": start.step,
            "skipped_steps": self.skipped,
            "train_seconds": round(seconds, 2),
            "rows_per_s": round(self.rows * dist.get_world_size() / seconds, 1),
            "data_wait_share": round(self.waited_s / seconds, 4),
            "tokens_max_over_mean": round(float(np.mean(balance)), 4),
            "tokens_max_over_mean_worst": round(max(balance), 4),
            "last_loss": self.loss,
        }
