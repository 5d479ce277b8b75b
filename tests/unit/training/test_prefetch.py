"""Batches built ahead in a thread: in order, errors arrive, and nothing is left running."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from gem.errors import JaggedError
from gem.training.data import Prefetch


def rows(count: int) -> Iterator[np.ndarray]:
    for i in range(count):
        yield np.array([i])


def ends(feed: Prefetch) -> bool:
    feed._thread.join(5)
    return not feed._thread.is_alive()


def test_batches_come_in_order_and_the_thread_ends() -> None:
    feed: Any = Prefetch(lambda at: int(at[0]) * 2, rows(20))  # type: ignore[arg-type, return-value]
    assert list(feed) == [2 * i for i in range(20)]
    assert ends(feed)


def test_an_error_in_the_thread_reaches_the_consumer_after_the_good_batches() -> None:
    def build(at: np.ndarray) -> Any:
        if at[0] == 3:
            raise JaggedError("offsets run backwards")
        return int(at[0])

    feed, seen = Prefetch(build, rows(10)), []
    with pytest.raises(JaggedError, match="offsets run backwards"):
        for item in feed:
            seen.append(item)
    assert seen == [0, 1, 2]
    assert ends(feed)


def test_an_error_in_the_plan_reaches_the_consumer() -> None:
    def broken() -> Iterator[np.ndarray]:
        yield np.array([0])
        raise ValueError("no plan")

    with pytest.raises(ValueError, match="no plan"):
        list(Prefetch(lambda at: at, broken()))  # type: ignore[arg-type, return-value]


def test_stopping_early_ends_the_thread_and_builds_only_a_few_ahead() -> None:
    built: list[int] = []
    feed: Any = Prefetch(lambda at: built.append(int(at[0])), rows(10_000), depth=2)  # type: ignore[arg-type, return-value, func-returns-value]
    for count, _ in enumerate(feed):
        if count == 4:
            break
    feed.close()
    assert ends(feed)
    assert len(built) <= 5 + 2 + 2


def test_closing_without_reading_ends_the_thread() -> None:
    before = threading.active_count()
    feed: Any = Prefetch(lambda at: at, rows(10_000))  # type: ignore[arg-type, return-value]
    feed.close()
    assert ends(feed)
    assert threading.active_count() <= before


def test_waiting_for_a_slow_builder_is_counted() -> None:
    def slow(at: np.ndarray) -> Any:
        time.sleep(0.05)
        return at

    feed = Prefetch(slow, rows(3))
    assert len(list(feed)) == 3
    assert feed.waited_s > 0.1
