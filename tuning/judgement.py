"""Which trial won and why the others did not: pure functions over what the trials reported.

A trial is judged by the last report it sent, since that is what the printed flags lead to: the loop trains to
the end. Trials are compared where they stand level, so one that saw more of the data comes first, and NE
decides among equals. (Ray Tune's `get_best_result` mixes the two: it finds the lowest NE of any moment and
then shows the figures of the last.) The lowest NE on the way is kept beside, with its step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from pipelines.console import duration
from pipelines.table import aligned

# What became of a trial. Only the first three, in which the trial is judged by what it reported, can win.
FINISHED, STOPPED, OUT_OF_TIME = "finished", "stopped early", "out of time"
INTERRUPTED, DIVERGED, FAILED = "interrupted", "diverged", "failed"
WAITING, RUNNING, NOT_STARTED = "waiting", "running", "not started"
CAN_WIN = (FINISHED, STOPPED, OUT_OF_TIME, INTERRUPTED, RUNNING)
PARTS = 4  # reports of one trial: after each quarter of the data
OWN = 0  # number of the trial with the recipe's own setting


@dataclass(frozen=True)
class Report:
    """One report of a trial. ne: normalised entropy of the first task on the validation rows (None: not finite)."""

    percent: int  # of the training rows seen
    step: int
    ne: float | None
    figures: dict[str, float] = field(default_factory=dict)

    @property
    def part(self) -> int:
        """How many whole parts of the data have been seen, of `PARTS`."""
        return self.percent * PARTS // 100


@dataclass
class TrialRecord:
    """Everything known of a trial. seconds: from its start on a worker to its end."""

    number: int
    setting: dict[str, Any]
    status: str = WAITING
    reports: list[Report] = field(default_factory=list)
    error: str = ""
    seconds: float = 0.0
    run_id: str = ""

    def judged(self) -> Report | None:
        """The last report, if the trial can win: it neither failed nor diverged and sent one."""
        able = self.status in CAN_WIN and bool(self.reports) and self.reports[-1].ne is not None
        return self.reports[-1] if able else None

    def lowest(self) -> Report | None:
        """The report with the lowest finite NE on the way, the earlier one of equals."""
        usable = [r for r in self.reports if r.ne is not None]
        return min(usable, key=lambda r: (r.ne, r.step), default=None)

    def to_dict(self) -> dict[str, Any]:
        lowest = self.lowest()
        return {**asdict(self), "lowest": asdict(lowest) if lowest else None}


def make_report(raw: Mapping[str, Any]) -> Report:
    """A report from what a trial sent; NaN and infinities become None."""
    ne = raw.get("ne")
    figures = {k: float(v) for k, v in raw.items() if k.startswith("ne_") or k in ("rows_per_s", "validation_rows")}
    good = isinstance(ne, int | float) and math.isfinite(ne)
    return Report(
        int(raw["percent"]), int(raw["step"]), float(ne) if good else None,
        {k: v for k, v in figures.items() if math.isfinite(v)},
    )  # fmt: skip


def ended_status(trial: TrialRecord) -> str:
    """The status of a trial that ended without an error."""
    if trial.reports and trial.reports[-1].ne is None:
        return DIVERGED
    return FINISHED if trial.reports and trial.reports[-1].percent >= 100 else STOPPED


def best_trial(trials: Sequence[TrialRecord]) -> TrialRecord | None:
    """The trial that saw most of the data and then has the lowest NE; None if no trial can win.

    The share of the data counts in parts of 100 / `PARTS` per cent. Equal NE: fewer steps, then the lower
    number. A failed or diverged trial never wins, whatever it reported before.
    """
    ranked = [t for t in sorted(trials, key=_rank) if t.judged()]
    return ranked[0] if ranked else None


def judged_ne(trial: TrialRecord | None) -> float | None:
    """The NE that a trial is judged by, if there is one."""
    report = trial.judged() if trial else None
    return report.ne if report else None


def flags(trials: Sequence[TrialRecord]) -> list[str]:
    """`path=value` texts that turn the recipe into the winner; empty if its own setting won (or nobody did)."""
    winner = best_trial(trials)
    own = next((t.setting for t in trials if t.number == OWN), {})
    return [f"{p}={v}" for p, v in winner.setting.items() if own.get(p) != v] if winner else []


def why_no_winner(trials: Sequence[TrialRecord], budget_s: float) -> str:
    """What to tell when no trial can win: the first reason there is, and what to do."""
    for status in (FAILED, DIVERGED):
        found = [t for t in trials if t.status == status]
        if found:
            first = found[0]
            many = "all" if len(found) == len(trials) else f"{len(found)} of"
            what = first.error or "its scores were no longer finite"
            return f"no usable trial: {many} {len(trials)} {status}. Trial {first.number} ({_set(first)}): {what}"
    return f"no trial reported within {duration(budget_s)}; give more time with --budget-s, or fewer --users"


def table(trials: Sequence[TrialRecord], width: int = 100) -> str:
    """The closing table, best trial first, at most `width` columns. Trials that cannot win show their last NE too."""
    winner = best_trial(trials)
    paths = list(trials[0].setting) if trials else []
    names = short_names(paths)
    rows = []
    for trial in sorted(trials, key=_rank):
        last = trial.reports[-1] if trial.reports else None
        label = f"{trial.number}{' recipe' if trial.number == OWN else ''}{' *' if trial is winner else ''}"
        seen = [_shown(last.ne), str(last.step), f"{last.percent} %"] if last else ["-", "-", "-"]
        rows.append([label, *(str(trial.setting[p]) for p in paths), *seen, trial.status])
    header = ["trial", *(names[p] for p in paths), "NE", "step", "data", "status"]
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    spare = width - sum(w + 2 for i, w in enumerate(widths) if not 0 < i <= len(paths))
    if sum(w + 2 for w in widths[1 : 1 + len(paths)]) > spare:
        widths[1 : 1 + len(paths)] = [max(min(w, spare // len(paths) - 2), 3) for w in widths[1 : 1 + len(paths)]]
    return aligned(header, rows, widths)


def line(trial: TrialRecord) -> str:
    """One sentence on a trial that ended."""
    last = trial.reports[-1] if trial.reports else None
    head = f"trial {trial.number} {trial.status}"
    seen = f"NE {_shown(last.ne)} at {last.percent} %" if last else ""
    return "  ".join(p for p in (head, seen, f"{trial.seconds:.1f} s", _set(trial), trial.error) if p)


def verdict(trials: Sequence[TrialRecord]) -> list[str]:
    """Sentences: who won, by how much against the recipe's own setting, and what to beware of."""
    winner = best_trial(trials)
    last = winner.judged() if winner else None
    if winner is None or last is None or last.ne is None:
        return ["no trial can be judged"]
    out = [f"best: trial {winner.number}, validation NE {last.ne:.4f} after {last.percent} % of the data"]
    lowest = winner.lowest()
    if lowest and lowest.ne is not None and lowest.ne < last.ne:
        out.append(
            f"its NE was lower on the way ({lowest.ne:.4f} at step {lowest.step} of {last.step}): it may overfit"
        )
    own = next((t for t in trials if t.number == OWN), None)
    return [*out, _against(winner, last, own)]


