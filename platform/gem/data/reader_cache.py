"""The arrays of a feature store as files that every process of a machine maps: built once, read without copies.

<store>/../.readers/<hash>/           arrays (see `gem.data.reader_build`), cache.json, held
<store>/../.readers/<hash>.building/  being built; renamed when complete
<store>/../.readers/.locks/<hash>     one process builds, others wait and then find it done

A reader holds a shared lock on `held`; old caches go only when nobody holds them. Where the place beside the store
cannot be written, the caches stand in the temp folder of the system. Deleting a cache is always safe.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from gem.data.build.store_write import manifest_hash
from gem.data.reader_build import build_arrays
from gem.data.schema import Schema
from gem.errors import StoreError

VERSION = 3  # of the layout; a cache of another version is built again
KEPT = 2  # caches of one data set that stay, the latest used ones
FOLDER, DESCRIPTION, HELD = ".readers", "cache.json", "held"
_FULL = (errno.ENOSPC, errno.EDQUOT)


class ReaderCache:
    """Mapped arrays of one store. Holds the cache: it is not removed while this object lives."""

    def __init__(self, folder: Path, days: Mapping[str, int], held: IO[bytes]) -> None:
        self.folder = folder
        self.days = dict(days)  # impressions of every day, in day order
        self._held = held

    def array(self, name: str) -> npt.NDArray[Any]:
        """The read-only array of the file `<name>.npy`; nothing is read until it is touched."""
        return np.asarray(np.load(self.folder / f"{name}.npy", mmap_mode="r", allow_pickle=False))

    def names(self, folder: str) -> list[str]:
        """Names of the arrays directly below a folder, sorted."""
        return sorted(p.name.removesuffix(".npy") for p in (self.folder / folder).glob("*.npy"))


def open_cache(store: Path, manifest: Mapping[str, Any], schema: Schema) -> ReaderCache:
    """Map the arrays of a store; build them first where they are absent or damaged.

    Raises StoreError if the store's partitions cannot be read, or if no place can take the arrays.
    """
    key = manifest_hash(manifest)
    refused = []
    for home in _homes(store):
        if _foreign(home):
            refused.append(f"{home.parent} (belongs to another user)")
            continue
        found = _find(home, key)
        if found is None:
            try:
                lock = _open_lock(home, key)
            except OSError as e:
                refused.append(f"{home} ({e.strerror or e})")
                continue
            with lock:
                # Whoever waited here finds what the other process has built.
                found = _find(home, key) or _build(home, key, (store, manifest, schema))
            _remove_old(home, key)
        return found
    raise StoreError(
        f"{store}: no place for the arrays training reads: {'; '.join(refused)}; make one of them writable"
    )


def _homes(store: Path) -> Iterator[Path]:
    """Folders that may hold the caches of a data set, the best first."""
    beside = store.resolve().parent
    yield beside / FOLDER
    name = f"gem-readers-{os.getuid()}"
    yield Path(tempfile.gettempdir()) / name / hashlib.sha256(str(beside).encode()).hexdigest()[:16]


def _foreign(home: Path) -> bool:
    """Whether another user made our folder in the shared temp folder: nothing in it can be trusted."""
    if home.name == FOLDER:
        return False
    try:
        found = home.parent.lstat()
    except OSError:
        return False
    return found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode)


def _find(home: Path, key: str) -> ReaderCache | None:
    """The whole cache of this key, held, or None."""
    folder = home / key[:16]
    try:
        held = (folder / HELD).open("rb")
    except OSError:
        return None
    days = _whole(folder, held, key)
    if days is None:
        held.close()
        return None
    with contextlib.suppress(OSError):
        os.utime(folder / HELD)  # when it was last used
    return ReaderCache(folder, days, held)


def _whole(folder: Path, held: IO[bytes], key: str) -> dict[str, int] | None:
    """The days of a cache that is complete and now held, else None."""
    try:
        fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)  # refused while it is being removed
        same = os.path.samestat(os.fstat(held.fileno()), (folder / HELD).stat())
        described = json.loads((folder / DESCRIPTION).read_bytes())
        if not same or described["version"] != VERSION or described["store"] != key:
            return None
        whole = all((folder / f).stat().st_size == size for f, size in described["bytes"].items())
        return {str(day): int(rows) for day, rows in described["days"].items()} if whole else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _open_lock(home: Path, key: str) -> IO[bytes]:
    """The lock of a key, held until it is closed. Raises OSError where nothing can be written or locked."""
    if home.name != FOLDER:
        home.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    home.mkdir(parents=True, exist_ok=True)
    (home / ".locks").mkdir(exist_ok=True)
    return _locked(home / ".locks" / key[:16], fcntl.LOCK_EX)


def _locked(path: Path, how: int) -> IO[bytes]:
    lock = path.open("ab")
    try:
        fcntl.flock(lock, how)
    except BaseException:
        lock.close()
        raise
    return lock


def _build(home: Path, key: str, source: tuple[Path, Mapping[str, Any], Schema]) -> ReaderCache:
    """Build the cache of a key. The caller holds its lock."""
    temp, final = home / f"{key[:16]}.building", home / key[:16]
    shutil.rmtree(temp, ignore_errors=True)  # of a builder that died
    try:
        temp.mkdir()
        days = build_arrays(*source, temp)
        sizes = {p.relative_to(temp).as_posix(): p.stat().st_size for p in sorted(temp.rglob("*.npy"))}
        (temp / HELD).touch()
        described = {"version": VERSION, "store": key, "days": days, "bytes": sizes}
        with (temp / DESCRIPTION).open("w", encoding="utf-8") as f:
            json.dump(described, f)
            f.flush()
            os.fsync(f.fileno())
        _discard(final)  # damaged, else it had been found
        temp.rename(final)
    except OSError as e:
        if e.errno not in _FULL:
            raise StoreError(f"{source[0]}: the arrays training reads cannot be written to {home}: {e}") from None
        free = shutil.disk_usage(home).free
        raise StoreError(
            f"{source[0]}: no space left for the arrays training reads, in {home} ({free / 2**30:.1f} GiB free; they "
            "take about 24 bytes an event and 100 an impression); free some space and run again"
        ) from None
    finally:
        shutil.rmtree(temp, ignore_errors=True)
    found = _find(home, key)
    if found is None:
        raise StoreError(f"{final}: was removed as soon as it was built; run again")
    return found


def _remove_old(home: Path, key: str) -> None:
    """Remove all but the latest used caches, and what builders left that died. What is in use stays."""
    with contextlib.suppress(OSError):  # others may remove the same
        caches = [p for p in home.iterdir() if (p / HELD).exists() and p.suffix == ""]
        caches.sort(key=lambda p: (p.name != key[:16], -(p / HELD).stat().st_mtime_ns))
        for folder in caches[KEPT:]:
            with contextlib.suppress(OSError), _locked(folder / HELD, fcntl.LOCK_EX | fcntl.LOCK_NB):
                _discard(folder)
        for left in home.glob("*.building"):
            with contextlib.suppress(OSError), _locked(home / ".locks" / left.stem, fcntl.LOCK_EX | fcntl.LOCK_NB):
                shutil.rmtree(left, ignore_errors=True)
        for left in home.glob("*.removed-*"):
            shutil.rmtree(left, ignore_errors=True)


def _discard(folder: Path) -> None:
    """Take a cache away: first its name, so that nobody finds half of it. Maps of it stay good."""
    aside = folder.with_name(f"{folder.name}.removed-{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        folder.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)
