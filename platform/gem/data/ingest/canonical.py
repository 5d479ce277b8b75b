"""Raw files to canonical Arrow tables, one file or part at a time, every row checked (contract 1).

Ids stay int64 or text and never pass through a float; times are int64 ms UTC. A wrong row goes to the
quarantine with the first reason that applies; a wrong file (unit, type, damage) is refused with DataError.
No Ray here: a pipeline calls these readers once per part of a file, in any process.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pyarrow as pa

from gem.data.hashing import stable_hash64
from gem.data.ingest import columns
from gem.data.ingest.canonical_events import read_events, read_label_log
from gem.data.ingest.clock import Limits
from gem.data.ingest.impression_keys import impression_keys, key_columns
from gem.data.ingest.raw import Part, RawFile, resolve_files
from gem.data.ingest.row_reader import Canonical, RowReader, Slice
from gem.data.ingest.spec_check import check_spec, flag_names, kind_names
from gem.data.spec import DatasetSpec, FeatureSpec, TimeSpec

SINCE = "~since"  # no feature can be mistaken for it

__all__ = [
    "SINCE",
    "Canonical",
    "Limits",
    "Part",
    "RawFile",
    "check_spec",
    "flag_names",
    "kind_names",
    "read_entities",
    "read_events",
    "read_impressions",
    "read_label_log",
    "resolve_files",
    "stable_hash64",
]


def read_impressions(
    spec: DatasetSpec, file: RawFile | Path, part: Part | None = None, limits: Limits | None = None
) -> Canonical:
    """Columns: impression_id int64; user, ad int64 or string; time_ms int64; surface string (null allowed);
    `ctx:<feature>` string | float64 | list<string>; `label:<task>` int8 (1, 0, -1 unknown) for labels with a column;
    `true:<task>` float32 if the spec names it; `key:<task>` int64 or string for labels with a log of their own;
    dup int64: hash of the duplicate_key columns (of the impression id if there are none), never null;
    day int32, days since 1970-01-01, if the spec names a day column: that day, or that of the time where it is empty.

    An id column is int64 if every value of the file is a whole number, else string; so two files of one table may
    differ: cast both to string before concatenating (the text of an int is its decimal form, and stable_hash64 is the
    same for 5 and "5").
    Reasons: null_user null_ad null_id id_too_long bad_id null_time time_out_of_range future_time nan_numeric bad_label
    unparsable day_not_of_time. Repairs: clamped_time. Raises DataError if most days are not those of their times.
    """
    imp = spec.impressions
    reader = RowReader(spec, imp.table, Slice(file, part, limits), _impression_columns(spec), spec.context.features)
    user, ad = reader.ids(imp.user, "null_user"), reader.ids(imp.ad, "null_ad")
    time_ms = reader.times(imp.time)
    impression_id, dup = impression_keys(imp, reader, user, ad, time_ms)
    out: dict[str, pa.Array] = {
        "impression_id": impression_id,
        "user": user,
        "ad": ad,
        "time_ms": pa.array(time_ms),
        "surface": reader.category(imp.surface),
    }
    for feature in spec.context.features:
        out[f"ctx:{feature.name}"] = _context_column(reader, feature)
    for name, label in spec.labels.items():
        if label.column:
            out[f"label:{name}"] = pa.array(reader.binary(label.column, "bad_label", label.at_least))
        elif label.key:
            out[f"key:{name}"] = reader.ids(label.key, None)
    for name, column in imp.true_probability.items():
        out[f"true:{name}"] = reader.probability(column)
    out["dup"] = pa.array(dup)
    if imp.day:
        out["day"] = pa.array(reader.days(imp.day, time_ms))
    return reader.finish(out)


def read_entities(
    spec: DatasetSpec,
    side: Literal["user", "ad"],
    file: RawFile | Path,
    part: Part | None = None,
    limits: Limits | None = None,
) -> Canonical:
    """Columns: key int64 or string, then one per feature under its feature name: string | float64 | list<string> |
    fixed_size_list<float32>. A key may occur twice in a file or over files; the caller decides. Where the table is a
    log too, `SINCE`: int64, the time of the row.

    A NaN or infinite number becomes null and is counted.
    Reasons: null_key id_too_long bad_id bad_embedding unparsable; of a log also null_time time_out_of_range.
    """
    entity = spec.users if side == "user" else spec.ads
    assert entity.table and entity.key  # spec_check refuses one without the other; without both nothing is read
    when = log_time(spec, entity.table)
    wanted = [entity.key, *(f.column or f.name for f in entity.features), *([when.column] if when else [])]
    reader = RowReader(spec, entity.table, Slice(file, part, limits), wanted, entity.features)
    out = {"key": reader.ids(entity.key, "null_key")}
    for feature in entity.features:
        column = feature.column or feature.name
        if feature.kind == "categorical":
            out[feature.name] = reader.category(column)
        elif feature.kind == "numeric":
            out[feature.name] = reader.number_or_missing(column, feature)
        elif feature.kind == "multi":
            out[feature.name] = reader.multi(column, feature.separator)
        else:
            values, bad = columns.to_embedding(
                reader.column(column), feature.width or 0, feature.separator, reader.where(column)
            )
            reader.mark(bad, "bad_embedding")
            out[feature.name] = values
    if when:
        out[SINCE] = pa.array(reader.any_times(when))
    return reader.finish(out)


def log_time(spec: DatasetSpec, table: str | None) -> TimeSpec | None:
    """The time of the rows of a table that is a log: the impressions, an event source, a label's log. Else None."""
    logs = [(spec.impressions.table, spec.impressions.time)]
    logs += [(e.table, when) for e in spec.events if (when := e.time or e.list_before)]
    logs += [(la.table, la.time) for la in spec.labels.values() if la.table and la.time]
    return next((when for name, when in logs if name == table), None)


def _context_column(reader: RowReader, feature: FeatureSpec) -> pa.Array:
    column = feature.column or feature.name
    if feature.kind == "categorical":
        return reader.category(column)
    if feature.kind == "multi":
        return reader.multi(column, feature.separator)
    values, wrong = reader.number(column)
    reader.mark(wrong, "nan_numeric")
    reader.count_negative(values, feature)
    return values


def _impression_columns(spec: DatasetSpec) -> Iterator[str]:
    imp = spec.impressions
    yield from key_columns(imp)
    yield imp.surface
    if imp.day:
        yield imp.day
    yield from (f.column or f.name for f in spec.context.features)
    yield from (column for label in spec.labels.values() if (column := label.column or label.key))
    yield from imp.true_probability.values()
