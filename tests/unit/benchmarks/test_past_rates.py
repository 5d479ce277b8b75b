"""Past-only counts, rates and meetings against double loops over small tables full of ties."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.benchmarks.peers.past import STRENGTH, Meetings, Outcomes, Past, past_meetings, past_rates

Rng = np.random.Generator


@pytest.mark.parametrize("seed", range(3))
def test_sums_and_last_equal_a_double_loop(seed: int) -> None:
    rng = np.random.default_rng(seed)
    key, at = rng.integers(0, 5, 60), rng.integers(-4, 9, 60)
    weights, value = rng.random((60, 2)), rng.integers(0, 1000, 60)
    ask_key, ask_at = rng.integers(0, 7, 40), rng.integers(-6, 12, 40)  # also keys and times nobody has
    past = Past(key, at)
    spans = past.spans(ask_key, ask_at)
    sums, last = past.sums(weights, spans), past.last(value, spans, -1)
    for i in range(40):
        before = [j for j in range(60) if key[j] == ask_key[i] and at[j] < ask_at[i]]
        assert sums[i] == pytest.approx(weights[before].sum(0))
        newest = max((at[j] for j in before), default=None)
        assert last[i] in ([-1] if newest is None else [value[j] for j in before if at[j] == newest])


def test_nothing_known() -> None:
    past = Past(np.zeros(0, np.int64), np.zeros(0, np.int64))
    spans = past.spans(np.array([3]), np.array([9]))
    assert past.sums(np.zeros((0, 1)), spans).tolist() == [[0.0]]
    assert past.last(np.zeros(0, np.int64), spans, -5).tolist() == [-5]


def outcomes(rng: Rng, num: int = 80, delays: tuple[int, ...] = (60, 300)) -> Outcomes:
    time = rng.integers(0, 40, num) * 30  # many outcomes become known at the very time of another impression
    mask = (rng.random((num, 2)) < 0.8).astype(np.float32)
    labels = (rng.random((num, 2)) < 0.4).astype(np.float32) * mask
    keys = {"user": rng.integers(0, 6, num), "ad": rng.integers(0, 9, num)}
    return Outcomes(time, keys, labels, mask, time[:, None] + np.array(delays), ("click", "conversion"))


@pytest.mark.parametrize("seed", range(3))
def test_rates_equal_a_double_loop(seed: int) -> None:
    rows = outcomes(np.random.default_rng(seed))
    found, names = past_rates(rows)
    assert len(names) == found.shape[1] == 2 * (1 + 2 * 2)
    for i in range(len(rows.time_ms)):
        expected: dict[str, float] = {}
        for k, task in enumerate(rows.tasks):
            known = [j for j in range(len(rows.time_ms)) if rows.mask[j, k] and rows.known_NK[j, k] < rows.time_ms[i]]
            prior = (sum(rows.labels[j, k] for j in known) + 1) / (len(known) + 2)
            expected[f"{task}_rate"] = prior
            for group, key in rows.keys.items():
                same = [j for j in known if key[j] == key[i]]
                positive = sum(rows.labels[j, k] for j in same)
                expected[f"{task}_rate_{group}"] = (positive + STRENGTH * prior) / (len(same) + STRENGTH)
                expected[f"{task}_count_{group}"] = math.log1p(len(same))
        assert dict(zip(names, found[i].tolist(), strict=True)) == pytest.approx(expected, rel=1e-5)


def test_a_label_not_yet_known_changes_no_rate_before_it_is() -> None:
    rows = outcomes(np.random.default_rng(9))
    late = int(np.argsort(rows.time_ms)[-10])
    before = rows.time_ms <= rows.known_NK[late].min()
    first, _ = past_rates(rows)
    rows.labels[late] = 1 - rows.labels[late]
    rows.mask[late] = 1.0
    second, _ = past_rates(rows)
    assert (first[before] == second[before]).all() and before[late]


def test_meetings_equal_a_loop() -> None:
    rng = np.random.default_rng(4)
    lengths = rng.integers(0, 9, 6)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    user = np.repeat(np.arange(6), lengths)
    number = np.arange(len(user)) - offsets[user]
    time = np.sort(rng.integers(0, 9_000, len(user)))  # known in this order within every user
    clicked = rng.integers(0, 2, (len(user), 1)).astype(np.float32)
    tags = [rng.choice(4, rng.integers(0, 3), replace=False) for _ in user]
    ask_user = np.repeat(np.arange(6), 5)
    cut = rng.integers(0, lengths[ask_user] + 1)
    ask_tags = [rng.choice(4, rng.integers(0, 3), replace=False) for _ in ask_user]

    def flat(lists: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        owner = np.repeat(np.arange(len(lists)), [len(v) for v in lists])
        return owner, np.concatenate(lists).astype(np.int64)

    found, names = past_meetings(
        Meetings(
            user, number, time, clicked, ["click"], ask_user, cut, np.full(len(cut), 10_000),
            {"tag": (flat(tags), flat(ask_tags))},
        )
    )  # fmt: skip
    assert names == ["met_tag", "met_tag_click", "since_tag"]
    for i, own in enumerate(ask_tags):
        seen = range(offsets[ask_user[i]], offsets[ask_user[i]] + cut[i])
        pairs = [(j, tag) for j in seen for tag in own if tag in tags[j]]
        age = min(((10_000 - time[j]) / 1000 for j, _ in pairs), default=None)
        expected = [math.log1p(len(pairs)), math.log1p(sum(clicked[j, 0] for j, _ in pairs))]
        assert found[i].tolist() == pytest.approx([*expected, -1.0 if age is None else math.log1p(age)], rel=1e-5)
