"""Where values stand among distinct keys, a whole column at a time. A number and its decimal text are one value."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

ABSENT = -1
_CANONICAL_INT = r"^(0|-?[1-9][0-9]{0,18})$"
_MIN, _MAX = str(-(2**63)), str(2**63 - 1)
_HEAD = 1024
_DENSE = 8  # a table over the whole range of the keys pays off while at most so many times larger than the keys


def canonical_ints(words: pa.Array) -> tuple[I64, Bools]:
    """Text [N] -> the int64 it is the plain decimal form of (else 0), and where it is one; nowhere for null.

    "05", "+5", "5.0" and numbers beyond int64 are not: they are other values than 5.
    """
    maybe, valid = _starts_like_a_number(words), np.asarray(words.is_valid())
    if len(words) and np.array_equal(maybe, valid) and _all_ints(words.slice(0, _HEAD)) is not None:
        numbers = _all_ints(words)  # a cast that fails is slow: hence the look at the head
        if numbers is not None:
            return numbers, valid
    return _single_ints(words, np.flatnonzero(maybe))


def _all_ints(words: pa.Array) -> I64 | None:
    """The numbers, if every text is the plain form of one."""
    try:
        numbers = words.cast(pa.int64())
    except pa.ArrowInvalid:
        return None
    same = pc.all(pc.equal(numbers.cast(words.type), words), min_count=0).as_py()
    return _filled(numbers) if same else None


def _single_ints(words: pa.Array, maybe: I64) -> tuple[I64, Bools]:
    out, mask = np.zeros(len(words), np.int64), np.zeros(len(words), np.bool_)
    if not len(maybe):
        return out, mask
    some = words.take(pa.array(maybe))
    length, negative = pc.binary_length(some), pc.starts_with(some, "-")
    fits = pc.if_else(
        negative,
        pc.or_(pc.less(length, len(_MIN)), pc.less_equal(some, _MIN)),
        pc.or_(pc.less(length, len(_MAX)), pc.less_equal(some, _MAX)),
    )
    good = np.asarray(pc.and_(pc.match_substring_regex(some, _CANONICAL_INT), fits))
    at = maybe[good]
    out[at] = _filled(some.filter(pa.array(good)).cast(pa.int64()))
    mask[at] = True
    return out, mask


def text_buffers(words: pa.Array) -> tuple[npt.NDArray[np.integer], npt.NDArray[np.uint8]]:
    """Offsets [N + 1] and UTF-8 bytes of a string or large_string array, as they lie in memory."""
    _, raw_offsets, raw_data = words.buffers()
    if not len(words) or raw_offsets is None:
        return np.zeros(len(words) + 1, np.int64), np.zeros(0, np.uint8)
    kind = np.dtype(np.int64 if pa.types.is_large_string(words.type) else np.int32)
    offsets: npt.NDArray[np.integer] = np.frombuffer(raw_offsets, kind)[words.offset : words.offset + len(words) + 1]
    return offsets, np.frombuffer(raw_data if raw_data is not None else b"", np.uint8)


def _starts_like_a_number(words: pa.Array) -> Bools:
    offsets, data = text_buffers(words)
    out: Bools = offsets[1:] > offsets[:-1]
    if len(data):
        first = data[np.minimum(offsets[:-1], len(data) - 1)]
        out &= ((first >= ord("0")) & (first <= ord("9"))) | (first == ord("-"))
    return out & np.asarray(words.is_valid()) if words.null_count else out


class Positions:
    """Positions of values among `keys`: distinct int64 or text; a null key is never found."""

    def __init__(self, keys: pa.Array) -> None:
        self._keys = keys
        self._is_int = pa.types.is_integer(keys.type)
        self._ints: _IntPositions | None = None

    def find(self, values: pa.Array) -> I32:
        """Position of each value (integers or text), [N] -> [N] int32; ABSENT where it is no key or null."""
        if pa.types.is_null(values.type) or not len(self._keys) or not len(values):
            return np.full(len(values), ABSENT, np.int32)
        if pa.types.is_integer(values.type):
            big = pa.types.is_uint64(values.type) and (pc.max(values).as_py() or 0) >= 2**63
            return self._find_text(values.cast(pa.string())) if big else self._find_ints(values)
        return self._find_text(values)

    def _find_ints(self, values: pa.Array) -> I32:
        out = self._int_positions().find(_filled(values))
        if values.null_count:
            out[np.asarray(values.is_null())] = ABSENT
        return out

    def _find_text(self, words: pa.Array) -> I32:
        numbers, whole = canonical_ints(words)
        at = self._int_positions()
        out = np.where(whole, at.find(numbers), np.int32(ABSENT)) if whole.any() else None
        if self._is_int or (out is not None and int(whole.sum()) + words.null_count == len(words)):
            return np.full(len(words), ABSENT, np.int32) if out is None else out
        found = pc.index_in(words.cast(self._keys.type), value_set=self._keys, skip_nulls=True)
        by_text: I32 = pc.fill_null(found, ABSENT).to_numpy(zero_copy_only=False)
        return by_text if out is None else np.where(whole, out, by_text)

    def _int_positions(self) -> _IntPositions:
        if self._ints is None:
            if self._is_int:
                numbers, valid = _filled(self._keys), np.asarray(self._keys.is_valid())
            else:
                numbers, valid = canonical_ints(self._keys)
            at = np.flatnonzero(valid).astype(np.int32)
            self._ints = _IntPositions(numbers[at], at)
        return self._ints


class _IntPositions:
    """`positions[i]` belongs to the int64 key `keys[i]`."""

    def __init__(self, keys: I64, positions: I32) -> None:
        self._positions = positions
        self._keys = pa.array(keys)
        self._first, last = (int(keys.min()), int(keys.max())) if len(keys) else (0, 0)
        self._span = last - self._first + 1
        self._table: I32 | None = None
        if len(keys) and self._span <= _DENSE * len(keys) + 1024:
            self._table = np.full(self._span, ABSENT, np.int32)
            self._table[keys - self._first] = positions

    def find(self, values: I64) -> I32:
        if not len(self._keys):
            return np.full(len(values), ABSENT, np.int32)
        if self._table is not None:
            at = values.astype(np.uint64) - np.uint64(self._first % 2**64)  # below the first wraps to far above
            inside = at < self._span
            return np.where(inside, self._table[np.where(inside, at, 0).astype(np.int64)], np.int32(ABSENT))
        found = pc.index_in(pa.array(values), value_set=self._keys)
        at = pc.fill_null(found, len(self._positions)).to_numpy(zero_copy_only=False)
        out: I32 = np.append(self._positions, np.int32(ABSENT))[at]
        return out


def _filled(values: pa.Array) -> I64:
    """Integers as int64, 0 for null."""
    filled = pc.fill_null(values, 0) if values.null_count else values
    out: I64 = filled.cast(pa.int64()).to_numpy(zero_copy_only=False)
    return out
