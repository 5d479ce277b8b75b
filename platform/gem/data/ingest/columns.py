"""Converters from raw columns (any Arrow type, or text from a CSV) to canonical ones, a whole column at a time.

Each returns a canonical array of the same length and, where a row can be wrong, a mask [N] of the wrong rows.
Serving uses `category_text` too, so that a request and a training row spell a value alike.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gem.errors import DataError

Bools = npt.NDArray[np.bool_]

NULL_TEXTS = ("", "nan", "NaN", "null", "NULL", "\\N")  # text that means "no value"; "NA" and "None" are values
_INT = r"^[+-]?[0-9]{1,19}$"
_CANONICAL_INT = r"^(0|-?[1-9][0-9]{0,18})$"
_WHOLE_FLOAT = r"^-?(0|[1-9][0-9]*)\.0+$"
_FLOAT = r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$|^[+-]?(nan|NaN|NAN|inf|Inf|INF|infinity|Infinity)$"
_FLOAT_HINT = "Declare `kind: categorical` if it is text"
_EXACT_FLOAT = 2**53


def text(values: pa.Array) -> pa.Array:
    """Text as it is compared everywhere: NFC, no surrounding blanks, null for the NULL_TEXTS."""
    return _per_distinct(values, _clean)


def category_text(values: pa.Array, where: str = "") -> pa.Array:
    """A categorical column as text: `text`, and whole floats without their fraction (29.0 -> "29")."""
    kind = values.type
    if is_text(kind):
        return _per_distinct(values, lambda words: _drop_zero_fraction(_clean(words)))
    if pa.types.is_floating(kind):
        return _per_distinct(values.cast(pa.float64()), _float_text)
    if pa.types.is_nested(kind) or pa.types.is_binary(kind):
        raise DataError(f"{where}: a categorical value must be text or a number, got {kind}. Declare `kind: multi`.")
    return values.cast(pa.string())


def to_ids(values: pa.Array, where: str) -> pa.Array:
    """Ids as int64 if every one is a whole number in its plain decimal form, else as text; never through a float.

    Raises DataError for floats with a fraction or at 2^53 and above (they have lost digits already) and for
    types that cannot be an id.
    """
    kind = values.type
    if pa.types.is_null(kind):
        return values.cast(pa.int64())
    if pa.types.is_integer(kind):
        if kind == pa.uint64() and pc.any(pc.greater(values, pa.scalar(2**63 - 1, pa.uint64()))).as_py():
            return values.cast(pa.string())
        return values.cast(pa.int64())
    if pa.types.is_floating(kind):
        return _float_ids(values.cast(pa.float64()), where)
    plain = _plain(values, _CANONICAL_INT, pa.int64()) if is_text(kind) else None
    if plain is not None:
        return plain
    if not is_text(kind):
        raise DataError(f"{where}: an id must be an integer or text, got {kind}. Write the column as int64 or string.")
    words = text(values)
    whole = pc.match_substring_regex(words, _WHOLE_FLOAT)
    if pc.any(whole).as_py():
        plain = pc.or_(whole, pc.match_substring_regex(words, _CANONICAL_INT))
        if pc.all(plain).as_py():  # a numeric column that went through a float, as pandas writes ids beside nulls
            _float_ids(pc.if_else(whole, words, pa.scalar(None, pa.string())).cast(pa.float64()), where)
            words = _per_distinct(words, _drop_zero_fraction)
    if pc.all(pc.match_substring_regex(words, _CANONICAL_INT)).as_py() is False:
        return words
    try:
        return words.cast(pa.int64())
    except pa.ArrowInvalid:  # nineteen digits beyond int64
        return words


def to_ints(values: pa.Array, where: str, hint: str) -> tuple[pa.Array, Bools]:
    """Whole numbers as int64 and a mask of cells that are none. DataError if most cells are none."""
    kind = values.type
    if pa.types.is_null(kind) or (pa.types.is_integer(kind) and kind != pa.uint64()):
        return values.cast(pa.int64()), no_rows(values)
    if kind == pa.uint64():
        bad = _true(pc.greater(values, pa.scalar(2**63 - 1, pa.uint64())))
        return _blank(values, bad).cast(pa.int64()), bad
    plain = _plain(values, _INT, pa.int64()) if is_text(kind) else None
    if plain is not None:
        return plain, no_rows(values)
    if pa.types.is_floating(kind):
        numbers = values.cast(pa.float64())
        numbers = pc.if_else(pc.is_nan(numbers), pa.scalar(None, pa.float64()), numbers)
        whole = pc.and_(pc.equal(numbers, pc.floor(numbers)), pc.less(pc.abs(numbers), float(_EXACT_FLOAT)))
    elif is_text(kind):
        numbers = pc.replace_substring_regex(category_text(values), r"^\+", "")
        whole = pc.match_substring_regex(numbers, _INT)
    else:
        raise DataError(f"{where}: whole numbers expected, got {kind}. {hint}")
    bad = _true(pc.invert(whole))
    _refuse_if_most(numbers, bad, where, f"whole numbers expected. {hint}")
    try:
        return _blank(numbers, bad).cast(pa.int64()), bad
    except pa.ArrowInvalid:  # text of nineteen digits beyond int64
        big = _true(pc.greater(pc.abs(_blank(numbers, bad).cast(pa.float64())), 9.2e18))
        return _blank(numbers, bad | big).cast(pa.int64()), bad | big


def to_floats(values: pa.Array, where: str, hint: str = _FLOAT_HINT) -> tuple[pa.Array, Bools]:
    """Numbers as float64 (NaN and infinities kept) and a mask of cells that are none.

    In a CSV an empty cell is null, "nan" is NaN, and true and false are 1 and 0. DataError if most cells are none.
    """
    kind = values.type
    if pa.types.is_null(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return values.cast(pa.float64()), no_rows(values)
    if pa.types.is_integer(kind):
        return values.cast(pa.float64(), safe=False), no_rows(values)
    if pa.types.is_boolean(kind):
        return values.cast(pa.int8()).cast(pa.float64()), no_rows(values)
    if not is_text(kind):
        raise DataError(f"{where}: a column of numbers expected, got {kind}. {hint}.")
    plain = _plain(values, _FLOAT, pa.float64())
    if plain is not None:
        return plain, no_rows(values)
    words = pc.utf8_trim_whitespace(values.cast(pa.string()))
    words = pc.if_else(pc.is_in(words, pa.array(["", "null", "NULL", "\\N"])), pa.scalar(None, pa.string()), words)
    lower = pc.utf8_lower(words)
    words = pc.if_else(pc.equal(lower, "true"), "1", pc.if_else(pc.equal(lower, "false"), "0", words))
    bad = _true(pc.invert(pc.match_substring_regex(words, _FLOAT)))
    _refuse_if_most(words, bad, where, f"numbers expected. {hint}")
    return _blank(words, bad).cast(pa.float64()), bad


def to_binary(values: pa.Array, where: str, at_least: float | None = None) -> tuple[npt.NDArray[np.int8], Bools]:
    """A 0/1 outcome as int8 with -1 for null, and a mask of the cells that are anything else.

    With `at_least` the cells are numbers of any size, and 1 are those from there on.
    """
    floats, bad = to_floats(values, where, "An outcome or flag must be 0, 1 or empty; convert the column")
    known = ~np.asarray(pc.is_null(floats, nan_is_null=True))
    numbers = np.nan_to_num(floats.to_numpy(zero_copy_only=False), nan=0.0)
    if at_least is not None:
        return np.where(known & ~bad, numbers >= at_least, -1).astype(np.int8), bad
    wrong = bad | (known & (numbers != 0) & (numbers != 1))
    out = np.where(known & ~wrong, numbers == 1, -1).astype(np.int8)
    return out, wrong


def to_multi(values: pa.Array, separator: str, where: str) -> pa.Array:
    """A multi-valued column as list<string>: lists, or text cut at `separator`. Empty items are dropped."""
    if not is_list(values.type):
        words = text(values) if is_text(values.type) else category_text(values, where)
        values = pc.split_pattern(words, pattern=separator) if separator else pc.split_pattern_whitespace(words)
    values = as_list(values)
    items = category_text(values.flatten(), where)
    keep = np.asarray(items.is_valid())
    lengths = np.asarray(pc.fill_null(pc.list_value_length(values), 0), dtype=np.int64)
    ends = np.concatenate([[0], np.cumsum(keep)])
    offsets = ends[np.concatenate([[0], np.cumsum(lengths)])].astype(np.int32)
    out = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), items.filter(pa.array(keep)))
    return pc.if_else(values.is_valid(), out, pa.scalar(None, out.type)) if values.null_count else out


def to_embedding(values: pa.Array, width: int, separator: str, where: str) -> tuple[pa.Array, Bools]:
    """A frozen representation as fixed_size_list<float32>[width] and a mask of rows of another width or not finite."""
    if pa.types.is_null(values.type):
        values = values.cast(pa.list_(pa.float32()))
    if not is_list(values.type):
        if not is_text(values.type):
            raise DataError(f"{where}: an embedding must be a list of {width} numbers, got {values.type}")
        words = text(values)
        values = pc.split_pattern(words, pattern=separator) if separator.strip() else pc.split_pattern_whitespace(words)
    values = as_list(values)
    flat, wrong = to_floats(values.flatten(), where)
    numbers = flat.to_numpy(zero_copy_only=False).astype(np.float32)
    lengths = np.asarray(pc.fill_null(pc.list_value_length(values), 0), dtype=np.int64)
    bad_item = wrong | ~np.isfinite(numbers)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    spoiled = np.concatenate([[0], np.cumsum(bad_item)])
    known = np.asarray(values.is_valid())
    good = known & (lengths == width) & (spoiled[starts[1:]] == spoiled[starts[:-1]])
    table = np.zeros((len(values), width), dtype=np.float32)
    table[good] = numbers[starts[:-1][good][:, None] + np.arange(width)[None, :]]
    out = pa.FixedSizeListArray.from_arrays(pa.array(table.ravel()), width, mask=pa.array(~good))
    return out, known & ~good


def is_text(kind: pa.DataType) -> bool:
    """Text of any Arrow spelling, dictionary-encoded included."""
    if pa.types.is_dictionary(kind):
        return is_text(kind.value_type)
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def is_list(kind: pa.DataType) -> bool:
    """Lists of any Arrow spelling."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def as_list(values: pa.Array) -> pa.Array:
    """Any list type as list<item>; `flatten` then skips what lies under null lists."""
    return values if pa.types.is_list(values.type) else values.cast(pa.list_(values.type.value_type))


