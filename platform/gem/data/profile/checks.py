"""The canonical tables' contract as pandera schemas built from a spec: types, nulls, ranges, sets, uniqueness."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from gem.data.ingest.spec_check import flag_names, kind_names
from gem.data.ingest.units import MS_2000, MS_2100
from gem.data.schema import DWELL_BUCKETS
from gem.data.spec import DatasetSpec, FeatureSpec

# What a failed check means, by the name it carries.
MEANING = {
    "in the years 2000 to 2099": "times outside every plausible year",
    "not in the future": "rows later than now: a wrong clock or unit; a model would train on what has not happened",
    "1, 0 or unknown": "label values that are no outcome",
    "a probability": "true probabilities outside 0..1",
    "not below 0 under log1p": "negative numbers under log1p: they are treated as missing",
    "a surface with a name": "surfaces that surfaces.names does not name: they keep their raw value as name",
    "one row per key": "a key with several rows: only one of them is used",
    "a kind of the spec": "event kinds that no source declares",
    "flags of the spec": "event flags that no source declares",
    "a dwell bucket": "dwell buckets that do not exist",
    "not null": "nulls where a value is needed",
}


def check_rows(spec: DatasetSpec, role: str, source: int, rows: pa.Table, now_ms: int) -> list[dict[str, Any]]:
    """Failures of the canonical rows of one file: {column, check, rows, example}; all checks are made, none stops."""
    import pandera.polars as pandera
    import polars as pl
    from pandera.errors import SchemaErrors

    flat = [n for n in rows.column_names if not pa.types.is_nested(rows.schema.field(n).type)]
    frame = pl.from_arrow(rows.select(flat))
    assert isinstance(frame, pl.DataFrame)
    columns = {name: c for name, c in _columns(spec, role, now_ms).items() if name in flat}
    try:
        pandera.DataFrameSchema(columns, strict=False).validate(frame, lazy=True)
    except SchemaErrors as failed:
        cases = failed.failure_cases.group_by("column", "check").agg(pl.len().alias("rows"), pl.first("failure_case"))
        return [
            {"column": r["column"], "check": _name(r["check"]), "rows": r["rows"], "example": str(r["failure_case"])}
            for r in cases.sort("column", "check").to_dicts()
        ]
    return []


def _name(check: str) -> str:
    return {"not_nullable": "not null", "field_uniqueness": "one row per key"}.get(check, check)


def _columns(spec: DatasetSpec, role: str, now_ms: int) -> dict[str, Any]:
    import pandera.polars as pandera

    Check, Column = pandera.Check, pandera.Column
    times = [
        Check.in_range(MS_2000, MS_2100, include_max=False, error="in the years 2000 to 2099"),
        Check.le(now_ms, error="not in the future"),
    ]
    time = Column("int64", times, nullable=False)
    if role == "impressions":
        names = list(spec.surfaces.names)
        surface = [Check.isin(names, error="a surface with a name")] if names else []
        out = {"time_ms": time, "surface": Column(str, surface, nullable=True), "user": Column(nullable=False)}
        out |= {"ad": Column(nullable=False), "dup": Column("int64", nullable=False)}
        for task in spec.labels:
            out[f"label:{task}"] = Column("int8", Check.isin([1, 0, -1], error="1, 0 or unknown"))
            out[f"true:{task}"] = Column("float32", Check.in_range(0, 1, error="a probability"), nullable=True)
        return out | {f"ctx:{f.name}": _feature(f) for f in spec.context.features}
    if role == "events":
        kind = Check.in_range(1, len(kind_names(spec)), error="a kind of the spec")
        flags = Check.lt(1 << len(flag_names(spec)), error="flags of the spec")
        out = {"time_ms": time, "known_ms": Column("int64"), "user": Column(nullable=False)}
        out |= {"kind": Column("uint8", kind), "flags": Column("uint16", flags), "ad": Column(nullable=False)}
        return out | {"dwell": Column("uint8", Check.lt(DWELL_BUCKETS, error="a dwell bucket"))}
    if role == "labels":
        return {"time_ms": time, "key": Column(nullable=False)}
    entity = spec.users if role == "users" else spec.ads
    key = Column(nullable=False, unique=True)
    return {"key": key} | {f.name: _feature(f) for f in entity.features}


def _feature(feature: FeatureSpec) -> Any:
    import pandera.polars as pandera

    if feature.kind != "numeric":
        return pandera.Column(nullable=True)
    positive = pandera.Check.ge(0, error="not below 0 under log1p")
    return pandera.Column("float64", [positive] if feature.transform == "log1p" else [], nullable=True)
