"""One preprocess in a process of its own: `python -m tests.benchmarks.data_build RAW OUT [STORE_BEFORE]`.

The last line of its output is JSON. With the store before, only the files that it does not hold are added.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from gem.config import DataConfig, RunConfig
from gem.data.build.store_write import read_manifest
from gem.data.ingest.canonical import resolve_files
from gem.data.ingest.sources import sha256
from pipelines.cluster import Cluster
from pipelines.memory import PeakMemory
from pipelines.preprocess import Base, preprocess
from tests.benchmarks.data_world import spec

SAMPLE_S = 0.25


def build(raw: Path, out: Path, parent: Path | None = None) -> dict[str, Any]:
    """Seconds of Ray's start and of the preprocess, CPU seconds of the latter over all processes, peak memory."""
    with PeakMemory(SAMPLE_S) as memory, Cluster() as cluster:
        start = time.perf_counter()
        if parent is None:
            cluster.ray()  # a small window does without
        known = {} if parent is None else read_manifest(parent)["inputs"]
        ready, cpu = time.perf_counter(), _cpu_seconds()
        files = resolve_files(spec(), raw)
        # As the stage does: files that have not changed since the day before are not read again for their hash.
        hashes = {
            t: {f.relative: known.get(t, {}).get(f.relative) or sha256(f) for f in found} for t, found in files.items()
        }
        record = preprocess(RunConfig(data=DataConfig()), spec(), raw, out, print, Base(parent, hashes), cluster.ray)
        done = time.perf_counter()
        used = _cpu_seconds() - cpu
    return {
        "ray_start_s": ready - start,
        "seconds": done - ready,
        "cpu_s": used,
        "peak_gb": memory.peak_mb / 1024,
        "peak_note": memory.note,
        "impressions": record["rows_out"],
        "store_hash": record["store_hash"],
    }


def _cpu_seconds() -> float:
    """CPU seconds of this process and of all below it, ended ones too."""
    total = 0.0
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        try:
            total += sum(process.cpu_times()[:4])  # own and of ended children, in user and system mode
        except psutil.Error:
            continue
    return total


def main() -> None:
    """RAW OUT [STORE_BEFORE] from the command line."""
    print(json.dumps(build(*map(Path, sys.argv[1:]))))


if __name__ == "__main__":
    main()
