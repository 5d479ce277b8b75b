"""Which of several equal rows stays, and which of the others contradict it, against loops over every row."""

from __future__ import annotations

import numpy as np

from gem.data.build.duplicates import find_duplicates


def test_kept_and_conflicting_rows_against_a_naive_search() -> None:
    rng = np.random.default_rng(4)
    key, other, tie, value = (rng.integers(0, n, 400) for n in (9, 12, 4, 3))
    found = find_duplicates((key, other), (tie,), (value,))
    for i in range(400):
        same = [j for j in range(400) if (key[j], other[j]) == (key[i], other[i])]
        best = min(same, key=lambda j: (tie[j], j))
        assert found.keep[i] == (i == best)
        assert found.conflict[i] == (value[i] != value[best])
    assert found.num_dropped == 400 - len({*zip(key.tolist(), other.tolist(), strict=True)})


def test_rows_without_a_repeat_and_no_rows_at_all() -> None:
    rows = np.arange(5)
    assert find_duplicates((rows, rows % 2), (), (rows,)).keep.all()
    none = np.zeros(0, np.int64)
    assert find_duplicates((none,), (none,), (none,)).keep.tolist() == []


def test_extreme_numbers_do_not_meet() -> None:
    key = np.array([-(2**63), 2**63 - 1, -1, 0, -(2**63)], np.int64)
    assert find_duplicates((key,), (), ()).keep.tolist() == [True, True, True, True, False]
