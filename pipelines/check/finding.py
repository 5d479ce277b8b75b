"""One finding: what is wrong (or was looked at and is fine), where, the numbers, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

ERROR, WARN, HINT, OK = "ERROR", "WARN", "HINT", "OK"
LEVELS = (ERROR, WARN, HINT, OK)


@dataclass(frozen=True)
class Finding:
    """A line of the report.

    level: ERROR (do not train), WARN (look at it before training), HINT (worth knowing), OK (looked at, fine).
    check: the rule, such as `drift`. where: table, column, day or surface. numbers: the figures, JSON.
    """

    level: str
    check: str
    where: str
    what: str
    todo: str = ""
    numbers: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def by_level(findings: list[Finding]) -> list[Finding]:
    """Errors first, then warnings, hints and what is fine; the order of the rules within."""
    return sorted(findings, key=lambda f: LEVELS.index(f.level))


def percent(share: float) -> str:
    """A share as a person reads it: 43 %, 2.6 %, 0.004 %, 0 %, and never 100 % for less than all."""
    value = 100 * share
    if value in (0, 100):
        return f"{value:.0f} %"
    digits = 0 if 10 <= value < 99 else 1 if value >= 1 else 2
    text = f"{value:.{digits}f}"
    return f"{value:.2g} %" if float(text) in (0.0, 100.0) else f"{text} %"


def tally(findings: Sequence[Finding]) -> str:
    """How many of each level: 2 errors, 1 warning, 7 hints, 15 checks fine."""
    count = {level: sum(f.level == level for f in findings) for level in LEVELS}
    names = ((ERROR, "error"), (WARN, "warning"), (HINT, "hint"))
    words = [f"{count[level]} {name}{'' if count[level] == 1 else 's'}" for level, name in names]
    return ", ".join([*words, f"{count[OK]} checks fine"])


def some(names: list[str], most: int = 4) -> str:
    """A short list: a, b, c and 5 more."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
