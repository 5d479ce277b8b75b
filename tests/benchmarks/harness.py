"""The one form of all benchmarks: claims with goals, a table on the screen, a JSON file for the record.

`tests/benchmarks/out/<name>.json`: {commit, date, machine, data, rows: [...],
claims: [{id, value, low, high, goal, met, unit, note}]}.
A claim that could not be measured stands there with value null and the reason.
"""

from __future__ import annotations

import argparse
import json
import operator
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pipelines.provenance import git_commit

OUT = Path(__file__).parent / "out"
SENSES = {">=": operator.ge, ">": operator.gt, "<=": operator.le, "<": operator.lt}
DEFAULT_DATA = Path("..") / "shared" / "data"


@dataclass(frozen=True)
class Claim:
    """One headline number. goal is the bound that `sense` (one of SENSES) compares with.

    by: what is compared: "value", or "low" or "high", the interval's end.
    """

    id: str
    value: float | None
    goal: float
    sense: str = ">="
    unit: str = ""
    low: float | None = None
    high: float | None = None
    note: str = ""
    by: str = "value"

    @property
    def met(self) -> bool:
        """False also when there is no value, or no interval where its end is compared."""
        number = {"value": self.value, "low": self.low, "high": self.high}[self.by]
        return number is not None and SENSES[self.sense](number, self.goal)


@dataclass
class Report:
    name: str
    data: str
    claims: list[Claim] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)

    def finish(self) -> Path:
        """Print the claims and write the JSON; returns its path."""
        OUT.mkdir(exist_ok=True)
        path = OUT / f"{self.name}.json"
        claims = [{**asdict(c), "goal": f"{c.sense} {c.goal:g}", "met": c.met} for c in self.claims]
        machine = (
            f"{os.cpu_count()} cores, {platform.processor() or platform.machine()}, Python {platform.python_version()}"
        )
        date = datetime.now(UTC).isoformat(timespec="seconds")
        body = {"commit": git_commit(), "date": date, "machine": machine, "data": self.data}
        path.write_text(json.dumps({**body, "claims": claims, "rows": self.rows}, indent=2) + "\n")
        print(f"\n{self.name} · {self.data} · commit {body['commit']}\n")
        for c in self.claims:
            value = "not measured" if c.value is None else f"{c.value:.4g} {c.unit}".strip()
            between = f" [{c.low:.4g}, {c.high:.4g}]" if c.low is not None and c.high is not None else ""
            end = "" if c.by == "value" else f"{c.by} "
            mark = "met   " if c.met else "MISSED"
            print(f"  {mark} {c.id:<32} {value}{between}  (goal {end}{c.sense} {c.goal:g})  {c.note}".rstrip())
        print(f"\n  {path}")
        return path


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments every benchmark takes: `--data-dir`, a folder that holds `kuairand/` and others."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-dir", type=Path, default=Path(os.environ.get("GEM_DATA_DIR") or DEFAULT_DATA))
    return parser.parse_args(argv)
