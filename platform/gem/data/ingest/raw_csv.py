"""CSV files: header, rows as text, and cuts at line ends outside quotes."""

from __future__ import annotations

import codecs
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv

from gem.data.ingest.csv_cuts import MAX_RECORD, LineScan
from gem.data.ingest.raw_parts import PART_ROWS, Part
from gem.data.ingest.sources import RawFile, open_input
from gem.data.spec import TableSpec
from gem.errors import DataError

COMPRESSED = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4", ".br": "brotli"}
_MAX_COMPRESSED = 1 << 30
_BLOCK = 8 << 20
_SMALL = 1 << 16
_HEAD = 1 << 20  # a header line is not longer
_NO_SEPARATOR = "\x1f"  # a whole line is one cell; a line that has it is refused as unparsable

I64 = npt.NDArray[np.int64]


def header(table: TableSpec, file: RawFile) -> list[str]:
    """Column names: those of the spec, else the first line. Raises ArrowInvalid or DataError."""
    if table.columns:
        return list(table.columns)
    if len(table.separator) > 1:
        with _stream(table, file) as stream:
            text = codecs.getincrementaldecoder(table.encoding)().decode(stream.read(_HEAD))
        lines = text.removeprefix("\ufeff").lstrip("\r\n").splitlines()
        return lines[0].split(table.separator) if lines else []
    options = pacsv.ParseOptions(
        delimiter=table.separator, invalid_row_handler=lambda _: "skip", newlines_in_values=True
    )
    reading = pacsv.ReadOptions(encoding=table.encoding, use_threads=False)
    with pacsv.open_csv(_stream(table, file), reading, options) as reader:
        return list(reader.schema.names)


def csv_parts(table: TableSpec, file: RawFile, part_bytes: int) -> list[Part]:
    """Byte ranges of about `part_bytes`, from line end to line end. Raises DataError."""
    if compression(file):
        if file.size > _MAX_COMPRESSED:
            raise DataError(
                f"{file}: {file.size / 1e9:.1f} GB of compressed text cannot be read in parts: decompress it first."
            )
        return [Part(0, file.size)]
    if file.size <= 2 * part_bytes or not _cuttable(table.encoding):
        return [Part(0, file.size)]
    scan = LineScan(table.separator.encode(table.encoding), quotes=len(table.separator) == 1)
    out: list[Part] = []
    start = first = 0
    with open_input(file) as stream:
        while block := stream.read(min(_BLOCK, part_bytes)):
            if not scan.feed(block):
                raise DataError(
                    f"{file}: no line ends within {MAX_RECORD >> 20} MB after byte {scan.end}: a quote is opened there "
                    "and not closed. Repair the line."
                )
            if scan.end - start >= part_bytes or scan.records - first >= PART_ROWS:
                out.append(Part(start, scan.end, first))
                start, first = scan.end, scan.records
    if start < file.size:
        out.append(Part(start, file.size, first))
    headers = 0 if table.columns else 1  # the header line is a record for the scan, not a row
    return [Part(p.start, p.end, max(0, p.first_row - headers)) for p in out]


def read(table: TableSpec, file: RawFile, wanted: list[str], part: Part | None) -> tuple[pa.Table, I64, list[str]]:
    """(wanted columns as text, record number of each row, lines with a wrong number of fields)."""
    names = header(table, file)
    at_start = part is None or part.start == 0
    first = part.first_row if part else 0
    if part is None or (part.start == 0 and part.end == file.size) or compression(file):
        stream = _stream(table, file)
    else:
        with open_input(file) as whole:
            whole.seek(part.start)
            stream = pa.BufferReader(whole.read_buffer(part.end - part.start))
    with stream:
        if len(table.separator) > 1:
            return _read_lines(table, stream, (names, wanted), at_start and not table.columns, first)
        return _read_cells(table, stream, (names, wanted), at_start and not table.columns, first)


def compression(file: RawFile) -> str | None:
    """How the file is compressed, by its ending."""
    return COMPRESSED.get(file.suffixes[-1].lower()) if file.suffixes else None


