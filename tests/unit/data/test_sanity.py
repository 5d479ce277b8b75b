"""Checks of the data set as a whole: keys that are not unique, outcomes that are not settled."""

from __future__ import annotations

import pytest

from gem.data.build.sanity import check_distinct, check_settled
from gem.data.days import HOUR_MS, Split, day_number
from gem.data.spec import parse_spec
from gem.errors import DataError
from tests.unit.data.toy_log import SPEC

DAY = 24 * HOUR_MS
SPLIT = Split(("2024-03-04",), "2024-03-05", "2024-03-06")


def shard(conflicts: int) -> dict[str, int]:
    return {"conflicts": conflicts, "impressions": 90, "duplicates": 10 - conflicts}


def test_an_id_of_whole_requests_is_refused_with_the_column() -> None:
    spec = parse_spec(SPEC)
    check_distinct(spec, [shard(1), shard(1)])
    with pytest.raises(DataError, match=r"3 of 200 rows have the same .* as an impression of another ad"):
        check_distinct(spec, [shard(1), shard(2)])


def labelled(**changes: object) -> object:
    conversion = SPEC["labels"]["conversion"] | {"window_hours": 24} | changes
    return parse_spec(SPEC | {"labels": SPEC["labels"] | {"conversion": conversion}})


def test_a_test_day_without_a_settled_outcome_is_refused_and_the_last_good_day_named() -> None:
    start = day_number("2024-03-06") * DAY
    check_settled(labelled(), SPLIT, {"conversion": start + DAY})
    with pytest.raises(DataError, match=r"test day 2024-03-06 is settled.*choose data.test_day no later|2024-03-05"):
        check_settled(labelled(), SPLIT, {"conversion": start + DAY - 1})
    check_settled(labelled(complete=True), SPLIT, {"conversion": start})
    check_settled(labelled(window_hours=None), SPLIT, {"conversion": start})
