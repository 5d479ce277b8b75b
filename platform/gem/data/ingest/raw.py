"""Raw files: which belong to a table, which columns they have, and their rows as Arrow tables.

CSV cells are read as text and typed by `gem.data.ingest.columns`, so that one bad cell costs one row, not the file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from gem.data.ingest import raw_csv, raw_parts
from gem.data.ingest.globs import check_patterns
from gem.data.ingest.made_columns import made_column, made_names
from gem.data.ingest.raw_parts import Part
from gem.data.ingest.sources import DataFolder, RawFile, open_input, over_files, partition_day
from gem.data.spec import DatasetSpec, FeatureSpec, TableSpec
from gem.errors import DataError, SpecError, suggest

__all__ = [
    "Part",
    "RawFile",
    "RawRows",
    "file_format",
    "header",
    "parts",
    "quarantine",
    "read_columns",
    "resolve_files",
]

QUARANTINE_SCHEMA = pa.schema([("row", pa.string()), ("reason", pa.string()), ("file", pa.string())])
_MANY_LINES = 1000
_OTHER_SEPARATORS = ("::", "\t", ";", "|", ",", "^")
_CSV_ENDINGS = (".csv", ".tsv", ".txt")


@dataclass
class RawRows:
    """The wanted columns of one file or part.

    `unparsable`: CSV lines with a wrong number of fields, as they stand. `number`: int64 [N], the record number of
    each row in its file (such lines count, so that it does not depend on how the file was cut).
    """

    table: pa.Table
    number: npt.NDArray[np.int64]
    unparsable: list[str] = field(default_factory=list)


def resolve_files(spec: DatasetSpec, data_dir: str | os.PathLike[str]) -> dict[str, list[RawFile]]:
    """Files of every table, sorted by path; an absent optional table maps to []. `data_dir` may be a URI.

    Raises SpecError if a table has no file, and DataError for a file that is empty (0 bytes), truncated or of
    another format. A file with a header and no rows is fine.
    """
    folder = DataFolder(data_dir)
    folder.check()
    out: dict[str, list[RawFile]] = {}
    for name, table in spec.tables.items():
        check_patterns(f"tables.{name}", table.files)
        found = folder.find(table.files)
        if not found and not table.optional:
            raise SpecError(
                f'table "{name}": no file matches {table.files} in {folder}, which holds {folder.listing()}. '
                f"Correct tables.{name}.files or the data folder."
            )
        out[name] = found
    todo = [(file, file_format(spec.tables[name], file)) for name, files in out.items() for file in files]
    over_files(lambda item: _check_file(*item), todo, remote=folder.local is None)
    return out


def file_format(table: TableSpec, file: RawFile | Path) -> str:
    """`parquet` or `csv`: as the spec says, else by the file's ending. Raises SpecError."""
    if table.format:
        return table.format
    suffixes = [s.lower() for s in file.suffixes[-2:]]
    if ".parquet" in suffixes:
        return "parquet"
    if any(ending in suffixes for ending in _CSV_ENDINGS):
        return "csv"
    last = file.suffixes[-1] if file.suffixes else ""
    raise SpecError(f"{file}: cannot tell the format from the ending {last!r}; set `format: parquet` or `csv`.")


def header(table: TableSpec, file: RawFile | Path) -> list[str]:
    """Names of the columns of one file, then of those made from its path and rows; no row is read. Raises DataError."""
    file = RawFile.of(file)
    stored = stored_schema(table, file).names
    return stored + [n for n in made_names(table, file) if n not in stored]


@dataclass(frozen=True)
class Stored:
    """The columns that are in a file itself; types and number of rows only of a Parquet file."""

    names: list[str]
    types: dict[str, pa.DataType] = field(default_factory=dict)
    num_rows: int = 0


def stored_schema(table: TableSpec, file: RawFile) -> Stored:
    """The columns that are in the file itself; no row is read. Raises DataError."""
    try:
        if file_format(table, file) == "csv":
            return Stored(raw_csv.header(table, file))
        with open_input(file) as stream:
            meta = pq.read_metadata(stream)
        schema = meta.schema.to_arrow_schema()
        return Stored(list(schema.names), dict(zip(schema.names, schema.types, strict=True)), int(meta.num_rows))
    except (pa.ArrowInvalid, OSError, UnicodeError) as e:
        raise DataError(f"{file}: cannot read the header: {e}") from None


def parts(table: TableSpec, file: RawFile | Path, part_bytes: int = raw_parts.PART_BYTES) -> list[Part]:
    """Slices of one file of about `part_bytes` and at most about a million rows, in order; one for a small file.

    Parquet is cut at row groups, uncompressed CSV at line ends outside quotes (the file is then scanned once).
    Raises DataError for a damaged file and for a compressed CSV above 1 GB.
    """
    file = RawFile.of(file)
    try:
        if file_format(table, file) == "parquet":
            return raw_parts.parquet_parts(file, part_bytes)
        return raw_csv.csv_parts(table, file, part_bytes)
    except (pa.ArrowInvalid, OSError) as e:
        raise DataError(f"{file}: cannot be cut into parts: {e}") from None


