"""One run of one of our models, in a worker process: train, score both days, count what it cost."""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from gem.model.counting import TRAINING_FACTOR, measured_flops
from gem.model.ranker import Ranker, num_parameters
from gem.training.data import StoreReader
from gem.training.loop import Job, Trained, train
from gem.training.plan import plan_epoch
from gem.training.predict import predict
from tests.benchmarks.quality_data import TEST, VALIDATION, Days, open_days
from tests.benchmarks.quality_runs import OurRun


def start_rank() -> None:
    """Make this process the only rank of a group of its own, once."""
    if dist.is_initialized():
        return
    warnings.simplefilter("ignore")  # of TorchRec and torch; failures are exceptions
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # in memory: no port


def train_ours(run: OurRun, store: Path) -> tuple[dict[str, Any], dict[str, NDArray[np.float32]]]:
    """(record, logits by day). Logits are conditional, as the model gives them."""
    start_rank()
    days = open_days(store)
    reader = days.reader(run.model, run.merged)
    rows = days.train_rows(run.surface)
    trained = train(Job(run.arm, run.model, run.train, rows), days.schema, reader)
    ranker = Ranker(days.schema, run.model)
    ranker.load_state_dict(trained.weights)
    logits = {day: predict(ranker, reader, days.at(day)).logits for day in (VALIDATION, TEST)}
    return record_of(run, days, trained, ranker, reader), logits


def record_of(run: OurRun, days: Days, trained: Trained, ranker: Ranker, reader: StoreReader) -> dict[str, Any]:
    """Cost of a run: parameters, FLOPs per impression of a forward pass, FLOPs of the training."""
    rows = days.train_rows(run.surface)
    imp = days.impressions
    plan = plan_epoch(imp.user[rows], imp.day[rows], batch_size=run.train.batch_impressions, window_days=1,
                      seed=run.train.seed, epoch=0)  # fmt: skip
    middle = reader.batch(rows[plan.batch(len(plan) // 2)])  # late enough to have histories
    with torch.no_grad():
        flops = measured_flops(ranker.dense, middle, ranker.tables(middle.lookups())) / len(middle)
    parameters = num_parameters(ranker)
    return {
        "train_seconds": trained.record["train_seconds"],
        "rows_per_s": trained.record["rows_per_s"],
        "skipped_steps": trained.record["skipped_steps"],
        "train_rows": trained.record["train_rows"],
        "parameters_dense": parameters["dense"],
        "parameters_tables": parameters["tables"],
        "flops_per_impression": flops,
        "train_flops": TRAINING_FACTOR * flops * rows.size * run.train.epochs,
    }
