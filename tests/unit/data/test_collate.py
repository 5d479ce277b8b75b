"""Collate against a naive reading: every impression finds its own user, ad, context, labels and events."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from gem.data import collate
from gem.data.batch import EntityRows
from gem.data.collate import take_rows
from gem.errors import JaggedError
from tests.unit.model.synthetic import make_world

WORLD = make_world(3)
POSITION = {int(i): n for n, i in enumerate(WORLD.impressions.impression_id)}


def one(rows: EntityRows, at: int, name: str) -> list[int]:
    """The ids of one field of one entity."""
    if name not in rows.offsets:
        return [int(rows.ids[name][at])]
    start, end = rows.offsets[name][at : at + 2].tolist()
    return rows.ids[name][start:end].tolist()


def same_entity(got: EntityRows, at: int, want: EntityRows) -> None:
    for name in want.ids:
        assert one(got, at, name) == one(want, 0, name), name
    assert torch.equal(got.numeric[at], want.numeric[0])
    assert torch.equal(got.vectors[at], want.vectors[0])


@pytest.mark.parametrize("max_history", [1, 4, 100])
@pytest.mark.parametrize("seed", range(3))
def test_every_impression_keeps_what_is_its_own(seed: int, max_history: int) -> None:
    at = np.random.default_rng(seed).permutation(60)[:45]
    batch, imp, t = WORLD.batch(at, max_history), WORLD.impressions, WORLD.timelines
    assert sorted(batch.impression_id.tolist()) == sorted(imp.impression_id[at].tolist())
    for n, key in enumerate(batch.impression_id.tolist()):
        row = POSITION[key]
        user = int(imp.user[row])
        same_entity(batch.users, int(batch.user_of[n]), WORLD.users.rows(np.array([user])))
        same_entity(batch.ads, int(batch.ad_of[n]), WORLD.ads.rows(np.array([imp.ad[row]])))
        same_entity(batch.context, n, imp.context_rows(np.array([row])))
        assert batch.labels[n].tolist() == imp.labels[row].tolist()
        assert batch.mask[n].tolist() == imp.mask[row].tolist()
        assert (int(batch.time_ms[n]), int(batch.surface[n])) == (imp.time_ms[row], imp.surface[row])
        # The newest `max_history` events before the cut, straight from the store.
        end = int(t.offsets[user]) + int(imp.cut[row])
        want = range(max(int(t.offsets[user]), end - max_history), end)
        stop = int(batch.timeline.offsets[batch.user_of[n]]) + int(batch.cut[n])
        got = range(stop - len(want), stop)
        assert got.start >= int(batch.timeline.offsets[batch.user_of[n]])
        for name in ("kind", "flags", "surface", "dwell", "time_ms"):
            assert getattr(batch.timeline, name)[list(got)].tolist() == [int(getattr(t, name)[e]) for e in want]
        for e, w in zip(got, want, strict=True):
            same_entity(batch.ads, int(batch.timeline.ad[e]), WORLD.ads.rows(t.ad[w : w + 1]))


def test_users_and_ads_stand_once_and_no_event_is_carried_for_nothing() -> None:
    batch = WORLD.batch(np.arange(60), 4)
    assert len(batch.users.ids["user_id"].unique()) == len(batch.users)
    assert len(batch.ads.ids["ad_id"].unique()) == len(batch.ads)
    used = torch.cat([batch.ad_of, batch.timeline.ad]).unique()
    assert used.tolist() == list(range(len(batch.ads)))
    lengths = batch.timeline.offsets.diff()
    for u in range(len(batch.users)):
        assert int(lengths[u]) == int(batch.cut[batch.user_of == u].max())


def test_nothing_gives_an_empty_batch() -> None:
    batch = WORLD.batch([])
    assert (len(batch), len(batch.users), batch.timeline.ad.numel()) == (0, 0, 0)
    assert batch.timeline.offsets.tolist() == [0]


def test_take_rows_keeps_jagged_fields() -> None:
    rows = WORLD.ads.rows(np.arange(10))
    at = torch.tensor([9, 0, 3, 3])
    got = take_rows(rows, at)
    for place, source in enumerate(at.tolist()):
        assert one(got, place, "tags") == one(rows, source, "tags")
        assert one(got, place, "brand") == one(rows, source, "brand")
    assert got.offsets["tags"].numel() == 5
    assert len(take_rows(rows, at[:0])) == 0


def test_a_cut_beyond_its_users_timeline_never_reads_the_next_users_events() -> None:
    imp, lengths = WORLD.impressions, WORLD.timelines.lengths()
    row = int(np.flatnonzero(imp.user < len(lengths) - 1)[0])
    cut = imp.cut.copy()
    cut[row] = lengths[imp.user[row]] + 1
    broken = replace(WORLD, impressions=replace(imp, cut=cut))
    with pytest.raises(JaggedError, match=rf"asked of user {imp.user[row]}, whose timeline has {cut[row] - 1};"):
        broken.batch(np.arange(60))


def test_a_negative_ad_is_refused() -> None:
    ad = WORLD.impressions.ad.copy()
    ad[3] = -1
    with pytest.raises(JaggedError, match="ad: entity index -1"):
        replace(WORLD, impressions=replace(WORLD.impressions, ad=ad)).batch([3])


def test_very_many_ads_give_the_same_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Marks in a table over all ads, or sorting where such a table would be too large."""
    dense = WORLD.batch(np.arange(60), 4)
    monkeypatch.setattr(collate, "DENSE", 0)
    sparse = WORLD.batch(np.arange(60), 4)
    assert torch.equal(dense.ad_of, sparse.ad_of) and torch.equal(dense.timeline.ad, sparse.timeline.ad)
    assert torch.equal(dense.ads.ids["ad_id"], sparse.ads.ids["ad_id"])
    assert dense.ad_of.dtype == sparse.ad_of.dtype == sparse.timeline.ad.dtype == torch.int64
