"""Mergeable summaries of raw tables: what `python -m pipelines check` knows about a data set without holding it.

A summary of two files merged is the summary of both. Keys are sampled by their hash (the smallest hashes are kept), so
that a key in the sample is there with all its rows, in every file and every table.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gem.data.hashing import combine64

MAX_KEYS = 65_536
_SPACE = 2.0**64

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]


def hash_keys(values: pa.Array | pa.ChunkedArray) -> U64:
    """Hash ids or texts, [N] -> uint64 [N]; 5 and "5" are equal. Same in all processes of one run, not beyond it."""
    import polars as pl

    words = pl.Series("", _plain(values)).cast(pl.String)
    return combine64(words.hash(seed=1).to_numpy().astype(np.uint64))


def hash_rows(rows: pa.Table) -> U64:
    """Hash of whole rows over their columns that are not nested, [N] -> uint64 [N]; like `hash_keys`."""
    import polars as pl

    plain = [n for n in rows.column_names if not pa.types.is_nested(rows.schema.field(n).type)]
    frame = pl.from_arrow(rows.select(plain))
    assert isinstance(frame, pl.DataFrame)
    return combine64(frame.hash_rows(seed=1).to_numpy().astype(np.uint64))


@dataclass(frozen=True)
class KeySample:
    """The distinct keys with the smallest hashes, and how many rows each has.

    hashes: uint64 [K], ascending. rows: int64 [K]. num_rows: all rows with a key. complete: no key was left out.
    """

    hashes: U64
    rows: I64
    num_rows: int
    complete: bool
    limit: int = MAX_KEYS

    @classmethod
    def of(cls, hashes: U64, limit: int = MAX_KEYS) -> KeySample:
        """Sample the keys of rows, given one hash per row."""
        keys, rows = np.unique(hashes, return_counts=True)
        return cls(keys[:limit], rows[:limit].astype(np.int64), len(hashes), len(keys) <= limit, limit)

    @classmethod
    def of_column(cls, values: pa.Array | pa.ChunkedArray, limit: int = MAX_KEYS) -> KeySample:
        """Sample the keys of a column; nulls are no keys."""
        return cls.of(hash_keys(pc.drop_null(values)), limit)

    @classmethod
    def merge(cls, samples: Sequence[KeySample]) -> KeySample:
        """The sample of all rows together."""
        if not samples:
            return cls(np.zeros(0, np.uint64), np.zeros(0, np.int64), 0, True)
        limit = min(s.limit for s in samples)
        hashes = np.concatenate([s.hashes for s in samples])
        keys, inverse = np.unique(hashes, return_inverse=True)
        rows = np.zeros(len(keys), np.int64)
        np.add.at(rows, inverse.reshape(-1), np.concatenate([s.rows for s in samples]))
        # Beyond the smallest last hash of an incomplete part, keys may lack rows of that part.
        sure = min((int(s.hashes[-1]) for s in samples if not s.complete), default=2**64 - 1)
        num = min(limit, int(np.searchsorted(keys, np.uint64(sure), side="right")))
        whole = all(s.complete for s in samples) and len(keys) <= limit
        return cls(keys[:num], rows[:num], sum(s.num_rows for s in samples), whole, limit)

    @property
    def num_keys(self) -> int:
        """Distinct keys: exact if complete, else estimated from the density of the hashes (about 0.4 % off)."""
        if self.complete or not len(self.hashes):
            return len(self.hashes)
        return round((len(self.hashes) - 1) * _SPACE / float(self.hashes[-1]))

    @property
    def num_singletons(self) -> int:
        """Keys with one row (estimated if not complete)."""
        return round(float((self.rows == 1).mean()) * self.num_keys) if len(self.rows) else 0

    @property
    def num_repeats(self) -> int:
        """Rows beyond the first of their key (estimated if not complete)."""
        if not len(self.rows):
            return 0
        extra = int(self.rows.sum()) - len(self.rows)
        return extra if self.complete else round(extra / int(self.rows.sum()) * self.num_rows)

    def found_in(self, other: KeySample) -> tuple[float, float]:
        """Shares of the keys and of the rows of self whose key is in `other`; (1, 1) without keys."""
        ends = [s.hashes[-1] for s in (self, other) if not s.complete and len(s.hashes)]
        num = int(np.searchsorted(self.hashes, min(ends), side="right")) if ends else len(self.hashes)
        mine, rows = self.hashes[:num], self.rows[:num]
        if not num:
            return 1.0, 1.0
        hit = np.isin(mine, other.hashes, assume_unique=True)
        return float(hit.mean()), float(rows[hit].sum() / rows.sum())

    def to_arrays(self, name: str) -> dict[str, npt.NDArray[Any]]:
        """Arrays to save; `from_arrays` reads them."""
        facts = np.array([self.num_rows, self.complete, self.limit], np.int64)
        return {f"{name}|hashes": self.hashes, f"{name}|rows": self.rows, f"{name}|facts": facts}

    @classmethod
    def from_arrays(cls, name: str, arrays: Any) -> KeySample:
        """The sample that `to_arrays` gave."""
        num, complete, limit = arrays[f"{name}|facts"].tolist()
        return cls(arrays[f"{name}|hashes"], arrays[f"{name}|rows"], num, bool(complete), limit)


def column_summary(values: pa.ChunkedArray) -> dict[str, Any]:
    """Counts of one column as JSON: rows, nulls, type; for numbers also min, max, sum (NaN counts as null)."""
    kind = values.type
    out: dict[str, Any] = {"rows": len(values), "nulls": values.null_count, "type": str(kind)}
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        return out
    known = pc.drop_null(values)
    if pa.types.is_floating(kind):
        known = known.filter(pc.is_finite(known))
        out["nulls"] = len(values) - len(known)
    if len(known):
        ends = pc.min_max(known).as_py()
        out |= {"min": ends["min"], "max": ends["max"], "sum": float(known.to_numpy().astype(np.float64).sum())}
    return out


def merge_columns(summaries: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The summary of all rows together; `type` lists the different types."""
    out: dict[str, Any] = {"rows": 0, "nulls": 0, "type": ""}
    types: dict[str, None] = {}
    for one in summaries:
        out["rows"] += one["rows"]
        out["nulls"] += one["nulls"]
        types[one["type"]] = None
        if "min" in one:
            out["min"] = min(one["min"], out.get("min", one["min"]))
            out["max"] = max(one["max"], out.get("max", one["max"]))
            out["sum"] = out.get("sum", 0.0) + one["sum"]
    out["type"] = " | ".join(types)
    return out


