"""Flat arrays for reading, made from the partitions of a feature store; `gem.data.reader_cache` keeps them.

    timelines/offsets.npy [U + 1]     timelines/<column>.npy [E]: user by user, oldest known first
    impressions/<column>.npy [N], labels.npy and mask.npy [N, K], true/<task>.npy [N]: in (day, shard, user, time) order
    past/starts.npy [D + 1], past/<match>.{keys,sums}.npy: what all users did with an ad, day by day (`gem.data.past`)
    impressions/context/{ids,numeric,vectors}.npy, multi/<field>.{offsets,values}.npy: see `gem.data.rows.SideRows`

One partition is in memory at a time, besides a few numbers per user and the pages being written, which the system can
take back; only the past counts take some 110 bytes per event while they are made.
Letters: U users (row 0 unknown), E events, N impressions, K tasks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from gem.data.build import store_write
from gem.data.past import AdValues, count_past, day_starts, past_fields
from gem.data.rows import SideRows
from gem.data.schema import Schema, Side
from gem.errors import StoreError

I64 = npt.NDArray[np.int64]
Array = npt.NDArray[Any]

EVENT_COLUMNS = {
    "ad": "i4", "kind": "u1", "flags": "u2", "surface": "i2", "dwell": "u1", "time_ms": "i8", "known_ms": "i8",
}  # fmt: skip
ROW_COLUMNS = {"impression_id": "i8", "user": "i4", "ad": "i4", "time_ms": "i8", "cut": "i4", "surface": "i2"}
TRUE = "true_"


def build_arrays(store: Path, manifest: Mapping[str, Any], schema: Schema, out: Path) -> dict[str, int]:
    """Write all arrays below `out`; returns the impressions of every day, in day order.

    Raises StoreError for a partition that cannot be read or breaks the order of the store, OSError if writing fails.
    """
    num_users = _read(store, store_write.USERS, ["key"]).num_rows
    _build_timelines(store, store_write.paths_of(manifest["files"], "timelines"), num_users, out / "timelines")
    _build_past(store, manifest, schema, out)
    return _build_impressions(store, manifest, schema, out / "impressions")


class ArrayWriter:
    """Appends rows to one .npy file; its header counts them once it is closed."""

    def __init__(self, path: Path, dtype: str, row: tuple[int, ...] = ()) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.num_rows, self._dtype, self._row = 0, np.dtype(dtype), row
        self._file: BinaryIO = path.open("wb")
        self._header()

    def append(self, values: Array) -> None:
        """Add rows [n, *row]; their type must fit without loss."""
        if values.shape[1:] != self._row or not np.can_cast(values.dtype, self._dtype, "safe"):
            raise StoreError(
                f"{self._file.name}: rows of {self._row} {self._dtype} expected, got {values.shape[1:]} "
                f"{values.dtype}; the partitions of the store do not agree, preprocess again"
            )
        self._file.write(np.ascontiguousarray(values, self._dtype).reshape(-1).view(np.uint8).data)
        self.num_rows += len(values)

    def reserve(self, num_rows: int) -> None:
        """Rows to be written through a map later: the space is taken now, since a map cannot report a full disk."""
        size = num_rows * self._dtype.itemsize
        if size and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self._file.fileno(), self._file.tell(), size)
        elif size:
            self._file.truncate(self._file.tell() + size)
        self.num_rows = num_rows

    def close(self) -> None:
        """Write the header again (NumPy leaves room for the largest number of rows) and flush to the disk."""
        self._file.seek(0)
        self._header()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def _header(self) -> None:
        described = {"descr": self._dtype.str, "fortran_order": False, "shape": (self.num_rows, *self._row)}
        np.lib.format.write_array_header_1_0(self._file, described)


def _build_timelines(store: Path, files: Sequence[str], num_users: int, out: Path) -> None:
    counts = np.zeros(num_users, np.int64)
    for relative in files:
        starts, who = _runs(_read(store, relative, ["user"])["user"].to_numpy(), num_users, relative)
        counts[who] += np.diff(starts)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    _write(out / "offsets.npy", offsets)
    for name, dtype in EVENT_COLUMNS.items():
        writer = ArrayWriter(out / f"{name}.npy", dtype)
        writer.reserve(int(offsets[-1]))
        writer.close()
    mapped = {n: np.load(out / f"{n}.npy", mmap_mode="r+") for n in EVENT_COLUMNS}
    place, newest = offsets[:-1].copy(), np.full(num_users, np.iinfo(np.int64).min)
    for relative in files:  # files are in day order: a user's next events go behind those of earlier files
        table = _read(store, relative, ["user", *EVENT_COLUMNS])
        starts, who = _runs(table["user"].to_numpy(), num_users, relative)
        if not who.size:
            continue
        _check_order(table["known_ms"].to_numpy(), starts, newest[who], relative)
        lengths = np.diff(starts)
        at = np.repeat(place[who] - starts[:-1], lengths) + np.arange(starts[-1])
        place[who] += lengths
        newest[who] = table["known_ms"].to_numpy()[starts[1:] - 1]
        for name in EVENT_COLUMNS:
            mapped[name][at] = table[name].to_numpy()
    for name in EVENT_COLUMNS:
        with (out / f"{name}.npy").open("r+b") as f:
            os.fsync(f.fileno())


def _build_past(store: Path, manifest: Mapping[str, Any], schema: Schema, out: Path) -> None:
    """Count the events that `_build_timelines` has written."""
    starts = day_starts(manifest["days"], manifest["zone"])
    names = ("ad", "kind", "flags", "surface", "known_ms")
    events = {n: np.load(out / "timelines" / f"{n}.npy", mmap_mode="r") for n in names}
    ads = _read(store, store_write.ADS, ["key", *past_fields(schema)])
    counted = Side(tuple(f for f in schema.ad.fields if f.name in past_fields(schema)))
    rows = SideRows(counted, {f.name: ads[f.name] for f in counted.fields}, ads.num_rows)
    values = AdValues.of(schema, rows.first, ads.num_rows)
    _write(out / "past" / "starts.npy", starts)
    for number, (_, table) in enumerate(count_past(schema, events, values, starts)):
        _write(out / "past" / f"{number}.keys.npy", table.keys)
        _write(out / "past" / f"{number}.sums.npy", table.sums)


def _runs(user: Array, num_users: int, relative: str) -> tuple[I64, I64]:
    """Bounds [R + 1] of the runs of equal users of a file, and their users [R]."""
    change = np.flatnonzero(user[1:] != user[:-1]) + 1 if user.size else np.zeros(0, np.int64)
    starts = np.concatenate([[0], change, [user.size]]) if user.size else np.zeros(1, np.int64)
    who = user[starts[:-1]].astype(np.int64)
    if who.size and (bool((who[1:] <= who[:-1]).any()) or int(who[0]) < 0 or int(who[-1]) >= num_users):
        raise StoreError(f"{relative}: users must rise from 0 to {num_users - 1} within a file; preprocess again")
    return starts, who


def _check_order(known_ms: I64, starts: I64, newest: I64, relative: str) -> None:
    """A cut counts the first events of a timeline: their known times must not fall, or outcomes would leak."""
    falls = known_ms[1:] < known_ms[:-1]
    falls[starts[1:-1] - 1] = False
    if bool(falls.any()) or bool((known_ms[starts[:-1]] < newest).any()):
        raise StoreError(f"{relative}: events of a user are not in the order they became known; preprocess again")


def _build_impressions(store: Path, manifest: Mapping[str, Any], schema: Schema, out: Path) -> dict[str, int]:
    days = {str(day): store_write.paths_of(manifest["files"], "impressions", str(day)) for day in manifest["days"]}
    first = next((f for files in days.values() for f in files), None)
    stored = pq.read_schema(store / first).names if first else []
    true = [n for n in stored if n.startswith(TRUE)]
    labels = [f"label_{t.name}" for t in schema.tasks]
    names = [f.name for f in schema.context.fields if f.name != "surface"]
    names += [*schema.context.numeric, *(n for n, _ in schema.context.vectors)]
    context = [store_write.CONTEXT_PREFIX + n for n in names]
    writers = {n: ArrayWriter(out / f"{n}.npy", dtype) for n, dtype in ROW_COLUMNS.items()}
    writers |= {n: ArrayWriter(out / f"{n}.npy", "f4", (len(labels),)) for n in ("labels", "mask")}
    writers |= {n: ArrayWriter(out / "true" / f"{n.removeprefix(TRUE)}.npy", "f4") for n in true}
    sides = _ContextWriter(out / "context", schema)
    rows = dict.fromkeys(days, 0)
    for day, files in days.items():
        for relative in files:
            table = _read(store, relative, [*ROW_COLUMNS, *labels, *true, *context])
            for name in (*ROW_COLUMNS, *true):
                writers[name].append(table[name].to_numpy())
            raw = np.stack([table[name].to_numpy() for name in labels], 1)
            writers["labels"].append((raw == 1).astype(np.float32))
            writers["mask"].append((raw >= 0).astype(np.float32))
            columns = {n.removeprefix(store_write.CONTEXT_PREFIX): table[n] for n in context}
            sides.append(SideRows(schema.context, {**columns, "surface": table["surface"]}, table.num_rows))
            rows[day] += table.num_rows
    for writer in writers.values():
        writer.close()
    sides.close()
    return rows


class _ContextWriter:
    """The arrays of a `SideRows`, partition by partition; offsets of multi-valued fields run on."""

    def __init__(self, out: Path, schema: Schema) -> None:
        side = schema.context
        num_single = sum(not f.multi for f in side.fields)
        self._ids = ArrayWriter(out / "ids.npy", "i4", (num_single,))
        self._numeric = ArrayWriter(out / "numeric.npy", "f4", (2 * len(side.numeric),))
        self._vectors = ArrayWriter(out / "vectors.npy", "f4", (sum(w for _, w in side.vectors),))
        self._multi = {
            f.name: tuple(ArrayWriter(multi_path(out, f.name, n), t) for n, t in (("offsets", "i8"), ("values", "i4")))
            for f in side.fields
            if f.multi
        }
        for offsets, _ in self._multi.values():
            offsets.append(np.zeros(1, np.int64))

    def append(self, rows: SideRows) -> None:
        self._ids.append(rows.ids)
        self._numeric.append(rows.numeric)
        self._vectors.append(rows.vectors)
        for name, (offsets, values) in self._multi.items():
            own_offsets, own_values = rows.multi[name]
            offsets.append(own_offsets[1:] + values.num_rows)
            values.append(own_values)

    def close(self) -> None:
        for writer in (self._ids, self._numeric, self._vectors, *(w for pair in self._multi.values() for w in pair)):
            writer.close()


def multi_path(folder: Path, field: str, part: str) -> Path:
    """File of one array ("offsets" or "values") of a multi-valued context field."""
    return folder / "multi" / f"{field}.{part}.npy"


def _read(store: Path, relative: str, columns: list[str]) -> pa.Table:
    try:
        with pq.ParquetFile(store / relative, page_checksum_verification=True) as file:
            table = file.read(columns=columns)
    except (OSError, pa.ArrowException) as e:
        raise StoreError(f"{store}: {relative} cannot be read ({str(e).splitlines()[0]}); preprocess again") from None
    absent = [c for c in columns if c not in table.column_names]
    if absent:
        raise StoreError(f"{store}: {relative} lacks the columns {absent}; preprocess again")
    return table.combine_chunks()


def _write(path: Path, values: Array) -> None:
    writer = ArrayWriter(path, values.dtype.str, values.shape[1:])
    writer.append(values)
    writer.close()
