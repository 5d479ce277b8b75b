"""The closing table of a run: plain text, at most 100 columns, from a validated summary."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from pipelines.console import duration

WIDTH = 100
NONE = "-"


def render(summary: Mapping[str, Any]) -> str:
    """Stages, models, gate reasons, next commands, and last the report; `summary` as `validate_summary` returns it."""
    parts = [_head(summary), _stages(summary["stages"]), _models(summary["models"]), _gates(summary["models"])]
    if summary["next"]:
        parts.append("next\n" + "\n".join(f"  {command}" for command in summary["next"]))
    if summary["report"]:
        parts.append(f"report   {summary['report']}")
    return "\n\n".join(part for part in parts if part)


def format_metric(metric: Mapping[str, Any], digits: int = 3, interval: bool = False) -> str:
    """ "0.912", "0.912 [0.901, 0.923]", or "-" where there is no value."""
    if metric["value"] is None:
        return NONE
    text = f"{metric['value']:.{digits}f}"
    if interval and metric["low"] is not None and metric["high"] is not None:
        text += f" [{metric['low']:.{digits}f}, {metric['high']:.{digits}f}]"
    return text


def limit_of(task: Mapping[str, Any]) -> str:
    """What an NE is held against: the Bayes limit if it is known, else a baseline, else the base rate."""
    if task["bayes_ne"] is not None:
        return f"{task['bayes_ne']:.3f} Bayes"
    if task["baseline_ne"] is not None:
        return f"{task['baseline_ne']:.3f} {task['baseline'] or 'baseline'}"
    return "1 base rate"


def aligned(header: Sequence[str], rows: Sequence[Sequence[str]], widths: Sequence[int], left: int = 1) -> str:
    """Columns with two blanks between, the first `left` to the left, the others to the right."""
    lines = []
    for row in [header, *rows]:
        cells = [clip(cell, width) for cell, width in zip(row, widths, strict=True)]
        cells = [c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
    rule = "─" * (sum(widths) + 2 * (len(widths) - 1))
    return "\n".join([lines[0], rule, *lines[1:]])


def clip(text: str, width: int) -> str:
    """Cut to `width` characters; control characters (a name may hold a line break) become blanks."""
    text = "".join(c if c.isprintable() else " " for c in text)
    return text if len(text) <= width else text[: width - 1] + "…"


def _head(summary: Mapping[str, Any]) -> str:
    memory = summary["peak_rss_mb"]
    facts = [summary["dataset"], f"{duration(summary['seconds'])} in all"]
    if memory is not None:
        facts.append(f"peak memory {memory / 1024:.1f} GB")
    if summary["commit"]:
        facts.append(f"commit {summary['commit'][:10]}")
    return clip(" · ".join(facts), WIDTH)


def _stages(stages: Mapping[str, Any]) -> str:
    rows = []
    for name, stage in stages.items():
        took = "skipped" if stage["skipped"] else f"{stage['seconds']:.1f}"
        rows.append([name, took, _count(stage["rows_in"]), _count(stage["rows_out"]), _count(stage["quarantined"])])
    header = ["stage", "seconds", "rows in", "rows out", "quarantined"]
    return aligned(header, rows, [28, 10, 14, 14, 12]) if rows else ""


def _models(models: Mapping[str, Any]) -> str:
    rows = []
    for name, model in models.items():
        for i, (task, values) in enumerate(model["tasks"].items()):
            metrics = [format_metric(values[m]) for m in ("auc", "gauc", "calibration")]
            ne = format_metric(values["ne"], interval=True)
            rows.append([name if i == 0 else "", task, _count(values["rows"]), ne, *metrics, limit_of(values)])
    header = ["model", "task", "rows", "NE [95 %]", "AUC", "gAUC", "calib", "NE limit"]
    return aligned(header, rows, [18, 10, 10, 20, 5, 5, 5, 13], left=2) if rows else ""


def _gates(models: Mapping[str, Any]) -> str:
    lines = []
    for name, model in models.items():
        version = f" (version {model['version']})" if model["version"] is not None else ""
        verdict = "promoted    " if model["promoted"] else "NOT promoted"
        lines.append(clip(f"{verdict}  {name}{version}", WIDTH))
        for reason in model["reasons"]:
            lines += textwrap.wrap(reason, WIDTH, initial_indent="  · ", subsequent_indent="    ")
    return "\n".join(lines)


def _count(value: int | None) -> str:
    return NONE if value is None else f"{value:,}"
