"""The sections of the report: each takes the validated summary and returns HTML ("" = nothing to show)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pipelines.console import duration
from pipelines.report import plots
from pipelines.report.lineage import lineage_svg
from pipelines.report.style import badge, card, esc, figure, section, table
from pipelines.table import format_metric, limit_of

Json = Mapping[str, Any]


def verdict(summary: Json) -> str:
    """What was trained, what was promoted and why, in plain words; first on the page."""
    models = summary["models"]
    promoted = [name for name, model in models.items() if model["promoted"]]
    if not models:
        lead, kind = "No model was trained.", "bad"
    elif len(promoted) == len(models):
        lead, kind = f"All {len(models)} models passed their gates and are the new champions.", "good"
        if len(models) == 1:
            lead = "The model passed its gates and is the new champion."
    elif promoted:
        lead, kind = f"{len(promoted)} of {len(models)} models passed their gates and were promoted.", "mixed"
    else:
        lead, kind = "No model was promoted; whatever was serving before goes on serving.", "bad"
    items = "".join(_verdict_item(name, model) for name, model in models.items())
    return card(f'<p class="lead">{esc(lead)}</p><ul>{items}</ul>', f"verdict {kind}")


def _verdict_item(name: str, model: Json) -> str:
    what = "foundation model" if model["kind"] == "foundation" else f"vertical model for {model['group'] or name}"
    mark = badge("promoted", "good") if model["promoted"] else badge("not promoted", "bad")
    version = f", version {model['version']}" if model["version"] is not None else ""
    head = f"{mark} <b>{esc(name)}</b> ({esc(what + version)})"
    if model["promoted"]:
        why = esc("; ".join(model["reasons"]))
        return f'<li>{head}<div class="why">{why}</div></li>'
    why = "".join(f"<li>{esc(reason)}</li>" for reason in model["reasons"] or ["no reason was recorded"])
    return f"<li>{head}<ul>{why}</ul></li>"


def facts(summary: Json) -> str:
    """The few figures that are asked for first."""
    out = [(duration(summary["seconds"]), "whole loop")]
    if summary["peak_rss_mb"] is not None:
        out.append((f"{summary['peak_rss_mb'] / 1024:.1f} GB", "peak memory, all processes"))
    for model in summary["models"].values():
        if model["kind"] != "foundation":
            continue
        for task, values in list(model["tasks"].items())[:2]:
            out.append((format_metric(values["ne"]), f"NE of {task}, foundation model"))
            out.append((format_metric(values["auc"]), f"AUC of {task}, foundation model"))
        break
    cells = "".join(f'<div class="fact"><b>{esc(value)}</b><span>{esc(name)}</span></div>' for value, name in out)
    return f'<div class="facts">{cells}</div>'


def models_section(summary: Json) -> str:
    """All models and tasks with intervals; a missing value says why. Transfer ratios only where one was measured."""
    rows = []
    transferred = any(m["transfer_ratio"] is not None for m in summary["models"].values())
    for name, model in summary["models"].items():
        for i, (task, values) in enumerate(model["tasks"].items()):
            rate = "–" if values["base_rate"] is None else f"{values['base_rate']:.4f}"
            cells = [_metric(values[m]) for m in ("ne", "auc", "gauc", "calibration")]
            ratio = "–" if model["transfer_ratio"] is None or i else f"{model['transfer_ratio']:.2f}"
            first = f"<b>{esc(name)}</b>" if i == 0 else ""
            last = [rate, ratio] if transferred else [rate]
            rows.append([first, esc(task), *cells, esc(limit_of(values)), f"{values['rows']:,}", *last])
    header = ["model", "task", "NE", "AUC", "gAUC", "calibration", "NE limit", "rows", "base rate"]
    header += ["transfer ratio"] if transferred else []
    note = '<p class="note">Small figures: 95 % intervals. Definitions stand at the end of the page.</p>'
    note += _without_hot_users(summary["models"])
    return section("Models", card(table(header, rows, left=(0, 1)) + note)) if rows else ""


def _without_hot_users(models: Json) -> str:
    """What the figures would be without the users that preprocess flagged; nothing where none was shown an ad."""
    found = [
        f"{esc(name)}, {esc(task)}: NE {format_metric(values['ne'])}, AUC {format_metric(values['auc'])} "
        f"({model['tasks'][task]['rows'] - values['rows']:,} rows fewer)"
        for name, model in models.items()
        for task, values in model["without_hot_users"].items()
    ]
    text = "Without the users that look like no people (hot_users in the manifest of the store): "
    return f'<p class="note">{text}{"; ".join(found)}.</p>' if found else ""


def surfaces_section(summary: Json) -> str:
    """The figures behind the pictures by surface, folded away."""
    rows = [
        [esc(surface), f"<b>{esc(name)}</b>", esc(task)]
        + [_metric(values[m]) for m in ("ne", "auc", "calibration")]
        + [esc(limit_of(values)), f"{values['rows']:,}"]
        for name, model in summary["models"].items()
        for surface, by_task in model["by_surface"].items()
        for task, values in by_task.items()
    ]
    if not rows:
        return ""
    header = ["surface", "model", "task", "NE", "AUC", "calibration", "NE limit", "rows"]
    body = f"<details><summary>By surface, as a table ({len(rows)} rows)</summary>{table(header, rows, (0, 1, 2))}"
    return card(f"{body}</details>")


def pictures_section(summary: Json) -> str:
    """All plots that have something to show."""
    models, out = summary["models"], []
    tasks = plots.tasks_of(models)
    surface_text = (
        "Dots: NE, bars: 95 % interval. Dashed: the base rate of the same rows (NE 1). "
        "Green tick: the Bayes limit, where it is known. Left is better."
    )
    curve_text = (
        "Observed rate against mean prediction, in bins of the prediction. On the dashed line the model "
        "predicts what happens; below it, it promises too much."
    )
    out += [figure(f"NE of {task} by surface", plots.ne_by_surface(models, task), surface_text) for task in tasks]
    out += [figure(f"Calibration of {task}", plots.calibration_curves(models, task), curve_text) for task in tasks]
    day_text = "Each day against its own base rate (dashed, NE 1)."
    out += [figure(f"NE of {task} by day", plots.ne_by_day(models, task), day_text) for task in tasks]
    out.append(figure("Time per stage", plots.stage_times(summary["stages"]), "Skipped: its inputs had not changed."))
    histogram = plots.history_histogram(summary["history_length_histogram"])
    out.append(figure("History lengths", histogram, "Events of the user known strictly before each impression."))
    body = "".join(out)
    return section("Pictures", f'<div class="pics">{body}</div>') if body else ""


def stages_section(summary: Json) -> str:
    """What each stage took, read, wrote and put aside."""
    rows = []
    for name, stage in summary["stages"].items():
        took = badge("skipped", "plain") if stage["skipped"] else esc(duration(stage["seconds"]))
        run = f"<code>{esc(stage['run_id'][:12])}</code>" if stage["run_id"] else "–"
        counts = [_count(stage["rows_in"]), _count(stage["rows_out"]), _count(stage["quarantined"])]
        rows.append([f"<b>{esc(name)}</b>", took, *counts, run])
    header = ["stage", "time", "rows in", "rows out", "quarantined", "MLflow run"]
    return section("Stages", card(table(header, rows))) if rows else ""


def lineage_section(summary: Json) -> str:
    """The graph, and the ids in full to copy from."""
    rows = []
    for name, model in summary["models"].items():
        parents = model["parents"]
        ids = [model["hash"], parents.get("data"), parents.get("teacher"), parents.get("commit")]
        rows.append([f"<b>{esc(name)}</b>", *(f"<code>{esc(value)}</code>" if value else "–" for value in ids)])
    header = ["model", "bundle hash", "feature store", "teacher", "commit"]
    full = f"<details><summary>Hashes in full</summary>{table(header, rows, left=(0, 1, 2, 3, 4))}</details>"
    mlflow = summary["mlflow"]
    note = ""
    if mlflow["parent_run_id"]:
        note = f'<p class="note">MLflow run <code>{esc(mlflow["parent_run_id"])}</code>'
        note += f" at <code>{esc(mlflow['tracking_uri'])}</code></p>"
    return section("Lineage", card(lineage_svg(summary) + note + (full if rows else "")))


def data_section(summary: Json) -> str:
    """Duplicates, quarantine with reasons, unknown and collision rates, suspicious users, split."""
    data, out = summary["data"], []
    if summary["split"]:
        cells = [[esc(key), esc(_plain(value))] for key, value in summary["split"].items()]
        out.append(card("<h3>Split in time</h3>" + table(["part", "days"], cells, left=(0, 1))))
    if "duplicates" in data:
        count = data["duplicates"]
        shown = f"{count:,}" if isinstance(count, int) else esc(_plain(count))
        out.append(card(f"<h3>Exact duplicates</h3><p>{shown} dropped</p>"))
    quarantined = data.get("quarantined")
    if quarantined is not None:
        rows = [[esc(t), esc(reason), _count(n)] for t, reason, n in _reasons(quarantined)]
        text = table(["table", "reason", "rows"], rows, left=(0, 1)) if rows else "<p>No row was put aside.</p>"
        out.append(card(f"<h3>Quarantined rows</h3>{text}"))
    vocab = data.get("vocab")
    if isinstance(vocab, Mapping) and vocab:
        figures = [("rows", _count), ("values", _count), ("unknown_rate", _share), ("collision_rate", _share)]
        rows = [[esc(name), *(show(v.get(key)) for key, show in figures)] for name, v in vocab.items()]
        header = ["table", "rows", "values", "unknown on held-out days", "values that collide"]
        out.append(card("<h3>Vocabularies</h3>" + table(header, rows)))
    hot = data.get("hot_users")
    if hot:
        keys = ("user", "events", "share", "peak_per_s", "capped")
        rows = [[esc(_plain(user.get(k))) for k in keys] for user in hot]
        header = ["user", "events", "share", "most in a second", "rows over the cap"]
        out.append(card("<h3>Users who may be no people</h3>" + table(header, rows)))
    return section("Data health", f'<div class="pics">{"".join(out)}</div>') if out else ""


def config_section(summary: Json) -> str:
    """The configuration of the run, folded away."""
    if not summary["config"]:
        return ""
    text = json.dumps(summary["config"], indent=2, ensure_ascii=False)
    recipe = f"recipe {summary['recipe']}" if summary["recipe"] else "all values"
    return section("Configuration", card(f"<details><summary>{esc(recipe)}</summary><pre>{esc(text)}</pre></details>"))


def next_section(summary: Json) -> str:
    """The commands to type next."""
    text = "\n".join(summary["next"])
    return section("Next", card(f"<pre>{esc(text)}</pre>")) if text else ""


def _metric(metric: Json) -> str:
    if metric["value"] is None:
        return f'– <br><span class="why">{esc(metric["reason"])}</span>'
    text = f"{metric['value']:.4f}"
    if metric["low"] is not None and metric["high"] is not None:
        text += f'<br><span class="ci">{metric["low"]:.3f}–{metric["high"]:.3f}</span>'
    return text


def _reasons(tree: Any, path: tuple[str, ...] = ()) -> list[tuple[str, str, Any]]:
    """A nested `{table: {reason: n}}` (or `{reason: n}`, or n) as rows."""
    if isinstance(tree, Mapping):
        return [row for key, value in tree.items() for row in _reasons(value, (*path, str(key)))]
    if not tree:
        return []
    return [(path[0] if path else "all", ", ".join(path[1:]) or "not named", tree)]


def _count(value: Any) -> str:
    return "–" if value is None else f"{value:,}" if isinstance(value, int) else esc(value)


def _share(value: Any) -> str:
    return f"{100 * value:.2f} %" if isinstance(value, (int, float)) else "–"


def _plain(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        texts = [str(v) for v in value]
        return ", ".join(texts) if len(texts) <= 4 else f"{texts[0]} … {texts[-1]} ({len(texts)})"
    return str(value)
