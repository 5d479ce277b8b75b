"""Stable 64-bit hashes of ids: equal on every machine and in every process, unlike `hash()`.

The number 5 and the text "5" hash alike, so that a table with numeric keys meets a log with text keys.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

U64 = npt.NDArray[np.uint64]

_CANONICAL_INT = r"^(0|-?[1-9][0-9]{0,18})$"


def stable_hash64(values: pa.Array | pa.ChunkedArray, salt: str = "") -> U64:
    """Hash integers or text, [N] -> uint64 [N]. Null has a hash of its own.

    Integers go through splitmix64; text through BLAKE2b, once per distinct value, except text that is
    the decimal form of an int64, which hashes as that integer. Raises TypeError for other types.
    """
    array = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
    seed = _salt_word(salt)
    null = _splitmix64(np.array([seed ^ 0x6E756C6C6E756C6C], dtype=np.uint64))[0]
    if pa.types.is_uint64(array.type) and pc.any(pc.greater(array, pa.scalar(2**63 - 1, pa.uint64()))).as_py():
        array = array.cast(pa.string())  # beyond int64: as text, which treats every value alike
    if pa.types.is_null(array.type):
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


def as_int63(hashes: U64) -> npt.NDArray[np.int64]:
    """The low 63 bits as non-negative int64, for columns and tensors that have no unsigned type."""
    return (hashes & np.uint64(0x7FFF_FFFF_FFFF_FFFF)).astype(np.int64)


def _salt_word(salt: str) -> int:
    return int.from_bytes(hashlib.blake2b(salt.encode(), digest_size=8).digest(), "little") if salt else 0


def _splitmix64(x: U64) -> U64:
    """Steele, Lea and Flood 2014; arithmetic modulo 2^64 is intended."""
    with np.errstate(over="ignore"):
        z = x + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        out: U64 = z ^ (z >> np.uint64(31))
    return out


def _hash_ints(array: pa.Array, seed: int) -> U64:
    numbers = pc.fill_null(array, 0).to_numpy(zero_copy_only=False).astype(np.uint64)
    return _splitmix64(numbers ^ np.uint64(seed))


def _hash_text(array: pa.Array, seed: int, salt: str) -> U64:
    coded = array if pa.types.is_dictionary(array.type) else array.dictionary_encode()
    distinct = coded.dictionary.cast(pa.string())
    if not len(distinct):
        return np.zeros(len(array), dtype=np.uint64)
    key = hashlib.blake2b(salt.encode(), digest_size=32).digest()
    hashes = np.zeros(len(distinct), dtype=np.uint64)
    numeric = np.asarray(pc.fill_null(pc.match_substring_regex(distinct, _CANONICAL_INT), False))
    for i, text in enumerate(distinct.to_pylist()):
        number = int(text) if numeric[i] else None
        if number is not None and -(2**63) <= number < 2**63:
            hashes[i] = np.uint64(number & (2**64 - 1))
        else:
            numeric[i] = False
            digest = hashlib.blake2b((text or "").encode(), digest_size=8, key=key).digest()
            hashes[i] = int.from_bytes(digest, "little")
    hashes[numeric] = _splitmix64(hashes[numeric] ^ np.uint64(seed))
    codes = pc.fill_null(coded.indices, 0).to_numpy(zero_copy_only=False)
    out: U64 = hashes[codes]
    return out


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return _is_text(kind.value_type)
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))
