"""Pictures of the report as inline SVG, drawn by matplotlib (imported when a picture is drawn).

Text stays text, colours are replaced by the report's CSS variables (light and dark), ids are prefixed
per picture, and nothing in the SVG points outside. Each function returns "" when there is nothing to draw.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from pipelines.console import duration
from pipelines.report.style import NUM_SERIES, esc
from pipelines.table import clip

# Stand-in colours given to matplotlib, replaced by CSS variables in the SVG.
INK, SOFT, GRID, CARD, GOOD = "#010101", "#010102", "#010103", "#010104", "#010105"
SERIES = [f"#0102{i:02x}" for i in range(NUM_SERIES)]
_VARIABLES = {INK: "--ink", SOFT: "--soft", GRID: "--grid", CARD: "--card", GOOD: "--good"} | {
    color: f"--s{i}" for i, color in enumerate(SERIES)
}
WIDTH_IN = 4.9
MAX_DAYS = 60


def calibration_curves(models: Mapping[str, Any], task: str) -> str:
    """Observed against predicted rate per model, both axes logarithmic; the diagonal is perfect."""
    curves = {}
    for name, model in models.items():
        points = [(c["p"], c["y"]) for c in model["calibration_curve"].get(task, []) if c["p"] > 0 and c["y"] > 0]
        if points:
            curves[name] = sorted(points)
    if not curves:
        return ""
    fig, ax = axes(3.6 + 0.17 * math.ceil(len(curves) / 2))
    flat = [v for points in curves.values() for point in points for v in point]
    low, high = min(flat) / 1.3, max(flat) * 1.3
    ax.plot([low, high], [low, high], color=SOFT, linestyle="--", linewidth=1)
    for i, (name, points) in enumerate(curves.items()):
        p, y = zip(*points, strict=True)
        ax.plot(p, y, marker="o", markersize=3.2, linewidth=1.4, color=series_color(i), label=short_label(name))
    ax.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
    ax.set(xlabel="mean prediction", ylabel="observed rate")
    _decades(ax, low, high)
    legend(fig, len(curves))
    return to_svg(fig, f"cal-{task}", f"Calibration of {task}: observed against predicted rate")


def ne_by_surface(models: Mapping[str, Any], task: str) -> str:
    """NE with its 95 % interval per surface and model; 1 is the base rate, a green tick the Bayes limit."""
    rows = _surface_rows(models, task)
    if not rows:
        return ""
    order = list(models)
    fig, ax = axes(1.15 + 0.27 * len(rows))
    ax.axvline(1.0, color=SOFT, linestyle="--", linewidth=1)
    labels = []
    for y, (surface, name, values) in enumerate(rows):
        color = series_color(order.index(name))
        ne = values["ne"]
        _interval(ax, ne["value"], ne["low"], ne["high"], y, color)
        if values["bayes_ne"] is not None:
            ax.plot([values["bayes_ne"]], [y], marker="|", markersize=11, markeredgewidth=2, color=GOOD)
        first = y == 0 or rows[y - 1][0] != surface
        labels.append(f"{short_label(surface, 18)} · {short_label(name, 16)}" if first else short_label(name, 16))
        if first and y:
            ax.axhline(y - 0.5, color=GRID, linewidth=0.8)
    ax.set_yticks(range(len(rows)), labels)
    ax.set(xlabel="NE (lower is better)", ylim=(len(rows) - 0.4, -0.6))
    ax.grid(axis="y", visible=False)
    return to_svg(fig, f"surface-{task}", f"Normalized entropy of {task} by surface")


def ne_by_day(models: Mapping[str, Any], task: str) -> str:
    """NE per day and model."""
    lines: dict[str, dict[str, float]] = {}
    for name, model in models.items():
        by_day = model["by_day"].items()
        found = {d: t[task]["ne"]["value"] for d, t in by_day if task in t and t[task]["ne"]["value"] is not None}
        if found:
            lines[name] = found
    days = sorted({day for found in lines.values() for day in found})[-MAX_DAYS:]
    if not days:
        return ""
    fig, ax = axes(2.5 + 0.17 * math.ceil(len(lines) / 2))
    ax.axhline(1.0, color=SOFT, linestyle="--", linewidth=1)
    for i, name in enumerate(models):
        points = [(x, lines[name][d]) for x, d in enumerate(days) if d in lines.get(name, {})]
        if points:
            x, y = zip(*points, strict=True)
            ax.plot(x, y, marker="o", markersize=3.5, linewidth=1.4, color=series_color(i), label=short_label(name))
    every = math.ceil(len(days) / 6)
    ax.set_xticks(range(0, len(days), every), [short_label(d[5:] or d) for d in days[::every]])
    ax.set(ylabel="NE", xlim=(-0.5, len(days) - 0.5))
    legend(fig, len(lines))
    return to_svg(fig, f"day-{task}", f"Normalized entropy of {task} by day")


def history_histogram(histogram: Mapping[str, Any]) -> str:
    """How many impressions have a history of which length."""
    edges, counts = histogram["edges"], histogram["counts"]
    if not counts or not sum(counts):
        return ""
    fig, ax = axes(2.5)
    ax.bar(range(len(counts)), counts, width=0.86, color=SERIES[0])
    names = [_range(a, b) for a, b in pairwise(edges)]
    every = math.ceil(len(names) / 8)
    ax.set_xticks(range(0, len(names), every), names[::every])
    ax.yaxis.set_major_formatter(lambda value, _: thousands(value))
    ax.set(xlabel="events known before the impression", ylabel="impressions")
    ax.grid(axis="x", visible=False)
    return to_svg(fig, "history", "Histogram of history lengths")


def stage_times(stages: Mapping[str, Any]) -> str:
    """Seconds per stage."""
    if not stages:
        return ""
    names, seconds = list(stages), [stage["seconds"] for stage in stages.values()]
    fig, ax = axes(0.75 + 0.3 * len(names))
    ax.barh(range(len(names)), seconds, height=0.62, color=SERIES[0])
    room = max([*seconds, 1e-9])
    for y, (name, value) in enumerate(zip(names, seconds, strict=True)):
        text = "skipped" if stages[name]["skipped"] else duration(value)
        ax.text(value + room * 0.015, y, text, va="center", ha="left", color=INK, fontsize=9)
    ax.set_yticks(range(len(names)), [short_label(name, 24) for name in names])
    ax.set(xlabel="seconds", ylim=(len(names) - 0.4, -0.6), xlim=(0, room * 1.22))
    ax.grid(axis="y", visible=False)
    return to_svg(fig, "stages", "Time per stage")


def _surface_rows(models: Mapping[str, Any], task: str) -> list[tuple[str, str, Any]]:
    surfaces = list(dict.fromkeys(s for model in models.values() for s in model["by_surface"]))
    return [
        (surface, name, model["by_surface"][surface][task])
        for surface in surfaces
        for name, model in models.items()
        if task in model["by_surface"].get(surface, {})
        and model["by_surface"][surface][task]["ne"]["value"] is not None
    ]


def _interval(ax: Any, value: float, low: float | None, high: float | None, y: float, color: str) -> None:
    if low is not None and high is not None:
        ax.plot([low, high], [y, y], color=color, linewidth=2, solid_capstyle="round")
    ax.plot([value], [y], marker="o", markersize=5.5, color=color, markeredgecolor=CARD, markeredgewidth=0.8)


def axes(height_in: float) -> tuple[Any, Any]:
    """A figure and its axes in the report's look."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    fig = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
    FigureCanvasAgg(fig)
    ax = fig.add_subplot()
    ax.grid(color=GRID, linewidth=0.8)
    ax.set_axisbelow(True)
    for side, spine in ax.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(GRID)
    ax.tick_params(colors=SOFT, labelsize=9, length=0)
    for axis in (ax.xaxis, ax.yaxis):
        axis.label.set(color=SOFT, fontsize=9.5)
    return fig, ax


