"""Finding values among keys, against plain dicts: numbers and their texts, nulls, huge and negative numbers."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from gem.data.keys import KeyIndex
from gem.data.lookup import ABSENT, Positions, canonical_ints
from gem.data.vocabulary import Vocabulary, count_values, merge_counts

INTS = st.one_of(st.integers(-4, 12), st.integers(-(2**63), 2**63 - 1), st.sampled_from([-(2**63), 2**63 - 1]))
ODD = ["", "05", "-0", "+5", "5.0", " 5", "-", "a", "ü", "1a", str(2**63), str(-(2**63) - 1), "9" * 19, "9" * 30]
WORDS = st.one_of(INTS.map(str), st.sampled_from(ODD))


def is_plain(word: str | None) -> bool:
    try:
        return word is not None and str(int(word)) == word and -(2**63) <= int(word) < 2**63
    except ValueError:
        return False


@settings(max_examples=100, deadline=None)
@given(st.lists(st.one_of(st.none(), WORDS), max_size=8), st.sampled_from([pa.string(), pa.large_string()]))
def test_only_the_plain_form_of_an_int64_is_a_number(words: list[str | None], kind: pa.DataType) -> None:
    numbers, mask = canonical_ints(pa.array(["x", *words], kind).slice(1))
    assert mask.tolist() == [is_plain(w) for w in words]
    assert numbers.tolist() == [int(w) if is_plain(w) and w else 0 for w in words]


@settings(max_examples=100, deadline=None)
@given(
    st.one_of(st.lists(INTS, unique=True, max_size=8), st.lists(WORDS, unique=True, max_size=8)),
    st.one_of(st.lists(st.one_of(st.none(), INTS), max_size=8), st.lists(st.one_of(st.none(), WORDS), max_size=8)),
    st.booleans(),
)
def test_values_are_found_where_a_dict_finds_them(keys: list, values: list, null_key: bool) -> None:
    kind = pa.int64() if all(isinstance(k, int) for k in keys) else pa.string()
    where = {str(k): i + null_key for i, k in enumerate(keys)}
    column = pa.array([None] * null_key + keys, kind)
    asked = pa.array(values, pa.int64() if all(v is None or isinstance(v, int) for v in values) else pa.string())
    want = [ABSENT if v is None else where.get(str(v), ABSENT) for v in values]
    assert Positions(column).find(asked).tolist() == want
    index = KeyIndex(pa.concat_arrays([pa.nulls(1, kind), column]))
    assert index.index_many(asked).tolist() == [w + 1 for w in want] == [index.index_of(v) for v in values]


def test_numbers_beyond_int64_and_columns_without_a_type() -> None:
    index = KeyIndex(pa.array([None, str(2**64 - 1), "-1"]))
    assert index.index_many(pa.array([2**64 - 1, 1], pa.uint64())).tolist() == [1, 0]
    assert index.index_many([-1, None]).tolist() == [2, 0] and index.index_many(pa.nulls(2)).tolist() == [0, 0]
    assert index.index_many(pa.array(["-1", None]).dictionary_encode()).tolist() == [2, 0]


def test_large_columns_of_a_vocabulary_agree_with_its_dict() -> None:
    rng = np.random.default_rng(0)
    for values in ([str(v) for v in range(0, 900, 3)], [f"u{v}" for v in range(300)] + ["7", "-7"]):
        vocabulary = Vocabulary(values)
        numbers = rng.integers(-10, 1000, 6000)
        for column in (pa.array(numbers), pa.array(numbers).cast(pa.string()), pa.array([f"u{n}" for n in numbers])):
            want = [vocabulary.row(str(v)) for v in column.to_pylist()]
            assert vocabulary.lookup(column).tolist() == want


def test_counts_of_numbers_and_texts_add_up() -> None:
    number, word = np.array([3, 1, 3, 3]), pa.array(["3", "x", None, "x"])
    merged = merge_counts([count_values(pa.array(number), np.array([1, 2, 0, 5])), count_values(word)])
    assert dict(zip(*merged.to_pydict().values(), strict=True)) == {"3": 7, "1": 2, "x": 2}
    lists = pa.array([[1, 2], None, [2, None]], pa.list_(pa.int64()))
    assert count_values(lists, np.array([10, 100, 1])).to_pydict() == {"value": ["1", "2"], "count": [10, 11]}
    assert count_values(pa.nulls(3)).num_rows == 0
