"""Raw files on disk: which belong to a table, which columns they have, and their rows as Arrow tables.

CSV cells are read as text and typed by `gem.data.columns`, so that one bad cell costs one row, not the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from gem.data.spec import DatasetSpec, TableSpec
from gem.errors import DataError, SpecError, suggest

QUARANTINE_SCHEMA = pa.schema([("row", pa.string()), ("reason", pa.string()), ("file", pa.string())])
_MAX_LISTED = 20


@dataclass
class RawRows:
    """The wanted columns of one file. `unparsable`: CSV lines with a wrong number of fields, as they stand."""

    table: pa.Table
    unparsable: list[str] = field(default_factory=list)


def resolve_files(spec: DatasetSpec, data_dir: Path) -> dict[str, list[Path]]:
    """Files of every table, sorted by path; an absent optional table maps to [].

    Raises SpecError if a table has no file, and DataError for a file that is empty (0 bytes), truncated or of
    another format. A file with a header and no rows is fine.
    """
    if not data_dir.is_dir():
        raise SpecError(f"data folder {data_dir}: no such folder. Set DATA_DIR to the folder of the raw tables.")
    out: dict[str, list[Path]] = {}
    for name, table in spec.tables.items():
        found = {path for pattern in table.files for path in data_dir.glob(pattern) if path.is_file()}
        if not found and not table.optional:
            raise SpecError(
                f'table "{name}": no file matches {table.files} in {data_dir}, which holds {_listing(data_dir)}. '
                f"Correct tables.{name}.files or the data folder."
            )
        out[name] = sorted(found)
        for path in out[name]:
            _check_file(path, file_format(table, path))
    return out


def file_format(table: TableSpec, path: Path) -> str:
    """`parquet` or `csv`: as the spec says, else by the file's ending. Raises SpecError."""
    if table.format:
        return table.format
    suffixes = path.suffixes[-2:]
    for ending, name in ((".parquet", "parquet"), (".csv", "csv")):
        if ending in suffixes:
            return name
    raise SpecError(f"{path}: cannot tell the format from the ending {path.suffix!r}; set `format: parquet` or `csv`.")


def header(table: TableSpec, path: Path) -> list[str]:
    """Column names of one file, without reading its rows. Raises DataError."""
    try:
        if file_format(table, path) == "parquet":
            return list(pq.read_schema(path).names)
        with pacsv.open_csv(path, parse_options=pacsv.ParseOptions(invalid_row_handler=lambda _: "skip")) as reader:
            return list(reader.schema.names)
    except (pa.ArrowInvalid, OSError) as e:
        raise DataError(f"{path}: cannot read the header: {e}") from None


def read_columns(table: TableSpec, path: Path, columns: Iterable[str]) -> RawRows:
    """Read the named columns of one file. CSV columns come as text. Raises DataError for a damaged file and
    SpecError for a column the file does not have."""
    wanted = list(dict.fromkeys(columns))
    names = header(table, path)
    for column in wanted:
        if column not in names:
            raise SpecError(f'{path}: no column "{column}".{suggest(column, names)} The file has: {names}')
    try:
        if file_format(table, path) == "parquet":
            return RawRows(pq.ParquetFile(path, page_checksum_verification=True).read(columns=wanted))
        return _read_csv(path, names, wanted)
    except (pa.ArrowInvalid, OSError) as e:
        todo = "Restore the file; no row of it was used."
        if "Expected all lists to be of size" in str(e):
            todo = "pyarrow cannot read nulls in a fixed-size list: write that column as a plain list<float32>."
        raise DataError(f"{path}: damaged or not readable: {e}. {todo}") from None


def quarantine(table: TableSpec, path: Path, rows: dict[int, str], raw: RawRows) -> pa.Table:
    """Quarantine table of one file: `rows` maps row number to reason; CSV lines that did not parse are added.

    The file is read again in full, so that the original row is kept with the columns nobody asked for.
    """
    texts: list[str] = []
    if rows:
        full = read_columns(table, path, header(table, path)).table
        bad = full.take(pa.array(list(rows), pa.int64()))
        texts = [json.dumps(row, ensure_ascii=False, default=str) for row in bad.to_pylist()]
    texts += [json.dumps({"line": line}, ensure_ascii=False) for line in raw.unparsable]
    reasons = list(rows.values()) + ["unparsable"] * len(raw.unparsable)
    return pa.table([texts, reasons, [str(path)] * len(texts)], schema=QUARANTINE_SCHEMA)


def _read_csv(path: Path, names: list[str], wanted: list[str]) -> RawRows:
    lines: list[str] = []

    def skip(row: Any) -> str:
        lines.append(row.text)
        return "skip"

    table = pacsv.read_csv(
        path,
        read_options=pacsv.ReadOptions(use_threads=False),
        parse_options=pacsv.ParseOptions(invalid_row_handler=skip),
        convert_options=pacsv.ConvertOptions(
            column_types=dict.fromkeys(names, pa.string()), include_columns=wanted, strings_can_be_null=False
        ),
    )
    return RawRows(table, lines)


def _check_file(path: Path, kind: str) -> None:
    if path.stat().st_size == 0:
        raise DataError(
            f"{path}: the file is empty (0 bytes). A day without rows is a {kind} file with a header and no rows; "
            "write the file again or delete it."
        )
    if kind != "parquet":
        return
    try:
        pq.read_metadata(path)
    except (pa.ArrowInvalid, OSError) as e:
        raise DataError(f"{path}: truncated or no Parquet file ({e}). Write the file again or delete it.") from None


def _listing(folder: Path) -> str:
    names = sorted(p.name + ("/" if p.is_dir() else "") for p in folder.iterdir())
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return (", ".join(names[:_MAX_LISTED]) or "nothing") + more
