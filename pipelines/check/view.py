"""The check on the console: findings (errors first), then short overview tables."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipelines.check.finding import ERROR, HINT, LEVELS, OK, WARN, Finding, tally
from pipelines.check.gather import Facts
from pipelines.check.measures import Measures
from pipelines.check.overview import rates_overview, tables_overview

_STYLES = {ERROR: "bold red", WARN: "yellow", HINT: "cyan", OK: "green"}
MIN_WIDTH, MAX_WIDTH = 100, 160
MAX_RATES = 12
MAX_WHERE = 32


def show(name: str, findings: Sequence[Finding], facts: Facts | None, measures: Measures, made: Sequence[Path]) -> None:
    """Print everything to standard output."""
    from rich.console import Console

    width = min(MAX_WIDTH, max(MIN_WIDTH, shutil.get_terminal_size((120, 40)).columns))
    console = Console(file=sys.stdout, width=width, highlight=False, markup=False, soft_wrap=False)
    console.print(_findings(findings))
    if facts is not None and facts.roles:
        console.print(_plain("tables", *tables_overview(facts), num_left=2))
        header, rows = rates_overview(measures)
        console.print(_plain("label rates", header, rows[:MAX_RATES], num_left=2))
    count = {level: sum(f.level == level for f in findings) for level in LEVELS}
    text = f"{name}: {tally(findings)}"
    console.print(text, style=_STYLES[next((level for level in LEVELS if count[level] and level != HINT), OK)])
    for path in made:
        print(f"{'page' if path.suffix == '.html' else 'data':<8} {path}", flush=True)


def _findings(findings: Sequence[Finding]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1))
    for title in ("level", "check", "where", "what, and what to do"):
        most = MAX_WHERE if title == "where" else None
        table.add_column(title, max_width=most, overflow="fold", no_wrap=title in ("level", "check"))
    for f in findings:
        what = Text(f.what)
        if f.todo:
            what.append(f"\n{f.todo}", style="dim")
        table.add_row(Text(f.level, style=_STYLES[f.level]), Text(f.check), Text(f.where), what)
    return table


def _plain(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], num_left: int) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 1))
    for i, name in enumerate(header):
        table.add_column(name, justify="left" if i < num_left else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table
