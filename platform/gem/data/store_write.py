"""Write side of the feature store: partitions, entity tables, manifest. `gem.data.store` reads it.

    manifest.json  spec.json  schema.json  encoder.json
    entities/{users,ads}.parquet                 row i = entity index i; row 0 = the unknown entity
    timelines/day=<day|before>/shard-000.parquet    sorted by (user, known_ms, time_ms, order)
    impressions/day=<day>/shard-000.parquet         sorted by (user, time_ms, impression_id)
    quarantine/<table>.parquet

The manifest is written last: a store without one is not a store.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from gem.data.days import BEFORE

VERSION = 1
MANIFEST, SPEC, SCHEMA, ENCODER = "manifest.json", "spec.json", "schema.json", "encoder.json"
USERS, ADS = "entities/users.parquet", "entities/ads.parquet"
CONTEXT_PREFIX = "ctx_"

Entry = dict[str, Any]  # sha256, bytes, rows


def partition_path(kind: str, day: str, shard: int) -> str:
    """Relative path of one partition file; `kind` is "timelines" or "impressions"."""
    return f"{kind}/day={day}/shard-{shard:03d}.parquet"


def write_table(store: Path, relative: str, table: pa.Table) -> Entry:
    """Write one Parquet file below `store` and return its manifest entry."""
    path = store / relative
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table.combine_chunks(), path, compression="zstd", write_page_checksum=True)
    return file_entry(path, table.num_rows)


def write_text(store: Path, relative: str, text: str) -> Entry:
    """Write one UTF-8 text file below `store` and return its manifest entry."""
    path = store / relative
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return file_entry(path, 0)


def write_by_day(
    store: Path, kind: str, shard: int, table: pa.Table, days: npt.NDArray[np.generic]
) -> dict[str, Entry]:
    """Write the rows of each day ([N] day texts) to the day's file of this shard, their order kept."""
    out: dict[str, Entry] = {}
    if not len(days):
        return out
    order = np.argsort(days, kind="stable")
    names, starts = np.unique(days[order], return_index=True)
    ends = [*starts[1:].tolist(), len(days)]
    for name, start, end in zip(names.tolist(), starts.tolist(), ends, strict=True):
        relative = partition_path(kind, str(name), shard)
        out[relative] = write_table(store, relative, table.take(pa.array(order[start:end])))
    return out


def file_entry(path: Path, rows: int) -> Entry:
    """sha256 and size of a file."""
    return {"sha256": file_sha256(path), "bytes": path.stat().st_size, "rows": rows}


def file_sha256(path: Path) -> str:
    """Hex sha256 of a file's bytes, read in pieces."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def canonical_json(value: Any) -> str:
    """The one text of a JSON value: sorted keys, no spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def manifest_hash(manifest: Mapping[str, Any]) -> str:
    """Hash of a store: sha256 of its canonical manifest, which holds the hash of every file."""
    return hashlib.sha256(canonical_json(manifest).encode()).hexdigest()


def write_manifest(store: Path, manifest: Mapping[str, Any]) -> str:
    """Write the manifest in one step (beside, then rename) and return the store's hash."""
    beside = store / (MANIFEST + ".tmp")
    with beside.open("w", encoding="utf-8") as f:
        json.dump(manifest, f, sort_keys=True, indent=1, ensure_ascii=False)
        f.flush()
        os.fsync(f.fileno())
    beside.replace(store / MANIFEST)
    return manifest_hash(manifest)


def paths_of(files: Iterable[str], kind: str, day: str | None = None) -> list[str]:
    """Relative paths of the partitions of a kind (and of one day), in (day, shard) order with `before` first."""
    prefix, before = f"{kind}/day=" + (f"{day}/" if day else ""), f"{kind}/day={BEFORE}/"
    return sorted((f for f in files if f.startswith(prefix)), key=lambda f: (not f.startswith(before), f))
