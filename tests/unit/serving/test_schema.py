"""The edge: what a request may not be, and that the answer names the field."""

from __future__ import annotations

import json
import pickle

import pytest

from serving.schema import Candidate, RankRequest, Refusal, parse_request

GOOD = {"surface": "feed", "user_id": 7, "candidates": [{"ad_id": 1, "bid": 2.5}, {"ad_id": "a", "bid": 0}]}


def body(**changes: object) -> bytes:
    return json.dumps({**GOOD, **changes}).encode()


def refusal(raw: bytes, max_candidates: int = 2000) -> Refusal:
    with pytest.raises(Refusal) as caught:
        parse_request(raw, max_candidates)
    assert caught.value.status == 422
    return caught.value


def test_a_good_request_keeps_types_and_defaults() -> None:
    request = parse_request(body(context={"slot": 3, "tags": ["x", 1], "price": 0.5, "none": None}, time_ms=None))
    assert request.candidates == [Candidate(ad_id=1, bid=2.5), Candidate(ad_id="a", bid=0.0)]
    assert type(request.candidates[0].ad_id) is int and type(request.candidates[1].ad_id) is str
    assert request.context == {"slot": 3, "tags": ["x", 1], "price": 0.5, "none": None}
    assert request.request_id is None and request.time_ms is None


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("surface", {"surface": 3}),
        ("surface", {"surface": None}),
        ("surface", {"surface": ""}),
        ("surface", {"surface": "x" * 257}),
        ("surface", {"surface": "\ud800"}),
        ("user_id", {"user_id": None}),
        ("user_id", {"user_id": True}),
        ("user_id", {"user_id": 1.0}),
        ("user_id", {"user_id": []}),
        ("user_id", {"user_id": ""}),
        ("user_id", {"user_id": "u" * 300_000}),
        ("user_id", {"user_id": 2**63}),
        ("user_id", {"user_id": float("nan")}),
        ("user_id", {"user_id": "\udfff"}),
        ("time_ms", {"time_ms": "1700000000000"}),
        ("time_ms", {"time_ms": 1.7e12}),
        ("time_ms", {"time_ms": True}),
        ("time_ms", {"time_ms": -5}),
        ("time_ms", {"time_ms": 2**70}),
        ("context", {"context": [1]}),
        ("context.slot", {"context": {"slot": {"deep": 1}}}),
        ("context.slot", {"context": {"slot": float("inf")}}),
        ("context.slot", {"context": {"slot": [[1]]}}),
        ("context.slot", {"context": {"slot": [1] * 257}}),
        ("candidates", {"candidates": []}),
        ("candidates", {"candidates": None}),
        ("candidates", {"candidates": {"ad_id": 1}}),
        ("candidates.1", {"candidates": [{"ad_id": 1, "bid": 1}, 5]}),
        ("candidates.0.ad_id", {"candidates": [{"bid": 1}]}),
        ("candidates.0.ad_id", {"candidates": [{"ad_id": None, "bid": 1}]}),
        ("candidates.0.bid", {"candidates": [{"ad_id": 1}]}),
        ("candidates.0.bid", {"candidates": [{"ad_id": 1, "bid": "1"}]}),
        ("candidates.0.bid", {"candidates": [{"ad_id": 1, "bid": True}]}),
        ("candidates.0.bid", {"candidates": [{"ad_id": 1, "bid": None}]}),
        ("candidates.0.bid", {"candidates": [{"ad_id": 1, "bid": -0.01}]}),
        ("candidates.0.bid", {"candidates": [{"ad_id": 1, "bid": float("nan")}]}),
        ("candidates.0.bid", {"candidates": [{"ad_id": 1, "bid": float("-inf")}]}),
        ("candidates.0.bid", {"candidates": [{"ad_id": 1, "bid": 10**400}]}),
        ("candidates.0.color", {"candidates": [{"ad_id": 1, "bid": 1, "color": 1}]}),
        ("request_id", {"request_id": "two words"}),
        ("request_id", {"request_id": 5}),
        ("page", {"page": 1}),
    ],
)
def test_wrong_values_name_their_field(field: str, changes: dict[str, object]) -> None:
    assert field in [name for name, _ in refusal(body(**changes)).problems]


@pytest.mark.parametrize("field", ["surface", "user_id", "candidates"])
def test_missing_fields_are_named(field: str) -> None:
    raw = {k: v for k, v in GOOD.items() if k != field}
    assert refusal(json.dumps(raw).encode()).problems == [(field, "is required")]


def test_overflowing_number_is_not_infinity() -> None:
    raw = body().replace(b"2.5", b"1e400")
    assert refusal(raw).problems[0][0] == "candidates.0.bid"


def test_misspelt_field_gets_the_nearest_name() -> None:
    assert 'Did you mean "surface"?' in str(refusal(body(sruface="feed")))
    assert 'Did you mean "bid"?' in str(refusal(body(candidates=[{"ad_id": 1, "bids": 1}])))


def test_seconds_are_recognised() -> None:
    assert "looks like seconds" in str(refusal(body(time_ms=1_700_000_000)))


def test_no_candidates_says_so() -> None:
    assert refusal(body(candidates=[])).problems == [("candidates", "must name at least one ad, got an empty list")]


def test_too_many_candidates_name_the_limit_before_they_are_validated() -> None:
    raw = body(candidates=[{"nonsense": 1}] * 20_000)
    error = refusal(raw)
    assert error.code == "too_many_candidates" and error.limit == 2000
    assert "20000" in str(error) and "2000" in str(error) and "candidates" in str(error)
    assert len(parse_request(body(candidates=[{"ad_id": 1, "bid": 1}] * 2000)).candidates) == 2000


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b'{"a": 1,}', "is not JSON"),
        (b"\xff\xfe{}", "not UTF-8 at byte 0"),
        (b"[1, 2]", "must be a JSON object, got an array"),
        (b"null", "got null"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"user_id": ' + b"1" * 5000 + b"}", "is not JSON"),
    ],
)
def test_bodies_that_are_no_json_object(raw: bytes, says: str) -> None:
    error = refusal(raw)
    assert error.problems[0][0] == "body" and says in str(error)


@pytest.mark.parametrize("inner", [b'"user_id": 1, "user_id": 2', b'"context": {"x": 1, "x": 1}'])
def test_repeated_keys_are_refused(inner: bytes) -> None:
    error = refusal(b"{" + inner + b"}")
    assert error.code == "duplicate_key" and error.problems[0][0] in ("user_id", "x")


def test_many_errors_are_cut() -> None:
    assert len(refusal(body(candidates=[{"ad_id": 1, "bid": -1}] * 500)).problems) == 10


def test_messages_never_echo_long_input() -> None:
    assert len(str(refusal(body(surface=["z" * 100_000])))) < 500


def test_refusal_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(Refusal(422, "code", [("f", "m")], 9)))
    assert (error.status, error.code, error.problems, error.limit) == (422, "code", [("f", "m")], 9)


def test_request_schema_is_complete_for_openapi() -> None:
    schema = RankRequest.model_json_schema()
    assert set(schema["required"]) == {"surface", "user_id", "candidates"}
    assert schema["properties"]["candidates"]["maxItems"] == 2000
