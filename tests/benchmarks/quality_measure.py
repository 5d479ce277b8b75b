"""From logits to figures: one calibration for all arms, metrics over seeds, rows of the table.

Every arm, ours or a peer's, passes the same layer: `gem.model.calibration.fit_calibration` on its logits of the
validation day (slope, shift, a shift per surface), shrunk by the day-to-day noise of the training days. "raw" figures
are those without it. NE always takes the base rate of the rows it is measured on.

Letters: N rows of a day, K tasks of a run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gem.data.schema import NUM_RESERVED, Schema, Task
from gem.metrics import PlattCalibration, normalized_entropy
from gem.metrics.bootstrap import UserSums
from gem.model.calibration import Outcomes, calibrated_probabilities, day_noise, fit_calibration
from tests.benchmarks.quality_data import KUAIRAND, TEST, VALIDATION, Days
from tests.benchmarks.quality_runs import Finished
from tests.benchmarks.quality_stats import interval, itself, mean_metric, measured, noise_floor, per_seed

Floats = NDArray[np.float64]
SPOKEN = {(KUAIRAND, "conversion"): "long_view"}  # what the second task of KuaiRand is
ROW_BOOTSTRAP = 200
COSTS = ("cpu_s", "train_seconds", "flops_per_impression", "train_flops", "parameters_dense", "parameters_tables")


def spoken(dataset: str, task: str) -> str:
    """The task's name in tables and claims."""
    return SPOKEN.get((dataset, task), task)


