"""Encoded columns of one side in memory, gathered into `EntityRows`. B rows asked for, D numerics, E vector width."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import torch

from gem.data.batch import EntityRows
from gem.data.schema import PAD, Side
from gem.errors import StoreError

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
F32 = npt.NDArray[np.float32]


class SideRows:
    """All rows of one side: single ids as one matrix, multi-valued ids jagged, numerics with missing flags.

    ids [B, F] int32 of the single-valued fields; multi: field -> (offsets [B + 1], flat values);
    numeric [B, 2 D] and vectors [B, E] float32.
    """

    ids: I32
    multi: dict[str, tuple[I64, I32]]
    numeric: F32
    vectors: F32

    def __init__(self, side: Side, columns: Mapping[str, pa.Array], num_rows: int) -> None:
        """`columns`: encoded columns by field, numeric and vector name. StoreError names an absent one."""
        names = [f.name for f in side.fields] + list(side.numeric) + [n for n, _ in side.vectors]
        absent = [n for n in names if n not in columns]
        if absent:
            raise StoreError(f"encoded table lacks the columns {absent}; it has {sorted(columns)}; preprocess again")
        self.side = side
        self._single = _single(side)
        ids = [_numpy(columns[n]).astype(np.int32, copy=False) for n in self._single]
        self.ids = np.stack(ids, 1) if ids else np.zeros((num_rows, 0), np.int32)
        self.multi = {f.name: _jagged(columns[f.name]) for f in side.fields if f.multi}
        self.numeric = _numeric([_numpy(columns[n]) for n in side.numeric], num_rows)
        parts = [_matrix(columns[n], width) for n, width in side.vectors]
        self.vectors = np.concatenate(parts, 1) if parts else np.zeros((num_rows, 0), np.float32)

    @classmethod
    def of_arrays(cls, side: Side, ids: I32, multi: dict[str, tuple[I64, I32]], matrices: tuple[F32, F32]) -> SideRows:
        """Rows whose arrays exist already (mapped from a file, say); `matrices` are numeric and vectors."""
        self = cls.__new__(cls)
        self.side, self._single = side, _single(side)
        self.ids, self.multi, (self.numeric, self.vectors) = ids, multi, matrices
        return self

    def __len__(self) -> int:
        return len(self.ids)

    def field(self, name: str) -> npt.NDArray[np.integer]:
        """Table rows of one field over all rows; flat values for a multi-valued field."""
        if name in self.multi:
            offsets, values = self.multi[name]
            return values[offsets[0] : offsets[-1]]
        return self.ids[:, self._single.index(name)]

    def first(self, name: str) -> npt.NDArray[np.integer]:
        """Table row of one field over all rows, of several values the first; PAD where there is none."""
        if name not in self.multi:
            return self.ids[:, self._single.index(name)]
        offsets, values = self.multi[name]
        padded = np.append(values, np.int32(PAD))
        out: npt.NDArray[np.integer] = padded[np.where(offsets[1:] > offsets[:-1], offsets[:-1], len(values))]
        return out

    def part(self, start: int, end: int) -> SideRows:
        """Rows start..end - 1; arrays are shared, not copied."""
        multi = {name: (offsets[start : end + 1], values) for name, (offsets, values) in self.multi.items()}
        matrices = (self.numeric[start:end], self.vectors[start:end])
        return SideRows.of_arrays(self.side, self.ids[start:end], multi, matrices)

    def take(self, idx: npt.NDArray[np.integer]) -> EntityRows:
        """Features of the rows `idx` [B], in that order."""
        single = torch.from_numpy(self.ids.take(idx, axis=0)).T.to(torch.int64, memory_format=torch.contiguous_format)
        ids = dict(zip(self._single, single, strict=True))
        offsets: dict[str, torch.Tensor] = {}
        for name, (starts, values) in self.multi.items():
            picked_offsets, picked = _take_jagged(starts, values, idx)
            offsets[name] = torch.from_numpy(picked_offsets)
            ids[name] = torch.from_numpy(picked)
        numeric, vectors = (torch.from_numpy(m.take(idx, axis=0)) for m in (self.numeric, self.vectors))
        return EntityRows(ids, offsets, numeric, vectors)


def _single(side: Side) -> tuple[str, ...]:
    return tuple(f.name for f in side.fields if not f.multi)


def _numpy(column: pa.Array | pa.ChunkedArray) -> npt.NDArray[np.generic]:
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    out: npt.NDArray[np.generic] = array.to_numpy(zero_copy_only=False)
    return out


def _numeric(columns: list[npt.NDArray[np.generic]], num_rows: int) -> npt.NDArray[np.float32]:
    if not columns:
        return np.zeros((num_rows, 0), np.float32)
    values = np.stack([c.astype(np.float32) for c in columns], 1)
    missing = ~np.isfinite(values)
    return np.concatenate([np.where(missing, np.float32(0), values), missing.astype(np.float32)], 1)


def _matrix(column: pa.Array | pa.ChunkedArray, width: int) -> npt.NDArray[np.float32]:
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    flat: npt.NDArray[np.float32] = array.flatten().to_numpy(zero_copy_only=False).astype(np.float32, copy=False)
    return flat.reshape(len(array), width)


def _jagged(column: pa.Array | pa.ChunkedArray) -> tuple[I64, I32]:
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
    offsets = np.zeros(len(array) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets, pc.list_flatten(array).to_numpy(zero_copy_only=False).astype(np.int32)


def _take_jagged(offsets: I64, values: I32, idx: npt.NDArray[np.integer]) -> tuple[I64, I64]:
    starts = offsets[idx]
    lengths = offsets[idx + 1] - starts
    out = np.zeros(len(idx) + 1, np.int64)
    np.cumsum(lengths, out=out[1:])
    at = np.repeat(starts - out[:-1], lengths)
    at += np.arange(out[-1])
    return out, values[at].astype(np.int64)
