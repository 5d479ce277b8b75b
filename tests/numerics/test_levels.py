"""Which tokens of the memory an impression reads, against a walk back through its user's events one by one."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest

from gem.config import ModelConfig
from gem.data.batch import Batch
from gem.errors import JaggedError
from gem.model.levels import MemoryPlan, plan_memory
from gem.model.packing import GAP_BUCKETS
from tests.unit.model.synthetic import MODEL, World, make_timelines, make_world


@dataclass(frozen=True)
class Token:
    """A token of a level: of this user of the batch, the number-th block of block ** level events ever."""

    user: int
    level: int
    number: int


def naive_reads(end: int, config: ModelConfig) -> list[tuple[int, int]]:
    """(level, number) of all that an impression after `end` events of its user reads, newest first."""
    last = config.block ** (config.num_levels - 1)
    low = max(end - config.max_history, 0)
    while low % last:
        low -= 1
    at, out = end, []
    for level in range(config.num_levels):
        span, taken = config.block**level, 0
        while at > low:
            # A level ends where a block of the next begins, once enough of its own tokens are taken.
            if level < config.num_levels - 1 and taken >= config.window and at % (span * config.block) == 0:
                break
            at -= span
            taken += 1
            out.append((level, at // span))
    return out


def tokens_of(plan: MemoryPlan) -> list[Token]:
    """What every row of the memory stands for."""
    out = []
    for k, level in enumerate(plan.levels):
        for u in range(level.low.numel()):
            assert int(level.offsets[u]) == len(out)
            out += [Token(u, k, number) for number in range(int(level.low[u]), int(level.high[u]))]
    return out


def events_of(plan: MemoryPlan, token: Token) -> list[int]:
    """Rows of the batch's events that are folded into a token, by its children and their children."""
    level = plan.levels[token.level]
    begin = 0 if token.level <= 1 else int(plan.levels[token.level - 1].offsets[0])
    place = int(level.offsets[token.user]) - int(level.offsets[0]) + token.number - int(level.low[token.user])
    if token.level == 0:
        return [int(level.rows[place])]
    if token.level == 1:
        return level.children[place].tolist()
    below = tokens_of(plan)
    return [e for child in level.children[place].tolist() for e in events_of(plan, below[begin + child])]


def read_rows(plan: MemoryPlan) -> dict[int, list[tuple[int, int]]]:
    """impression row -> (memory row, gap bucket) of everything it may read; each impression stands in one cell."""
    out: dict[int, list[tuple[int, int]]] = {}
    for block in plan.packing.blocks:
        assert not block.visible[~block.impression_mask].any()
        for p, i in block.impression_mask.nonzero().tolist():
            n, seen = int(block.impressions[p, i]), block.visible[p, i]
            assert n not in out
            out[n] = list(zip(block.events[p][seen].tolist(), block.gap[p, i][seen].tolist(), strict=True))
    return out


def case(seed: int) -> tuple[ModelConfig, World, Batch]:
    """A random configuration, and impressions of a random world."""
    rng = np.random.default_rng(seed)
    block, window = int(rng.integers(2, 6)), int(rng.integers(1, 9))
    config = replace(
        MODEL,
        num_levels=1 + seed % 3,
        block=block,
        window=window,
        max_history=int(rng.choice([1, 5, 20, 60, 200])),
        num_recent=min(int(rng.integers(0, 4)), window),
        event_attention=bool(rng.integers(0, 2)),
    )
    world = make_world(seed, num_users=6, num_impressions=30, events_per_user=int(rng.choice([1, 8, 40, 90])))
    at = rng.permutation(30)[: int(rng.integers(1, 31))]
    return config, world, world.batch(at, config.max_history, config.align)


SEEDS = range(18)


def test_cases_are_unlike() -> None:
    cases = [case(s) for s in SEEDS]
    assert {c.num_levels for c, _, _ in cases} == {1, 2, 3}
    assert {c.block for c, _, _ in cases} >= {2, 3, 4, 5}
    assert {c.event_attention for c, _, _ in cases} == {True, False}
    deep = [tokens_of(plan_memory(b, c)) for c, _, b in cases if c.num_levels == 3]
    assert any({t.level for t in tokens} == {0, 1, 2} for tokens in deep)
    assert any(bool((b.timeline.first > 0).any()) for _, _, b in cases), "some histories begin before the batch"
    assert any(bool((b.cut == 0).any()) for _, _, b in cases)


@pytest.mark.parametrize("seed", SEEDS)
def test_an_impression_reads_what_a_walk_back_finds(seed: int) -> None:
    config, _, batch = case(seed)
    plan = plan_memory(batch, config)
    tokens, read = tokens_of(plan), read_rows(plan)
    assert sorted(read) == list(range(len(batch)))
    assert plan.num_tokens == len(tokens) == len(plan.user_of)
    assert plan.user_of.tolist() == [t.user for t in tokens]
    for n in range(len(batch)):
        u = int(batch.user_of[n])
        walk = naive_reads(int(batch.cut[n] + batch.timeline.first[u]), config)
        assert sorted((tokens[row].level, tokens[row].number) for row, _ in read[n]) == sorted(walk)
        assert all(tokens[row].user == u for row, _ in read[n])


