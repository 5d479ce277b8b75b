"""Raw files to canonical Arrow tables, one file at a time, every row checked (contract 1).

Ids stay int64 or text and never pass through a float; times are int64 ms UTC. A wrong row goes to the
quarantine with the first reason that applies; a wrong file (unit, type, damage) is refused with DataError.
No Ray here: a pipeline calls these readers once per file, in any process.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gem.data import columns, units
from gem.data.hashing import as_int63, combine64, stable_hash64
from gem.data.raw import RawRows, quarantine, read_columns, resolve_files
from gem.data.schema import DWELL_BUCKETS
from gem.data.spec import DatasetSpec, EventSource, FeatureSpec, ImpressionSpec, TableSpec, TimeSpec
from gem.data.spec_check import check_spec, flag_names, kind_names

__all__ = [
    "Canonical",
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

_TIME_HINT = "A time must be an integer, UTC epoch; text and zone-less timestamps are ambiguous, convert them first"
_ORDER = (
    "null_user",
    "null_ad",
    "null_key",
    "null_id",
    "null_time",
    "time_out_of_range",
    "nan_numeric",
    "bad_label",
    "bad_flag",
    "bad_embedding",
    "unparsable",
)


@dataclass
class Canonical:
    """One raw file, read and checked.

    rows:         the good rows, in file order, in the columns the reader's docstring lists
    quarantined:  columns row (JSON text of the original row), reason, file (text)
    raw_rows:     data rows in the file; for list sources the number of lists, not of events. For everything
                  but list sources raw_rows == rows.num_rows + quarantined.num_rows.
    counts:       repairs that cost no row: "nan:<feature>", "infinite:<feature>", "null_list_items"
    """

    rows: pa.Table
    quarantined: pa.Table
    raw_rows: int
    counts: dict[str, int] = field(default_factory=dict)


def read_impressions(spec: DatasetSpec, path: Path) -> Canonical:
    """Columns: impression_id int64; user, ad int64 or string; time_ms int64; surface string (null allowed);
    `ctx:<feature>` string | float64 | list<string>; `label:<task>` int8 (1, 0, -1 unknown) for labels with a column;
    `true:<task>` float32 if the spec names it; `key:<task>` int64 or string for labels with a log of their own;
    dup int64: hash of the duplicate_key columns (of the impression id if there are none), never null.

    An id column is int64 if every value of the file is a whole number, else string; so two files of one table may
    differ: cast both to string before concatenating (the text of an int is its decimal form, and stable_hash64 is the
    same for 5 and "5").
    Reasons: null_user null_ad null_id null_time time_out_of_range nan_numeric bad_label unparsable.
    """
    imp = spec.impressions
    reader = _Reader(spec.tables[imp.table], path, _impression_columns(spec))
    user, ad = reader.ids(imp.user, "null_user"), reader.ids(imp.ad, "null_ad")
    time_ms = reader.times(imp.time)
    impression_id, dup = _impression_keys(imp, reader, user, ad, time_ms)
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
            out[f"label:{name}"] = pa.array(reader.binary(label.column, "bad_label"))
        elif label.key:
            out[f"key:{name}"] = columns.to_ids(reader.column(label.key), reader.where(label.key))
    for name, column in imp.true_probability.items():
        out[f"true:{name}"] = reader.probability(column)
    out["dup"] = pa.array(dup)
    return reader.finish(out)


def read_events(spec: DatasetSpec, source_index: int, path: Path) -> Canonical:
    """Columns: user, ad; time_ms, known_ms int64; kind uint8; flags uint16; surface string (null allowed); dwell uint8;
    order int64 (row number in the file; position in the list for list_before); dup int64: events equal in it are one
    event (over the impression table it equals the impressions' dup column; elsewhere a hash of all fields; list events
    never collide within a user).

    With `list_before` (time L) the n items of a user stand 1 ms apart, the last one at L.
    Reasons: null_user null_ad null_time time_out_of_range bad_flag unparsable.
    """
    source = spec.events[source_index]
    when = source.list_before or source.time
    assert when is not None  # spec_check refuses a source without either
    over_impressions = source.table == spec.impressions.table and source.list_before is None
    extra = _key_columns(spec.impressions) if over_impressions else []
    reader = _Reader(spec.tables[source.table], path, [*_event_columns(source), *extra])
    user, time_ms = reader.ids(source.user, "null_user"), reader.times(when)
    size = len(user)
    out: dict[str, pa.Array] = {
        "user": user,
        "ad": pa.nulls(size, pa.int64()) if source.list_before else reader.ids(source.ad, "null_ad"),
        "time_ms": pa.array(time_ms),
        "known_ms": pa.array(time_ms + source.available_after_ms),
        "kind": pa.array(np.full(size, kind_names(spec).index(source.kind) + 1, dtype=np.uint8)),
        "flags": pa.array(_flags(spec, source, reader)),
        "surface": reader.category(source.surface) if source.surface else pa.nulls(size, pa.string()),
        "dwell": pa.array(_dwell(reader, source.dwell)),
        "order": pa.array(np.arange(size, dtype=np.int64)),
    }
    if source.list_before:
        return _expand_lists(source, reader, out)
    if over_impressions:
        imp = spec.impressions
        own = [reader.column(c) for c in (imp.user, imp.ad)]
        keys = [columns.to_ids(c, str(path)) for c in own]
        out["dup"] = pa.array(_impression_keys(imp, reader, keys[0], keys[1], time_ms)[1])
    else:
        parts = [out[c] for c in ("user", "ad", "time_ms", "kind", "flags", "surface", "dwell")]
        out["dup"] = pa.array(as_int63(combine64(*(stable_hash64(p) for p in parts))))
    return reader.finish(out)


def read_label_log(spec: DatasetSpec, label: str, path: Path) -> Canonical:
    """Columns: key int64 or string, time_ms int64. Reasons: null_key null_time time_out_of_range unparsable."""
    what = spec.labels[label]
    assert what.table and what.key and what.time  # spec_check refuses a label log without them
    reader = _Reader(spec.tables[what.table], path, [what.key, what.time.column])
    return reader.finish({"key": reader.ids(what.key, "null_key"), "time_ms": pa.array(reader.times(what.time))})


def read_entities(spec: DatasetSpec, side: Literal["user", "ad"], path: Path) -> Canonical:
    """Columns: key int64 or string, then one per feature under its feature name: string | float64 | list<string> |
    fixed_size_list<float32>. A key may occur twice in a file or over files; the caller decides.

    A NaN or infinite number becomes null and is counted. Reasons: null_key bad_embedding unparsable.
    """
    entity = spec.users if side == "user" else spec.ads
    wanted = [entity.key, *(f.column or f.name for f in entity.features)]
    reader = _Reader(spec.tables[entity.table], path, wanted)
    out = {"key": reader.ids(entity.key, "null_key")}
    for feature in entity.features:
        column = feature.column or feature.name
        if feature.kind == "categorical":
            out[feature.name] = reader.category(column)
        elif feature.kind == "numeric":
            out[feature.name] = reader.number_or_missing(column, feature.name)
        elif feature.kind == "multi":
            out[feature.name] = columns.to_multi(reader.column(column), feature.separator, reader.where(column))
        else:
            values, bad = columns.to_embedding(
                reader.column(column), feature.width or 0, feature.separator, reader.where(column)
            )
            reader.mark(bad, "bad_embedding")
            out[feature.name] = values
    return reader.finish(out)


class _Reader:
    """The wanted columns of one file and the reasons against its rows so far."""

    def __init__(self, table: TableSpec, path: Path, wanted: Iterable[str]) -> None:
        self.table = table
        self.path = path
        self.raw: RawRows = read_columns(table, path, wanted)
        self.size = int(self.raw.table.num_rows)
        self.counts: dict[str, int] = {}
        self._reason = np.full(self.size, len(_ORDER), dtype=np.int64)

    def where(self, column: str) -> str:
        return f'{self.path}, column "{column}"'

    def column(self, name: str) -> pa.Array:
        chunks = self.raw.table.column(name)
        array = chunks.combine_chunks()
        if isinstance(array, pa.ChunkedArray):  # zero chunks
            array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
        return array.dictionary_decode() if pa.types.is_dictionary(array.type) else array

    def mark(self, bad: columns.Bools, reason: str) -> None:
        """Send the rows of a mask to the quarantine; a row keeps its first reason in _ORDER."""
        self._reason[bad] = np.minimum(self._reason[bad], _ORDER.index(reason))

    def good(self) -> columns.Bools:
        out: columns.Bools = self._reason == len(_ORDER)
        return out

    def ids(self, column: str, reason: str) -> pa.Array:
        values = columns.to_ids(self.column(column), self.where(column))
        self.mark(np.asarray(values.is_null()), reason)
        return values

    def times(self, when: TimeSpec) -> npt.NDArray[np.int64]:
        where = self.where(when.column)
        values, bad = columns.to_ints(self.column(when.column), where, _TIME_HINT)
        known = np.asarray(values.is_valid())
        numbers = pc.fill_null(values, 0).to_numpy(zero_copy_only=False)
        time_ms, good = units.to_ms(numbers, known, when.unit, where)
        self.mark(bad, "unparsable")
        self.mark(~known & ~bad, "null_time")
        self.mark(known & ~good, "time_out_of_range")
        return time_ms

    def category(self, column: str) -> pa.Array:
        return columns.category_text(self.column(column), self.where(column))

    def binary(self, column: str, reason: str) -> npt.NDArray[np.int8]:
        values, bad = columns.to_binary(self.column(column), self.where(column))
        self.mark(bad, reason)
        return values

    def probability(self, column: str) -> pa.Array:
        values, bad = columns.to_floats(self.column(column), self.where(column))
        outside = pc.or_(pc.less(values, 0.0), pc.greater(values, 1.0))
        self.mark(bad | np.asarray(pc.fill_null(outside, False)), "bad_label")
        return values.cast(pa.float32())

    def number(self, column: str) -> tuple[pa.Array, columns.Bools]:
        """float64 column and the mask of its NaN and infinite cells; what is no number is marked."""
        values, bad = columns.to_floats(self.column(column), self.where(column))
        self.mark(bad, "unparsable")
        return values, np.asarray(pc.fill_null(pc.invert(pc.is_finite(values)), False))

    def number_or_missing(self, column: str, name: str) -> pa.Array:
        values, wrong = self.number(column)
        if not wrong.any():
            return values
        num_nan = int(pc.sum(pc.is_nan(values)).as_py() or 0)
        self.count(f"nan:{name}", num_nan)
        self.count(f"infinite:{name}", int(wrong.sum()) - num_nan)
        return pc.if_else(pa.array(wrong), pa.scalar(None, pa.float64()), values)

    def count(self, what: str, how_many: int) -> None:
        if how_many:
            self.counts[what] = self.counts.get(what, 0) + how_many

    def quarantined(self) -> pa.Table:
        rows = {int(i): _ORDER[self._reason[i]] for i in np.flatnonzero(~self.good())}
        return quarantine(self.table, self.path, rows, self.raw)

    def finish(self, out: dict[str, pa.Array]) -> Canonical:
        rows = pa.table(out).filter(pa.array(self.good()))
        return Canonical(rows, self.quarantined(), self.size + len(self.raw.unparsable), self.counts)


def _context_column(reader: _Reader, feature: FeatureSpec) -> pa.Array:
    column = feature.column or feature.name
    if feature.kind == "categorical":
        return reader.category(column)
    if feature.kind == "multi":
        return columns.to_multi(reader.column(column), feature.separator, reader.where(column))
    values, wrong = reader.number(column)
    reader.mark(wrong, "nan_numeric")
    return values


def _impression_columns(spec: DatasetSpec) -> Iterator[str]:
    imp = spec.impressions
    yield from _key_columns(imp)
    yield imp.surface
    yield from (f.column or f.name for f in spec.context.features)
    yield from (column for label in spec.labels.values() if (column := label.column or label.key))
    yield from imp.true_probability.values()


def _key_columns(imp: ImpressionSpec) -> list[str]:
    return [imp.user, imp.ad, imp.time.column, *([imp.id] if imp.id else []), *imp.duplicate_key]


def _event_columns(source: EventSource) -> Iterator[str]:
    yield from (source.user, source.ad)
    yield from (when.column for when in (source.time, source.list_before, source.dwell) if when)
    yield from ([source.surface] if source.surface else [])
    yield from source.flags.values()


def _impression_keys(
    imp: ImpressionSpec, reader: _Reader, user: pa.Array, ad: pa.Array, time_ms: npt.NDArray[np.int64]
) -> tuple[pa.Array, npt.NDArray[np.int64]]:
    """impression_id and dup columns; marks rows whose own id is null."""
    if imp.id:
        ids = reader.ids(imp.id, "null_id")
        impression_id = ids if pa.types.is_integer(ids.type) else pa.array(as_int63(stable_hash64(ids, "impression")))
    else:
        parts = (stable_hash64(part, "impression") for part in (user, ad, pa.array(time_ms)))
        impression_id = pa.array(as_int63(combine64(*parts)))
    if not imp.duplicate_key:
        return impression_id, as_int63(stable_hash64(impression_id, "dup"))
    raw = (reader.column(c) for c in imp.duplicate_key)
    words = (c if pa.types.is_integer(c.type) else columns.category_text(c) for c in raw)
    return impression_id, as_int63(combine64(*(stable_hash64(c, "dup") for c in words)))


def _flags(spec: DatasetSpec, source: EventSource, reader: _Reader) -> npt.NDArray[np.uint16]:
    names = flag_names(spec)
    out = np.full(reader.size, sum(1 << names.index(n) for n in set(source.always)), dtype=np.uint16)
    labels = [w.column for w in spec.labels.values()] if source.table == spec.impressions.table else []
    for name, column in source.flags.items():
        # The reason that the impressions give for the same cell, so that one bad row is counted once.
        on = reader.binary(column, "bad_label" if column in labels else "bad_flag") == 1
        out[on] |= np.uint16(1 << names.index(name))
    return out


def _dwell(reader: _Reader, dwell: TimeSpec | None) -> npt.NDArray[np.uint8]:
    """Bucket: 0 unknown, 1 below a second, then 2 + floor(log2(seconds)), at most DWELL_BUCKETS - 1."""
    if dwell is None:
        return np.zeros(reader.size, dtype=np.uint8)
    values, bad = columns.to_floats(reader.column(dwell.column), reader.where(dwell.column))
    seconds = units.to_seconds(values.to_numpy(zero_copy_only=False).astype(np.float64), dwell.unit)
    known = np.isfinite(seconds) & (seconds >= 0)
    reader.mark(bad, "unparsable")
    reader.count("unknown_dwell", int((~known & np.asarray(values.is_valid())).sum()))
    exponent = np.frexp(np.where(known, seconds, 0.0))[1] - 1  # floor(log2), exact at powers of two
    bucket = np.where(seconds >= 1, np.minimum(exponent + 2, DWELL_BUCKETS - 1), 1)
    return np.where(known, bucket, 0).astype(np.uint8)


def _expand_lists(source: EventSource, reader: _Reader, per_list: dict[str, pa.Array]) -> Canonical:
    """One row per list to one row per item, oldest first; the last item stands at the list's time."""
    raw = reader.column(source.ad)
    if not columns.is_list(raw.type):
        words = columns.text(raw) if columns.is_text(raw.type) else columns.category_text(raw)
        raw = pc.split_pattern(words, pattern=",")
    lists = columns.as_list(raw)
    items = columns.to_ids(lists.flatten(), reader.where(source.ad))
    parent = np.asarray(pc.list_parent_indices(lists), dtype=np.int64)
    known = np.asarray(items.is_valid())
    reader.count("null_list_items", int((~known).sum()))
    keep = known & reader.good()[parent]
    parent = parent[keep]
    lengths = np.bincount(parent, minlength=reader.size)
    starts = np.cumsum(lengths) - lengths
    position = np.arange(len(parent), dtype=np.int64) - starts[parent]
    out = {name: values.take(pa.array(parent)) for name, values in per_list.items()}
    back = pa.array(position - lengths[parent] + 1)
    out["ad"] = items.filter(pa.array(keep))
    out["time_ms"] = pc.add(out["time_ms"], back)
    out["known_ms"] = pc.add(out["known_ms"], back)
    out["order"] = pa.array(position)
    parts = [out[c] for c in ("user", "ad", "time_ms", "kind", "flags", "order")]
    out["dup"] = pa.array(as_int63(combine64(*(stable_hash64(p) for p in parts))))
    return Canonical(pa.table(out), reader.quarantined(), reader.size + len(reader.raw.unparsable), reader.counts)
