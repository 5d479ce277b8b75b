"""Where the CPU time of a training step goes, by part and in microseconds per impression.

`python -m tests.benchmarks.throughput_profile LOG --history 200 --per-user 8 --threads 1`

A part is a module of the model or a function of the learner. Its own time, forward and backward, is what none of the
parts within it took. Clocks around a part cost some microseconds, so the sum is a little above the benchmark's time.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gem.training import data, learner
from gem.training.learner import Learner
from tests.benchmarks.throughput_log import Log
from tests.benchmarks.throughput_ours import WARM_UP, Steps, model_config, options, start

DEPTH = 4  # of module names that count as parts
STEPS = 8
OTHER = "rest of the step"


class Clock:
    """Own time by (part, forward or backward): a stack of open parts, the innermost runs."""

    def __init__(self) -> None:
        self.spent: defaultdict[tuple[str, str], float] = defaultdict(float)
        self.open: list[tuple[str, str]] = []
        self.since = time.process_time()

    def enter(self, part: str, way: str) -> None:
        self._note()
        self.open.append((part, way))

    def leave(self, part: str, way: str) -> None:
        """Close a part, and what was opened within it and never closed."""
        self._note()
        if (part, way) in self.open:
            del self.open[len(self.open) - 1 - self.open[::-1].index((part, way)) :]

    def around(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with its time counted as a part's."""

        def call(*args: Any, **named: Any) -> Any:
            self.enter(part, "forward")
            try:
                return function(*args, **named)
            finally:
                self.leave(part, "forward")

        return call

    def _note(self) -> None:
        now = time.process_time()
        self.spent[self.open[-1] if self.open else (OTHER, "forward")] += now - self.since
        self.since = now


def watch_model(clock: Clock, model: nn.Module) -> None:
    """Clocks around every module down to DEPTH names, both ways."""
    for name, module in model.named_modules():
        part = f"model.{name}" if name else "model"
        if name.count(".") >= DEPTH or isinstance(module, nn.ModuleList):
            continue
        module.register_forward_pre_hook(lambda *_, part=part: clock.enter(part, "forward"))
        module.register_forward_hook(lambda *_, part=part: clock.leave(part, "forward"))
        module.register_full_backward_pre_hook(lambda *_, part=part: clock.enter(part, "backward"))
        module.register_full_backward_hook(lambda *_, part=part: clock.leave(part, "backward"))


def watch_step(clock: Clock, one: Learner) -> None:
    """Clocks around the parts of a step outside the model."""
    pieces: list[tuple[str, Any, str]] = [
        ("collate", data, "collate"),
        ("check batch", data, "check_batch"),
        ("look up tables", one.tables, "lookup"),
        ("set table rate", one.tables, "set_lr"),
        ("losses", learner, "task_losses"),
        ("dense optimizer", one.optimizer, "step"),
        ("update tables, autograd", torch.autograd, "backward"),
        ("clip norm", torch.nn.utils, "clip_grad_norm_"),
        ("agree over ranks", learner, "_all_ranks"),
    ]
    for part, owner, name in pieces:
        if hasattr(owner, name):
            setattr(owner, name, clock.around(part, getattr(owner, name)))
    for name, module in list(sys.modules.items()):
        if name.startswith("gem.model.") and hasattr(module, "pack"):
            module.pack = clock.around("pack", module.pack)  # type: ignore[attr-defined]


def main() -> None:
    """Print the parts, the costliest first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operators", type=int, default=0, help="also so many rows of torch's own profiler")
    given = options(parser)
    start(given.threads)
    steps = Steps(Log.open(given.log, given.per_user), model_config(given), given.batch)
    for _ in range(WARM_UP):
        steps.step()
    if given.operators:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
            for _ in range(STEPS):
                steps.step()
        print(found.key_averages().table(sort_by="self_cpu_time_total", row_limit=given.operators,
                                         max_name_column_width=50))  # fmt: skip
    plain = time.process_time()
    rows = sum(steps.step() for _ in range(STEPS))
    plain = (time.process_time() - plain) / rows * 1e6
    clock = Clock()
    watch_model(clock, steps.learner.model)
    watch_step(clock, steps.learner)
    clock.since = time.process_time()
    rows = sum(steps.step() for _ in range(STEPS))
    clock.enter(OTHER, "forward")
    parts: defaultdict[str, dict[str, float]] = defaultdict(lambda: {"forward": 0.0, "backward": 0.0})
    for (part, way), seconds in clock.spent.items():
        parts[part][way] += seconds / rows * 1e6
    print(f"{'part':<44} {'forward':>9} {'backward':>9}  us per impression (without clocks {plain:.1f} in all)")
    for part, both in sorted(parts.items(), key=lambda item: -sum(item[1].values())):
        print(f"{part:<44} {both['forward']:9.2f} {both['backward']:9.2f}")
    print(f"{'sum':<44} {sum(p['forward'] for p in parts.values()):9.2f} "
          f"{sum(p['backward'] for p in parts.values()):9.2f}")  # fmt: skip
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
