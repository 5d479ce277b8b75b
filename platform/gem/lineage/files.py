"""Small file tools of lineage: canonical JSON, hashes, durable writes, a lock between processes."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def canonical_json(value: Any) -> str:
    """The one JSON text of a value (sorted keys, no spaces). Raises ValueError for NaN or infinity."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def sha256_text(text: str) -> str:
    """Hex sha256 of UTF-8 text."""
    return hashlib.sha256(text.encode()).hexdigest()


def sha256_file(path: Path) -> str:
    """Hex sha256 of a file, read in pieces."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def finite(value: Any) -> Any:
    """A copy of a JSON tree in which NaN and infinities are null (JSON has no such numbers).

    Tuples become lists, numpy scalars plain numbers.
    """
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        return finite(value.item())
    return value


def relocated(path_text: str, runs: Path) -> Path:
    """Where a recorded path lies now: the path itself if it exists, else its longest tail that exists below `runs`.

    A runs folder may be moved or mounted elsewhere, the paths written in it stay. The path itself is
    returned if nothing is found. What is found may be something else: the caller checks its hash.
    """
    path = Path(path_text)
    if path.exists():
        return path
    parts = path.parts[1:] if path.is_absolute() else path.parts
    if ".." in parts:
        return path
    tails = (runs.joinpath(*parts[i:]) for i in range(len(parts)))
    return next((tail for tail in tails if tail.exists()), path)


def write_json(path: Path, value: Any) -> None:
    """Write readable JSON (sorted keys). Raises ValueError for NaN or infinity."""
    path.write_text(json.dumps(value, sort_keys=True, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def fsync_tree(root: Path) -> None:
    """Flush every file and folder below `root` to the disk, so that a rename after it is a commit."""
    for folder, _, names in os.walk(root):
        for name in names:
            _fsync(Path(folder) / name)
        _fsync(Path(folder))


def commit(temp: Path, final: Path) -> None:
    """Make a finished folder visible under its name: flush, rename, flush the parent.

    Raises FileExistsError if something stands there already: nothing is ever overwritten.
    """
    fsync_tree(temp)
    if final.exists() or final.is_symlink():
        raise FileExistsError(str(final))
    os.rename(temp, final)  # fails on a non-empty folder, should another process have been faster
    _fsync(final.parent)


@contextlib.contextmanager
def locked(path: Path, wait: bool = True) -> Iterator[bool]:
    """Hold an exclusive lock on the file `path` (made if absent); yields whether the lock was got.

    The kernel frees it when the process ends, however it ends. The file stays: removing a lock file
    would let two processes hold "the" lock.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            got = True
        except BlockingIOError:
            got = False
        yield got
    finally:
        os.close(fd)


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
