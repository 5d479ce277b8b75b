"""Timelines and cuts against a quadratic oracle that shares no code: ties, duplicates, delays, unsorted input."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gem.data.build.duplicates import find_duplicates
from gem.data.build.timelines import cuts, timeline_order

DELAYS = {1: 0, 2: 3, 3: 10}  # kind -> ms until the event is known

# (user, time, kind, ad): few values, so that ties and duplicates are the rule
EVENTS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 15), st.sampled_from([1, 2, 3]), st.integers(0, 2)))
QUERIES = st.lists(st.tuples(st.integers(0, 4), st.integers(-1, 30)))


def _columns(rows: list[tuple[int, ...]], width: int) -> list[np.ndarray]:
    return list(np.array(rows, np.int64).reshape(-1, width).T)


def _kernel(events: list[tuple[int, int, int, int]]) -> tuple[list[np.ndarray], np.ndarray]:
    """Distinct events in timeline order as (user, time, kind, ad), and their known_ms."""
    user, time, kind, ad = _columns(events, 4)
    keep = find_duplicates((user, kind, time, ad), (), ()).keep
    user, time, kind, ad = (c[keep] for c in (user, time, kind, ad))
    known = time + np.array([0, *DELAYS.values()])[kind]
    order = timeline_order(user, known, time, (kind, ad))
    return [c[order] for c in (user, time, kind, ad)], known[order]


@settings(max_examples=300, deadline=None)
@given(EVENTS, QUERIES)
def test_cut_is_the_number_of_events_known_strictly_before(events, queries) -> None:
    columns, known = _kernel(events)
    user, time = _columns(queries, 2)
    got = cuts(columns[0], known, user, time).tolist()
    distinct = set(events)
    assert got == [sum(1 for u, t, k, _ in distinct if u == qu and t + DELAYS[k] < qt) for qu, qt in queries]


@settings(max_examples=200, deadline=None)
@given(EVENTS, QUERIES)
def test_what_lies_before_the_cut_is_known_and_what_lies_behind_is_not(events, queries) -> None:
    columns, known = _kernel(events)
    user, time = _columns(queries, 2)
    for q, t, cut in zip(user.tolist(), time.tolist(), cuts(columns[0], known, user, time).tolist(), strict=True):
        own = known[columns[0] == q]
        assert bool((own[:cut] < t).all()) and bool((own[cut:] >= t).all())


@settings(max_examples=200, deadline=None)
@given(EVENTS, st.randoms(use_true_random=False))
def test_timeline_does_not_depend_on_the_order_of_the_input(events, random) -> None:
    shuffled = list(events)
    random.shuffle(shuffled)
    first, second = _kernel(events), _kernel(shuffled)
    assert all(bool((x == y).all()) for x, y in zip(first[0], second[0], strict=True))
    expected = sorted(set(events), key=lambda e: (e[0], e[1] + DELAYS[e[2]], e[1], e[2], e[3]))
    assert list(zip(*(c.tolist() for c in first[0]), strict=True)) == expected
