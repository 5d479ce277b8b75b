"""Slices of raw files, so that a file of any size is read in bounded memory; here those of Parquet files."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from gem.data.ingest.sources import RawFile, open_input

PART_BYTES = 64 << 20
PART_ROWS = 1_000_000
_BATCH = 1 << 16


@dataclass(frozen=True)
class Part:
    """A slice of one file. `first_row` is the record number of its first row in the file.

    Parquet: row groups [start, end); if `rows` is not None, of their rows only `rows` after the first `skip`.
    CSV: bytes [start, end), from line end to line end; the first part includes the header line.
    """

    start: int
    end: int
    first_row: int = 0
    skip: int = 0
    rows: int | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Part:
        return cls(**raw)


def parquet_parts(file: RawFile, part_bytes: int) -> list[Part]:
    """Ranges of row groups of about `part_bytes` (uncompressed); a larger group is cut by rows."""
    meta = pq.read_metadata(open_input(file))
    groups = [(meta.row_group(i).num_rows, meta.row_group(i).total_byte_size) for i in range(meta.num_row_groups)]
    out: list[Part] = []
    start = first = rows = size = 0
    for i, (more_rows, more_bytes) in enumerate(groups):
        if i > start and (size + more_bytes > part_bytes or rows + more_rows > PART_ROWS):
            out += _ranges(start, i, first, rows, size, part_bytes)
            start, first, rows, size = i, first + rows, 0, 0
        rows, size = rows + more_rows, size + more_bytes
    return out + _ranges(start, len(groups), first, rows, size, part_bytes)


def _ranges(start: int, end: int, first: int, rows: int, size: int, part_bytes: int) -> list[Part]:
    most = max(1, min(PART_ROWS, rows * part_bytes // max(1, size)))
    if rows <= 2 * most:
        return [Part(start, end, first)]
    return [Part(start, end, first + at, at, min(most, rows - at)) for at in range(0, rows, most)]


def read_parquet(file: RawFile, columns: list[str], part: Part | None) -> pa.Table:
    """The columns of a Parquet file or of one part of it; page checksums are verified where the file has them."""
    with open_input(file) as stream:
        if part is None:
            return pq.ParquetFile(stream, page_checksum_verification=True).read(columns=columns)
        groups = list(range(part.start, part.end))
        if part.rows is None:
            return pq.ParquetFile(stream, page_checksum_verification=True).read_row_groups(groups, columns=columns)
        # A piece of one large group: decoded from the group's start, page by page, and dropped up to the piece.
        reader = pq.ParquetFile(stream, page_checksum_verification=True, buffer_size=1 << 20, pre_buffer=False)
        left, todo, kept = part.skip, part.rows, []
        for batch in reader.iter_batches(_BATCH, row_groups=groups, columns=columns):
            piece = batch.slice(left, todo) if left < batch.num_rows else batch.slice(0, 0)
            left = max(0, left - batch.num_rows)
            todo -= piece.num_rows
            kept.append(piece)
            if not todo:
                break
        return pa.Table.from_batches(kept)