def _against(winner: TrialRecord, last: Report, own: TrialRecord | None) -> str:
    """The winner against the recipe's own setting, both after the same part of the data."""
    base = own.judged() if own else None
    if winner is own:
        return "that is the recipe's own setting: nothing to change"
    if own is None or base is None or base.ne is None:
        return "the recipe's own setting cannot be judged" + (f" ({own.status})" if own else "")
    level = last if base.part == last.part else next((r for r in winner.reports if r.part == base.part), None)
    text = f"the recipe's own setting: {base.ne:.4f} after {base.percent} %"
    if level is None or level.ne is None:
        return f"{text}, not comparable"
    there = "" if level is last else f"; the best had {level.ne:.4f} there"
    return f"{text}{there} ({100 * (level.ne / base.ne - 1):+.2f} % NE)"


def short_names(paths: Sequence[str]) -> dict[str, str]:
    """Config path -> its last part, or the whole path where that is not unique."""
    last = [p.rpartition(".")[2] for p in paths]
    return {p: short if last.count(short) == 1 else p for p, short in zip(paths, last, strict=True)}


def _set(trial: TrialRecord) -> str:
    names = short_names(list(trial.setting))
    return " ".join(f"{names[p]}={v}" for p, v in trial.setting.items())


def _shown(ne: float | None) -> str:
    return "nan" if ne is None else f"{ne:.4f}"


def _rank(trial: TrialRecord) -> tuple[bool, int, float, int, int]:
    last = trial.judged()
    if last is None or last.ne is None:
        return (True, 0, math.inf, 0, trial.number)
    return (False, -last.part, last.ne, last.step, trial.number)
