"""What the sections of the quality benchmark share: options, runs, chosen settings, measuring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tests.benchmarks.harness import Claim
from tests.benchmarks.quality_arms import Base, Setting, setting_of, trials
from tests.benchmarks.quality_data import KUAIRAND
from tests.benchmarks.quality_measure import Meter, table
from tests.benchmarks.quality_runs import Finished, Spec, Workshop
from tests.benchmarks.quality_stats import best_of

Rows = list[dict[str, Any]]
CLICK, CONVERSION = "click", "conversion"


class Unmeasured(Exception):
    """Something a claim needs was not run, or failed; the text says what."""


@dataclass(frozen=True)
class Options:
    """seeds of the arms, trials of every arm's tuning, seeds of ablations, seeds of a scaling size."""

    seeds: int = 5
    trials: int = 4
    few_seeds: int = 2
    scaling_seeds: int = 2
    num_bootstrap: int = 1000
    min_surface_rows: int = 2000  # test rows from which a surface counts for the claim


class Section(Protocol):
    """A part of the benchmark that can be run alone."""

    name: str

    def tuning(self, bench: Bench) -> Sequence[Spec]:
        """Runs that decide settings; only their validation day is looked at."""
        ...

    def final(self, bench: Bench) -> Sequence[Spec]:
        """Runs with the chosen settings. Raises Unmeasured where none can be chosen."""
        ...

    def report(self, bench: Bench) -> tuple[list[Claim], Rows]:
        """What was found; claims that could not be measured have no value and say why."""
        ...


@dataclass
class Bench:
    """Workshop and meters (one per data set) under one set of options."""

    base: Base
    options: Options
    workshop: Workshop
    meters: dict[str, Meter]
    planning: bool = False  # nothing is looked up: the first setting of a grid stands for the chosen one

    def say(self, text: str) -> None:
        """A line on the screen, at once."""
        self.workshop.say(text)

    def trials(self, arch: str, dataset: str = KUAIRAND, surface: str = "") -> list[Any]:
        """Tuning runs of one of our architectures."""
        return trials(self.base, arch, self.options.trials, dataset=dataset, surface=surface)

    def best(self, specs: Sequence[Spec], task: str = CLICK, surface: str = "") -> Finished:
        """The trial with the lowest NE on the validation day; the test day is not opened."""
        if self.planning:
            return Finished(specs[0], {}, Path())
        found = {self.workshop.key(run.spec): run for run in self.workshop.results(specs)}
        if not found:
            arm = specs[0].arm if specs else "no arm"
            raise Unmeasured(f"no trial of {arm} was finished")
        meter = self.meters[specs[0].dataset]
        return found[best_of({key: meter.validation_ne(run, task, surface) for key, run in found.items()})]

    def validation_ne(self, run: Finished, task: str) -> float:
        """Calibrated NE of a run on the validation day."""
        return self.meters[run.spec.dataset].validation_ne(run, task)

    def chosen(self, arch: str, dataset: str = KUAIRAND, surface: str = "") -> Setting:
        """The tuned fields of an architecture."""
        setting: Setting = setting_of(self.best(self.trials(arch, dataset, surface), surface=surface).spec)
        return setting

    def finished(self, specs: Sequence[Spec], at_least: int = 1) -> list[Finished]:
        """Results of these runs; Unmeasured if there are too few."""
        found = self.workshop.results(specs)
        if len(found) < at_least:
            arm = specs[0].arm if specs else "?"
            raise Unmeasured(f"{arm}: {len(found)} of {len(specs)} runs were finished")
        return found

    def trial_rows(self, section: str, specs: Sequence[Spec], task: str = CLICK, surface: str = "") -> Rows:
        """Validation NE of every trial, for the record."""
        meter = self.meters[specs[0].dataset]
        return [
            {
                "section": f"{section}: trials", "dataset": run.spec.dataset, "arm": run.spec.arm, "task": task,
                "surface": surface or "all", "setting": getattr(run.spec, "setting", None) or setting_of(run.spec),
                "validation_ne": meter.validation_ne(run, task, surface), "cpu_s": run.record["cpu_s"],
            }
            for run in self.workshop.results(specs)
        ]  # fmt: skip

    def show(self, title: str, rows: Rows) -> None:
        """Print rows as a table."""
        self.say(f"\n{title}\n{table(rows)}")


def unmeasured(name: str, goal: float, why: object, sense: str = ">=", **more: Any) -> Claim:
    """A claim without a value, with the reason."""
    return Claim(name, None, goal, sense, note=f"not measured: {why}", **more)
