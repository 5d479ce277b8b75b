"""Frequency-capped vocabularies. Rows 0 PAD, 1 NULL, 2 OOV are reserved; values start at row 3.

Values are text: the number 5 and the text "5" are one value, in training and at serving alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gem.data.lookup import Positions
from gem.data.schema import NULL, NUM_RESERVED, OOV

I32 = npt.NDArray[np.int32]

COUNTS = pa.schema([("value", pa.string()), ("count", pa.int64())])
_SMALL = 4096  # below it a lookup in a cached dict is cheaper than building a hash table


class Vocabulary:
    """Text value -> table row. `values[i]` has row `i + 3`."""

    def __init__(self, values: pa.Array | Iterable[str]) -> None:
        self.values = values if isinstance(values, pa.Array) else pa.array(list(values), pa.string())
        self._row_of: dict[str, int] | None = None
        self._positions: Positions | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Vocabulary) and bool(self.values.equals(other.values))

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[type[Vocabulary], tuple[pa.Array]]:
        return Vocabulary, (self.values,)  # without what look-ups have built

    @property
    def rows(self) -> int:
        """Rows an embedding table needs, reserved rows included."""
        return NUM_RESERVED + len(self.values)

    def to_list(self) -> list[str]:
        out: list[str] = self.values.to_pylist()
        return out

    def row(self, value: str | None) -> int:
        """Row of one value; NULL for None, OOV for a value never met in training."""
        if value is None:
            return NULL
        if self._row_of is None:
            self._row_of = {v: i + NUM_RESERVED for i, v in enumerate(self.values.to_pylist())}
        return self._row_of.get(value, OOV)

    def lookup(self, values: pa.Array) -> I32:
        """Rows of values (integers or text), [N] -> [N] int32."""
        if len(values) < _SMALL:
            return np.array([self.row(v) for v in as_text(values).to_pylist()], np.int32)
        if self._positions is None:
            self._positions = Positions(self.values)
        found = self._positions.find(values)
        rows = np.where(found < 0, np.int32(OOV), found + np.int32(NUM_RESERVED))
        if values.null_count:
            rows[np.asarray(values.is_null())] = NULL
        return rows


def fit_vocabulary(
    counts: pa.Table, min_count: int = 1, max_rows: int = 1_000_000, old: Vocabulary | None = None
) -> Vocabulary:
    """Keep the most frequent values, ties by value, at most `max_rows` rows with the reserved ones.

    `counts`: columns value (text), count; a value with a count of 0 was never met in training: not kept.
    With `old`, its values keep their rows whatever their count is now, and the others are put behind them; `old` itself
    is returned if there are none.
    """
    kept = counts.filter(pc.greater_equal(counts["count"], max(1, min_count)))
    if old is not None:
        found = Positions(old.values).find(kept["value"].combine_chunks())
        kept = kept.filter(pa.array(found < 0))
    order = pc.sort_indices(kept, sort_keys=[("count", "descending"), ("value", "ascending")])
    room = max(0, max_rows - (NUM_RESERVED if old is None else old.rows))
    new = kept["value"].take(order[:room]).combine_chunks()
    if old is None:
        return Vocabulary(new)
    return Vocabulary(pa.concat_arrays([old.values, new])) if len(new) else old


def count_values(values: pa.Array | pa.ChunkedArray, weights: npt.NDArray[np.int64] | None = None) -> pa.Table:
    """Count values ([N] or a list per row), each weighted; nulls are left out. Columns value (text), count."""
    array = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
    weight = weights
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        if weight is not None:
            weight = weight[pc.list_parent_indices(array).to_numpy(zero_copy_only=False)]
        array = pc.list_flatten(array)
    array = as_values(array)
    coded = array if pa.types.is_dictionary(array.type) else array.dictionary_encode()
    codes = pc.fill_null(coded.indices, len(coded.dictionary)).to_numpy(zero_copy_only=False)
    sums = np.zeros(len(coded.dictionary) + 1, np.int64)
    np.add.at(sums, codes, 1 if weight is None else weight)
    return pa.table({"value": coded.dictionary.cast(pa.string()), "count": sums[:-1]}, schema=COUNTS)


def merge_counts(parts: Sequence[pa.Table]) -> pa.Table:
    """Sum counts of equal values over several tables."""
    tables = [p.select(["value", "count"]).cast(COUNTS) for p in parts] or [COUNTS.empty_table()]
    total = pa.concat_tables(tables).group_by("value").aggregate([("count", "sum")])
    return total.select(["value", "count_sum"]).rename_columns(["value", "count"]).cast(COUNTS)


def as_values(values: Any) -> pa.Array:
    """Any column or Python sequence as what look-ups take: integers as they are, everything else `as_text`."""
    array = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
    if isinstance(array, pa.Array) and pa.types.is_integer(array.type):
        return array
    return as_text(array)


def as_text(values: Any) -> pa.Array:
    """Any column or Python sequence as text, [N] -> string array; None and NaN become null.

    One rule for training and serving: whole numbers in decimal form, true/false in lower case.
    """
    array = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
    if not isinstance(array, pa.Array):
        listed = list(array)
        try:
            array = pa.array(listed)
        except (pa.ArrowInvalid, pa.ArrowTypeError):
            return pa.array([_one_text(v) for v in listed], pa.string())
    if pa.types.is_floating(array.type):
        array = pc.if_else(pc.is_nan(array), pa.scalar(None, array.type), array)
    return array.cast(pa.string())


def _one_text(value: object) -> str | None:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    text: str = pa.scalar(value).cast(pa.string()).as_py()
    return text
