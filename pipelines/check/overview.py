"""The tables under the findings, as plain text cells: the console and the page show the same."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence

from pipelines.check.finding import percent
from pipelines.check.gather import EXTRA, Facts
from pipelines.check.measures import Measures
from pipelines.check.rules_signal import interval
from pipelines.check.rules_tables import plain

Cells = tuple[Sequence[str], list[list[str]]]
_INNER = ("impression_id", "dup", "order", "known_ms", "kind", "flags")


def tables_overview(facts: Facts) -> Cells:
    """One row per table and use."""
    header = ["table", "read as", "files", "MB", "rows", "quarantined", "keys", "days"]
    rows = []
    for role in facts.roles.values():
        files = facts.files.get(role.table, [])
        keys = {"impressions": "user", "events": "user"}.get(role.key.partition(".")[0], "key")
        bad = sum(role.quarantined.values())
        days = sorted(role.by_day)
        rows.append([
            role.table, role.title if role.title != role.table else role.key.partition(".")[0], f"{len(files):,}",
            f"{sum(f.size for f in files) / 1e6:,.1f}", f"{role.raw_rows:,}",
            f"{bad:,} ({percent(bad / role.raw_rows)})" if bad else "0",
            f"{role.keys[keys].num_keys:,} {keys}s" if keys in role.keys else "",
            f"{days[0]} to {days[-1]}" if days else "",
        ])  # fmt: skip
    return header, rows


def rates_overview(measures: Measures) -> Cells:
    """Label rates: all rows and every surface."""
    header = ["label", "surface", "rows", "positives", "rate [95 %]"]
    found = [r for r in measures.rates if not r.day and r.rows]
    return header, [[r.label, r.surface or "all", f"{r.rows:,}", f"{r.positives:,}", interval(r)] for r in found]


def columns_overview(facts: Facts, measures: Measures) -> Cells:
    """Every canonical column: type, nulls, distinct values, range."""
    header = ["table", "column", "type", "nulls", "distinct", "once", "min", "median", "max"]
    rows = []
    for role in facts.roles.values():
        for name, column in role.columns.items():
            if name in _INNER or not column["rows"]:
                continue
            values = role.keys.get(f"value:{name}") or role.keys.get(name)
            median = measures.medians.get((role.key, name))
            rows.append([
                role.title, plain(name) + (" (unused)" if name.startswith(f"ctx:{EXTRA}") else ""), column["type"],
                percent(column["nulls"] / column["rows"]), f"{values.num_keys:,}" if values else "",
                f"{values.num_singletons:,}" if values else "",
                *(number(name, v) for v in (column.get("min"), median, column.get("max"))),
            ])  # fmt: skip
    return header, rows


def number(name: str, value: float | None) -> str:
    """A number as a person reads it; times as UTC."""
    if value is None:
        return ""
    if name == "time_ms":
        return f"{dt.datetime.fromtimestamp(value / 1000, dt.UTC):%Y-%m-%d %H:%M}"
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.4g}"


def facts_overview(facts: Facts, measures: Measures) -> list[tuple[str, str]]:
    """The figures at the head."""
    imp = facts.roles.get("impressions")
    if imp is None:
        return []
    days = sorted(imp.by_day)
    out = [("impressions", f"{imp.rows:,}"), ("days", f"{len(days)}"), ("users", f"{imp.keys['user'].num_keys:,}")]
    out += [("ads", f"{imp.keys['ad'].num_keys:,}"), ("surfaces", f"{len(measures.surfaces)}")]
    out += [
        (f"rate of {r.label}", f"{100 * r.rate:.3g} %")
        for r in measures.rates
        if not r.day and not r.surface and r.rows
    ]
    if measures.histories:
        out.append(("events per user, median", f"{measures.histories['median']:,.0f}"))
        out.append(("longest history", f"{measures.histories['longest']:,.0f}"))
    return out