def read_columns(
    table: TableSpec, file: RawFile | Path, columns: Iterable[str], part: Part | None = None, absent: Iterable[str] = ()
) -> RawRows:
    """Read the named columns of one file, or of one part of it. CSV columns come as text.

    Columns of `absent` that the file does not have come as nulls. Raises DataError for a damaged file and SpecError
    for a column the file does not have.
    """
    file = RawFile.of(file)
    wanted, stored = list(dict.fromkeys(columns)), stored_schema(table, file).names
    made = [n for n in made_names(table, file) if n not in stored]
    for column in wanted:
        if column not in (*stored, *made, *absent):
            names = [*stored, *made]
            other = other_separator(table, stored)
            hint = f" Is the separator right? It is {table.separator!r}, the header has {other!r}." if other else ""
            raise SpecError(f'{file}: no column "{column}".{suggest(column, names)} The file has: {names}{hint}')
    day = table.row_time.day if table.row_time and table.row_time.column in wanted else None
    rows = _read(table, file, [c for c in stored if c in (*wanted, day)], part)
    out = {}
    for column in wanted:
        if column in stored:
            out[column] = rows.table.column(column)
        elif column in made:
            out[column] = made_column(table, file, column, rows.number, rows.table)
        else:
            out[column] = pa.nulls(rows.table.num_rows)
    return RawRows(pa.table(out), rows.number, rows.unparsable)


def other_separator(table: TableSpec, names: list[str]) -> str | None:
    """What seems to separate a header line that came as one column; None if there is nothing of the kind."""
    if len(names) != 1 or table.columns:
        return None
    return next((s for s in _OTHER_SEPARATORS if s != table.separator and s in names[0]), None)


def may_lack(features: Iterable[FeatureSpec], file: RawFile) -> list[str]:
    """Columns that a file need not have: those of features whose `since` is after the day of the file's folder."""
    day = partition_day(file)
    return [f.column or f.name for f in features if f.since and day and day.isoformat() < f.since]


def quarantine(
    table: TableSpec, file: RawFile | Path, rows: dict[int, str], raw: RawRows, part: Part | None = None
) -> pa.Table:
    """Quarantine table of one file or part: `rows` maps row number in `raw` to reason; lines that did not parse are
    added.

    Columns nobody asked for are read now, so that the original row is kept whole.
    """
    texts: list[str] = []
    if rows:
        names = header(table, file)
        at = pa.array(list(rows), pa.int64())
        bad = raw.table.take(at)
        others = [n for n in names if n not in raw.table.column_names]
        if others:
            more = read_columns(table, file, others, part).table.take(at)
            for name in more.column_names:
                bad = bad.append_column(name, more[name])
        bad = bad.select([*names, *(n for n in bad.column_names if n not in names)])
        texts = [json.dumps(row, ensure_ascii=False, default=str) for row in bad.to_pylist()]
    texts += [json.dumps({"line": line}, ensure_ascii=False) for line in raw.unparsable]
    reasons = list(rows.values()) + ["unparsable"] * len(raw.unparsable)
    return pa.table([texts, reasons, [str(file)] * len(texts)], schema=QUARANTINE_SCHEMA)


def _read(table: TableSpec, file: RawFile, stored: list[str], part: Part | None) -> RawRows:
    try:
        if file_format(table, file) == "parquet":
            rows = raw_parts.read_parquet(file, stored, part)
            first = part.first_row if part else 0
            return RawRows(rows, np.arange(first, first + rows.num_rows, dtype=np.int64))
        found = RawRows(*raw_csv.read(table, file, stored, part))
    except (pa.ArrowInvalid, OSError, UnicodeError) as e:
        todo = "Restore the file; no row of it was used."
        if "Expected all lists to be of size" in str(e):
            todo = "pyarrow cannot read nulls in a fixed-size list: write that column as a plain list<float32>."
        raise DataError(f"{file}: damaged or not readable: {e}. {todo}") from None
    whole = part is None or (part.start == 0 and part.end == file.size)
    if table.columns and not found.table.num_rows and len(found.unparsable) >= (1 if whole else _MANY_LINES):
        raise _wrong_width(table, file, found.unparsable[0])
    return found


def _wrong_width(table: TableSpec, file: RawFile, line: str) -> DataError:
    """Every line of a file without a header has a wrong number of fields; `line` is one of them."""
    width = len(line.split(table.separator))
    other = next((s for s in _OTHER_SEPARATORS if len(line.split(s)) == len(table.columns)), None)
    hint = f" Separated by {other!r} it would have {len(table.columns)}." if other else ""
    return DataError(
        f"{file}: every line has a wrong number of columns: expected {len(table.columns)} (`columns` of the spec), "
        f"found {width} with the separator {table.separator!r}, such as {line[:80]!r}.{hint} Correct `separator` or "
        "`columns`."
    )


def _check_file(file: RawFile, kind: str) -> None:
    if file.size == 0:
        raise DataError(
            f"{file}: the file is empty (0 bytes). A day without rows is a {kind} file with a header and no rows; "
            "write the file again or delete it."
        )
    if kind != "parquet":
        return
    try:
        pq.read_metadata(open_input(file))
    except (pa.ArrowInvalid, OSError) as e:
        raise DataError(f"{file}: truncated or no Parquet file ({e}). Write the file again or delete it.") from None
