"""Pictures of the check page, in the look of the report (inline SVG); "" where there is nothing to draw."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pipelines.check.gather import Facts, RoleFacts
from pipelines.check.measures import Measures, Rate
from pipelines.check.rules_signal import LEAK, PSI_STRONG, PSI_WARN
from pipelines.check.rules_tables import plain
from pipelines.report.plots import INK, SERIES, SOFT, axes, legend, series_color, short_label, thousands, to_svg

MAX_BARS = 14
LINES = 3  # surfaces drawn beside all


def rows_by_day(role: RoleFacts) -> str:
    """Impressions per day; missing days stay empty."""
    if not role.by_day:
        return ""
    first = dt.date.fromisoformat(min(role.by_day))
    span = (dt.date.fromisoformat(max(role.by_day)) - first).days + 1
    if span > 3660:
        return ""
    days = [(first + dt.timedelta(days=i)).isoformat() for i in range(span)]
    fig, ax = axes(2.5)
    ax.bar(range(span), [role.by_day.get(d, {"rows": 0})["rows"] for d in days], width=0.86, color=SERIES[0])
    ax.yaxis.set_major_formatter(lambda value, _: thousands(value))
    _days(ax, days)
    ax.grid(axis="x", visible=False)
    return to_svg(fig, "check-days", "Impressions by day")


def rates_by_day(measures: Measures, label: str) -> str:
    """Label rate per day with Wilson's interval: all rows, and the largest surfaces."""
    lines: dict[str, list[Rate]] = {}
    for where in ["", *(measures.surfaces[:LINES] if len(measures.surfaces) > 1 else [])]:
        found = [r for r in measures.rates if r.label == label and r.surface == where and r.day and r.rows]
        if found:
            lines[where or "all"] = found
    if not lines:
        return ""
    fig, ax = axes(2.9)
    for i, (name, rates) in enumerate(lines.items()):
        x = [measures.days.index(r.day) for r in rates]
        ax.fill_between(x, [r.low for r in rates], [r.high for r in rates], color=series_color(i), alpha=0.16, lw=0)
        ax.plot(x, [r.rate for r in rates], marker="o", markersize=3.2, linewidth=1.4, color=series_color(i),
                label=short_label(name))  # fmt: skip
    _days(ax, measures.days)
    ax.set(ylabel="rate", ylim=(0, None))
    legend(fig, len(lines))
    return to_svg(fig, f"check-rate-{label}", f"Rate of {label} by day")


def rates_by_surface(measures: Measures, label: str) -> str:
    """Label rate per surface with Wilson's interval, most rows first."""
    found = [r for r in measures.rates if r.label == label and r.surface and not r.day and r.rows][:MAX_BARS]
    if len(found) < 2:
        return ""
    fig, ax = axes(0.9 + 0.26 * len(found))
    for y, r in enumerate(found):
        ax.plot([r.low, r.high], [y, y], color=SERIES[0], linewidth=2, solid_capstyle="round")
        ax.plot([r.rate], [y], marker="o", markersize=5, color=SERIES[0])
    ax.set_yticks(range(len(found)), [f"{short_label(r.surface, 16)} ({thousands(r.rows)})" for r in found])
    ax.set(xlabel="rate", ylim=(len(found) - 0.4, -0.6))
    return to_svg(fig, f"check-surface-{label}", f"Rate of {label} by surface")


def hours(facts: Facts) -> str:
    """Share of the rows per local hour and table."""
    seen: dict[str, Any] = {}
    for role in facts.roles.values():
        total = np.sum([one["hours"] for one in role.by_day.values()], axis=0) if role.by_day else np.zeros(1)
        if total.sum() and role.table not in {t for t, _ in seen.values()}:
            seen[role.title] = (role.table, total / total.sum())
    if not seen:
        return ""
    fig, ax = axes(2.7)
    for i, (name, (_, share)) in enumerate(seen.items()):
        ax.plot(
            range(24), share, marker="o", markersize=3, linewidth=1.4, color=series_color(i), label=short_label(name)
        )
    ax.set(xlabel=f"hour in {facts.spec.impressions.zone}", ylabel="share of rows", ylim=(0, None))
    ax.set_xticks(range(0, 24, 3))
    legend(fig, len(seen))
    return to_svg(fig, "check-hours", "Activity by hour of the day")


