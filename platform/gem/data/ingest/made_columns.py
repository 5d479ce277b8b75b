"""Columns of a raw table that are not in its files: from the path, constant, numbered, or made from the row number."""

from __future__ import annotations

import datetime as dt
import re
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gem.data.hashing import stable_hash64
from gem.data.ingest import columns
from gem.data.ingest.sources import RawFile, hive_columns
from gem.data.spec import RowTime, TableSpec
from gem.errors import DataError

_ROW_BITS = 30  # of a row number; the rest of the 63 bits tells the file
_DAY_MS = 86_400_000


def made_names(table: TableSpec, file: RawFile) -> list[str]:
    """Names of the made columns of one file. A stored column of a hive folder's name takes its place."""
    names = [*hive_columns(file), *_path_values(table, file), *table.constants]
    names += [table.row_number] if table.row_number else []
    names += [table.row_time.column] if table.row_time else []
    return list(dict.fromkeys(names))


def made_column(
    table: TableSpec, file: RawFile, name: str, number: npt.NDArray[np.int64], rows: pa.Table
) -> pa.Array | pa.ChunkedArray:
    """One made column for the rows with these record numbers, [N]. Raises DataError."""
    size = len(number)
    if name == table.row_number:
        return pa.array(_row_numbers(file, number))
    if table.row_time and name == table.row_time.column:
        return _row_times(table, table.row_time, file, number, rows)
    value: str | int | None
    if name in table.constants:
        value = table.constants[name]
    else:
        value = (hive_columns(file) | _path_values(table, file))[name]
    return pa.repeat(pa.scalar(value, pa.int64() if isinstance(value, int) else pa.string()), size)


def file_number(file: RawFile) -> int:
    """What tells this file's row numbers from those of another; depends on its path below the folder alone."""
    return int(stable_hash64(pa.array([file.relative]), "row-number")[0] >> np.uint64(_ROW_BITS + 1))


def _row_numbers(file: RawFile, number: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    if len(number) and int(number.max()) >= 1 << _ROW_BITS:
        raise DataError(f"{file}: more than {1 << _ROW_BITS} rows, the most that `row_number` can count. Cut the file.")
    out: npt.NDArray[np.int64] = np.int64(file_number(file) << _ROW_BITS) | number
    return out


def _row_times(
    table: TableSpec, made: RowTime, file: RawFile, number: npt.NDArray[np.int64], rows: pa.Table
) -> pa.Array:
    start = int(dt.datetime.fromisoformat(made.start).replace(tzinfo=dt.UTC).timestamp() * 1000)
    within = number * made.step_us // 1000
    if made.day is None:
        return pa.array(start + within)
    stored = made.day in rows.column_names
    day = rows.column(made.day) if stored else made_column(table, file, made.day, number, rows)
    day = day.combine_chunks() if isinstance(day, pa.ChunkedArray) else day
    where = f'{file}, column "{made.day}"'
    if made.days:
        day = _named_days(day, made.days, where)
    days, _ = columns.to_ints(day, where, "The day of `row_time` counts from `start`: 0, 1, …; name others in `days`")
    _check_room(made, days, number, f'{file}, column "{made.column}"')
    return pc.add(pc.multiply(days, _DAY_MS), pa.array(start + within))


def _check_room(made: RowTime, days: pa.Array, number: npt.NDArray[np.int64], where: str) -> None:
    """Rows may go on until the next day named in `days`, else until midnight: DataError, since the split would lie."""
    numbers = pc.fill_null(days, 0).to_numpy(zero_copy_only=False)
    known = sorted(set(made.days.values()))
    room = np.ones(len(numbers), np.int64)
    for day, following in pairwise(known):
        room[numbers == day] = following - day
    beyond = number * made.step_us // 1000 >= room * _DAY_MS
    if beyond.any():
        row, free = int(number[beyond].max()), int(room[beyond].max())
        raise DataError(
            f"{where}: row {row} at {made.step_us} µs a row lies beyond its day. Set row_time.step_us to at most "
            f"{free * _DAY_MS * 1000 // (row + 1)}."
        )


def _named_days(names: pa.Array, days: dict[str, int], where: str) -> pa.Array:
    words = columns.category_text(names, where)
    found = pc.index_in(words, value_set=pa.array(list(days), pa.string()))
    unknown = words.filter(pc.and_(pc.is_valid(words), pc.is_null(found)))
    if len(unknown):
        raise DataError(f"{where}: no day for {unknown[0].as_py()!r}; row_time.days has {sorted(days)}. Add it there.")
    return pa.array(list(days.values()), pa.int64()).take(found)


def _path_values(table: TableSpec, file: RawFile) -> dict[str, str | None]:
    if not table.path_columns:
        return {}
    found = re.search(table.path_columns, file.relative)
    if found is None:
        raise DataError(
            f"{file}: its path {file.relative!r} does not match path_columns {table.path_columns!r}. Correct the "
            "expression, or the file patterns of the table."
        )
    return found.groupdict()
