"""Real Ray Serve over HTTP: two replicas, real bundles, and the command a person types."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from gem.lineage.bundle import load_bundle
from gem.lineage.gates import Decision
from gem.lineage.registry import Registry
from serving.config import ServingConfig
from serving.fleet import find_champions
from serving.replay import largest_difference
from serving.request_log import read
from serving.schema import RankResponse
from serving.server import RayServe
from tests.unit.serving.tiny import Tiny, build_tiny, sampled

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Served:
    """A running server over the champions of a tiny world."""

    client: httpx.Client
    tiny: Tiny
    config: ServingConfig

    def rank(self, **changes: Any) -> httpx.Response:
        good = {"surface": "feed", "user_id": 5, "candidates": [{"ad_id": 1, "bid": 1.0}, {"ad_id": 2, "bid": 2.0}]}
        return self.client.post("/v1/rank", json={**good, **changes})


@pytest.fixture(scope="module", autouse=True)
def _local_tracking() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        yield


@pytest.fixture(scope="module")
def tiny_runs(_local_tracking: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tiny, Path]:
    """The tiny world with all its models champions of a registry."""
    folder = tmp_path_factory.mktemp("serving")
    tiny = build_tiny(folder)
    registry = Registry(runs=folder / "runs")
    registry.check()
    for m in tiny.models:
        version = registry.register(Path(m.path), m.bundle_hash, "", "generated")
        registry.promote(version.name, version.version, None, Decision(True, ("test",)))
    return tiny, folder / "runs"


@pytest.fixture(scope="module")
def served(ray_session: Any, tiny_runs: tuple[Tiny, Path]) -> Iterator[Served]:
    from ray import serve

    tiny, runs = tiny_runs
    config = ServingConfig(runs=str(runs), port=free_port(), max_ongoing_requests=2, max_queued_requests=4)
    rim = RayServe(config)
    rim.metrics_dir.mkdir(parents=True)
    rim.run(find_champions(config))
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{config.port}", timeout=60) as client:
            yield Served(client, tiny, config)
    finally:
        serve.shutdown()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def test_an_answer_over_http(served: Served) -> None:
    response = served.rank(request_id="e2e-1", context={"device": "desktop"})
    assert response.status_code == 200
    answer = response.json()
    RankResponse.model_validate(answer)
    model = next(m for m in served.tiny.models if m.name == "tiny-vm-feed")
    assert answer["model"]["bundle_hash"] == model.bundle_hash and answer["model"]["version"] == "1"
    assert answer["model"]["store_hash"] == served.tiny.store.hash
    assert [r["rank"] for r in answer["ranked"]] == [1, 2] and answer["user_known"]
    values = [r["expected_value"] for r in answer["ranked"]]
    assert values == sorted(values, reverse=True)
    for r in answer["ranked"]:
        assert r["expected_value"] == pytest.approx(r["p_click"] * (1.0, 2.0)[r["index"]])


def test_replayed_requests_score_offline_as_they_were_served(served: Served) -> None:
    """Real impressions of the test day, asked over HTTP, read back from the log, scored in one offline batch."""
    rng = np.random.default_rng(0)
    asked = {}
    for n, row in enumerate(sampled(served.tiny.raw_impressions(served.tiny.store.split.test_day), 60)):
        ads = [row["ad_id"], *rng.integers(1, 81, 20).tolist(), "unseen"]
        response = served.rank(
            request_id=f"replay-{n}", surface=row["surface"], user_id=row["user_id"], time_ms=row["time_ms"],
            context={"device": row["device"], "slot": row["slot"]}, candidates=[{"ad_id": a, "bid": 1} for a in ads],
        )  # fmt: skip
        assert response.status_code == 200
        asked[f"replay-{n}"] = response.json()
    records = wait_for_records(served.config, set(asked))
    for model in served.tiny.models:
        own = [r for r in records if r["model"]["bundle_hash"] == model.bundle_hash]
        assert len(own) > 5
        assert largest_difference(own, load_bundle(Path(model.path)), served.tiny.store) < 1e-5
    for record in records:  # and the log tells what was answered
        by_index = {r["index"]: [r["p_click"], r["p_conversion"]] for r in asked[record["request_id"]]["ranked"]}
        assert [by_index[i] for i in range(len(by_index))] == record["p"]
    files = list(served.config.folder.glob("requests-*.jsonl"))
    assert len(files) == 2, "both replicas answered, each with a file of its own"


def wait_for_records(config: ServingConfig, ids: set[str]) -> list[dict[str, Any]]:
    deadline = time.monotonic() + 20
    while True:
        found = [r for r in read(config.folder) if r["request_id"] in ids]
        if len(found) == len(ids) or time.monotonic() > deadline:
            assert {r["request_id"] for r in found} == ids
            return found
        time.sleep(0.1)


def test_unseen_ids_are_served_and_flagged(served: Served) -> None:
    answer = served.rank(user_id="nobody", candidates=[{"ad_id": "new", "bid": 1}]).json()
    assert answer["user_known"] is False and answer["ranked"][0]["known"] is False
    assert answer["flags"] == ["unknown_user", "unknown_ads", "no_history"]
    assert 0 < answer["ranked"][0]["p_click"] < 1


def test_bad_requests_over_http(served: Served) -> None:
    none = served.rank(candidates=[])
    assert none.status_code == 422 and none.json()["detail"][0]["field"] == "candidates"
    many = served.rank(candidates=[{"ad_id": i, "bid": 1} for i in range(20_000)])
    assert many.status_code == 422 and many.json()["limit"] == 2000
    big = served.client.post("/v1/rank", content=b" " * 1_000_001)
    assert big.status_code == 413 and big.json()["limit"] == 1_000_000
    surface = served.rank(surface="fed")
    assert surface.status_code == 422 and "['feed', 'messaging', 'stories']" in surface.json()["detail"][0]["message"]
    nan = served.client.post("/v1/rank", content=b'{"surface":"feed","user_id":1,"candidates":[{"ad_id":1,"bid":NaN}]}')
    assert nan.status_code == 422 and nan.json()["detail"][0]["field"] == "candidates.0.bid"
    assert served.client.post("/v1/rank", content=b"{").status_code == 422


def test_health_docs_and_metrics_of_both_replicas(served: Served) -> None:
    health = served.client.get("/healthz")
    assert health.status_code == 200 and len(health.json()["models"]) == 3
    assert "RankRequest" in served.client.get("/openapi.json").json()["components"]["schemas"]
    assert served.client.get("/docs").status_code == 200
    before = answered(served)
    for _ in range(12):
        assert served.rank(surface="messaging").status_code == 200
    for _ in range(4):  # whichever replica is asked, it tells of both
        assert answered(served) == before + 12


def answered(served: Served) -> float:
    wanted = 'gem_rank_requests_total{status="200",surface="messaging"} '
    lines = served.client.get("/metrics").text.splitlines()
    return next((float(line.removeprefix(wanted)) for line in lines if line.startswith(wanted)), 0.0)


def test_overload_is_refused_at_once_and_passes(served: Served) -> None:
    """2 replicas x 2 requests in hand and 4 waiting; the rest hears 503 with Retry-After."""
    body = {"surface": "feed", "user_id": 5, "candidates": [{"ad_id": i % 80 + 1, "bid": 1} for i in range(2000)]}
    content = json.dumps(body).encode()
    with ThreadPoolExecutor(48) as pool:
        answers = list(pool.map(lambda _: served.client.post("/v1/rank", content=content), range(48)))
    seen = Counter(a.status_code for a in answers)
    assert set(seen) == {200, 503} and seen[200] >= 4, seen
    assert {a.headers.get("retry-after") for a in answers if a.status_code == 503} == {"1"}
    assert served.rank().status_code == 200


@pytest.mark.slow
def test_the_command_serves_its_own_example_and_stops_on_ctrl_c(tiny_runs: tuple[Tiny, Path]) -> None:
    port = free_port()
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "platform"), str(ROOT)])}
    command = [sys.executable, "-m", "serving", "--runs", str(tiny_runs[1]), "--port", str(port), "--replicas", "1"]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        curl = next((line for line in process.stdout if line.startswith("try: ")), "")
        words = shlex.split(curl.removeprefix("try: "))
        assert words[:2] == ["curl", "-s"], process.stderr.read() if process.stderr and process.poll() else curl
        response = httpx.post(words[2], content=words[words.index("-d") + 1], timeout=60)
        assert response.status_code == 200
        assert response.json()["flags"] == [] and response.json()["user_known"] is True
    finally:
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
    assert process.returncode == 0 and "Traceback" not in err
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/healthz", timeout=5)
    assert not any_left(process.pid), "Ctrl-C leaves no process of the cluster behind"
    assert not list((tiny_runs[1] / "generated" / "serving").glob(f"metrics-{process.pid}"))


def any_left(session: int) -> list[int]:
    """Processes of the command's session that still run 20 s after it ended."""
    import psutil

    left: list[int] = []
    for _ in range(100):
        left = []
        for p in psutil.process_iter():
            try:
                if os.getsid(p.pid) == session and p.status() != psutil.STATUS_ZOMBIE:
                    left.append(p.pid)
            except (psutil.Error, ProcessLookupError, PermissionError):
                continue
        if not left:
            break
        time.sleep(0.2)
    return left
