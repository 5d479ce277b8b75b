"""Match counts against loops over every impression, event and signal, on batches with every awkward shape."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from gem.data.batch import Batch
from gem.data.schema import NULL, NUM_RESERVED, OOV, Field, Schema
from gem.model import matches
from gem.model.matches import MatchCounts, Signals, first_ms, one_number
from gem.model.packing import gap_bucket
from tests.unit.model.synthetic import World, changed_after, make_schema, make_world

DIM = 8
WORLDS = {
    "mixed": make_world(0),
    "no events at all": make_world(1, events_per_user=0),
    "one event at most": make_world(2, events_per_user=1),
    "one impression": make_world(3, num_impressions=1),
    "long": make_world(4, num_users=5, num_ads=6, num_impressions=30, events_per_user=60),
}


def batch_of(name: str, max_history: int = 20) -> Batch:
    return WORLDS[name].batch(np.arange(len(WORLDS[name].impressions)), max_history)


def bucket(elapsed_ms: int) -> int:
    return int(gap_bucket(torch.tensor([[elapsed_ms]]), torch.zeros(1, dtype=torch.int64), torch.tensor([[0]])))


def visible_events(batch: Batch, n: int, max_history: int) -> range:
    """Rows of the batch's events that impression n may read."""
    start, cut = int(batch.timeline.offsets[batch.user_of[n]]), int(batch.cut[n])
    return range(start + max(cut - max_history, 0), start + cut)


def same_value(batch: Batch, field: Field, one: int, other: int) -> bool:
    width = field.hashes or 1
    rows = batch.ads.ids[field.name].tolist()
    if field.multi and not field.hashes:  # the first value counts
        ends = batch.ads.offsets[field.name].tolist()
        first = [rows[ends[a]] if ends[a + 1] > ends[a] else 0 for a in (one, other)]
        return first[0] >= NUM_RESERVED and first[0] == first[1]
    own, theirs = rows[one * width : (one + 1) * width], rows[other * width : (other + 1) * width]
    return own[0] >= NUM_RESERVED and own == theirs


def naive_counts(counts: MatchCounts, batch: Batch, max_history: int) -> np.ndarray:
    """[N, matches · windows · 2 signals]: log1p and smoothed shares of what every impression may see, in float64."""
    t, limits = batch.timeline, counts.GAPS
    shape = (len(batch), 3 + len(counts.fields), len(limits) + 1, counts.num_kinds + counts.num_flags)
    raw = np.zeros(shape)
    for n in range(len(batch)):
        shown, newest = int(batch.ad_of[n]), {}
        for e in visible_events(batch, n, max_history):
            ad, age = int(t.ad[e]), bucket(int(batch.time_ms[n]) - int(t.time_ms[e]))
            same = [True, int(t.surface[e]) == int(batch.surface[n])]
            same.append(ad == shown and int(batch.ads.ids["ad_id"][ad]) >= NUM_RESERVED)
            same += [same_value(batch, f, shown, ad) for f in counts.fields]
            signals = [int(t.kind[e]) == k + 1 for k in range(counts.num_kinds)]
            signals += [bool(int(t.flags[e]) >> b & 1) for b in range(counts.num_flags)]
            for m in np.flatnonzero(same):
                newest[m] = signals
                for w, limit in enumerate(limits):
                    raw[n, m, w] += np.array(signals) * (age < limit)
        for m, signals in newest.items():
            raw[n, m, -1] = signals
    total = raw[..., : counts.num_kinds].sum(3, keepdims=True)
    return np.concatenate([np.log1p(raw), raw / (total + 4)], axis=3).reshape(len(batch), -1)


def check(schema: Schema, batch: Batch, max_history: int) -> np.ndarray:
    counts = MatchCounts(schema, DIM, 2)
    got = counts.counts(batch, max_history)
    np.testing.assert_allclose(got.numpy(), naive_counts(counts, batch, max_history), atol=1e-6)
    return got.numpy()


def with_times(batch: Batch, time_ms: Tensor) -> Batch:
    return replace(batch, timeline=replace(batch.timeline, time_ms=time_ms))


def hashed(batch: Batch, schema: Schema, seed: int) -> tuple[Batch, Schema]:
    """Another ad field, an open vocabulary of two rows per value: some values share one row, some have none."""
    rng, num = np.random.default_rng(seed), len(batch.ads)
    rows = torch.from_numpy(rng.integers(NUM_RESERVED, NUM_RESERVED + 2, (num, 2)))
    rows[torch.from_numpy(rng.random(num) < 0.2)] = NULL
    ids = {**batch.ads.ids, "word": rows.flatten()}
    offsets = {**batch.ads.offsets, "word": torch.arange(num + 1) * 2}
    field = Field("word", "word", 5, multi=True, hashes=2)
    wider = replace(schema, ad=replace(schema.ad, fields=(*schema.ad.fields, field)))
    return replace(batch, ads=replace(batch.ads, ids=ids, offsets=offsets)), wider


