"""One small data set for the tests of reading: a spec, a log in memory, and how to put it on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from gem.data.ingest.canonical import Canonical
from gem.data.spec import DatasetSpec, parse_spec

NOON = 1_651_406_400_000  # 2022-05-01T12:00:00Z
BIG = 2**53 + 1  # the first whole number a float cannot hold


def make_spec(**changes: Any) -> DatasetSpec:
    """The small spec with top-level parts replaced."""
    raw = {
        "name": "small",
        "tables": {
            "log": {"files": ["log*.parquet", "log*.csv"]},
            "posts": {"files": ["posts*"], "optional": True, "format": "parquet"},
            "sales": {"files": ["sales*.parquet"]},
            "users": {"files": ["users.*"]},
            "ads": {"files": ["ads.*"]},
        },
        "impressions": {"table": "log", "user": "u", "ad": "a", "surface": "tab", "time": {"column": "t"}},
        "labels": {
            "click": {"column": "y"},
            "conversion": {
                "table": "sales",
                "key": "ref",
                "time": {"column": "t", "unit": "s"},
                "window_hours": 24,
                "given": "click",
            },
        },
        "users": {"table": "users", "key": "u"},
        "ads": {"table": "ads", "key": "a"},
    }
    return parse_spec(raw | changes)


def log_table(**columns: Any) -> pa.Table:
    """Impressions with plain values in the columns that are not given."""
    size = len(next(iter(columns.values()))) if columns else 2
    base = {"u": [1] * size, "a": [10] * size, "tab": ["x"] * size, "t": [NOON] * size, "y": [0] * size}
    return pa.table(base | {"ref": list(range(size))} | columns)


def write(folder: Path, table: pa.Table, name: str = "log.parquet") -> Path:
    """Write one Parquet file and return its path."""
    pq.write_table(table, folder / name)
    return folder / name


def reasons(canonical: Canonical) -> list[str]:
    """Reasons of the quarantined rows, in file order."""
    return canonical.quarantined["reason"].to_pylist()


CONTEXT = {"features": [{"name": "slot", "kind": "categorical"}, {"name": "len", "kind": "numeric"}]}
