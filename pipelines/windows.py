"""Which finished store a new window of data is added to, and the hashes of raw files without reading them twice."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gem.data.build.forgotten import Forgotten
from gem.data.ingest.sources import RawFile, sha256
from gem.data.spec import DatasetSpec
from gem.lineage.files import locked
from pipelines.preprocess import Hashes
from pipelines.stage import read_stage

FORGOTTEN = "forgotten.json"
HASHES = ".hashes.json"
ANY_VALUE = ("test_day", "validation_day", "max_quarantine_share", "allow_missing_days")  # settings a child may change
RACY_NS = 2 * 10**9  # a file changed this short before it was hashed may change again within one tick of its clock


def find_parent(home: Path, parts: Mapping[str, Any], spec: DatasetSpec) -> Path | None:
    """The finished preprocess stage below `home` with most of the raw files, all of which are still there as they were.

    Spec, code, forgotten users and settings must be the same; entity tables may have been delivered anew. None if there
    is none, or if the run does not want one.
    """
    if not parts["settings"]["incremental"]:
        return None
    best: tuple[int, str, Path] | None = None
    for folder in sorted(home.glob("[0-9a-f]*")):
        described = read_stage(folder)
        if described is None or not _fits(described["key_parts"], parts, spec):
            continue
        held = sum(len(found) for found in described["key_parts"]["files"].values())
        best = max(best or (0, "", folder), (held, described["finished_utc"], folder))
    return best[2] if best and best[0] else None


def _fits(old: Mapping[str, Any], new: Mapping[str, Any], spec: DatasetSpec) -> bool:
    if any(old.get(name) != new.get(name) for name in ("spec", "code", "forgotten")):
        return False
    settings = [{k: v for k, v in parts["settings"].items() if k not in ANY_VALUE} for parts in (old, new)]
    if settings[0] != settings[1]:
        return False
    logs = {
        spec.impressions.table,
        *(e.table for e in spec.events),
        *(la.table for la in spec.labels.values() if la.table),
    }
    return all(
        table not in logs or all(new["files"].get(table, {}).get(path) == sha for path, sha in found.items())
        for table, found in old["files"].items()
    )


def file_hashes(files: Mapping[str, Sequence[RawFile]], runs: Path) -> Hashes:
    """Table -> path below the data folder -> sha256: what the raw inputs of a stage are.

    A local file that has the size and time of change it had when it was last hashed is not read again.
    """
    cache = runs / HASHES
    with locked(runs / f"{HASHES}.lock"):
        known = _read(cache)
        out: dict[str, dict[str, str]] = {}
        for table, found in files.items():
            out[table] = {f.relative: _hash(f, known) for f in found}
        beside = cache.with_suffix(".tmp")
        beside.write_text(json.dumps(known), encoding="utf-8")
        beside.replace(cache)
    return out


def _hash(file: RawFile, known: dict[str, list[Any]]) -> str:
    stamp = [file.size, file.modified_ns]
    entry = known.get(file.uri)
    if entry is not None and entry[:2] == stamp and file.modified_ns:
        return str(entry[2])
    started = time.time_ns()
    found = sha256(file)
    if file.modified_ns and started - file.modified_ns > RACY_NS:
        known[file.uri] = [*stamp, found]
    return found


def _read(cache: Path) -> dict[str, list[Any]]:
    try:
        raw = json.loads(cache.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return raw if isinstance(raw, dict) else {}


def read_forgotten(root: Path) -> Forgotten:
    """The users who asked to be forgotten in this data set; kept as salted hashes."""
    path = root / FORGOTTEN
    if not path.is_file():
        return Forgotten()
    return Forgotten.from_dict(json.loads(path.read_text(encoding="utf-8")))


def key_part(forgotten: Forgotten) -> list[str] | None:
    """What of the list a stage depends on, without the key of its digests."""
    return list(forgotten.digests) or None


def write_forgotten(root: Path, forgotten: Forgotten) -> None:
    """Write the list in one step, readable by its owner only."""
    root.mkdir(parents=True, exist_ok=True)
    beside = root / (FORGOTTEN + ".tmp")
    fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "w", encoding="utf-8") as f:
        json.dump(forgotten.to_dict(), f)
        f.flush()
        os.fsync(f.fileno())
    beside.replace(root / FORGOTTEN)


__all__ = ["key_part", "file_hashes", "find_parent", "read_forgotten", "write_forgotten"]