@dataclass
class Meter:
    """Measures runs on one store. Probabilities and sums of a run are computed once."""

    dataset: str
    days: Days
    num_bootstrap: int = ROW_BOOTSTRAP
    _noise: dict[str, Mapping[str, float]] = field(default_factory=dict)
    _probabilities: dict[tuple[str, str], tuple[Floats, Floats]] = field(default_factory=dict)

    @property
    def tasks(self) -> list[str]:
        return [t.name for t in self.days.schema.tasks]

    def space(self, run: Finished) -> tuple[Schema, list[int]]:
        """What the run's logits are of: all tasks as the schema says, or one task on the entire space."""
        schema = self.days.schema
        target = getattr(run.spec, "target", "")
        if not target:
            return schema, list(range(len(schema.tasks)))
        return dataclasses.replace(schema, tasks=(Task(target),)), [self.tasks.index(target)]

    def outcomes(self, schema: Schema, columns: Sequence[int], at: NDArray[np.integer]) -> Outcomes:
        """Outcomes of the run's tasks."""
        whole = self.days.outcomes(at)
        return dataclasses.replace(whole, labels=whole.labels[:, columns], mask=whole.mask[:, columns])

    def noise(self, schema: Schema, columns: Sequence[int]) -> Mapping[str, float]:
        """Day-to-day noise of the training days, per task of the run."""
        key = schema.hash
        if key not in self._noise:
            self._noise[key] = day_noise(schema, self.outcomes(schema, columns, self.days.train))
        return self._noise[key]

    def probabilities(self, run: Finished, day: str) -> tuple[Floats, Floats]:
        """(calibrated, raw) entire-space probabilities [N, K] of a day, K as the run has them."""
        key = (str(run.path), day)
        if key not in self._probabilities:
            self._probabilities[key] = self._compute(run, day)
        return self._probabilities[key]

    def _compute(self, run: Finished, day: str) -> tuple[Floats, Floats]:
        days = self.days
        schema, columns = self.space(run)
        fit_at, logits = days.validation, run.validation
        surface = getattr(run.spec, "surface", "")
        if surface:  # a model of one surface is calibrated on its own rows
            mine = days.on_surface(fit_at, surface)
            fit_at, logits = fit_at[mine], logits[mine]
        outcomes = dataclasses.replace(self.outcomes(schema, columns, fit_at), surface=self.surfaces(run, fit_at))
        layers = fit_calibration(schema, logits, outcomes, self.noise(schema, columns))
        identity = {t.name: PlattCalibration() for t in schema.tasks}
        scored = run.validation if day == VALIDATION else run.test
        on = self.surfaces(run, days.at(day))
        both = [calibrated_probabilities(schema, scored, on, c) for c in (layers, identity)]
        return both[0], both[1]

    def surfaces(self, run: Finished, at: NDArray[np.integer]) -> NDArray[np.int64]:
        """Where these impressions were shown, as far as the run may know."""
        on = self.days.impressions.surface[at].astype(np.int64)
        return np.full_like(on, NUM_RESERVED) if getattr(run.spec, "merged", False) else on

    def known(self, task: str, day: str, surface: str = "") -> NDArray[np.integer]:
        """Places within the day of the rows whose outcome is known, all or one surface's."""
        at = self.days.at(day)
        use = self.days.impressions.mask[at, self.tasks.index(task)] > 0
        if surface:
            use &= self.days.on_surface(at, surface)
        return np.flatnonzero(use)

    def column(self, run: Finished, task: str) -> int:
        """Which column of the run's logits belongs to the task."""
        schema, _ = self.space(run)
        return [t.name for t in schema.tasks].index(task)

    def validation_ne(self, run: Finished, task: str, surface: str = "") -> float:
        """NE of the calibrated run on the validation day; what settings are chosen by. NaN where undefined."""
        rows = self.known(task, VALIDATION, surface)
        p = self.probabilities(run, VALIDATION)[0][rows, self.column(run, task)]
        y = self.labels(task, VALIDATION, rows)
        value = normalized_entropy(y, p).value
        return float("nan") if value is None else value

    def labels(self, task: str, day: str, rows: NDArray[np.integer]) -> Floats:
        """[n] labels of these rows of a day."""
        found = self.days.impressions.labels[self.days.at(day)[rows], self.tasks.index(task)]
        return np.asarray(found, dtype=np.float64)

    def sums(
        self, runs: Sequence[Finished], task: str, surface: str = "", raw: bool = False, day: str = TEST
    ) -> list[UserSums]:
        """The runs (seeds) of one arm, ready to be measured on a day."""
        rows = self.known(task, day, surface)
        p = [self.probabilities(run, day)[int(raw)][rows, self.column(run, task)] for run in runs]
        user = self.days.impressions.user[self.days.at(day)[rows]]
        return measured(user, self.labels(task, day, rows), p)

    def truth(self, task: str) -> list[UserSums]:
        """The true probabilities on the test day, as an arm of one run. Generated data only."""
        rows = self.known(task, TEST)
        at = self.days.test[rows]
        p = np.asarray(self.days.impressions.true[task][at], dtype=np.float64)
        return measured(self.days.impressions.user[at], self.labels(task, TEST, rows), [p])

    def row(self, section: str, arm: str, runs: Sequence[Finished], task: str, surface: str = "") -> dict[str, Any]:
        """All figures of an arm on one task of the test day: mean over seeds, each seed, interval, cost."""
        if not runs:
            return {"section": section, "dataset": self.dataset, "arm": arm, "task": spoken(self.dataset, task),
                    "failed": "no run was finished"}  # fmt: skip
        own, raw = self.sums(runs, task, surface), self.sums(runs, task, surface, raw=True)
        validation = self.sums(runs, task, surface, day=VALIDATION)
        out: dict[str, Any] = {
            "section": section, "dataset": self.dataset, "arm": arm, "task": spoken(self.dataset, task),
            "surface": surface or "all", "rows": self.known(task, TEST, surface).size,
            "seeds": [getattr(getattr(r.spec, "train", r.spec), "seed", None) for r in runs],
            "validation_ne": mean_metric(validation, "ne"),
        }  # fmt: skip
        for name in ("ne", "auc", "gauc", "calibration"):
            found = interval([own], name, itself, self.num_bootstrap)
            each = per_seed(own, name)
            out[name] = {"value": found.value, "low": found.low, "high": found.high, "seeds": each}
            out[name]["sd"] = noise_floor(each)
        out["raw"] = {name: mean_metric(raw, name) for name in ("ne", "calibration")}
        for name in COSTS:
            values = [r.record[name] for r in runs if r.record.get(name) is not None]
            out[name] = float(np.mean(values)) if values else None
        return out


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as text, one line each."""
    head = (
        "arm",
        "task",
        "surface",
        "NE",
        "[95 %]",
        "sd",
        "NE raw",
        "AUC",
        "gAUC",
        "calib.",
        "FLOPs",
        "dense",
        "CPU s",
    )
    lines = [head] + [_line(r) for r in rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join("  " + "  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def _line(row: Mapping[str, Any]) -> tuple[str, ...]:
    if "failed" in row:
        return (row["arm"], row["task"], "", f"failed: {row['failed'][:40]}", *[""] * 9)
    ne = row["ne"]
    between = "" if ne["low"] is None else f"[{ne['low']:.4f}, {ne['high']:.4f}]"
    return (
        str(row["arm"]), row["task"], row["surface"], _text(ne["value"], ".4f"), between, _text(ne["sd"], ".4f"),
        _text(row["raw"]["ne"], ".4f"), _text(row["auc"]["value"], ".4f"), _text(row["gauc"]["value"], ".4f"),
        _text(row["calibration"]["value"], ".3f"), _text(row["flops_per_impression"], ".3g"),
        _text(row["parameters_dense"], ".3g"), _text(row["cpu_s"], ".0f"),
    )  # fmt: skip


def _text(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
