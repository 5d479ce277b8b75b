"""Content-addressed stages: work whose inputs hash the same is done once, and unfinished work is never visible.

<root>/<name>/<key>/             what `build` wrote, and stage.json (key, inputs, record, sha256 of every file)
<root>/<name>/.tmp-<key>-<pid>/  being built; renamed when complete, removed when not
<root>/<name>/.locks/<key>       one process builds a key, others wait and then find it done
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

from gem.errors import ConfigError, GemError
from gem.lineage.chain import STAGE_FILE
from gem.lineage.files import canonical_json, commit, finite, locked, sha256_file, sha256_text, write_json

VERSION = 1
KEY_CHARS = 16


@dataclass(frozen=True)
class StageResult:
    """A finished stage.

    path: the folder with its files. key: hex sha256 of its inputs. skipped: it was there already.
    seconds: of this call; built_seconds: of the build, whenever that was. record: what `build` returned.
    """

    name: str
    path: Path
    key: str
    skipped: bool
    seconds: float
    record: dict[str, Any]
    built_seconds: float = 0.0


def stage_key(name: str, key_parts: Mapping[str, Any]) -> str:
    """Hex sha256 of everything a stage depends on. Raises ConfigError for parts that are no plain JSON."""
    try:
        return sha256_text(canonical_json({"stage": name, "parts": key_parts, "version": VERSION}))
    except (TypeError, ValueError) as e:
        raise ConfigError(f"stage {name}: its key parts must be finite plain JSON values: {e}") from None


def run_stage(
    name: str,
    *,
    key_parts: Mapping[str, Any],
    root: Path,
    build: Callable[[Path], dict[str, Any]],
    on_wait: Callable[[str], None] | None = None,
) -> StageResult:
    """Run `build(folder)` unless a whole result for the same key stands there.

    `build` writes into the folder it gets and returns a JSON record (rows_in, rows_out, ...; NaN becomes
    null). It must not keep paths into that folder, which is renamed afterwards. Whatever stops it (an
    error, Ctrl-C, SIGTERM, a full disk, kill -9) leaves nothing visible; the error propagates. A result
    with missing or changed files is built again. on_wait: told a sentence when another process builds
    this key and this one waits.
    """
    key = stage_key(name, key_parts)
    home = root / name
    final = home / key[:KEY_CHARS]
    start = time.monotonic()
    with _only_one(home, key[:KEY_CHARS], name, on_wait):
        _sweep(home, key[:KEY_CHARS])
        found = _finished(final, key)
        if found is not None:
            return _result(name, final, found, True, time.monotonic() - start)
        temp = home / f".tmp-{key[:KEY_CHARS]}-{os.getpid()}"
        try:
            with _terminate_as_interrupt():
                temp.mkdir(parents=True)
                record = finite(build(temp) or {})
                described = _describe(name, key, key_parts, temp, record, time.monotonic() - start)
                if final.exists():
                    shutil.rmtree(final)  # damaged, else it had been found
                write_json(temp / STAGE_FILE, described)
                commit(temp, final)
        finally:
            shutil.rmtree(temp, ignore_errors=True)
    return _result(name, final, described, False, time.monotonic() - start)


def read_stage(path: Path) -> dict[str, Any] | None:
    """stage.json of a finished folder, or None if there is none that can be read."""
    try:
        raw = json.loads((path / STAGE_FILE).read_bytes())
    except (OSError, ValueError):
        return None
    return raw if isinstance(raw, dict) and raw.get("version") == VERSION else None


def lock_path(home: Path, key: str) -> Path:
    """The lock that is held while a key (its first KEY_CHARS) is built below `home`."""
    return home / ".locks" / key


def damaged_files(path: Path, described: Mapping[str, Any]) -> list[str]:
    """Files of a finished stage that are missing or differ in size or sha256."""
    out = []
    for relative, want in described["files"].items():
        file = path / relative
        if not file.is_file() or file.stat().st_size != want["bytes"] or sha256_file(file) != want["sha256"]:
            out.append(relative)
    return out


def _finished(final: Path, key: str) -> dict[str, Any] | None:
    described = read_stage(final)
    if described is None or described.get("key") != key:
        return None
    return None if damaged_files(final, described) else described


def _describe(
    name: str, key: str, key_parts: Mapping[str, Any], folder: Path, record: dict[str, Any], seconds: float
) -> dict[str, Any]:
    try:
        canonical_json(record)
    except TypeError as e:
        raise GemError(f"stage {name}: its record must be plain JSON values: {e}") from None
    files = {}
    for file in sorted(folder.rglob("*")):
        if file.is_symlink():
            raise GemError(f"stage {name}: {file.name} is a symbolic link; a stage must hold its files itself")
        if file.is_file():
            files[file.relative_to(folder).as_posix()] = {"bytes": file.stat().st_size, "sha256": sha256_file(file)}
    if STAGE_FILE in files:
        raise GemError(f"stage {name}: its build wrote {STAGE_FILE}, which belongs to run_stage; use another name")
    return {
        "version": VERSION,
        "name": name,
        "key": key,
        "key_parts": dict(key_parts),
        "record": record,
        "files": files,
        "seconds": round(seconds, 3),
        "finished_utc": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _result(name: str, path: Path, described: Mapping[str, Any], skipped: bool, seconds: float) -> StageResult:
    built = float(described["seconds"])
    return StageResult(name, path, described["key"], skipped, seconds, dict(described["record"]), built)


@contextlib.contextmanager
def _only_one(home: Path, key: str, name: str, on_wait: Callable[[str], None] | None) -> Iterator[None]:
    """Hold the lock of a key; say so before waiting for another process."""
    path = lock_path(home, key)
    with locked(path, wait=False) as got:
        if got:
            yield
            return
    if on_wait is not None:
        on_wait(f"stage {name}: another process is building the same result ({key}); waiting for it")
    with locked(path):
        yield


def _sweep(home: Path, own: str) -> None:
    """Remove what builders left that died. The caller holds the lock of `own`; others are tried."""
    for left in home.glob(".tmp-*-*"):
        key = left.name.split("-")[1]
        if key == own:
            shutil.rmtree(left, ignore_errors=True)
            continue
        with locked(lock_path(home, key), wait=False) as dead:
            if dead:
                shutil.rmtree(left, ignore_errors=True)


@contextlib.contextmanager
def _terminate_as_interrupt() -> Iterator[None]:
    """Let SIGTERM clean up as Ctrl-C does, where nobody else handles it (only the main thread may)."""
    mine = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

    def stop(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt("SIGTERM")

    if mine:
        signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        if mine and signal.getsignal(signal.SIGTERM) is stop:  # the build may have started a runtime with its own
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
