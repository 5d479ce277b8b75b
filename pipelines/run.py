"""The whole loop: stages in order, one Ray runtime, one MLflow parent run, one summary, one report."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gem.config import RunConfig
from gem.lineage.registry import Registry
from pipelines.closing import build_summary
from pipelines.cluster import Cluster
from pipelines.console import Console, install_filters
from pipelines.data_stages import generate, needs_world, preprocess
from pipelines.evaluate import evaluate
from pipelines.generate_knowledge import generate_knowledge
from pipelines.loop import Loop, ended, load_dataset
from pipelines.memory import PeakMemory
from pipelines.model_stages import distill, pretrain
from pipelines.promote import promote
from pipelines.provenance import git_commit
from pipelines.summary import final_table, link_latest, write_summary

STAGES: dict[str, Callable[[Loop], Any]] = {
    "generate": generate,
    "preprocess": preprocess,
    "pretrain": pretrain,
    "generate-knowledge": generate_knowledge,
    "distill": distill,
    "evaluate": evaluate,
    "promote": promote,
}
RUNS = Path("runs")


def run(config: RunConfig, last: str = "promote", runs: Path = RUNS) -> Path | None:
    """Run all stages up to `last`; finished ones with the same inputs are skipped.

    Returns the loop's folder with summary.json and report.html after a whole loop, else None.
    Raises GemError for anything a user can mend; an interrupted loop continues when run again.
    """
    install_filters()
    spec, data_dir = load_dataset(config)
    registry = Registry(runs=runs)
    registry.check()  # a dead tracking server is said now, not after an hour
    started = datetime.now(UTC)
    clock = time.monotonic()
    with PeakMemory() as memory, Cluster() as cluster:
        loop = Loop(config, spec, data_dir or Path(), runs, Console(), cluster, registry)
        names = [n for n in STAGES if n != "generate" or needs_world(loop)]
        names = names[: names.index(last) + 1]
        loop.console.stages = tuple(names)
        loop.parent_run = registry.start_loop(spec.name, f"{last} {started:%Y-%m-%d %H:%M:%S}")
        with ended(registry, loop.parent_run):
            registry.log_params(loop.parent_run, _flat(dataclasses.asdict(config)))
            registry.set_tags(loop.parent_run, {"commit": git_commit(), "recipe": config.recipe})
            record = _run_stages(loop, names)
    if last != "promote":
        registry.end(loop.parent_run)
        return None
    figures = {"started_utc": started.isoformat(timespec="seconds"), "seconds": time.monotonic() - clock}
    with ended(registry, loop.parent_run):
        return _finish(loop, record, figures, memory)


def _run_stages(loop: Loop, names: Sequence[str]) -> dict[str, Any]:
    """Run the stages; returns the record of the last one."""
    outcome: Any = None
    for name in names:
        outcome = STAGES[name](loop)
    return outcome if isinstance(outcome, dict) else {}


def _finish(loop: Loop, promoted: dict[str, Any], figures: dict[str, Any], memory: PeakMemory) -> Path:
    """Write summary and report, log them, print the table."""
    from pipelines.report import write_report

    folder = loop.root / "loops" / datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
    folder.mkdir(parents=True)
    figures |= {"peak_rss_mb": memory.peak_mb, "peak_rss_note": memory.note, "report": str(folder / "report.html")}
    summary = build_summary(loop, promoted, figures)
    path = write_summary(summary, folder)
    write_report(summary, folder / "report.html")
    for file in (path, folder / "report.html"):
        loop.registry.log_artifact(loop.parent_run, file)
    loop.registry.log_metrics(loop.parent_run, _headline(summary))
    loop.registry.end(loop.parent_run)
    for lost in loop.registry.lost:
        loop.console.warn(lost)
    link_latest(loop.runs, folder)
    loop.console.line("\n" + final_table(summary), indent=False)
    return folder


def _headline(summary: dict[str, Any]) -> dict[str, float | None]:
    out: dict[str, float | None] = {"seconds": summary["seconds"], "peak_rss_mb": summary["peak_rss_mb"]}
    for name, model in summary["models"].items():
        for task, found in model["tasks"].items():
            for metric in ("ne", "auc", "calibration"):
                out[f"{name}/{task}/{metric}"] = found[metric]["value"]
    return out


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in tree.items():
        out |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return out
