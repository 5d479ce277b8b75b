"""Impossible batches are refused with a typed error before a kernel can read past its tables."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
import torch

from gem.data.batch import Batch, check_batch, check_ids, check_offsets
from gem.errors import JaggedError
from tests.unit.model.synthetic import make_world

WORLD = make_world(0)
ROWS_OF = WORLD.rows_of()


def batch() -> Batch:
    return WORLD.batch(np.arange(len(WORLD.impressions)))


@pytest.mark.parametrize("events_per_user", [0, 14])
def test_good_batches_pass(events_per_user: int) -> None:
    world = make_world(1, events_per_user=events_per_user)
    check_batch(world.batch(np.arange(60)), ROWS_OF)
    check_batch(world.batch([3]), ROWS_OF)


@pytest.mark.parametrize(
    ("offsets", "num_values", "said"),
    [
        ([1, 2, 3], 3, "must be one-dimensional and start at 0, got [1, 2, 3]"),
        ([], 0, "must be one-dimensional and start at 0"),
        ([[0, 1]], 1, "must be one-dimensional and start at 0"),
        ([0, 4, 2, 5], 5, "offsets run backwards at row 1"),
        ([0, 5, 5, -1, 5], 5, "offsets run backwards at row 2"),
        ([0, 2, 4], 5, "offsets end at 4 but there are 5 values"),
        ([0, 2, 9], 5, "offsets end at 9 but there are 5 values"),
    ],
)
def test_offsets(offsets: list[int], num_values: int, said: str) -> None:
    with pytest.raises(JaggedError, match=re.escape(said)):
        check_offsets("tags", torch.tensor(offsets, dtype=torch.int64), num_values)


def test_number_of_offsets() -> None:
    check_offsets("tags", torch.tensor([0, 1]), 1, 1)
    with pytest.raises(JaggedError, match="tags: 2 offsets for 2 rows"):
        check_offsets("tags", torch.tensor([0, 1]), 1, 2)


@pytest.mark.parametrize("bad", [5, -1, 2**40])
def test_ids_outside_the_table(bad: int) -> None:
    check_ids("ad_id", torch.tensor([0, 4]), 5)
    check_ids("ad_id", torch.tensor([], dtype=torch.int64), 5)
    with pytest.raises(JaggedError, match=rf"ad_id: id {bad} is outside the table, allowed 0\.\.4"):
        check_ids("ad_id", torch.tensor([0, bad, 4]), 5)


def set_at(path: str, at: int, value: int) -> Callable[[Batch], None]:
    """Change one number of the tensor at `path` (dots and field names)."""

    def change(b: Batch) -> None:
        target: object = b
        for part in path.split("."):
            target = target[part] if isinstance(target, dict) else getattr(target, part)
        target[at] = value  # type: ignore[index]

    return change


def cut_short(path: str) -> Callable[[Batch], None]:
    def change(b: Batch) -> None:
        owner, name = (b, path) if "." not in path else (getattr(b, path.split(".")[0]), path.split(".")[1])
        setattr(owner, name, getattr(owner, name)[:-1])

    return change


def unsort(b: Batch) -> None:
    b.user_of = b.user_of.flip(0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (set_at("users.ids.user_id", 0, 15), "users.user_id: id 15 is outside the table, allowed 0..14"),
        (set_at("ads.ids.tags", 1, 9), "ads.tags: id 9 is outside the table, allowed 0..8"),
        (set_at("context.ids.hour", 2, -1), "context.hour: id -1 is outside the table, allowed 0..26"),
        (set_at("ads.offsets.tags", 3, 10**6), "ads.tags: offsets run backwards at row 3"),
        (set_at("ads.offsets.tags", -1, 10**6), "ads.tags: offsets end at 1000000"),
        (set_at("timeline.offsets", 2, -5), "timeline: offsets run backwards at row 1"),
        (set_at("timeline.offsets", 0, 1), "timeline: offsets must be one-dimensional and start at 0"),
        (set_at("timeline.ad", 0, 20), "timeline.ad: id 20 is outside the table"),
        (set_at("user_of", -1, 12), "user_of: id 12 is outside the table"),
        (set_at("ad_of", 0, -1), "ad_of: id -1 is outside the table"),
        (set_at("cut", 0, -1), "cut lies outside"),
        (set_at("cut", 0, 10**6), "cut lies outside"),
        (unsort, "user_of: must not fall; sort the impressions by user"),
        (cut_short("timeline.dwell"), "timeline.dwell: "),
        (cut_short("timeline.time_ms"), "timeline.time_ms: "),
        (cut_short("cut"), "cut: 59 rows for 60 impressions"),
        (cut_short("labels"), "labels: 59 rows for 60 impressions"),
        (cut_short("surface"), "surface: 59 rows for 60 impressions"),
    ],
)
def test_a_batch_with_one_fault_is_refused(change: Callable[[Batch], None], said: str) -> None:
    broken = batch()
    change(broken)
    with pytest.raises(JaggedError, match=re.escape(said)):
        check_batch(broken, ROWS_OF)


def test_single_valued_fields_have_one_id_per_row() -> None:
    broken = batch()
    broken.ads.ids["brand"] = broken.ads.ids["brand"][1:]
    with pytest.raises(JaggedError, match=r"ads.brand: \d+ ids for \d+ rows"):
        check_batch(broken, ROWS_OF)
    broken = batch()
    broken.ads.offsets["tags"] = torch.cat([broken.ads.offsets["tags"], broken.ads.offsets["tags"][-1:]])
    with pytest.raises(JaggedError, match=r"ads.tags: \d+ offsets for \d+ rows"):
        check_batch(broken, ROWS_OF)


def test_timelines_of_more_or_fewer_users_are_refused() -> None:
    broken = batch()
    broken.timeline.offsets = torch.cat([broken.timeline.offsets, broken.timeline.offsets[-1:]])
    with pytest.raises(JaggedError, match="timeline: 14 offsets for 12 rows"):
        check_batch(broken, ROWS_OF)
