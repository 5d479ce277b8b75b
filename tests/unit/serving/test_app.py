"""The HTTP surface over a fake model: every bad input, limits, failures, health and metrics."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from serving.app import build_app
from serving.config import ServingConfig
from serving.request_log import RequestLog, read
from serving.router import Router
from serving.schema import RankResponse
from serving.service import RankService
from tests.unit.serving.doubles import FakeRanker

NOW_MS = 1_767_225_600_000


class Stack:
    """A service over one fake ranker, its client and its log folder."""

    def __init__(self, folder: Path, **limits: Any) -> None:
        self.ranker = FakeRanker("feed", {"feed": "click", "shop": "conversion"}, ("feed", "shop", "stories"))
        self.folder = folder
        config = ServingConfig(max_body_bytes=200_000, health_timeout_s=0.5, **limits)
        log = RequestLog(folder, "r1", 10_000_000)
        self.service = RankService(Router([self.ranker]), config, log, now_s=lambda: NOW_MS / 1000)
        self.client = TestClient(build_app(self.service), raise_server_exceptions=False)

    def rank(self, **changes: Any) -> httpx.Response:
        good = {"surface": "feed", "user_id": 7, "candidates": [{"ad_id": 1, "bid": 1}, {"ad_id": 200, "bid": 1}]}
        return self.client.post("/v1/rank", json={**good, **changes})

    def metric(self, line: str) -> float:
        text = self.client.get("/metrics").text
        return next((float(row.rsplit(" ", 1)[1]) for row in text.splitlines() if row.startswith(line)), 0.0)


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    s = Stack(tmp_path / "log")
    yield s
    s.ranker.block.set()
    s.service.close()


def test_an_answer_is_complete_ordered_and_says_who_made_it(stack: Stack) -> None:
    response = stack.rank(request_id="abc-1")
    answer = response.json()
    assert response.status_code == 200
    RankResponse.model_validate(answer)
    assert answer["request_id"] == "abc-1" and answer["surface"] == "feed" and answer["objective"] == "click"
    assert answer["model"] == {"name": "fake-feed", "version": "3", "bundle_hash": "b" * 64, "store_hash": "d" * 64}
    assert [r["ad_id"] for r in answer["ranked"]] == [200, 1]
    assert answer["ranked"][0] == {
        "ad_id": 200, "p_click": 0.2, "p_conversion": 0.02, "expected_value": 0.2, "rank": 1, "known": True, "index": 1,
    }  # fmt: skip
    assert answer["user_known"] is True and answer["flags"] == []


def test_expected_value_pays_for_the_objective_of_the_surface(stack: Stack) -> None:
    answer = stack.rank(surface="shop", candidates=[{"ad_id": 200, "bid": 50}]).json()
    assert answer["objective"] == "conversion"
    assert answer["ranked"][0]["expected_value"] == pytest.approx(50 * 0.02)


def test_time_defaults_to_now_and_context_reaches_the_model(stack: Stack) -> None:
    assert stack.rank(context={"device": "ios"}).json()["time_ms"] == NOW_MS
    assert stack.ranker.seen[-1] == (7, NOW_MS, "feed", {"device": "ios"})
    assert stack.rank(time_ms=NOW_MS - 5).json()["time_ms"] == NOW_MS - 5


def test_unseen_user_and_ads_are_served_and_flagged(stack: Stack) -> None:
    answer = stack.rank(user_id="nobody", candidates=[{"ad_id": "new", "bid": 1}, {"ad_id": 5, "bid": 1}]).json()
    assert answer["user_known"] is False
    assert answer["flags"] == ["unknown_user", "unknown_ads", "no_history"]
    assert {r["ad_id"]: r["known"] for r in answer["ranked"]} == {"new": False, 5: True}
    assert stack.metric('gem_rank_unknown_users_total{surface="feed"}') == 1
    assert stack.metric('gem_rank_unknown_ads_total{surface="feed"}') == 1


def test_request_id_comes_from_the_body_or_the_header_or_is_made(stack: Stack) -> None:
    body = {"surface": "feed", "user_id": 7, "candidates": [{"ad_id": 1, "bid": 1}]}
    for headers, given, wanted in (
        ({"X-Request-ID": "h-1"}, {"request_id": "b-1"}, "b-1"),
        ({"X-Request-ID": "h-1"}, {}, "h-1"),
    ):
        response = stack.client.post("/v1/rank", json={**body, **given}, headers=headers)
        assert response.json()["request_id"] == wanted
    made = [
        stack.client.post("/v1/rank", json=body, headers={"X-Request-ID": bad}).json() for bad in ("", "a b", "x" * 200)
    ]
    assert len({m["request_id"] for m in made}) == 3 and all(len(m["request_id"]) == 32 for m in made)
    refused = stack.client.post("/v1/rank", json={}, headers={"X-Request-ID": "h-2"})
    assert refused.json()["request_id"] == "h-2"


def test_duplicate_candidates_are_both_ranked_and_flagged(stack: Stack) -> None:
    answer = stack.rank(candidates=[{"ad_id": 5, "bid": 1}, {"ad_id": 5, "bid": 2}]).json()
    assert [r["index"] for r in answer["ranked"]] == [1, 0] and answer["flags"] == ["duplicate_candidates"]


@pytest.mark.parametrize(
    ("changes", "status", "code", "field"),
    [
        ({"candidates": []}, 422, "invalid_request", "candidates"),
        ({"candidates": [{"ad_id": 1, "bid": 1}] * 2001}, 422, "too_many_candidates", "candidates"),
        ({"candidates": [{"ad_id": 1, "bid": "1"}]}, 422, "invalid_request", "candidates.0.bid"),
        ({"user_id": None}, 422, "invalid_request", "user_id"),
        ({"user_id": "u" * 1_000_000}, 413, "body_too_large", "body"),
        ({"surface": "fed"}, 422, "unknown_surface", "surface"),
        ({"surface": "stories"}, 503, "no_champion", "surface"),
        ({"context": {"devise": "ios"}}, 422, "invalid_context", "context.devise"),
        ({"time_ms": 1_700_000_000}, 422, "invalid_request", "time_ms"),
        ({"extra": 1}, 422, "invalid_request", "extra"),
    ],
)
def test_refusals_have_one_form_and_name_the_field(
    stack: Stack, changes: dict[str, Any], status: int, code: str, field: str
) -> None:
    response = stack.rank(**changes)
    answer = response.json()
    assert response.status_code == status
    assert answer["error"] == code and answer["detail"][0]["field"] == field and answer["detail"][0]["message"]
    assert answer["request_id"]
    assert stack.ranker.seen == [(0, 0, "golden", {})], "a refused request never reaches the model"


def test_20000_candidates_are_refused_with_the_limit(stack: Stack) -> None:
    many = [{"ad_id": i, "bid": 1.5} for i in range(20_000)]
    response = stack.rank(candidates=many)
    assert response.status_code == 413 and response.json()["limit"] == 200_000
    compact = json.dumps({"surface": "feed", "user_id": 1, "candidates": [{}] * 20_000}, separators=(",", ":"))
    response = stack.client.post("/v1/rank", content=compact)
    assert response.status_code == 422 and response.json()["limit"] == 2000


@pytest.mark.parametrize("body", [b"", b"not json", b"\xff\xff", b'{"surface": "feed", "surface": "feed"}', b"[]"])
def test_malformed_bodies_are_422(stack: Stack, body: bytes) -> None:
    assert stack.client.post("/v1/rank", content=body).status_code == 422


def test_nan_in_the_body_names_its_field(stack: Stack) -> None:
    body = b'{"surface": "feed", "user_id": 1, "candidates": [{"ad_id": 1, "bid": NaN}]}'
    response = stack.client.post("/v1/rank", content=body)
    assert response.status_code == 422 and response.json()["detail"][0]["field"] == "candidates.0.bid"


def test_surrogates_in_names_do_not_break_the_answer(stack: Stack) -> None:
    body = b'{"surface": "feed", "user_id": 1, "candidates": [{"ad_id": 1, "bid": 1}], "\\ud800": 1}'
    assert stack.client.post("/v1/rank", content=body).status_code == 422
    body = b'{"surface": "\\ud83d\\ude00", "user_id": 1, "candidates": [{"ad_id": 1, "bid": 1}]}'
    assert stack.client.post("/v1/rank", content=body).json()["error"] == "unknown_surface"


def test_body_limit_holds_without_a_declared_length(stack: Stack) -> None:
    sent = []

    def chunks() -> Iterator[bytes]:
        for n in range(100):
            sent.append(n)
            yield b" " * 10_000

    response = stack.client.post("/v1/rank", content=chunks())
    assert response.status_code == 413 and response.json()["limit"] == 200_000


def test_scores_that_are_no_numbers_come_out_as_null(stack: Stack) -> None:
    stack.ranker.shift = float("nan")
    response = stack.rank()
    assert response.status_code == 200
    assert [r["p_click"] for r in response.json()["ranked"]] == [None, None]
    assert response.json()["flags"] == ["non_finite_score"]


def test_a_failing_model_is_a_500_without_inner_details(stack: Stack) -> None:
    stack.ranker.fail = RuntimeError("secret path /x")
    response = stack.rank()
    assert response.status_code == 500 and response.json()["error"] == "internal"
    assert "secret" not in response.text
    assert stack.metric('gem_rank_requests_total{status="500",surface="feed"}') == 1


def test_health_goes_through_the_model(stack: Stack) -> None:
    response = stack.client.get("/healthz")
    assert response.status_code == 200 and response.json()["status"] == "ok"
    assert response.json()["models"][0]["name"] == "fake-feed" and response.json()["unserved"] == ["stories"]
    stack.ranker.fail = RuntimeError("broken")
    assert stack.client.get("/healthz").status_code == 503
    stack.ranker.fail = None
    stack.ranker.shift = 0.01
    assert "differ" in stack.client.get("/healthz").json()["problems"][0]
    stack.ranker.shift = float("nan")
    assert "not finite" in stack.client.get("/healthz").json()["problems"][0]


def test_a_stuck_model_fails_health_in_time_and_never_blocks_the_loop(stack: Stack) -> None:
    stack.ranker.block.clear()

    async def run() -> tuple[httpx.Response, httpx.Response, float]:
        transport = httpx.ASGITransport(app=stack.client.app)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            start = time.perf_counter()
            metrics, health = await asyncio.gather(client.get("/metrics"), client.get("/healthz"))
            return metrics, health, time.perf_counter() - start

    metrics, health, seconds = asyncio.run(run())
    assert metrics.status_code == 200
    assert health.status_code == 503 and "did not answer" in health.json()["problems"][0]
    assert seconds < 5


def test_all_model_work_happens_on_one_thread(stack: Stack) -> None:
    stack.ranker.threads.clear()
    callers = [threading.Thread(target=stack.rank) for _ in range(8)]
    for t in callers:
        t.start()
    for t in callers:
        t.join()
    assert len(stack.ranker.seen) == 9 and len(stack.ranker.threads) == 1
    assert stack.ranker.threads.isdisjoint({threading.get_ident(), *(t.ident for t in callers)})


def test_every_answer_is_logged_with_its_inputs(stack: Stack) -> None:
    answer = stack.rank(request_id="r-9", context={"device": "ios"}).json()
    stack.rank(candidates=[])
    stack.service.close()
    (record,) = read(stack.folder)
    assert record["request_id"] == "r-9" and record["model"] == answer["model"]
    assert record["candidates"] == [[1, 1.0], [200, 1.0]] and record["context"] == {"device": "ios"}
    assert (record["user_id"], record["time_ms"], record["cut"], record["surface"]) == (7, NOW_MS, 5, "feed")
    for row in answer["ranked"]:
        assert record["p"][row["index"]] == [row["p_click"], row["p_conversion"]]


def test_a_full_disk_does_not_stop_ranking(stack: Stack) -> None:
    stack.folder.parent.mkdir(exist_ok=True)
    stack.folder.write_text("a file where the folder should be")
    assert stack.rank().status_code == 200
    stack.service.close()
    assert stack.metric("gem_request_log_errors_total") == 1


def test_metrics_count_with_bounded_labels(stack: Stack) -> None:
    stack.rank()
    for n in range(5):
        stack.rank(surface=f"made-up-{n}")
    assert stack.metric('gem_rank_requests_total{status="200",surface="feed"}') == 1
    assert stack.metric('gem_rank_requests_total{status="422",surface="unknown"}') == 5
    assert stack.metric('gem_rank_seconds_count{stage="score"}') == 1
    assert stack.metric('gem_rank_candidates_sum{surface="feed"}') == 2
    assert stack.metric("gem_model_info") == 1
    assert "made-up" not in stack.client.get("/metrics").text


def test_openapi_describes_the_request_and_every_reference_resolves(stack: Stack) -> None:
    schema = stack.client.get("/openapi.json").json()
    rank = schema["paths"]["/v1/rank"]["post"]
    assert rank["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("/RankRequest")
    assert {"200", "413", "422", "503"} <= set(rank["responses"])
    names = set(schema["components"]["schemas"])
    refs = {part.split('"')[0] for part in json.dumps(schema).split("#/components/schemas/")[1:]}
    assert refs <= names and {"RankRequest", "Candidate", "RankResponse", "ErrorResponse"} <= names
    assert stack.client.get("/docs").status_code == 200


def test_other_methods_and_paths(stack: Stack) -> None:
    assert stack.client.get("/v1/rank").status_code == 405
    assert stack.client.get("/nothing").status_code == 404
