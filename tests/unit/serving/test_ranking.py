"""Order by expected value, against a plain sort."""

from __future__ import annotations

import json
import math

import numpy as np

from serving.ranking import rank
from serving.schema import Candidate


def ads(*bids: float) -> list[Candidate]:
    return [Candidate(ad_id=f"ad{i}", bid=b) for i, b in enumerate(bids)]


def test_expected_value_is_bid_times_probability_of_the_objective() -> None:
    p = {"click": np.array([0.1, 0.2, 0.3]), "conversion": np.array([0.05, 0.01, 0.02])}
    known = np.array([True, False, True])
    by_click = rank(ads(1.0, 1.0, 0.5), p, known, "click")
    assert [r["ad_id"] for r in by_click] == ["ad1", "ad2", "ad0"]
    assert [r["rank"] for r in by_click] == [1, 2, 3] and [r["index"] for r in by_click] == [1, 2, 0]
    assert by_click[0] == {
        "ad_id": "ad1", "p_click": 0.2, "p_conversion": 0.01, "expected_value": 0.2,
        "rank": 1, "known": False, "index": 1,
    }  # fmt: skip
    by_conversion = rank(ads(1.0, 1.0, 0.5), p, known, "conversion")
    assert [r["ad_id"] for r in by_conversion] == ["ad0", "ad1", "ad2"]
    assert math.isclose(by_conversion[0]["expected_value"], 0.05)


def test_order_equals_a_plain_stable_sort() -> None:
    rng = np.random.default_rng(0)
    bids, scores = rng.integers(0, 4, 500).astype(float), rng.integers(1, 4, 500) / 10
    got = rank(ads(*bids), {"click": scores}, np.ones(500, bool), "click")
    want = sorted(range(500), key=lambda i: (-bids[i] * scores[i], i))
    assert [r["index"] for r in got] == want


def test_scores_that_are_no_numbers_go_last_as_null() -> None:
    p = {"click": np.array([np.nan, 0.1, np.inf])}
    got = rank(ads(9.0, 1.0, 9.0), p, np.ones(3, bool), "click")
    assert [r["index"] for r in got] == [1, 0, 2]
    assert got[1]["p_click"] is None and got[2]["expected_value"] is None
    json.dumps(got, allow_nan=False)


def test_tasks_without_a_click_are_named_after_themselves() -> None:
    got = rank(ads(2.0), {"install": np.array([0.5])}, np.ones(1, bool), "install")
    assert got[0]["p_install"] == 0.5 and got[0]["expected_value"] == 1.0
    assert got[0]["p_click"] is None and got[0]["p_conversion"] is None
