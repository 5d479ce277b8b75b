"""Knowledge records (contract 5): what the teacher says of an impression, written once, read by all students.

One Parquet row per impression: impression_id, logit_<task> (raw, conditional), p_<task> (entire space,
uncalibrated), representation (float16 list [R]). The teacher's bundle hash and training end stand in the
schema metadata, so that the age of the knowledge is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from gem.data.schema import Schema
from gem.errors import DataError


@dataclass(frozen=True)
class Teacher:
    """Who wrote the records: the bundle, and the last day it learned from (the age of the knowledge)."""

    bundle_hash: str
    trained_to_day: str


@dataclass
class KnowledgeRecords:
    """Aligned arrays: impression_id [N], logits [N, K], p [N, K], known [N] (0 where no record exists)."""

    impression_id: NDArray[np.int64]
    logits: NDArray[np.float32]
    p: NDArray[np.float32]
    known: NDArray[np.float32]


def write_records(
    path: Path,
    schema: Schema,
    teacher: Teacher,
    impression_id: NDArray[np.int64],
    logits: NDArray[np.float32],
    representation: NDArray[np.float32],
) -> int:
    """Write one part file; returns its rows."""
    width = representation.shape[1]
    columns: dict[str, pa.Array] = {"impression_id": pa.array(impression_id)}
    p = entire_space(schema, logits)
    for k, task in enumerate(schema.tasks):
        columns[f"logit_{task.name}"] = pa.array(logits[:, k])
        columns[f"p_{task.name}"] = pa.array(p[:, k])
    half = pa.array(representation.astype(np.float16).ravel(), type=pa.float16())
    columns["representation"] = pa.FixedSizeListArray.from_arrays(half, width)
    table = pa.table(columns).replace_schema_metadata(
        {"teacher": teacher.bundle_hash, "trained_to_day": teacher.trained_to_day}
    )
    pq.write_table(table, path, compression="zstd")
    return int(table.num_rows)


def entire_space(schema: Schema, logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Conditional logits [N, K] -> entire-space probabilities [N, K]."""
    names = [t.name for t in schema.tasks]
    own = np.exp(-np.logaddexp(0.0, -logits.astype(np.float64))).astype(np.float32)
    for k, task in enumerate(schema.tasks):
        if task.given is not None:
            own[:, k] *= own[:, names.index(task.given)]
    return own


def read_records(
    folder: Path, schema: Schema, impression_id: NDArray[np.int64], teacher_hash: str, min_share: float = 0.99
) -> KnowledgeRecords:
    """Records of these impressions, in their order; missing ones have known = 0.

    Raises DataError if a part is damaged or belongs to another teacher, or if fewer than `min_share` of rows are known.
    """
    parts = sorted(folder.glob("part-*.parquet"))
    if not parts:
        raise DataError(f"no knowledge records under {folder}; run `python -m pipelines generate-knowledge`")
    columns = _columns(schema)
    tables = [_read(part, columns, teacher_hash) for part in parts]
    table = pa.concat_tables(tables)
    ids = table.column("impression_id").to_numpy()
    order = np.argsort(ids, kind="stable")
    at = np.searchsorted(ids[order], impression_id).clip(max=max(ids.size - 1, 0))
    found = order[at] if ids.size else np.zeros(impression_id.size, np.int64)
    known = (ids[found] == impression_id) if ids.size else np.zeros(impression_id.size, bool)
    if impression_id.size and known.mean() < min_share:
        raise DataError(
            f"knowledge covers {known.mean():.1%} of {impression_id.size} impressions, at least {min_share:.0%} is "
            "needed; regenerate it with `python -m pipelines generate-knowledge`"
        )

    def matrix(prefix: str) -> NDArray[np.float32]:
        if not ids.size:
            return np.zeros((impression_id.size, len(schema.tasks)), np.float32)
        found_columns = [table.column(f"{prefix}_{t.name}").to_numpy()[found] for t in schema.tasks]
        return np.stack(found_columns, axis=1).astype(np.float32)

    return KnowledgeRecords(impression_id, matrix("logit"), matrix("p"), known.astype(np.float32))


def _columns(schema: Schema) -> Sequence[str]:
    return ["impression_id", *(f"{p}_{t.name}" for p in ("logit", "p") for t in schema.tasks)]


def _read(part: Path, columns: Sequence[str], teacher_hash: str) -> pa.Table:
    try:
        table = pq.read_table(part, columns=list(columns))
    except (OSError, pa.ArrowException) as e:
        raise DataError(
            f"{part} cannot be read ({e}); regenerate it with `python -m pipelines generate-knowledge`"
        ) from e
    found = (table.schema.metadata or {}).get(b"teacher", b"").decode()
    if found != teacher_hash:
        raise DataError(f"{part} was written by teacher {found[:12]}, expected {teacher_hash[:12]}")
    return table.replace_schema_metadata(None)
