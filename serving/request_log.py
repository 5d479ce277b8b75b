"""The prediction log: one JSON line per answered request, enough to score it again offline.

A replica writes its own file, so lines of two replicas never mix; `read` joins them again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class RequestLog:
    """Appends to `<folder>/requests-<replica>.jsonl`; above `max_bytes` the file becomes `….1`.

    Not thread-safe by itself: one thread writes. Raises OSError when the disk refuses.
    """

    def __init__(self, folder: Path, replica: str, max_bytes: int) -> None:
        safe = "".join(c if c.isalnum() or c in "-_" else "-" for c in replica)
        self.path = folder / f"requests-{safe}.jsonl"
        self._max_bytes = max_bytes

    def write(self, record: dict[str, Any]) -> None:
        """Append one record with a single write, so that a killed replica leaves whole lines but the last."""
        line = (json.dumps(record, allow_nan=True, separators=(",", ":")) + "\n").encode()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists() and self.path.stat().st_size + len(line) > self._max_bytes:
            os.replace(self.path, self.path.with_suffix(".jsonl.1"))
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o640)
        try:
            os.write(fd, line)
        finally:
            os.close(fd)


def read(folder: Path) -> Iterator[dict[str, Any]]:
    """All whole records of a folder, rotated files first (a cut last line is skipped)."""
    older, newer = folder.glob("requests-*.jsonl.1"), folder.glob("requests-*.jsonl")
    for path in [*sorted(older), *sorted(newer)]:
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                if line.endswith("\n"):
                    yield json.loads(line)
