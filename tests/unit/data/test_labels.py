"""Labels from a log: window, maturity, entire space. A naive reading is the second opinion."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from gem.data.build.labels import entire_space, immature, join_log, shown_at
from gem.data.schema import Task
from gem.errors import SpecError

HOUR = 3_600_000


def i8(*values: int) -> np.ndarray:
    return np.array(values, np.int8)


def join(keys: list[object], times: list[int], log: list[tuple[object, int]], window: float | None = 1.0):
    log_keys = pa.array([k for k, _ in log]) if log else pa.array([], pa.array(keys).type)
    log_times = np.array([t for _, t in log], np.int64)
    return join_log(pa.array(keys), np.array(times, np.int64), (log_keys, log_times), window).tolist()


def test_inside_the_window_both_ends_included() -> None:
    log = [("a", 100), ("b", 100 + HOUR), ("c", 101 + HOUR), ("d", 99)]
    assert join(["a", "b", "c", "d", "e"], [100] * 5, log) == [1, 1, 0, 0, 0]


def test_an_early_row_does_not_hide_the_one_inside() -> None:
    assert join([7], [100], [(7, 50), (7, 200), (7, 9 * HOUR)]) == [1]


def test_young_impressions_are_immature_whatever_was_seen() -> None:
    times = np.array([HOUR - 1, HOUR, HOUR + 1], np.int64)
    assert immature(times, 1.0, 2 * HOUR).tolist() == [False, False, True]
    assert not immature(times, None, 0).any()


def test_null_key_is_unknown_and_empty_log_is_no_outcome() -> None:
    assert join(["a", None], [0, 0], [("b", 1)]) == [0, -1]
    assert join(["a", "b"], [0, 9 * HOUR], []) == [0, 0]


def test_without_a_window_every_later_row_counts() -> None:
    assert join([1, 2], [0, 0], [(1, 10**12)], window=None) == [1, 0]


def test_against_a_naive_scan() -> None:
    rng = np.random.default_rng(3)
    keys, times = rng.integers(0, 60, 300), rng.integers(0, 60, 300) * (HOUR // 8)
    log = list(zip(rng.integers(0, 80, 200).tolist(), (rng.integers(0, 60, 200) * (HOUR // 8)).tolist(), strict=True))
    expected = []
    for k, t in zip(keys.tolist(), times.tolist(), strict=True):
        seen = any(lk == k and t <= lt <= t + 2 * HOUR for lk, lt in log)
        expected.append(1 if seen else 0)
    assert join(keys.tolist(), times.tolist(), log, window=2.0) == expected
    assert set(expected) == {1, 0}


def test_the_impression_of_an_outcome_against_a_naive_search() -> None:
    """Keys that name one impression and keys that many share, outcomes before all, between and long after them."""
    rng = np.random.default_rng(5)
    for num_keys in (4, 40, 400):
        keys, times = rng.integers(0, num_keys, 120), rng.integers(0, 300, 120)
        shown = pa.array([None if k % 7 == 3 else str(k) for k in keys.tolist()], pa.string())
        log_keys, log_times = rng.integers(0, num_keys, 90), rng.integers(0, 300, 90)
        log = (pa.array([str(k) for k in log_keys.tolist()]), log_times)
        own, found = shown_at((shown, times), log, 60, 9)
        for i, (key, at) in enumerate(zip(log_keys.tolist(), log_times.tolist(), strict=True)):
            mine = sorted(t for k, t in zip(keys.tolist(), times.tolist(), strict=True) if k == key and k % 7 != 3)
            near = [t for t in mine if at - 60 <= t <= at + 9]
            later = [t for t in mine if t > at + 9]
            want = near[-1:] or later[:1]
            assert (bool(found[i]), int(own[i])) == (bool(want), want[0] if want else at)
    none = pa.array([], pa.string())
    assert not shown_at((none, np.zeros(0, np.int64)), log, 60, 9)[1].any()
    assert shown_at((shown, times), (none, np.zeros(0, np.int64)), 60, 9)[0].tolist() == []


def test_entire_space_is_a_three_valued_and() -> None:
    tasks = (Task("conversion", "click"), Task("click"))
    own = {"click": i8(1, 1, 1, 0, 0, 0, -1, -1, -1), "conversion": i8(1, 0, -1, 1, 0, -1, 1, 0, -1)}
    out = entire_space(own, tasks)
    assert out["click"].tolist() == own["click"].tolist()
    assert out["conversion"].tolist() == [1, 0, -1, 0, 0, 0, -1, 0, -1]


def test_conditions_in_a_ring_are_refused() -> None:
    tasks = (Task("a", "b"), Task("b", "a"))
    with pytest.raises(SpecError, match="a given b, b given a"):
        entire_space({"a": i8(1), "b": i8(1)}, tasks)
