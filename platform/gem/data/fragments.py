"""First pass of preprocess: one raw file -> checked rows, cut into fragments by user shard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gem.data import canonical
from gem.data.days import NO_DAY, day_numbers, day_text, parse_days
from gem.data.hashing import stable_hash64
from gem.data.shards import shard_name
from gem.data.spec import DatasetSpec, FeatureSpec

Role = Literal["impressions", "events", "labels", "users", "ads"]
_SALT = "user-shard"
_DAY = "log day"  # no feature can be mistaken for it


@dataclass(frozen=True)
class FileJob:
    """Read one file in one role. `source` is the event source's position, `label` the label of a log."""

    number: int
    role: Role
    table: str
    file: str
    source: int = -1
    label: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> FileJob:
        return cls(**raw)


def plan_files(spec: DatasetSpec, files: Mapping[str, Sequence[Path]]) -> list[FileJob]:
    """Every (file, role) to read; a file is read once per role it has."""
    uses: list[tuple[Role, str, int, str]] = [("impressions", spec.impressions.table, -1, "")]
    uses += [("events", source.table, i, "") for i, source in enumerate(spec.events)]
    uses += [("labels", label.table, -1, name) for name, label in spec.labels.items() if label.table]
    uses += [("users", spec.users.table, -1, ""), ("ads", spec.ads.table, -1, "")]
    flat = [(use, path) for use in uses for path in files.get(use[1], [])]
    return [FileJob(i, role, table, str(p), source, label) for i, ((role, table, source, label), p) in enumerate(flat)]


def read_job(spec: DatasetSpec, job: FileJob) -> canonical.Canonical:
    """Canonical rows of a job's file."""
    path = Path(job.file)
    if job.role == "impressions":
        return _read_impressions(spec, path)
    if job.role == "events":
        return canonical.read_events(spec, job.source, path)
    if job.role == "labels":
        return canonical.read_label_log(spec, job.label, path)
    return canonical.read_entities(spec, "user" if job.role == "users" else "ad", path)


def cut_file(spec: DatasetSpec, job: FileJob, root: Path, work: Path, num_shards: int) -> dict[str, Any]:
    """Read one file, write its fragments under `work`, return counts as JSON.

    Fragments: `<role>/<shard>/<number>.parquet`; label logs and ads are not cut: `labels/<label>/`, `ads/`.
    Quarantined rows: `quarantine/<number>.parquet`, their file named relative to `root`.
    """
    got = read_job(spec, job)
    rows = got.rows
    if job.role == "events":
        listed = spec.events[job.source].list_before is not None
        rows = rows.append_column("listed", pa.array(np.full(rows.num_rows, listed)))
    name = f"{job.number:05d}.parquet"
    if job.role in ("impressions", "events", "users"):
        _write_shards(rows, "key" if job.role == "users" else "user", work / job.role, name, num_shards)
    else:
        _write(rows, work / job.role / job.label / name)
    if got.quarantined.num_rows:
        file = _relative(Path(job.file), root)
        at = got.quarantined.column_names.index("file")
        column = pa.array([file] * got.quarantined.num_rows, pa.string())
        _write(got.quarantined.set_column(at, "file", column), work / "quarantine" / name)
    record: dict[str, Any] = {
        "job": job.to_dict(),
        "raw_rows": got.raw_rows,
        "rows": rows.num_rows,
        "quarantined": _value_counts(got.quarantined["reason"]),
        "repairs": got.counts,
        "types": _key_types(job, rows),
    }
    if rows.num_rows and "time_ms" in rows.column_names:
        record["max_time_ms"] = pc.max(rows["time_ms"]).as_py()
    if job.role == "impressions":
        days, counts = np.unique(rows["day"].to_numpy(), return_counts=True)
        record["days"] = {day_text(d): n for d, n in zip(days.tolist(), counts.tolist(), strict=True)}
    return record


def _read_impressions(spec: DatasetSpec, path: Path) -> canonical.Canonical:
    """Canonical impressions and their `day` (int32, days since 1970-01-01).

    A day column is read along as one more categorical value, so that it goes through the same checks; rows without one
    get the day of their time.
    """
    column = spec.impressions.day
    if column:
        extra = FeatureSpec(name=_DAY, column=column, kind="categorical")
        context = spec.context.model_copy(update={"features": [*spec.context.features, extra]})
        spec = spec.model_copy(update={"context": context})
    got = canonical.read_impressions(spec, path)
    days = day_numbers(got.rows["time_ms"].to_numpy(), spec.impressions.zone)
    if column:
        own = parse_days(got.rows[f"ctx:{_DAY}"], f'{path}, column "{column}"')
        days = np.where(own == NO_DAY, days, own)
        got.rows = got.rows.drop_columns([f"ctx:{_DAY}"])
    got.rows = got.rows.append_column("day", pa.array(days, pa.int32()))
    return got


def _write_shards(rows: pa.Table, column: str, folder: Path, name: str, num_shards: int) -> None:
    """One fragment per shard, also where it has no rows: it carries the columns."""
    shard = (stable_hash64(rows[column], _SALT) % np.uint64(num_shards)).astype(np.int64)
    order = np.argsort(shard, kind="stable")
    bounds = np.searchsorted(shard[order], np.arange(num_shards + 1))
    rows = rows.take(pa.array(order))
    for s in range(num_shards):
        start, end = int(bounds[s]), int(bounds[s + 1])
        _write(rows.slice(start, end - start), folder / shard_name(s) / name)


def _write(table: pa.Table, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, compression="lz4")


def _relative(path: Path, root: Path) -> str:
    try:
        return path.resolve().relative_to(root.resolve()).as_posix()
    except ValueError:
        return path.name


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