def drift_bars(measures: Measures) -> str:
    """PSI of the features over all surfaces, largest first; bars hold what equal distributions would show."""
    found = sorted((d for d in measures.drift if not d.surface), key=lambda d: -d.psi)[:MAX_BARS]
    if not found:
        return ""
    fig, ax = _bars([d.feature for d in found], [d.psi for d in found], "PSI, last day against the days before")
    ax.plot([d.noise for d in found], range(len(found)), linestyle="", marker="|", markersize=9, color=INK)
    for at in (PSI_WARN, PSI_STRONG):
        ax.axvline(at, color=SOFT, linestyle="--", linewidth=1)
    return to_svg(fig, "check-drift", "Drift of the features")


def auc_bars(measures: Measures) -> str:
    """AUC of single columns, highest first; features, unused columns and declared outcomes in colours of their own."""
    uses = {"feature": 0, "free": 0, "unused": 1, "outcome": 3}
    best: dict[str, Any] = {}
    for one in measures.aucs:
        if one.column not in best or one.auc > best[one.column].auc:
            best[one.column] = one
    found = sorted(best.values(), key=lambda a: -a.auc)[:MAX_BARS]
    if not found:
        return ""
    colors = [series_color(uses[a.use]) for a in found]
    fig, ax = _bars([a.column for a in found], [a.auc - 0.5 for a in found], "AUC alone", colors)
    ax.set_xticks([0, 0.1, 0.2, 0.3, 0.4, 0.5], ["0.5", "0.6", "0.7", "0.8", "0.9", "1"])
    ax.set(xlim=(0, 0.5))
    ax.axvline(LEAK - 0.5, color=SOFT, linestyle="--", linewidth=1)
    for name, at in (("feature", 0), ("unused column", 1), ("declared outcome", 3)):
        ax.plot([], [], marker="s", linestyle="", color=series_color(at), label=name)
    legend(fig, 3)
    return to_svg(fig, "check-auc", "AUC of single columns")


def history_bars(measures: Measures) -> str:
    """Users by the number of their events."""
    if not measures.history_counts:
        return ""
    fig, ax = axes(2.5)
    names = [f"{thousands(a)}+" if b > 10**9 else thousands(a) if b - a == 1 else f"{thousands(a)}–{thousands(b - 1)}"
             for a, b, _ in measures.history_counts]  # fmt: skip
    ax.bar(range(len(names)), [n for _, _, n in measures.history_counts], width=0.86, color=SERIES[0])
    ax.set_xticks(range(len(names)), names, rotation=30 if len(names) > 7 else 0)
    ax.yaxis.set_major_formatter(lambda value, _: thousands(value))
    ax.set(xlabel="events of a user, all sources", ylabel="users")
    ax.grid(axis="x", visible=False)
    return to_svg(fig, "check-history", "Users by length of history")


def null_bars(roles: Mapping[str, RoleFacts]) -> str:
    """Null rates of the columns that have any, highest first."""
    found = []
    for role in roles.values():
        if role.key.startswith("events"):
            continue
        for name, column in role.columns.items():
            if column["nulls"]:
                found.append((column["nulls"] / column["rows"], f"{role.title}.{plain(name)}"))
    found = sorted(found, key=lambda f: (-f[0], f[1]))[:MAX_BARS]
    if not found:
        return ""
    fig, ax = _bars([name for _, name in found], [share for share, _ in found], "share of rows without a value")
    ax.set(xlim=(0, max(0.05, found[0][0] * 1.05)))
    return to_svg(fig, "check-nulls", "Null rates")


def _bars(names: Sequence[str], values: Sequence[float], title: str, colors: Any = SERIES[0]) -> tuple[Any, Any]:
    fig, ax = axes(0.9 + 0.26 * len(names))
    ax.barh(range(len(names)), values, height=0.66, color=colors)
    ax.set_yticks(range(len(names)), [short_label(n, 30) for n in names])
    ax.set(xlabel=title, ylim=(len(names) - 0.4, -0.6))
    ax.grid(axis="y", visible=False)
    return fig, ax


def _days(ax: Any, days: Sequence[str]) -> None:
    every = -(-len(days) // 6)
    ax.set_xticks(range(0, len(days), every), [d[5:] for d in days[::every]])
