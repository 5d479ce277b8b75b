"""Training steps of our models on the benchmark's log, in a process of its own; the last line of output is JSON.

A step is everything from rows in memory to updated weights: collate, check, look up, forward, backward, both updates.
`python -m tests.benchmarks.throughput_ours LOG --history 200 --per-user 8 --threads 1 --batch 1024 --seconds 6`
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gem.config import ModelConfig, RunConfig, TrainConfig, apply_overrides
from gem.model.ranker import num_parameters
from gem.training.data import RankShare, StoreReader
from gem.training.learner import Learner
from gem.training.loop import Job, make_learner
from gem.training.plan import plan_epoch
from tests.benchmarks.throughput_log import Log

WARM_UP = 3  # steps
LONG = 512  # events; longer histories are summarised twice
TOTAL_STEPS = 10_000  # of the learning rate's schedule


def memory_mb(which: str) -> float:
    """VmRSS (now) or VmHWM (peak) of this process, MB (10^6 bytes)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(which + ":"):
            return int(line.split()[1]) * 1024 / 1e6
    return float("nan")


def cpu_s() -> float:
    """CPU seconds of this process, all threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class Steps:
    """One learner, and an endless run over the log's impressions in the order of real plans."""

    def __init__(self, log: Log, model: ModelConfig, batch: int) -> None:
        imp = log.impressions
        train = TrainConfig(batch_impressions=batch)
        self.job = Job("throughput", model, train, imp.impression_id)
        self.learner: Learner = make_learner(self.job, log.store.schema, TOTAL_STEPS)
        self.reader: StoreReader = log.reader(model)
        self.share = RankShare(self.reader)
        self.plan = self._plans(batch)
        self.events = self.rows = 0

    def _plans(self, batch: int) -> Iterator[Any]:
        imp, epoch = self.reader.impressions, 0
        while True:
            plan = plan_epoch(imp.user, imp.day, batch_size=batch, window_days=1, seed=1, epoch=epoch)
            yield from (plan.batch(i) for i in range(len(plan)))
            epoch += 1

    def step(self) -> int:
        """One training step; returns its rows."""
        batch = self.share.build(next(self.plan))
        report = self.learner.step(batch, len(batch))
        if report.skipped:
            raise SystemExit("a step was skipped: losses or gradients were not finite")
        self.events, self.rows = self.events + batch.timeline.ad.numel(), self.rows + len(batch)
        return len(batch)


def measure(step: Callable[[], int], seconds: float) -> dict[str, float]:
    """Warm up, then step for so many seconds."""
    for _ in range(WARM_UP):
        step()
    rows, walls = 0, []
    began, used = time.perf_counter(), cpu_s()
    while time.perf_counter() - began < seconds:
        start = time.perf_counter()
        rows += step()
        walls.append(time.perf_counter() - start)
    wall, cpu = time.perf_counter() - began, cpu_s() - used
    return {
        "impressions_per_s": rows / wall,
        "impressions_per_cpu_s": rows / cpu,
        "steps": len(walls),
        "step_ms": statistics.median(walls) * 1000,
        "wall_s": wall,
        "cpu_s": cpu,
    }


def start(threads: int) -> None:
    """So many threads, and a process group of one."""
    torch.set_num_threads(threads)
    if torch.get_num_interop_threads() != 1:
        torch.set_num_interop_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def options(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The arguments that say what is trained."""
    parser.add_argument("log", type=Path)
    parser.add_argument("--arch", default="gem")
    parser.add_argument("--history", type=int, default=200)
    parser.add_argument("--per-user", type=int, default=8)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--set", action="append", default=[], help="model.field=value, for trying other sizes")
    return parser.parse_args()


def model_config(given: argparse.Namespace) -> ModelConfig:
    """The default size, reading so many events (long ones on one level more); and what `--set` says."""
    levels = ModelConfig().num_levels + int(given.history > LONG)
    model = ModelConfig(arch=given.arch, max_history=given.history, num_levels=levels)
    return apply_overrides(RunConfig(model=model), given.set).model


def main() -> None:
    """Measure what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=6.0)
    given = options(parser)
    start(given.threads)
    imports_mb = memory_mb("VmRSS")
    steps = Steps(Log.open(given.log, given.per_user), model_config(given), given.batch)
    ready_mb = memory_mb("VmRSS")
    found = measure(steps.step, given.seconds)
    memory = {"imports_mb": imports_mb, "ready_mb": ready_mb, "peak_mb": memory_mb("VmHWM")}
    about = {"parameters": num_parameters(steps.learner.model)["dense"], "events_carried": steps.events / steps.rows}
    print(json.dumps({**found, **memory, **about}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
