"""Append-only audit of promotions: one JSON object per line, flushed before a change counts."""

from __future__ import annotations

import getpass
import json
import os
import socket
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gem.errors import TrackingError
from gem.lineage.files import canonical_json


@dataclass(frozen=True)
class AuditEntry:
    """One change of the champion of one model. Versions are text; empty = there was none.

    action: "promote", "rollback", or "observed" (the alias had been moved by other means than ours,
    found at the next change; `from_version` is then what the log believed).
    """

    name: str
    from_version: str
    to_version: str
    bundle_hash: str
    reasons: tuple[str, ...]
    action: str = "promote"
    who: str = ""
    utc: str = ""

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> AuditEntry:
        return cls(**{**raw, "reasons": tuple(raw["reasons"])})


@dataclass(frozen=True)
class AuditLog:
    """The log of one runs folder. `damaged` lines (a write that was cut off) are skipped and listed."""

    path: Path

    def append(self, entry: AuditEntry) -> AuditEntry:
        """Write one line and flush it to the disk; fills `who` and `utc` where empty. Returns what was written.

        The caller holds the lock of the registry, so lines of two processes never mix.
        """
        raw = asdict(entry)
        raw["who"] = entry.who or current_user()
        raw["utc"] = entry.utc or datetime.now(UTC).isoformat(timespec="milliseconds")
        line = canonical_json(raw) + "\n"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                size = os.fstat(fd).st_size
                if size and os.pread(fd, 1, size - 1) != b"\n":
                    line = "\n" + line  # the last writer died in the middle of its line
                data = line.encode()
                if os.write(fd, data) != len(data):
                    raise OSError("short write")
                os.fsync(fd)
            finally:
                os.close(fd)
        except OSError as e:
            raise TrackingError(f"audit log {self.path}: cannot append ({e}); free space or fix its rights") from None
        return AuditEntry.from_dict(raw)

    def read(self, name: str | None = None) -> list[AuditEntry]:
        """All whole lines, oldest first; only those of one model if `name` is given."""
        entries = [e for e in map(_parse, self._lines()) if e is not None]
        return [e for e in entries if name is None or e.name == name]

    def damaged(self) -> list[int]:
        """Numbers (from 1) of lines that are no audit entries."""
        return [i for i, line in enumerate(self._lines(), 1) if _parse(line) is None]

    def _lines(self) -> list[str]:
        try:
            return [x for x in self.path.read_text(encoding="utf-8", errors="replace").split("\n") if x]
        except FileNotFoundError:
            return []


def champions_before(entries: list[AuditEntry]) -> list[str]:
    """Versions one can roll back to, oldest first: a promotion pushes, a rollback pops."""
    stack: list[str] = []
    for e in entries:
        if e.action == "rollback":
            while stack and stack.pop() != e.to_version:
                pass
        elif e.from_version and e.from_version != e.to_version:
            stack.append(e.from_version)
    return stack


def current_user() -> str:
    """`user@host` of this process; `unknown` where the system does not know a name."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = "unknown"
    return f"{user}@{socket.gethostname()}"


def _parse(line: str) -> AuditEntry | None:
    try:
        raw = json.loads(line)
        return AuditEntry.from_dict(raw)
    except (ValueError, TypeError, KeyError):
        return None