@pytest.mark.parametrize("max_history", [1, 5, 20])
@pytest.mark.parametrize("name", WORLDS)
def test_counts_are_the_counted_events(name: str, max_history: int) -> None:
    batch = batch_of(name)
    got = check(WORLDS[name].schema, batch, max_history)
    assert got.any() == any(len(visible_events(batch, n, max_history)) for n in range(len(batch)))


def test_worlds_hold_the_awkward_histories() -> None:
    batch, counts = batch_of("mixed"), MatchCounts(WORLDS["mixed"].schema, DIM, 2)
    assert {f.name for f in counts.fields} == {"type", "brand", "origin", "tags"}
    assert {0, 1, 5} <= {len(visible_events(batch, n, 5)) for n in range(len(batch))}
    cuts = {(int(u), int(c)) for u, c in zip(batch.user_of, batch.cut, strict=True)}
    assert len(cuts) > len(batch.users)  # a user's impressions differ in their cuts
    long = batch_of("long")
    assert int(long.cut.max()) > 20 and len(long.ads) == 6  # ads repeat


@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_times(seed: int) -> None:
    """Timelines are sorted by when events became known: ties, late events, and clocks ahead of the impression."""
    rng, batch = np.random.default_rng(seed), batch_of("long")
    now, size = int(batch.time_ms.max()), batch.timeline.time_ms.numel()
    times = [
        batch.timeline.time_ms // 7_200_000 * 7_200_000,
        batch.timeline.time_ms - torch.from_numpy(rng.integers(0, 2, size) * rng.integers(0, 200_000_000, size)),
        now - torch.from_numpy(rng.integers(-10_000_000, 200_000_000, size)),
        torch.full((size,), now),
        batch.timeline.time_ms.flip(0),
        torch.where(torch.arange(size) % 17 == 3, now + 10**12, batch.timeline.time_ms),
    ]
    check(WORLDS["long"].schema, with_times(batch, times[seed]), 20)


@pytest.mark.parametrize("few", [0, 255])
@pytest.mark.parametrize("dense", [0, 16])
def test_every_way_to_find_events_agrees(monkeypatch: pytest.MonkeyPatch, few: int, dense: int) -> None:
    """All events sorted or only those asked for (through a filter that lets many others pass), table or search."""
    monkeypatch.setattr(matches, "FEW", few)
    monkeypatch.setattr(matches, "DENSE", dense)
    monkeypatch.setattr(matches, "CELLS", 1)
    for seed, name in enumerate(["mixed", "long", "one impression"]):
        batch, schema = hashed(batch_of(name), WORLDS[name].schema, seed)
        late = torch.from_numpy(np.random.default_rng(seed).integers(0, 10**8, batch.timeline.time_ms.numel()))
        check(schema, with_times(batch, batch.timeline.time_ms - late), 12)


def test_hashed_values_match_where_all_their_rows_do() -> None:
    batch, schema = hashed(batch_of("mixed"), WORLDS["mixed"].schema, 0)
    rows = batch.ads.ids["word"].view(-1, 2)
    assert len({tuple(r) for r in rows.tolist()}) == 5  # four values and none
    assert "word" in {f.name for f in MatchCounts(schema, DIM, 2).fields}
    check(schema, batch, 20)


def test_an_ad_without_a_known_id_does_not_match_itself() -> None:
    batch, schema = batch_of("long"), WORLDS["long"].schema
    for reserved in (NULL, OOV):
        ids = {**batch.ads.ids, "ad_id": torch.where(batch.ads.ids["ad_id"] == 5, reserved, batch.ads.ids["ad_id"])}
        unknown = replace(batch, ads=replace(batch.ads, ids=ids))
        got = check(schema, unknown, 20).reshape(len(batch), 7, -1)
        asks = unknown.ads.ids["ad_id"][batch.ad_of].numpy() == reserved
        assert asks.any() and not got[asks, 2].any() and got[~asks, 2].any()


def test_an_open_vocabulary_of_ad_ids() -> None:
    batch, schema = batch_of("long"), WORLDS["long"].schema
    own = replace(schema.ad.fields[0], multi=True, hashes=2)
    rows = torch.stack([batch.ads.ids["ad_id"], batch.ads.ids["ad_id"] + 1], 1)
    rows[2] = NULL
    twice = replace(batch, ads=replace(batch.ads, ids={**batch.ads.ids, "ad_id": rows.flatten()}))
    one = batch.ads.ids["ad_id"].clone()
    one[2] = NULL
    once = replace(batch, ads=replace(batch.ads, ids={**batch.ads.ids, "ad_id": one}))
    hashed_schema = replace(schema, ad=replace(schema.ad, fields=(own, *schema.ad.fields[1:])))
    got = MatchCounts(hashed_schema, DIM, 2).counts(twice, 20)
    assert torch.equal(got, MatchCounts(schema, DIM, 2).counts(once, 20))


