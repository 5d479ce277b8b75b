"""Glob patterns over relative paths, alike for local folders and object stores."""

from __future__ import annotations

import re
from collections.abc import Iterable

from gem.errors import SpecError


def check_patterns(where: str, patterns: Iterable[str]) -> None:
    """Raise SpecError for a pattern that is not below the data folder."""
    for pattern in patterns:
        if pattern.startswith("/") or ".." in pattern.split("/"):
            raise SpecError(f"{where}.files: {pattern!r} leaves the data folder; give a pattern below it.")


def glob_regex(pattern: str) -> re.Pattern[str]:
    """A glob pattern as a regular expression over relative paths with `/`."""
    out = ""
    parts = pattern.split("/")
    for i, part in enumerate(parts):
        last = i == len(parts) - 1
        if part == "**":
            out += ".*" if last else "(?:[^/]+/)*"
        else:
            out += _name_regex(part) + ("" if last else "/")
    return re.compile(out, re.DOTALL)


def _name_regex(part: str) -> str:
    out, i = "", 0
    while i < len(part):
        char, end = part[i], part.find("]", i + 2)
        i += 1
        if char == "*":
            out += "[^/]*"
        elif char == "?":
            out += "[^/]"
        elif char == "[" and end > 0:
            inside = part[i:end].replace("\\", r"\\").replace("[", r"\[")
            out += "[" + ("^" + inside[1:] if inside[0] in "!^" else inside) + "]"
            i = end + 1
        else:
            out += re.escape(char)
    return out


def fixed_folder(pattern: str) -> tuple[str, int]:
    """The folders before the first wildcard, and how many names the rest has (0 with `**`)."""
    parts = pattern.split("/")
    fixed = 0
    while fixed < len(parts) - 1 and not re.search(r"[*?\[]", parts[fixed]):
        fixed += 1
    return "/".join(parts[:fixed]), 0 if "**" in parts else len(parts) - fixed
