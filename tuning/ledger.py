"""The sweep's own book: what every trial reported, kept on disk and in MLflow while the sweep runs.

Ray Tune calls it from the driver. It is written after every trial, so that nothing finished is lost.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gem.lineage.files import finite, write_json
from gem.lineage.registry import Registry
from pipelines.console import Console, Progress
from tuning import judgement
from tuning.judgement import TrialRecord

RESULT = "result.json"
MAX_ERROR = 400


@dataclass
class Ledger:
    """Trials by number, and what the sweep as a whole has to say (`head`, plain JSON)."""

    folder: Path
    trials: list[TrialRecord]
    head: dict[str, Any]
    registry: Registry
    parent_run: str
    console: Console
    progress: Progress | None = None
    started_s: dict[int, float] = field(default_factory=dict)

    def started(self, number: int) -> None:
        """A trial got its worker."""
        trial = self.trials[number]
        trial.status = judgement.RUNNING
        self.started_s[number] = time.monotonic()
        trial.run_id = self.registry.start_child(self.parent_run, f"trial-{number}")
        self.registry.log_params(trial.run_id, trial.setting)
        self._show()

    def reported(self, number: int, raw: Mapping[str, Any]) -> None:
        """A trial sent a report."""
        trial = self.trials[number]
        report = judgement.make_report(raw)
        trial.reports.append(report)
        metrics = {"ne": raw.get("ne"), "percent": report.percent, **report.figures}
        self.registry.log_metrics(trial.run_id, metrics, step=report.step)
        self._show()

    def ended(self, number: int, status: str = "", error: str = "") -> None:
        """A trial ended: with an error, with a given status, or by itself."""
        trial = self.trials[number]
        trial.error = error
        trial.status = judgement.FAILED if error else status or judgement.ended_status(trial)
        self._close(trial)
        self.console.line(judgement.line(trial))
        self.write()
        self._show()

    def finish(self, running: str) -> None:
        """The sweep is over: trials still running get the status `running`, waiting ones "not started"."""
        for trial in self.trials:
            if trial.status == judgement.RUNNING:
                trial.status = running
                self._close(trial)
            elif trial.status == judgement.WAITING:
                trial.status = judgement.NOT_STARTED
        self.write(complete=True)

    def write(self, complete: bool = False) -> Path:
        """Write result.json (beside, then renamed)."""
        winner = judgement.best_trial(self.trials)
        last = winner.judged() if winner else None
        content = {**self.head, "complete": complete, "trials": [t.to_dict() for t in self.trials], "best": None}
        if winner and last:
            content["best"] = {
                "trial": winner.number, "setting": winner.setting, "ne": last.ne, "step": last.step,
                "percent": last.percent, "set": judgement.flags(self.trials),
            }  # fmt: skip
        beside = self.folder / f".{RESULT}"
        write_json(beside, finite(content))
        os.replace(beside, self.folder / RESULT)
        return self.folder / RESULT

    def _close(self, trial: TrialRecord) -> None:
        trial.seconds = round(time.monotonic() - self.started_s.get(trial.number, time.monotonic()), 2)
        lowest = trial.lowest()
        if lowest:
            self.registry.log_metrics(trial.run_id, {"lowest_ne": lowest.ne, "lowest_step": lowest.step})
        self.registry.set_tags(trial.run_id, {"status": trial.status, "error": trial.error})
        failed = {judgement.FAILED: "FAILED", judgement.DIVERGED: "FAILED", judgement.INTERRUPTED: "KILLED"}
        self.registry.end(trial.run_id, failed.get(trial.status, "FINISHED"))

    def _show(self) -> None:
        if self.progress is None:
            return
        open_statuses = (judgement.WAITING, judgement.RUNNING)
        winner = judgement.best_trial(self.trials)
        best = judgement.judged_ne(winner)
        running = [
            f"{t.number} at {t.reports[-1].percent if t.reports else 0} %"
            for t in self.trials if t.status == judgement.RUNNING
        ]  # fmt: skip
        notes = [f"best NE {best:.4f} (trial {winner.number})"] if winner and best is not None else []
        notes += [f"running {', '.join(running)}"] if running else []
        self.progress.update(sum(t.status not in open_statuses for t in self.trials), "  ".join(notes))


def tune_callback(ledger: Ledger) -> Any:
    """The ledger as a Ray Tune callback."""
    from ray.tune import Callback

    class LedgerCallback(Callback):
        """Passes on starts, results, ends and errors. Tune pickles it with its own state; the ledger stays here."""

        def __init__(self) -> None:
            self.ledger: Ledger | None = ledger

        def __reduce__(self) -> Any:
            return (Callback, ())

        def on_trial_start(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
            ledger.started(trial.config["number"])

        def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: Any, **info: Any) -> None:
            ledger.reported(trial.config["number"], result)

        def on_trial_complete(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
            ledger.ended(trial.config["number"])

        def on_trial_error(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
            ledger.ended(trial.config["number"], error=error_of(trial))

    return LedgerCallback()


def error_of(trial: Any) -> str:
    """A failed Tune trial's own error in one line, without Ray's wrapping."""
    try:
        text = Path(trial.error_file).read_text(encoding="utf-8")
    except (OSError, TypeError):
        return "unknown error (it left no error file)"
    return own_error(text)


def own_error(text: str) -> str:
    """The exception at the end of a traceback text, or else the first line that says something."""
    lines = [x for x in text.splitlines() if x.strip() and not x.startswith("Failure # ")]
    named = [i for i, x in enumerate(lines) if re.match(r"[\w.]+(Error|Exception|Interrupt|Exit)(:|$)", x)]
    if named:
        words = " ".join(lines[named[-1] :])
        return one_line(re.sub(r"^[\w.]+\.(?=\w+(:|$))", "", words))
    return one_line(lines[0] if lines else "unknown error")


def one_line(text: str) -> str:
    """Whitespace and length cut to what a line bears."""
    flat = " ".join(text.split())
    return flat if len(flat) <= MAX_ERROR else flat[: MAX_ERROR - 1] + "…"
