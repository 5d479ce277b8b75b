"""Write side of the feature store: partitions, entity tables, manifest. `gem.data.store` reads it.

    manifest.json  spec.json  schema.json  encoder.json  vocabularies.parquet
    entities/{users,ads}.parquet                    row i = entity index i; row 0 = the unknown entity
    timelines/day=<day|before>/shard-000.parquet    sorted by (user, known_ms, time_ms, order)
    impressions/day=<day>/shard-000.parquet         sorted by (user, time_ms, impression_id)
    quarantine/<table>-<window>.parquet

What only the next window needs, and no reader:

    raw/{users,ads}.parquet          key and raw features, row i = entity index i + 1
    index/shard-000.parquet          key, user, events (so far) of the shard's users, by user index
    counts/{values,entities}.parquet how often values and entities occurred on training days (-1), and on later days
    outcomes/<label>/<window>.parquet    rows of a label log
    windows/<number>.json            what each window read, how many rows it gave, which files it wrote

The manifest is written last: a store without one is not a store. Files may be hard links to those of the store before,
so a file is never changed in place: every write goes beside and is renamed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gem.data.days import BEFORE, day_number, day_text

VERSION = 3
MANIFEST, SPEC, SCHEMA, ENCODER = "manifest.json", "spec.json", "schema.json", "encoder.json"
USERS, ADS = "entities/users.parquet", "entities/ads.parquet"
RAW_USERS, RAW_ADS = "raw/users.parquet", "raw/ads.parquet"
VALUE_COUNTS, ENTITY_COUNTS = "counts/values.parquet", "counts/entities.parquet"
CONTEXT_PREFIX = "ctx_"
BEFORE_NUMBER = -(2**31) + 1  # partition number of `before`; others are days since 1970-01-01

_RANDOM = ("dup", "impression_id", "key")  # hashes and ids: nothing makes them smaller
_RISING = ("user", "time_ms", "known_ms", "cut", "events")  # neighbours differ little

Entry = dict[str, Any]  # sha256, bytes, rows; min_ms and max_ms where the rows have times


def partition_path(kind: str, day: str, shard: int) -> str:
    """Relative path of one partition file; `kind` is "timelines" or "impressions"."""
    return f"{kind}/day={day}/shard-{shard:03d}.parquet"


def partition_name(number: int) -> str:
    """Day text of a partition number."""
    return BEFORE if number == BEFORE_NUMBER else day_text(number)


def partition_number(relative: str) -> int:
    """Partition number of a path `<kind>/day=<day>/shard-000.parquet`."""
    name = relative.split("/")[1].removeprefix("day=")
    return BEFORE_NUMBER if name == BEFORE else day_number(name)


def partition_numbers(days: npt.NDArray[np.int32], first_day: int) -> npt.NDArray[np.int32]:
    """Partition of every event by its local day, [E] -> [E]: all days before `first_day` are one."""
    return np.where(days >= first_day, days, BEFORE_NUMBER).astype(np.int32)


def index_path(shard: int) -> str:
    """Relative path of the user index of a shard."""
    return f"index/shard-{shard:03d}.parquet"


def write_table(store: Path, relative: str, table: pa.Table, level: int = 1) -> Entry:
    """Write one Parquet file below `store` and return its manifest entry."""
    path = store / relative
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".tmp")
    names = table.column_names
    random = {f.name for f in table.schema if f.name in _RANDOM and pa.types.is_integer(f.type)}
    pq.write_table(
        table,
        beside,
        compression={n: "none" if n in random else "zstd" for n in names},
        compression_level={n: level for n in names if n not in random},
        use_dictionary=[n for n in names if n not in _RANDOM and n not in _RISING],
        column_encoding={n: "DELTA_BINARY_PACKED" for n in names if n in _RISING},
        write_statistics=["time_ms"] if "time_ms" in names else False,
        write_page_checksum=True,
    )
    beside.replace(path)
    entry = file_entry(path, table.num_rows)
    if "time_ms" in table.column_names and table.num_rows:
        ends = pc.min_max(table["time_ms"]).as_py()
        entry |= {"min_ms": ends["min"], "max_ms": ends["max"]}
    return entry


def read_table(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """One file of a store, or some of its columns; folder names add none."""
    with pq.ParquetFile(path, memory_map=True, page_checksum_verification=True) as file:
        return file.read(columns=None if columns is None else list(columns), use_threads=False)


def write_text(store: Path, relative: str, text: str) -> Entry:
    """Write one UTF-8 text file below `store` and return its manifest entry."""
    path = store / relative
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".tmp")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)
    return file_entry(path, 0)


def link_files(source: Path, target: Path, files: Iterable[str]) -> None:
    """Make the files of one store appear in another: hard links, copies where the disk has none."""
    for relative in files:
        path = target / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(source / relative, path)
        except OSError:
            shutil.copy2(source / relative, path)


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


def read_manifest(store: Path) -> dict[str, Any]:
    """The manifest as it stands; the caller handles a missing or broken one."""
    manifest: dict[str, Any] = json.loads((store / MANIFEST).read_text(encoding="utf-8"))
    return manifest


def paths_of(files: Iterable[str], kind: str, day: str | None = None) -> list[str]:
    """Relative paths of the partitions of a kind (and of one day), in (day, shard) order with `before` first."""
    prefix, before = f"{kind}/day=" + (f"{day}/" if day else ""), f"{kind}/day={BEFORE}/"
    return sorted((f for f in files if f.startswith(prefix)), key=lambda f: (not f.startswith(before), f))