def no_rows(values: pa.Array) -> Bools:
    """A mask that marks no row."""
    return np.zeros(len(values), dtype=np.bool_)


def _plain(values: pa.Array, pattern: str, kind: pa.DataType) -> pa.Array | None:
    """Text as numbers where every value matches `pattern` or is empty; else None. Most numeric columns of a CSV are
    so, and need none of the cleaning."""
    words = values.cast(pa.string())
    words = pc.if_else(pc.equal(words, ""), pa.scalar(None, pa.string()), words)
    if pc.all(pc.match_substring_regex(words, pattern)).as_py() is False:
        return None
    try:
        return words.cast(kind)
    except pa.ArrowInvalid:  # more digits than fit
        return None


def _per_distinct(values: pa.Array, change: Callable[[pa.Array], pa.Array]) -> pa.Array:
    """Apply `change` once per distinct value."""
    if not len(values):
        return pa.array([], pa.string())
    coded = values if pa.types.is_dictionary(values.type) else values.dictionary_encode()
    return change(coded.dictionary).take(coded.indices)


def _clean(words: pa.Array) -> pa.Array:
    words = pc.utf8_trim_whitespace(_compose(words.cast(pa.string())))
    return pc.if_else(pc.is_in(words, pa.array(NULL_TEXTS)), pa.scalar(None, pa.string()), words)


