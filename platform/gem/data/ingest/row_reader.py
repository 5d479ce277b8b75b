"""The wanted columns of one raw file or part, typed and checked; each wrong row gets the first reason that applies."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gem.data.days import NO_DAY, day_numbers, parse_days
from gem.data.ingest import clock, columns, units
from gem.data.ingest.clock import Limits
from gem.data.ingest.raw import Part, RawFile, may_lack, quarantine, read_columns
from gem.data.ingest.sources import partition_day
from gem.data.spec import DatasetSpec, FeatureSpec, TimeSpec
from gem.errors import DataError

MAX_ID_BYTES = 256  # of an id's UTF-8 text
_TIME_HINT = "A time must be an integer, UTC epoch; text and zone-less timestamps are ambiguous, convert them first"
_ORDER = (
    "null_user",
    "null_ad",
    "null_key",
    "null_id",
    "id_too_long",
    "bad_id",
    "null_time",
    "time_out_of_range",
    "future_time",
    "nan_numeric",
    "bad_label",
    "bad_flag",
    "bad_embedding",
    "unparsable",
    "day_not_of_time",
)


@dataclass
class Canonical:
    """One raw file, or one part of it, read and checked.

    rows:         the good rows, in file order, in the columns the reader's docstring lists
    quarantined:  columns row (JSON text of the original row), reason, file (text)
    raw_rows:     data rows in the file; for list sources the number of lists, not of events. For everything
                  but list sources raw_rows == rows.num_rows + quarantined.num_rows.
    counts:       repairs that cost no row: "nan:<feature>", "infinite:<feature>", "negative:<feature>" (under log1p),
                  "null_list_items", "bad_list_items", "clamped_time", "unknown_dwell", "null_arrival"
    """

    rows: pa.Table
    quarantined: pa.Table
    raw_rows: int
    counts: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Slice:
    """What to read of a table: a file, a part of it (None: all), and how far its times may run ahead (None: any)."""

    file: RawFile | Path
    part: Part | None = None
    limits: Limits | None = None


def long_ids(values: pa.Array) -> columns.Bools:
    """Which ids, as `columns.to_ids` gives them, have more than MAX_ID_BYTES."""
    if not columns.is_text(values.type):
        return columns.no_rows(values)
    return np.asarray(pc.fill_null(pc.greater(pc.binary_length(values), MAX_ID_BYTES), False))


def nul_ids(values: pa.Array) -> columns.Bools:
    """Which ids hold a NUL character."""
    if not columns.is_text(values.type):
        return columns.no_rows(values)
    return np.asarray(pc.fill_null(pc.match_substring(values, "\x00"), False))


class RowReader:
    """The wanted columns of one slice and the reasons against its rows so far.

    `features` are those read from this table: a column of theirs may be absent before their `since`.
    """

    def __init__(
        self, spec: DatasetSpec, table: str, what: Slice, wanted: Iterable[str], features: Iterable[FeatureSpec] = ()
    ) -> None:
        self.file = RawFile.of(what.file)
        self._table = spec.tables[table]
        self._part, self._limits = what.part, what.limits
        self._zone = spec.impressions.zone
        self.raw = read_columns(self._table, self.file, wanted, what.part, may_lack(features, self.file))
        self.size = int(self.raw.table.num_rows)
        self.counts: dict[str, int] = {}
        self._reason = np.full(self.size, len(_ORDER), dtype=np.int64)

    def where(self, column: str) -> str:
        return f'{self.file}, column "{column}"'

    def column(self, name: str) -> pa.Array:
        """A raw column as one array, dictionaries decoded. Raises DataError for text that is not UTF-8."""
        chunks = self.raw.table.column(name)
        array = chunks.combine_chunks()
        if isinstance(array, pa.ChunkedArray):  # zero chunks
            array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
        if columns.is_text(array.type):
            try:
                array.validate(full=True)
            except pa.ArrowInvalid as e:
                raise DataError(f"{self.where(name)}: {e}. Write the column again as UTF-8 text.") from None
        return array.dictionary_decode() if pa.types.is_dictionary(array.type) else array

    def mark(self, bad: columns.Bools, reason: str) -> None:
        """Send the rows of a mask to the quarantine; a row keeps its first reason in _ORDER."""
        self._reason[bad] = np.minimum(self._reason[bad], _ORDER.index(reason))

    def good(self) -> columns.Bools:
        out: columns.Bools = self._reason == len(_ORDER)
        return out

    def ids(self, column: str, null_reason: str | None) -> pa.Array:
        """Ids as int64 or text; null ones are marked if there is a reason for it."""
        return self.checked_ids(columns.to_ids(self.column(column), self.where(column)), null_reason)

    def checked_ids(self, values: pa.Array, null_reason: str | None) -> pa.Array:
        if null_reason:
            self.mark(np.asarray(values.is_null()), null_reason)
        self.mark(long_ids(values), "id_too_long")
        self.mark(nul_ids(values), "bad_id")
        return values

    def times(self, when: TimeSpec) -> npt.NDArray[np.int64]:
        """Times in ms UTC within the limits; null, unreadable and impossible ones are marked (0)."""
        time_ms = self.any_times(when)
        if self._limits is None:
            return time_ms
        day = partition_day(self.file)
        if day is not None:
            clock.check_partition(time_ms[time_ms != 0], day, self._zone, self._limits, self.where(when.column))
        time_ms, moved, beyond = clock.limit_times(time_ms, day, self._zone, self._limits)
        self.count("clamped_time", int(moved.sum()))
        self.mark(beyond, "future_time")
        return time_ms

    def days(self, column: str, time_ms: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """Days since 1970-01-01 of the good rows, [N]; that of the time where the column is empty.

        Rows with a day that is not near that of their time are marked. Raises DataError if most are.
        """
        good, where = self.good(), self.where(column)
        times, out = time_ms[good], np.full(self.size, NO_DAY, np.int32)
        own = parse_days(self.category(column).filter(pa.array(good)), where)
        bad = np.zeros(self.size, np.bool_)
        bad[good] = clock.check_days(times, own, self._zone, where)
        out[good] = np.where(own == NO_DAY, day_numbers(times, self._zone), own)
        self.mark(bad, "day_not_of_time")
        return out

    def any_times(self, when: TimeSpec) -> npt.NDArray[np.int64]:
        """Times in ms UTC, however far ahead; null, unreadable and impossible ones are marked (0)."""
        time_ms, known = self._times(when)
        self.mark(~known, "null_time")
        return time_ms

    def arrival(self, when: TimeSpec) -> npt.NDArray[np.int64]:
        """Times of arrival in ms UTC, 0 where not given; unreadable and impossible ones are marked."""
        time_ms, known = self._times(when)
        self.count("null_arrival", int((~known).sum()))
        return time_ms

    def _times(self, when: TimeSpec) -> tuple[npt.NDArray[np.int64], columns.Bools]:
        """(ms UTC or 0, mask of the rows that are not null)."""
        where = self.where(when.column)
        values, bad = columns.to_ints(self.column(when.column), where, _TIME_HINT)
        known = np.asarray(values.is_valid())
        numbers = pc.fill_null(values, 0).to_numpy(zero_copy_only=False)
        time_ms, good = units.to_ms(numbers, known, when.unit, where)
        self.mark(bad, "unparsable")
        self.mark(known & ~good, "time_out_of_range")
        return time_ms, known | bad

    def category(self, column: str) -> pa.Array:
        return columns.category_text(self.column(column), self.where(column))

    def multi(self, column: str, separator: str) -> pa.Array:
        return columns.to_multi(self.column(column), separator, self.where(column))

    def binary(self, column: str, reason: str, at_least: float | None = None) -> npt.NDArray[np.int8]:
        values, bad = columns.to_binary(self.column(column), self.where(column), at_least)
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

    def number_or_missing(self, column: str, feature: FeatureSpec) -> pa.Array:
        """float64 column; NaN and infinities become null and are counted."""
        values, wrong = self.number(column)
        self.count_negative(values, feature)
        name = feature.name
        if not wrong.any():
            return values
        num_nan = int(pc.sum(pc.is_nan(values)).as_py() or 0)
        self.count(f"nan:{name}", num_nan)
        self.count(f"infinite:{name}", int(wrong.sum()) - num_nan)
        return pc.if_else(pa.array(wrong), pa.scalar(None, pa.float64()), values)

    def count_negative(self, values: pa.Array, feature: FeatureSpec) -> None:
        """Count what log1p makes a missing value."""
        if feature.transform == "log1p":
            finite = pc.and_(pc.is_finite(values), pc.less(values, 0.0))
            self.count(f"negative:{feature.name}", int(pc.sum(finite).as_py() or 0))

    def count(self, what: str, how_many: int) -> None:
        if how_many:
            self.counts[what] = self.counts.get(what, 0) + how_many

    def quarantined(self) -> pa.Table:
        rows = {int(i): _ORDER[self._reason[i]] for i in np.flatnonzero(~self.good())}
        return quarantine(self._table, self.file, rows, self.raw, self._part)

    def finish(self, out: dict[str, pa.Array]) -> Canonical:
        rows = pa.table(out).filter(pa.array(self.good()))
        return self.result(rows)

    def result(self, rows: pa.Table) -> Canonical:
        return Canonical(rows, self.quarantined(), self.size + len(self.raw.unparsable), self.counts)