@pytest.mark.parametrize("seed", SEEDS)
def test_every_event_before_the_cut_is_read_once_and_none_after_it(seed: int) -> None:
    config, _, batch = case(seed)
    plan = plan_memory(batch, config)
    tokens, read, t = tokens_of(plan), read_rows(plan), batch.timeline
    events = [events_of(plan, token) for token in tokens]
    for n in range(len(batch)):
        u = int(batch.user_of[n])
        start, first, cut = int(t.offsets[u]), int(t.first[u]), int(batch.cut[n])
        low = max(cut + first - config.max_history, 0)
        low -= low % config.block ** (config.num_levels - 1)
        assert sorted(e for row, _ in read[n] for e in events[row]) == list(range(start + low - first, start + cut))
        singles = [events[row][0] for row, _ in read[n] if tokens[row].level == 0]
        newest = config.max_history if config.num_levels == 1 else config.window
        assert len(singles) >= min(newest, start + cut - (start + low - first))
        assert set(singles) == set(range(start + cut - len(singles), start + cut))
        # Newest first, as many as are read one by one.
        recent = [row for row in plan.recent[n].tolist() if row >= 0]
        assert [events[row][0] for row in recent] == sorted(singles, reverse=True)[: config.num_recent]
        assert plan.recent[n].tolist()[len(recent) :] == [-1] * (config.num_recent - len(recent))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_token_is_as_old_as_its_last_event(seed: int) -> None:
    config, _, batch = case(seed)
    plan = plan_memory(batch, config)
    times = batch.timeline.time_ms.tolist()
    for row, token in enumerate(tokens_of(plan)):
        events = events_of(plan, token)
        assert len(events) == config.block**token.level
        assert int(plan.time_ms[row]) == times[events[-1]] == max(times[e] for e in events)
    for n, found in read_rows(plan).items():
        for row, gap in found:
            seconds = max(int(batch.time_ms[n]) - int(plan.time_ms[row]), 0) / 1000
            assert gap == min(int(math.log2(1 + seconds)), GAP_BUCKETS - 1)


@pytest.mark.parametrize(
    ("config", "step"), [({"num_levels": 2}, 3), ({"num_levels": 3}, 9), ({"event_attention": True}, 3)]
)
def test_timelines_cut_anywhere_are_refused(config: dict[str, int], step: int) -> None:
    model = replace(MODEL, block=3, window=2, max_history=8, **config)
    world = make_world(4, num_users=5, num_impressions=40, events_per_user=90)
    batch = world.batch(np.arange(40), model.max_history)
    expected = f"timeline.first: got .*; allowed: multiples of {step}; collate with align=config.align"
    with pytest.raises(JaggedError, match=expected):
        plan_memory(batch, model)
    assert plan_memory(world.batch(np.arange(40), model.max_history, model.align), model).num_tokens > 0


def one_user(num_events: int, cuts: list[int], config: ModelConfig) -> MemoryPlan:
    """The plan for impressions of a user with so many events."""
    world = make_world(0, num_users=1, num_impressions=len(cuts), events_per_user=0)
    timelines = make_timelines(np.random.default_rng(0), np.array([num_events]), 20, 3)
    impressions = replace(world.impressions, cut=np.array(cuts, np.int32))
    batch = replace(world, timelines=timelines, impressions=impressions).batch(
        np.arange(len(cuts)), config.max_history, config.align
    )
    return plan_memory(batch, config)


def test_a_history_of_a_thousand_events_is_few_tokens() -> None:
    """Below the last level at most window + block - 1 tokens a level; on it one for block ** 2 events."""
    config = replace(MODEL, max_history=1000, window=8, block=4, num_levels=3)
    cuts = [1000, 999, 998, 985, 984]
    read = read_rows(one_user(1000, cuts, config))
    assert max(len(rows) for rows in read.values()) <= 2 * (8 + 4 - 1) + 1000 // 16 < 1000 / 11
    flat = read_rows(one_user(1000, cuts, replace(config, num_levels=1)))
    assert max(len(rows) for rows in flat.values()) == 1000


def test_what_is_read_grows_with_the_logarithm_of_the_history() -> None:
    """With a level more for every factor `block`: a history four times as long costs so many tokens more, not times."""
    sizes = []
    for levels in range(1, 6):
        history = 8 * 4 ** (levels - 1)
        config = replace(MODEL, max_history=history, window=8, block=4, num_levels=levels)
        read = read_rows(one_user(history + 300, list(range(history, history + 40)), config))
        sizes.append(max(len(rows) for rows in read.values()))
    # On the last level one more: the history is moved back to a whole block.
    assert all(size <= (8 + 4 - 1) * (level + 1) + 1 for level, size in enumerate(sizes)), sizes