def _stream(table: TableSpec, file: RawFile) -> pa.NativeFile:
    raw, kind = open_input(file), compression(file)
    stream = pa.CompressedInputStream(raw, kind) if kind else raw
    if file.size > _SMALL:
        return stream
    with stream:
        content = stream.read()
    # Arrow takes a header without a line end for no header.
    return pa.BufferReader(content if content.endswith(b"\n") or not _cuttable(table.encoding) else content + b"\n")


def _read_cells(
    table: TableSpec, stream: pa.NativeFile, columns: tuple[list[str], list[str]], has_header: bool, first: int
) -> tuple[pa.Table, I64, list[str]]:
    names, wanted = columns
    lines: list[str] = []
    numbers: list[int] = []

    def skip(row: Any) -> str:
        lines.append(row.text)
        numbers.append(row.number - 1 - has_header)
        return "skip"

    # Arrow cannot read no column at all, and still has to count the rows.
    included = wanted or names[:1]
    rows = pacsv.read_csv(
        stream,
        read_options=pacsv.ReadOptions(
            use_threads=False,
            block_size=_BLOCK,
            encoding=table.encoding,
            column_names=None if has_header else names,
        ),
        parse_options=pacsv.ParseOptions(delimiter=table.separator, invalid_row_handler=skip, newlines_in_values=True),
        convert_options=pacsv.ConvertOptions(
            column_types=dict.fromkeys(names, pa.string()), include_columns=included, strings_can_be_null=False
        ),
    )
    return rows.select(wanted) if wanted else rows, first + _numbers(rows.num_rows, numbers), lines


def _read_lines(
    table: TableSpec, stream: pa.NativeFile, columns: tuple[list[str], list[str]], has_header: bool, first: int
) -> tuple[pa.Table, I64, list[str]]:
    """Text with a separator of several characters: lines cut at it, without quotes."""
    names, wanted = columns
    refused: list[str] = []
    at: list[int] = []

    def skip(row: Any) -> str:
        refused.append(row.text)
        at.append(row.number - 1)
        return "skip"

    rows = pacsv.read_csv(
        stream,
        read_options=pacsv.ReadOptions(
            use_threads=False, block_size=_BLOCK, encoding=table.encoding, column_names=["line"]
        ),
        parse_options=pacsv.ParseOptions(delimiter=_NO_SEPARATOR, quote_char=False, invalid_row_handler=skip),
        convert_options=pacsv.ConvertOptions(column_types={"line": pa.string()}, strings_can_be_null=False),
    )
    number = _numbers(rows.num_rows, at)
    words = rows.column("line").combine_chunks()
    words = pa.concat_arrays(words.chunks) if isinstance(words, pa.ChunkedArray) else words
    if has_header:
        words, number = words.slice(1), number[1:] - 1
    cells = pc.split_pattern(words, pattern=table.separator)
    good = pc.equal(pc.list_value_length(cells), len(names))
    refused += words.filter(pc.invert(good)).to_pylist()
    flat = cells.filter(good).flatten()
    keep = np.arange(len(flat) // len(names), dtype=np.int64) * len(names)
    out = {name: flat.take(pa.array(keep + names.index(name))) for name in wanted}
    return pa.table(out), first + number[good.to_numpy(zero_copy_only=False)], refused


def _numbers(num_rows: int, skipped: list[int]) -> I64:
    """Record numbers of the rows that stayed when the records `skipped` were left out."""
    if not skipped:
        return np.arange(num_rows, dtype=np.int64)
    return np.delete(np.arange(num_rows + len(skipped), dtype=np.int64), skipped)


def _cuttable(encoding: str) -> bool:
    """Whether a line end, a quote and ASCII text are single bytes that occur in no other character."""
    name = codecs.lookup(encoding).name
    return name in ("utf-8", "ascii", "gbk", "gb18030", "big5", "shift_jis", "cp932", "euc_jp", "euc_kr") or (
        name.startswith(("iso8859", "cp125", "koi8", "cp437", "cp850"))
    )
