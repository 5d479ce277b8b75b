"""The plan of an epoch: every impression once, whole users, the same for any number of ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gem.errors import TrainingError
from gem.training.plan import BatchPlan, deal, plan_epoch, remaining


def make_plan(user: np.ndarray, day: np.ndarray, **changes: int) -> BatchPlan:
    return plan_epoch(user, day, **({"batch_size": 32, "window_days": 1, "seed": 3, "epoch": 0} | changes))


def log(seed: int, num: int = 600, users: int = 40, hot: int = 150) -> tuple[np.ndarray, np.ndarray]:
    """Users and days; user 0 alone has `hot` impressions a day on top."""
    rng = np.random.default_rng(seed)
    user = np.concatenate([rng.integers(0, users, num), np.zeros(3 * hot, np.int64)])
    day = np.concatenate([rng.integers(2, 5, num), np.repeat([2, 3, 4], hot)])
    order = rng.permutation(user.size)
    return user[order].astype(np.int64), day[order].astype(np.int64)


def shared(rows: np.ndarray, user: np.ndarray, cost: np.ndarray, world: int) -> list[np.ndarray]:
    """The rows of each rank."""
    owner = deal(user[rows], cost[rows], world)
    return [rows[owner == rank] for rank in range(world)]


logs = st.lists(st.tuples(st.integers(0, 8), st.integers(0, 6)), min_size=1, max_size=120)


@settings(max_examples=80, deadline=None)
@given(logs, st.integers(1, 40), st.integers(1, 3), st.integers(0, 5))
def test_every_impression_exactly_once_in_batches_of_bounded_size(
    rows: list[tuple[int, int]], batch_size: int, window_days: int, seed: int
) -> None:
    user, day = (np.array([r[i] for r in rows], np.int64) for i in (0, 1))
    plan = make_plan(user, day, batch_size=batch_size, window_days=window_days, seed=seed)
    batches = [plan.batch(i).tolist() for i in range(len(plan))]
    assert sorted(i for b in batches for i in b) == list(range(len(rows)))
    assert all(0 < len(b) <= batch_size for b in batches)
    windows = [{(int(day[i]) - int(day.min())) // window_days for i in b} for b in batches]
    assert all(len(w) == 1 for w in windows)
    assert [min(w) for w in windows] == sorted(min(w) for w in windows)


@pytest.mark.parametrize("seed", range(4))
def test_users_stay_whole_unless_larger_than_half_a_batch(seed: int) -> None:
    user, day = log(seed)
    plan = make_plan(user, day)
    places: dict[tuple[int, int], set[int]] = {}
    for index in range(len(plan)):
        rows = plan.batch(index)
        runs = 1 + int((user[rows][1:] != user[rows][:-1]).sum())
        assert runs <= len(set(user[rows].tolist())) + (user[rows] == 0).sum() // 16  # neighbours
        for row in rows.tolist():
            places.setdefault((int(user[row]), int(day[row])), set()).add(index)
    for (who, when), found in places.items():
        size = int(((user == who) & (day == when)).sum())
        assert len(found) == 1 or size > 16, (who, when)
    assert any(len(found) >= 5 for (who, _), found in places.items() if who == 0)


def test_batches_are_full() -> None:
    """All but the last of a window leave no room for half a batch."""
    user, day = log(0)
    plan = make_plan(user, day)
    for index in range(len(plan) - 1):
        same_window = day[plan.batch(index)][0] == day[plan.batch(index + 1)][0]
        assert not same_window or len(plan.batch(index)) > 16


def test_the_plan_is_a_function_of_seed_and_epoch() -> None:
    user, day = log(1)
    one, again = make_plan(user, day), make_plan(user, day)
    assert np.array_equal(one.rows, again.rows)
    assert np.array_equal(one.bounds, again.bounds)
    assert not np.array_equal(one.rows, make_plan(user, day, epoch=1).rows)
    assert not np.array_equal(one.rows, make_plan(user, day, seed=4).rows)


def test_users_come_in_random_order_not_by_index() -> None:
    user, day = log(2, hot=0)
    first = user[make_plan(user, day, window_days=3, batch_size=10_000).rows]
    seen = list(dict.fromkeys(first.tolist()))
    assert abs(np.corrcoef(seen, np.arange(len(seen)))[0, 1]) < 0.5


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_shares_part_every_batch_by_whole_users_and_are_balanced(world: int) -> None:
    user, day = log(3)
    cost = 1 + np.random.default_rng(0).integers(0, 100, user.size)
    plan = make_plan(user, day, batch_size=200)
    for index in range(len(plan)):
        rows = plan.batch(index)
        shares = shared(rows, user, cost, world)
        assert sorted(np.concatenate(shares).tolist()) == sorted(rows.tolist())
        owners = [set(user[s].tolist()) for s in shares]
        assert sum(map(len, owners)) == len(set().union(*owners))
        per_user = [cost[rows[user[rows] == u]].sum() for u in set(user[rows].tolist())]
        loads = [int(cost[s].sum()) for s in shares]
        # The last user went to the emptiest rank: two ranks differ by at most the largest user.
        assert max(loads) - min(loads) <= max(per_user)


def test_balance_of_many_users_is_close() -> None:
    rng = np.random.default_rng(5)
    user, cost = rng.integers(0, 200, 1000), 1 + rng.integers(0, 128, 1000)
    loads = [int(cost[share].sum()) for share in shared(np.arange(1000), user, cost, 4)]
    assert max(loads) / np.mean(loads) < 1.05


def test_fewer_users_than_ranks_leaves_ranks_without_rows() -> None:
    user, cost = np.array([4, 4, 9]), np.array([1, 1, 1])
    shares = [share.tolist() for share in shared(np.arange(3), user, cost, 4)]
    assert shares == [[0, 1], [2], [], []]


def test_remaining_starts_anywhere() -> None:
    user, day = log(4)
    plan = make_plan(user, day)
    rest = list(remaining(plan, 5))
    assert [i for i, _ in rest] == list(range(5, len(plan)))
    assert all(np.array_equal(rows, plan.batch(i)) for i, rows in rest)
    assert list(remaining(plan, len(plan))) == []


def test_nothing_to_train_on_and_impossible_sizes_are_refused() -> None:
    one = np.zeros(1, np.int64)
    with pytest.raises(TrainingError, match="no impressions to train on"):
        make_plan(one[:0], one[:0])
    with pytest.raises(TrainingError, match="batch_size and window_days must be >= 1, got 0 and 1"):
        make_plan(one, one, batch_size=0)
    with pytest.raises(TrainingError, match="got 32 and 0"):
        make_plan(one, one, window_days=0)


def test_users_are_dealt_to_the_emptiest_rank_by_hand() -> None:
    """Costs 8 to 1 on two ranks: 8 5 4 1 and 7 6 3 2; dealing round and round would give 20 and 16."""
    shares = shared(np.arange(8), np.arange(8), cost := np.array([3, 8, 1, 6, 7, 2, 5, 4]), 2)
    assert [sorted(cost[share].tolist()) for share in shares] == [[1, 4, 5, 8], [2, 3, 6, 7]]


def test_one_very_long_history_is_outweighed_by_many_short_ones() -> None:
    """Dealing back and forth would give the long one half of the others as well: 150 and 50."""
    cost = np.array([100, *[1] * 100])
    shares = shared(np.arange(101), np.arange(101), cost, 2)
    assert sorted(int(cost[share].sum()) for share in shares) == [100, 100]