def top_values(values: pa.Array | pa.ChunkedArray, num: int = 50) -> dict[str, int]:
    """The most frequent values as text and their rows. Summed over files they are lower bounds, tight at the top."""
    import polars as pl

    counts = pl.Series("v", _plain(values)).cast(pl.String).drop_nulls().value_counts(sort=True).head(num)
    return dict(zip(counts["v"].to_list(), counts["count"].to_list(), strict=True))


def smallest_per_day(rows: pa.Table, per_day: int) -> pa.Table:
    """Of rows with columns `rank` (uint64 hash of the row's identity) and `day`: per day the smallest ranks.

    Rows equal in `rank` are one row. Merging is concatenating and calling this again.
    """
    rank, day = rows["rank"].to_numpy(), rows["day"].to_numpy()
    order = np.lexsort((day, rank))
    first = np.ones(len(order), np.bool_)
    first[1:] = rank[order[1:]] != rank[order[:-1]]
    order = order[first]
    order = order[np.argsort(day[order], kind="stable")]
    days, starts = np.unique(day[order], return_index=True)
    position = np.arange(len(order)) - starts[np.searchsorted(days, day[order])]
    return rows.take(pa.array(order[position < per_day]))


def _plain(values: pa.Array | pa.ChunkedArray) -> Any:
    return values.cast(pa.int64()) if pa.types.is_null(values.type) else values
