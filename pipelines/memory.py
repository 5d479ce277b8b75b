"""Peak memory of a whole process tree: this process, Ray's servers and workers, the object store.

Resident sizes (RSS) of the processes cannot be added up: libraries and the object store would be
counted once per process. So the proportional set size (PSS: each shared page divided by the number of
its users) is summed over the private and file pages, and shared memory is counted once, by the size
of Ray's object store file. `ray.init` in a process makes all of Ray's processes its descendants; one
that was seen once as a descendant is followed even when its parent dies and it is re-parented.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass, field
from types import TracebackType

import psutil  # type: ignore[import-untyped]

MB = 1024 * 1024
MAX_CPU_SHARE = 0.01  # the sampling thread slows down rather than take more of one core
MAX_INTERVAL_S = 10.0


@dataclass(frozen=True)
class MemorySample:
    """One look at the tree. `total_mb` = private + file pages (PSS) + shared memory once."""

    total_mb: float
    shared_mb: float
    num_processes: int
    exact: bool  # False: some process gave no PSS, its RSS less its shared pages was taken
    by_name: dict[str, float] = field(default_factory=dict)  # process name -> MB without shared memory


class PeakMemory:
    """Context manager that samples the memory of this process and of all it started.

    >>> with PeakMemory() as memory:
    ...     work()
    >>> memory.peak_mb

    interval_s: time between samples; stretched (at most to 10 s) where reading would cost more than 1 %
    of a core. A peak shorter than the interval can be missed: the figure is a lower bound.
    """

    def __init__(self, interval_s: float = 2.0) -> None:
        self._interval_s = interval_s
        self._tree = _Tree(psutil.Process())
        self._peak: MemorySample | None = None
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="peak-memory", daemon=True)

    def __enter__(self) -> PeakMemory:
        self.sample()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(timeout=MAX_INTERVAL_S)
        self.sample()

    @property
    def peak_mb(self) -> float:
        """Largest total seen so far, MB (2^20 bytes)."""
        return self._peak.total_mb if self._peak else 0.0

    @property
    def peak(self) -> MemorySample | None:
        """The sample at the peak, with the share of each process name."""
        return self._peak

    @property
    def note(self) -> str:
        """How the figure was measured, for the report."""
        if self._peak is None:
            return "not measured"
        how = "PSS of all processes, object store once" if self._peak.exact else "RSS less shared pages (no PSS here)"
        return f"{how}; {self._peak.num_processes} processes at the peak"

    def sample(self) -> MemorySample:
        """Look once, now; also moves the peak."""
        with self._lock:
            now = self._tree.sample()
            if self._peak is None or now.total_mb > self._peak.total_mb:
                self._peak = now
            return now

    def _run(self) -> None:
        wait_s = self._interval_s
        while not self._stop.wait(wait_s):
            before_s = time.thread_time()
            self.sample()
            cost_s = time.thread_time() - before_s
            wait_s = min(max(self._interval_s, cost_s / MAX_CPU_SHARE), max(MAX_INTERVAL_S, self._interval_s))


class _Tree:
    """The processes under one root; keeps those that were re-parented after they had been seen."""

    def __init__(self, root: psutil.Process) -> None:
        self._root = root
        self._known: set[psutil.Process] = set()

    def sample(self) -> MemorySample:
        self._known |= {self._root, *self._root.children(recursive=True)}
        self._known = {p for p in self._known if p.is_running()}
        private = shmem = 0
        store = num = 0
        exact = True
        by_name: dict[str, float] = {}
        for process in self._known:
            try:
                own, shared, has_pss = _read(process)
                name = process.name()
            except (psutil.Error, OSError):
                continue  # it ended, or became a zombie, between the listing and now
            num += 1
            private, shmem, exact = private + own, shmem + shared, exact and has_pss
            by_name[name] = by_name.get(name, 0.0) + own / MB
            if name == "raylet":
                store += _object_store_bytes(process.pid)
        # Pages of the object store that no process has mapped just now still take memory.
        shared_bytes = max(shmem, store)
        return MemorySample((private + shared_bytes) / MB, shared_bytes / MB, num, exact, by_name)


def _read(process: psutil.Process) -> tuple[int, int, bool]:
    """(bytes without shared memory, bytes of shared memory, whether they are proportional)."""
    try:
        with open(f"/proc/{process.pid}/smaps_rollup", encoding="ascii") as lines:
            found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss")}
    except (OSError, ValueError, IndexError):
        found = {}
    if "Pss" in found:
        shared = found.get("Pss_Shmem", 0)
        return found["Pss"] - shared, shared, True
    info = process.memory_info()
    return info.rss - getattr(info, "shared", 0), 0, False


def _object_store_bytes(pid: int) -> int:
    """Bytes really taken by the (unlinked, sparse) object store files that a raylet holds open."""
    total, seen = 0, set()
    folder = f"/proc/{pid}/fd"
    try:
        names = os.listdir(folder)
    except OSError:
        return 0
    for name in names:
        path = f"{folder}/{name}"
        try:
            if not os.path.basename(os.readlink(path)).startswith("plasma"):
                continue
            status = os.stat(path)
        except OSError:
            continue
        if (status.st_dev, status.st_ino) not in seen:
            seen.add((status.st_dev, status.st_ino))
            total += status.st_blocks * 512
    return total
