"""Stable hashes: the same number for the same id everywhere, whatever type the id comes in."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest

from gem.data.hashing import as_int63, combine64, stable_hash64

MASK = 2**64 - 1


def splitmix64_by_hand(x: int) -> int:
    """The published algorithm on Python integers, which do not overflow."""
    z = (x + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def test_integers_go_through_splitmix64():
    values = [0, 1, 5, 2**53 + 1, 2**63 - 1, -1, -(2**63)]
    assert stable_hash64(pa.array(values, pa.int64())).tolist() == [splitmix64_by_hand(v & MASK) for v in values]


def test_first_output_of_the_published_generator():
    # splitmix64 seeded with 0: first output of the reference C program
    assert int(stable_hash64(pa.array([0]))[0]) == 0xE220A8397B1DCDAF


@pytest.mark.parametrize("salt", ["", "user"])
def test_number_and_text_of_one_id_hash_alike(salt):
    numbers = [0, 5, -7, 2**53 + 1, 2**63 - 1, -(2**63)]
    words = pa.array([str(n) for n in numbers])
    expected = stable_hash64(pa.array(numbers, pa.int64()), salt)
    np.testing.assert_array_equal(stable_hash64(words, salt), expected)
    np.testing.assert_array_equal(stable_hash64(words.dictionary_encode(), salt), expected)
    np.testing.assert_array_equal(stable_hash64(words.cast(pa.large_string()), salt), expected)


def test_integer_width_does_not_matter():
    small = stable_hash64(pa.array([1, 100], pa.int8()))
    np.testing.assert_array_equal(small, stable_hash64(pa.array([1, 100], pa.uint32())))
    np.testing.assert_array_equal(small, stable_hash64(pa.array([1, 100], pa.uint64())))


def test_ids_beyond_int64_keep_one_hash():
    big = 2**64 - 1
    as_number = stable_hash64(pa.array([big, 5], pa.uint64()))
    np.testing.assert_array_equal(as_number, stable_hash64(pa.array([str(big), "5"])))
    assert as_number[0] != stable_hash64(pa.array([-1]))[0]  # same bits, another id


def test_only_the_plain_decimal_form_is_the_number():
    words = ["5", "05", "+5", "5.0", " 5", "five", ""]
    assert len(set(stable_hash64(pa.array(words)).tolist())) == len(words)


def test_null_has_a_hash_of_its_own_and_does_not_touch_its_neighbours():
    with_null = stable_hash64(pa.array([1, None, 3]))
    plain = stable_hash64(pa.array([1, 0, 3]))
    assert with_null[0] == plain[0] and with_null[2] == plain[2] and with_null[1] != plain[1]
    assert stable_hash64(pa.array([None, "a"]))[0] == with_null[1] == stable_hash64(pa.nulls(1))[0]


def test_salt_separates_fields():
    ids = pa.array(list(range(1000)))
    assert not (stable_hash64(ids, "user") == stable_hash64(ids, "ad")).any()
    assert not (stable_hash64(ids.cast(pa.string()), "user") == stable_hash64(ids, "ad")).any()


def test_chunks_and_empty_columns():
    chunked = pa.chunked_array([["a", "b"], [], ["a"]], pa.string())
    one, two, three = stable_hash64(chunked)
    assert one == three != two
    assert len(stable_hash64(pa.array([], pa.string()))) == len(stable_hash64(pa.array([], pa.int64()))) == 0


def test_other_types_are_refused():
    with pytest.raises(TypeError, match=r"got double, allowed integers and text"):
        stable_hash64(pa.array([1.5]))


def test_equal_in_another_process(repo_root):
    code = "import pyarrow as pa; from gem.data.hashing import stable_hash64 as h; print(h(pa.array(['ü', '9']), 's'))"
    env = {"PYTHONPATH": "platform", "PYTHONHASHSEED": "12345"}
    command = [sys.executable, "-c", code]
    out = subprocess.run(command, cwd=repo_root, env=env, capture_output=True, text=True, check=True).stdout
    assert out.strip() == str(stable_hash64(pa.array(["ü", "9"]), "s"))


def test_hashes_spread_evenly_over_shards():
    shards = stable_hash64(pa.array(np.arange(40_000)), "shard") % np.uint64(4)
    counts = np.bincount(shards.astype(int))
    # binomial(40000, 1/4): standard deviation 86.6, so five of them
    assert np.abs(counts - 10_000).max() < 433


def test_combine_depends_on_every_part_and_on_their_order():
    a, b = stable_hash64(pa.array([1, 1, 2])), stable_hash64(pa.array([2, 3, 1]))
    both = combine64(a, b)
    assert len(set(both.tolist())) == 3
    assert combine64(b, a)[0] != both[0]
    assert both[0] == combine64(b, a)[2]  # the same pair (1, 2)


def test_int63_is_never_negative():
    ids = as_int63(stable_hash64(pa.array(np.arange(1000))))
    assert ids.dtype == np.int64 and (ids >= 0).all() and len(set(ids.tolist())) == 1000
