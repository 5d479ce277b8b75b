"""First pass of preprocess: one raw file, or a part of one -> checked rows, cut into pieces by user shard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gem.data.build.forgotten import Forgotten
from gem.data.build.pieces import write_piece, write_shards
from gem.data.days import day_numbers, day_text
from gem.data.hashing import stable_hash64
from gem.data.ingest import canonical, canonical_events, raw
from gem.data.ingest.canonical import Canonical
from gem.data.ingest.clock import Limits
from gem.data.ingest.raw import Part
from gem.data.ingest.sources import RawFile
from gem.data.spec import DatasetSpec

Role = Literal["impressions", "events", "labels", "users", "ads"]
_SALT = "user-shard"


@dataclass(frozen=True)
class FileJob:
    """Read one part of a file in one role. `source` is the event source's position, `label` the label of a log."""

    number: int
    role: Role
    table: str
    file: RawFile
    part: Part | None = None
    source: int = -1
    label: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> FileJob:
        file, part = RawFile(**plain["file"]), plain["part"]
        return cls(**(plain | {"file": file, "part": Part(**part) if part else None}))


@dataclass(frozen=True)
class CutSettings:
    """What is the same for every file of a window."""

    num_shards: int
    limits: Limits
    forgotten: Forgotten


def plan_files(spec: DatasetSpec, files: Mapping[str, Sequence[RawFile]]) -> list[FileJob]:
    """Every (file, part, role) to read; a file is read once per role it has."""
    uses: list[tuple[Role, str | None, int, str]] = [("impressions", spec.impressions.table, -1, "")]
    uses += [("events", source.table, i, "") for i, source in enumerate(spec.events)]
    uses += [("labels", label.table, -1, name) for name, label in spec.labels.items() if label.table]
    uses += [("users", spec.users.table, -1, ""), ("ads", spec.ads.table, -1, "")]
    parts = {t: [(f, p) for f in found for p in raw.parts(spec.tables[t], f)] for t, found in files.items()}
    flat = [(use, use[1], file, part) for use in uses if use[1] for file, part in parts.get(use[1], [])]
    return [
        FileJob(i, use[0], table, file, part, use[2], use[3]) for i, (use, table, file, part) in enumerate(flat)
    ]  # fmt: skip


def read_job(spec: DatasetSpec, job: FileJob, limits: Limits) -> Canonical:
    """Canonical rows of a job's part of a file."""
    if job.role == "impressions":
        return _read_impressions(spec, job, limits)
    if job.role == "events":
        return canonical_events.read_events(spec, job.source, job.file, job.part, limits)
    if job.role == "labels":
        return canonical_events.read_label_log(spec, job.label, job.file, job.part, limits)
    return canonical.read_entities(spec, "user" if job.role == "users" else "ad", job.file, job.part)


def cut_file(spec: DatasetSpec, job: FileJob, work: Path, settings: CutSettings) -> dict[str, Any]:
    """Read one job, write its pieces under `work`, return counts as JSON.

    Pieces: `<role>/<number>`, cut by shard; `labels/<label>/` and `ads/` are not cut. Quarantined rows:
    `quarantine/<number>`, their file named relative to the data folder. Rows of forgotten users go nowhere.
    """
    got = read_job(spec, job, settings.limits)
    column = "user" if job.role in ("impressions", "events") else "key"
    rows, forgotten = got.rows, 0
    by_user = job.role == "labels" and spec.labels[job.label].key == spec.impressions.user
    if settings.forgotten and (by_user or job.role in ("impressions", "events", "users")):
        keep = ~settings.forgotten.mask(rows[column])
        rows, forgotten = rows.filter(pa.array(keep)), int((~keep).sum())
    quarantined = settings.forgotten.without(got.quarantined)
    rows = _compact(spec, job, rows)
    name = f"{job.number:05d}"
    if job.role in ("impressions", "events", "users"):
        _write_shards(rows, column, work / job.role, name, settings.num_shards)
    else:
        write_piece(work / job.role / job.label / name, rows)
    if quarantined.num_rows:
        file = pa.array([job.file.relative] * quarantined.num_rows, pa.string())
        at = quarantined.column_names.index("file")
        write_piece(work / "quarantine" / name, quarantined.set_column(at, "file", file))
    record: dict[str, Any] = {
        "job": job.to_dict(),
        "piece": name,
        "raw_rows": got.raw_rows,
        "rows": rows.num_rows,
        "quarantined": _value_counts(quarantined["reason"]),
        "repairs": got.counts,
        "forgotten": forgotten,
        "types": _key_types(job, rows),
    }
    if rows.num_rows and "time_ms" in rows.column_names:
        record["max_time_ms"] = pc.max(rows["time_ms"]).as_py()
    if job.role == "impressions":
        days, counts = np.unique(rows["day"].to_numpy(), return_counts=True)
        record["days"] = {day_text(d): n for d, n in zip(days.tolist(), counts.tolist(), strict=True)}
    return record


def _compact(spec: DatasetSpec, job: FileJob, rows: pa.Table) -> pa.Table:
    """Repeated text as a dictionary, and no order where it means nothing: a piece is written and mapped as it is."""
    if job.role == "events" and spec.events[job.source].list_before is None:
        rows = rows.drop_columns(["order"])
    for name in rows.column_names if job.role in ("impressions", "events") else []:
        if name == "surface" or (name.startswith("ctx:") and pa.types.is_string(rows.schema.field(name).type)):
            rows = rows.set_column(rows.column_names.index(name), name, rows[name].dictionary_encode())
    return rows


def _read_impressions(spec: DatasetSpec, job: FileJob, limits: Limits) -> Canonical:
    """Canonical impressions and their `day` (int32, days since 1970-01-01), that of their time without a day column."""
    got = canonical.read_impressions(spec, job.file, job.part, limits)
    if "day" not in got.rows.column_names:
        days = day_numbers(got.rows["time_ms"].to_numpy(), spec.impressions.zone)
        got.rows = got.rows.append_column("day", pa.array(days, pa.int32()))
    return got


def _write_shards(rows: pa.Table, column: str, folder: Path, name: str, num_shards: int) -> None:
    """One piece, the rows of each shard together."""
    shard = (stable_hash64(rows[column], _SALT) % np.uint64(num_shards)).astype(np.uint16)
    order = np.argsort(shard, kind="stable")  # a radix sort on 16 bits
    bounds = np.searchsorted(shard[order], np.arange(num_shards + 1))
    write_shards(folder / name, rows.combine_chunks().take(pa.array(order)), bounds.tolist())


def _value_counts(column: pa.ChunkedArray) -> dict[str, int]:
    counted = pc.value_counts(column)
    return {row["values"]: row["counts"] for row in counted.to_pylist()}


def _key_types(job: FileJob, rows: pa.Table) -> dict[str, str]:
    """Logical key -> type in this file; a file without rows has no say."""
    if not rows.num_rows:
        return {}
    logical = {"users": {"key": "user"}, "ads": {"key": "ad"}, "labels": {"key": f"key:{job.label}"}}.get(job.role, {})
    logical |= {n: n for n in rows.column_names if n in ("user", "ad") or n.startswith("key:")}
    out = {}
    for column, name in logical.items():
        kind = rows.schema.field(column).type
        if not pa.types.is_null(kind):
            out[name] = "int64" if pa.types.is_integer(kind) else "string"
    return out


__all__ = ["CutSettings", "FileJob", "cut_file", "plan_files", "read_job"]