def _decades(ax: Any, low: float, high: float) -> None:
    """Plain numbers on logarithmic axes, few enough to read."""
    from matplotlib.ticker import FixedLocator, NullFormatter

    steps = (1, 3) if math.log10(high / low) > 1.2 else (1, 2, 3, 5, 7)
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [s * 10.0**e for e in exponents for s in steps if low <= s * 10.0**e <= high]
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(FixedLocator(ticks))
        axis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.set_minor_formatter(NullFormatter())
        axis.set_minor_locator(FixedLocator([]))


def legend(fig: Any, num: int) -> None:
    """A legend of `num` entries below the picture."""
    fig.legend(
        loc="outside lower center",
        ncols=min(2, num),
        frameon=False,
        fontsize=9.5,
        labelcolor=INK,
        handlelength=1.4,
        columnspacing=1.2,
    )


def to_svg(fig: Any, name: str, title: str) -> str:
    """The figure as inline SVG without outside references; ids get the prefix `name`."""
    import matplotlib

    out = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        fig.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\s(?:xmlns(?::\w+)?)="[^"]*"', "", svg).replace("xlink:href", "href")
    svg = re.sub(r'(<svg[^>]*?)\swidth="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?)\sheight="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r"font:\s*([\d.]+px)[^;\"]*", r"font-size: \1", svg)  # the page's own fonts
    prefix = re.sub(r"\W+", "-", name)
    svg = re.sub(r'\bid="', f'id="{prefix}-', svg)
    svg = re.sub(r'href="#', f'href="#{prefix}-', svg)
    svg = re.sub(r"url\(#", f"url(#{prefix}-", svg)
    for color, variable in _VARIABLES.items():
        svg = svg.replace(color, f"var({variable})")
    svg = svg.replace("<svg", f'<svg role="img" aria-label="{esc(title)}"', 1)
    return re.sub(r"\n\s*", "\n", svg)


def short_label(text: str, width: int = 24) -> str:
    """A name for matplotlib: short, no `$` (would start mathematics), no leading `_` (would hide it)."""
    text = clip(text, width).replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def series_color(index: int) -> str:
    """Colour of the series at a position."""
    return SERIES[index % NUM_SERIES]


def _range(low: float, high: float) -> str:
    if math.isinf(high):
        return f"{thousands(low)}+"
    return thousands(low) if high - low <= 1 else f"{thousands(low)}–{thousands(high - 1)}"


def thousands(value: float) -> str:
    """A count as an axis shows it: 950, 12k, 3.4M."""
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= max(size, 1e4):
            return f"{value / size:.3g}{unit}"
    return f"{value:g}"


def tasks_of(models: Mapping[str, Any]) -> Sequence[str]:
    """All tasks of all models, in order of first appearance."""
    return list(dict.fromkeys(task for model in models.values() for task in model["tasks"]))
