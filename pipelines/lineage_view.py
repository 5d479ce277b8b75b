"""The lineage of a model as text: data, features, teacher, student, deployment, one box below the other."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from gem.lineage.chain import ChainRecord

WIDTH = 96
_HASH_CHARS = 12


def format_chain(records: Sequence[ChainRecord]) -> str:
    """Plain text of a chain from `Registry.chain`, oldest link first. Hashes are shortened, problems marked with !!."""
    boxes = [_box(r) for r in records]
    arrow = f"\n{' ' * 8}│\n{' ' * 8}▼\n"
    broken = sum(1 for r in records if r.problem)
    text = arrow.join(boxes)
    return text + (f"\n!! {broken} of {len(records)} links cannot be verified" if broken else "")


def _box(record: ChainRecord) -> str:
    title = f" {record.step}{': ' + record.name if record.name else ''} "
    mark = f" {record.hash[:_HASH_CHARS]} " if record.hash else ""
    fill = "─" * max(1, WIDTH - 3 - len(title) - len(mark))
    lines = [f"┌─{title}{fill}{mark}┐"]
    width = max(WIDTH, len(lines[0]))
    rows = [(name, _value(name, value)) for name, value in record.facts.items()]
    if record.path:
        rows.append(("at", record.path))
    if record.problem:
        rows.append(("!!", record.problem))
    label = max((len(name) for name, _ in rows), default=0)
    for name, value in rows:
        for i, part in enumerate(textwrap.wrap(value, width - label - 6) or [""]):
            lines.append(f"│ {(name if i == 0 else ''):<{label}}  {part:<{width - label - 6}} │")
    lines.append(f"└{'─' * (width - 2)}┘")
    return "\n".join(lines)


def _value(name: str, value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {_value(k, v)}" for k, v in value.items())
    if isinstance(value, (list, tuple)):
        separator = "; " if name == "reasons" else ", "
        return (
            f"{value[0]} to {value[-1]}"
            if name.endswith("days") and len(value) > 2
            else separator.join(map(str, value))
        )
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4f}"
    text = str(value)
    return text[:_HASH_CHARS] if len(text) == 64 and set(text) <= set("0123456789abcdef") else text