def _compose(words: pa.Array) -> pa.Array:
    """NFC; `pc.utf8_normalize(form="NFC")` of pyarrow 25 leaves "e" + U+0301 in two pieces."""
    foreign = pc.fill_null(pc.invert(pc.string_is_ascii(words)), False)
    if not pc.any(foreign).as_py():
        return words
    composed = [unicodedata.normalize("NFC", word) for word in words.filter(foreign).to_pylist()]
    return pc.replace_with_mask(words, foreign, pa.array(composed, pa.string()))


def _drop_zero_fraction(words: pa.Array) -> pa.Array:
    whole = pc.match_substring_regex(words, _WHOLE_FLOAT)
    return pc.if_else(whole, pc.replace_substring_regex(words, r"\.0+$", ""), words)


def _float_text(numbers: pa.Array) -> pa.Array:
    whole = pc.and_(pc.equal(numbers, pc.floor(numbers)), pc.less(pc.abs(numbers), float(_EXACT_FLOAT)))
    ints = pc.if_else(whole, numbers, 0.0).cast(pa.int64()).cast(pa.string())
    words = pc.if_else(whole, ints, numbers.cast(pa.string()))
    return pc.if_else(pc.is_finite(numbers), words, pa.scalar(None, pa.string()))


def _float_ids(numbers: pa.Array, where: str) -> pa.Array:
    numbers = pc.if_else(pc.is_nan(numbers), pa.scalar(None, pa.float64()), numbers)
    exact = pc.and_(pc.equal(numbers, pc.floor(numbers)), pc.less(pc.abs(numbers), float(_EXACT_FLOAT)))
    wrong = numbers.filter(pc.invert(exact))
    if len(wrong):
        raise DataError(
            f"{where}: {len(wrong)} ids are floats that cannot be exact whole numbers, such as {wrong[0].as_py()!r}; "
            "allowed are integers, text, or floats that are whole and below 2^53. Write the ids as int64 or text."
        )
    return numbers.cast(pa.int64())


def _true(mask: pa.Array) -> Bools:
    return np.asarray(pc.fill_null(mask, False), dtype=np.bool_)


def _blank(values: pa.Array, bad: Bools) -> pa.Array:
    return pc.if_else(pa.array(bad), pa.scalar(None, values.type), values) if bad.any() else values


def _refuse_if_most(values: pa.Array, bad: Bools, where: str, expected: str) -> None:
    known = len(values) - values.null_count
    if 2 * int(bad.sum()) > known:
        example = values.filter(pa.array(bad))[0].as_py()
        raise DataError(f"{where}: {int(bad.sum())} of {known} values cannot be read, such as {example!r}; {expected}.")
