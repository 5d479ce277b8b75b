"""The kernel: order, duplicates, cuts. Expected values by hand; see tests/property/test_cuts.py for the oracle."""

from __future__ import annotations

import numpy as np
import pytest

from gem.data.build.timelines import count_before, cuts, rank_in_run, timeline_order, user_offsets
from gem.errors import DataError


def a(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def test_order_is_user_then_known_then_time_then_ties() -> None:
    user, known, time, order = a(1, 0, 0, 0, 0), a(1, 9, 5, 5, 5), a(1, 1, 4, 3, 3), a(0, 0, 0, 2, 1)
    assert timeline_order(user, known, time, (order,)).tolist() == [4, 3, 2, 1, 0]


def test_cut_counts_strictly_before_and_only_own_events() -> None:
    event_user, known = a(1, 1, 1, 3), a(10, 20, 20, 5)
    user, time = a(1, 1, 1, 1, 0, 2, 3, 4), a(10, 11, 20, 21, 99, 99, 6, 99)
    assert cuts(event_user, known, user, time).tolist() == [0, 1, 1, 3, 0, 0, 1, 0]


def test_cut_without_any_event() -> None:
    assert cuts(a(), a(), a(0, 7), a(1, 1)).tolist() == [0, 0]


def test_cut_survives_times_and_users_that_do_not_fit_one_product() -> None:
    big = 2**62
    event_user, known = a(0, 2**30, 2**30), a(-big, -big, big)
    assert cuts(event_user, known, a(2**30, 2**30, 0), a(big, -big, big)).tolist() == [1, 0, 1]


def test_unsorted_events_are_refused() -> None:
    with pytest.raises(DataError, match=r"sorted by \(user, known_ms\).*timeline_order"):
        cuts(a(0, 0), a(2, 1), a(0), a(5))
    with pytest.raises(DataError, match="sorted"):
        count_before(a(1, 0), a(1, 1), a(0), a(5))


def test_offsets_of_users_without_events() -> None:
    assert user_offsets(a(1, 1, 3), 5).tolist() == [0, 0, 2, 2, 3, 3]


def test_rank_in_run_starts_again_where_a_key_changes() -> None:
    assert rank_in_run(a(7, 7, 7, 8, 7), a(1, 1, 2, 2, 2)).tolist() == [0, 1, 0, 0, 0]
    assert rank_in_run(a()).tolist() == []