def test_windows_end_where_the_buckets_do() -> None:
    for gap in (1, 13, 17, 23):
        assert [bucket(first_ms(gap) + step) for step in (-1, 0)] == [gap - 1, gap]
    assert first_ms(0) == 0 and bucket(-5) == 0
    batch, schema = batch_of("long"), WORLDS["long"].schema
    edge = torch.tensor([first_ms(g) + step for g in (17, 13) for step in (1, 0, -1)] + [0, -1, -(10**9)])
    times = int(batch.time_ms[0]) - edge[torch.arange(batch.timeline.time_ms.numel()) % len(edge)]
    at_once = replace(with_times(batch, times), time_ms=torch.full_like(batch.time_ms, int(batch.time_ms[0])))
    check(schema, at_once, 20)


def test_nothing_after_the_cut_and_no_other_user_is_read() -> None:
    world = WORLDS["mixed"]
    user = int(np.bincount(world.impressions.user, weights=world.impressions.cut).argmax())
    own = np.flatnonzero(world.impressions.user == user)
    expected = counts_of(world, own)
    last = int(world.impressions.cut[own].max())
    assert expected[np.argsort(world.impressions.cut[own], kind="stable")[-1]].any()
    np.testing.assert_array_equal(counts_of(changed_after(world, user, last), own), expected)
    everybody = np.arange(len(world.impressions))
    all_counts = counts_of(world, everybody)
    np.testing.assert_array_equal(all_counts[own], expected)
    for other in set(world.impressions.user.tolist()) - {user}:
        changed = counts_of(changed_after(world, other, 0), everybody)
        np.testing.assert_array_equal(changed[own], expected)


def counts_of(world: World, at: np.ndarray) -> np.ndarray:
    """Counts of these impressions, made in one batch, in the order of `at`; cuts as they are."""
    batch = world.batch(at, 6)
    place = {int(i): n for n, i in enumerate(batch.impression_id)}
    got = MatchCounts(world.schema, DIM, 2).counts(batch, 6).numpy()
    return got[[place[int(i)] for i in world.impressions.impression_id[at]]]


@pytest.mark.parametrize("num_flags", [0, 1, 8, 9, 16])
def test_without_fields_and_with_many_flags(num_flags: int) -> None:
    schema = make_schema()
    bare = replace(
        schema,
        ad=replace(schema.ad, fields=schema.ad.fields[:1]),
        flags=tuple(f"f{b}" for b in range(num_flags)),
    )
    batch = batch_of("mixed")
    flags = torch.from_numpy(np.random.default_rng(0).integers(0, 1 << 16, batch.timeline.flags.numel()))
    batch = replace(batch, timeline=replace(batch.timeline, flags=flags))
    check(bare, batch, 5)
    assert MatchCounts(bare, DIM, 2)(batch, 5).shape == (len(batch), 2, DIM)


@pytest.mark.parametrize("most", [0, 1, 255, 256, 2**31])
@pytest.mark.parametrize(("num_kinds", "num_flags"), [(1, 0), (2, 3), (4, 16)])
def test_packed_sums_are_sums_even_beyond_64_bits(most: int, num_kinds: int, num_flags: int) -> None:
    rng, signals = np.random.default_rng(most % 7), Signals(num_kinds, num_flags, most)
    kind, flags = rng.integers(0, num_kinds + 1, 50), rng.integers(0, 1 << 16, 50)
    expected = np.array(
        [*(kind == k + 1 for k in range(num_kinds)), *((flags >> b) & 1 for b in range(num_flags))], np.int64
    )
    words = torch.stack(signals.pack(torch.from_numpy(kind), torch.from_numpy(flags)))
    one_by_one = signals.unpack(words.unsqueeze(1) if most else torch.zeros_like(words).unsqueeze(1))
    np.testing.assert_array_equal(one_by_one[:, 0].T.numpy(), expected if most else 0 * expected)
    before = words * 987_654_321_987  # sums that ran over long ago
    last = before + words * most
    np.testing.assert_array_equal(
        signals.unpack((last - before).unsqueeze(1))[:, 0].T.double().numpy(), expected * float(most)
    )


def test_no_impression_and_no_event() -> None:
    world = WORLDS["mixed"]
    counts = MatchCounts(world.schema, DIM, 2)
    none = world.batch(np.zeros(0, np.int64))
    assert counts.counts(none, 5).shape == (0, counts.width)
    assert not counts.counts(batch_of("no events at all"), 5).any()


@pytest.mark.parametrize("name", ["mixed", "no events at all"])
def test_every_parameter_gets_a_gradient_even_without_events(name: str) -> None:
    """DDP waits for all of them: a parameter outside the graph stops training at the next step."""
    counts = MatchCounts(WORLDS[name].schema, DIM, 2)
    counts(batch_of(name), 5).sum().backward()
    for parameter, value in counts.named_parameters():
        assert value.grad is not None and torch.isfinite(value.grad).all(), parameter
    assert list(counts.state_dict()) == ["mlp.0.weight", "mlp.0.bias", "mlp.2.weight", "mlp.2.bias"]


def test_many_rows_become_one_number() -> None:
    rows = torch.tensor([[3, 4], [4, 3], [3, 4], [NULL, NULL]])
    numbers = one_number(rows.flatten(), 2).tolist()
    assert numbers[0] == numbers[2] != numbers[1] and numbers[3] == NULL
    assert min(numbers[:3]) >= NUM_RESERVED
