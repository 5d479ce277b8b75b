"""Which finished store a new window of data is added to, and the hashes of raw files without reading them twice."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gem.data.build.forgotten import Forgotten
from gem.data.ingest.sources import RawFile, sha256
from gem.data.spec import DatasetSpec
from gem.errors import DataError
from gem.lineage.files import locked
from pipelines.preprocess import Hashes
from pipelines.stage import damaged_files, read_stage

FORGOTTEN = "forgotten.json"
HASHES = ".hashes.json"
ANY_VALUE = ("test_day", "validation_day", "max_quarantine_share", "allow_missing_days")  # settings a child may change
RACY_NS = 2 * 10**9  # a file changed this short before it was hashed may change again within one tick of its clock


def find_parent(
    home: Path, parts: Mapping[str, Any], spec: DatasetSpec, say: Callable[[str], None] = lambda text: None
) -> Path | None:
    """The finished preprocess stage below `home` with most of the raw files, all of which are still there as they were.

    Spec, code, forgotten users and settings must be the same; entity tables may have been delivered anew. A store whose
    own files are not as they were written is passed over. None if there is none, or if the run does not want one; `say`
    is told why.
    """
    if not parts["settings"]["incremental"]:
        return None
    finished = [(f, d) for f in sorted(home.glob("[0-9a-f]*")) if (d := read_stage(f)) is not None]
    finished.sort(key=lambda item: (_held(item[1]), item[1]["finished_utc"]), reverse=True)
    reasons = []
    for folder, described in finished:
        reason = _unfit(described["key_parts"], parts, spec)
        if not reason and (damaged := damaged_files(folder, described)):
            reason = f"its file {damaged[0]} is damaged or missing"
        if not reason:
            say(f"adding to the store {folder.name}")
            return folder
        reasons.append(f"not added to the store {folder.name}: {reason}")
    if reasons:
        say(reasons[0])
    return None


def _held(described: Mapping[str, Any]) -> int:
    return sum(len(found) for found in described["key_parts"]["files"].values())


def _unfit(old: Mapping[str, Any], new: Mapping[str, Any], spec: DatasetSpec) -> str:
    """Why files cannot be added to a store of these key parts; empty if they can."""
    names = {"spec": "the spec", "code": "the code", "forgotten": "the list of forgotten users"}
    for name, what in names.items():
        if old.get(name) != new.get(name):
            return f"{what} is another"
    settings = [{k: v for k, v in parts["settings"].items() if k not in ANY_VALUE} for parts in (old, new)]
    for name in sorted({*settings[0], *settings[1]}):
        if settings[0].get(name) != settings[1].get(name):
            return f"data.{name} is another"
    logs = {
        spec.impressions.table,
        *(e.table for e in spec.events),
        *(la.table for la in spec.labels.values() if la.table),
    }
    for table in sorted(logs & old["files"].keys()):
        for path, sha in old["files"][table].items():
            if new["files"].get(table, {}).get(path) != sha:
                return f"its raw file {path} has changed or is gone"
    return ""


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
        with contextlib.suppress(OSError):  # a full disk costs reading the files again, no more
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


def list_lock(root: Path) -> Path:
    """The lock of the list: held while it is written, and while a store that was made by it is committed."""
    return root / f"{FORGOTTEN}.lock"


@contextlib.contextmanager
def unchanged_list(root: Path, forgotten: Forgotten) -> Iterator[None]:
    """Keep the list as it is until a store is committed. Raises DataError if users were added since it was read."""
    with locked(list_lock(root)):
        if key_part(read_forgotten(root)) != key_part(forgotten):
            raise DataError(
                "users were forgotten while this store was built: it still held them and was not finished. Run the "
                "same command again, which leaves them out"
            )
        yield


__all__ = [
    "key_part", "file_hashes", "find_parent", "list_lock", "read_forgotten", "unchanged_list", "write_forgotten",
]  # fmt: skip
