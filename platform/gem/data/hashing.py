"""Stable 64-bit hashes of ids: equal on every machine and in every process, unlike `hash()`.

The number 5 and the text "5" hash alike, so that a table with numeric keys meets a log with text keys.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gem.data.lookup import canonical_ints, text_buffers

U64 = npt.NDArray[np.uint64]

_TEXT_WORD = 0x74657874_74657874  # text starts elsewhere than numbers
_BLOCK = 8  # bytes that one round of the text hash takes in
_LONG = 256  # bytes; longer texts are rare and go through BLAKE2b one by one
_CHUNK = 1 << 15  # rows at a time: what they need stays in the processor's cache


def stable_hash64(values: pa.Array | pa.ChunkedArray, salt: str = "") -> U64:
    """Hash integers or text, [N] -> uint64 [N]. Null has a hash of its own.

    Integers go through splitmix64; text through splitmix64 over its length and its blocks of eight bytes, except
    text that is the decimal form of an int64, which hashes as that integer. A value's hash depends on the value and the
    salt only. Not for values that an opponent chooses. Raises TypeError for other types.
    """
    array = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
    seed = _salt_word(salt)
    null = _splitmix64(np.array([seed ^ 0x6E756C6C6E756C6C], dtype=np.uint64))[0]
    if pa.types.is_uint64(array.type) and pc.any(pc.greater(array, pa.scalar(2**63 - 1, pa.uint64()))).as_py():
        array = array.cast(pa.string())  # beyond int64: as text, which treats every value alike
    if pa.types.is_null(array.type) or (array.null_count == len(array) and len(array)):
        return np.full(len(array), null, dtype=np.uint64)
    if pa.types.is_integer(array.type):
        out = _hash_ints(array, seed)
    elif _is_text(array.type):
        out = _hash_text(array, seed, salt)
    else:
        raise TypeError(f"stable_hash64: got {array.type}, allowed integers and text; cast first")
    if array.null_count:
        out[np.asarray(array.is_null())] = null
    return out


def combine64(*parts: U64) -> U64:
    """Hash of a row from the hashes of its columns; the order of the columns matters."""
    out = np.zeros(len(parts[0]), dtype=np.uint64)
    for part in parts:
        out = _splitmix64(out ^ part)
    return out


def rehash64(hashes: U64, number: int) -> U64:
    """The `number`-th of many hash functions over values that are already hashed, [N] -> [N]."""
    return _splitmix64(hashes ^ _splitmix64(np.array([number], np.uint64)))


def as_int63(hashes: U64) -> npt.NDArray[np.int64]:
    """The low 63 bits as non-negative int64, for columns and tensors that have no unsigned type."""
    return (hashes & np.uint64(0x7FFF_FFFF_FFFF_FFFF)).astype(np.int64)


def _salt_word(salt: str) -> int:
    return int.from_bytes(hashlib.blake2b(salt.encode(), digest_size=8).digest(), "little") if salt else 0


def _splitmix64(x: U64) -> U64:
    """Steele, Lea and Flood 2014; arithmetic modulo 2^64 is intended. [N] -> [N]."""
    out = np.empty(len(x), np.uint64)
    shifted = np.empty(min(len(x), _CHUNK), np.uint64)
    for start in range(0, len(x), _CHUNK):
        z = out[start : start + _CHUNK]
        s = shifted[: len(z)]
        np.add(x[start : start + _CHUNK], np.uint64(0x9E3779B97F4A7C15), out=z)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            np.right_shift(z, np.uint64(shift), out=s)
            np.bitwise_xor(z, s, out=z)
            np.multiply(z, np.uint64(factor), out=z)
        np.right_shift(z, np.uint64(31), out=s)
        np.bitwise_xor(z, s, out=z)
    return out


def _hash_ints(array: pa.Array, seed: int) -> U64:
    filled = pc.fill_null(array, 0) if array.null_count else array
    numbers = filled.cast(pa.int64()).to_numpy(zero_copy_only=False).view(np.uint64)
    return _splitmix64(numbers ^ np.uint64(seed) if seed else numbers)


def _hash_text(array: pa.Array, seed: int, salt: str) -> U64:
    if pa.types.is_dictionary(array.type):
        hashes = _hash_text(array.dictionary, seed, salt)
        codes = pc.fill_null(array.indices, 0).to_numpy(zero_copy_only=False)
        out: U64 = hashes[codes] if len(hashes) else np.zeros(len(array), np.uint64)
        return out
    words = pc.fill_null(array, "").cast(pa.large_string())
    numbers, whole = canonical_ints(words)
    if whole.all():
        return _hash_ints(pa.array(numbers), seed)
    out = _hash_bytes(words, seed, salt)
    if whole.any():
        out[whole] = _hash_ints(pa.array(numbers[whole]), seed)
    return out


def _hash_bytes(words: pa.Array, seed: int, salt: str) -> U64:
    """Hash of UTF-8 texts (large_string without nulls), [N] -> [N]."""
    offsets, data = text_buffers(words)
    offsets, data = offsets - offsets[0], data[offsets[0] : offsets[-1]]
    data = np.append(data, np.zeros(_BLOCK, np.uint8))  # so that the last text has a whole block to be read from
    blocks: U64 = np.ndarray((len(data) - _BLOCK + 1,), np.dtype("<u8"), data, strides=(1,))
    out = np.empty(len(words), np.uint64)
    start_word = np.uint64(seed ^ _TEXT_WORD)
    for begin in range(0, len(words), _CHUNK):
        at = offsets[begin : begin + _CHUNK + 1]
        lengths = np.diff(at)
        out[begin : begin + len(lengths)] = _hash_blocks(blocks, at[:-1], lengths, start_word)
    long = np.flatnonzero(np.diff(offsets) > _LONG)
    key = hashlib.blake2b(salt.encode(), digest_size=32).digest()
    for i in long.tolist():
        text = data[offsets[i] : offsets[i + 1]].tobytes()
        out[i] = int.from_bytes(hashlib.blake2b(text, digest_size=8, key=key).digest(), "little")
    return out


def _hash_blocks(
    blocks: U64, starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], start_word: np.uint64
) -> U64:
    """h = mix(start ^ length); then h = mix(h ^ block) for each block, the last one filled up with zeros."""
    out = _splitmix64(lengths.astype(np.uint64) ^ start_word)
    rows = np.flatnonzero((lengths > 0) & (lengths <= _LONG))
    left, at, state = lengths[rows], starts[rows], out[rows]
    while len(rows):
        unused = np.maximum(_BLOCK - left, 0).astype(np.uint64) << np.uint64(3)
        state = _splitmix64(state ^ ((blocks[at] << unused) >> unused))
        left = left - _BLOCK
        more = left > 0
        if not more.all():
            out[rows[~more]] = state[~more]
            rows, left, at, state = rows[more], left[more], at[more], state[more]
        at = at + _BLOCK
    return out


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return _is_text(kind.value_type)
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))
