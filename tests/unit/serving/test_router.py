"""Surfaces find their champion, or an answer that says what to do."""

from __future__ import annotations

import pytest

from gem.errors import ConfigError
from serving.router import Router
from serving.schema import Refusal
from tests.unit.serving.doubles import FakeRanker


def test_every_surface_goes_to_the_champion_of_its_group() -> None:
    feed = FakeRanker("feed", {"feed": "click"})
    rest = FakeRanker("other", {"stories": "click", "messaging": "conversion"})
    router = Router([feed, rest])
    assert router.surfaces == ("feed", "messaging", "stories") and router.unserved == ()
    assert router.route("feed").ranker is feed
    route = router.route("messaging")
    assert route.ranker is rest and route.objective == "conversion"


def test_unknown_surface_names_the_nearest_and_all_allowed() -> None:
    router = Router([FakeRanker("feed", {"feed": "click", "stories": "click"})])
    with pytest.raises(Refusal) as caught:
        router.route("storys")
    assert caught.value.status == 422 and caught.value.problems[0][0] == "surface"
    assert 'Did you mean "stories"?' in str(caught.value) and "['feed', 'stories']" in str(caught.value)


def test_a_known_surface_without_champion_is_not_the_callers_fault() -> None:
    router = Router([FakeRanker("feed", {"feed": "click"}, all_surfaces=("feed", "stories"))])
    assert router.unserved == ("stories",)
    with pytest.raises(Refusal) as caught:
        router.route("stories")
    assert caught.value.status == 503 and "did not pass the gates" in str(caught.value)


def test_of_two_claims_the_younger_bundle_wins_whatever_the_order() -> None:
    old = FakeRanker("other", {"feed": "click"}, created_utc="2026-01-01T00:00:00+00:00")
    new = FakeRanker("feed", {"feed": "click"}, created_utc="2026-02-01T00:00:00+00:00")
    assert Router([old, new]).route("feed").ranker is new
    assert Router([new, old]).route("feed").ranker is new


def test_no_champion_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r'run "make pipeline" first'):
        Router([])


def test_objective_that_no_head_predicts_is_refused_at_start() -> None:
    with pytest.raises(ConfigError, match=r'surface "feed" pays for "install".*It predicts'):
        Router([FakeRanker("feed", {"feed": "install"})])
