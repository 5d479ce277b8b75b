"""One request from bytes to answer, and the liveness probe: everything between HTTP and the model.

All model work of a replica happens on one thread of its own. The event loop only waits, so that it can
always answer; and the model never sees two requests at once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from serving.config import ServingConfig
from serving.metrics import Metrics
from serving.ranking import rank
from serving.request_log import RequestLog
from serving.router import Route, Router
from serving.schema import RankRequest, Refusal, parse_request
from serving.scorer import Scores
from serving.store import History

T = TypeVar("T")
logger = logging.getLogger("serving")


class RankService:
    """Answers ranking requests with the champions of a `Router`."""

    def __init__(
        self, router: Router, config: ServingConfig, log: RequestLog | None = None,
        now_s: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        self.router, self.config = router, config
        self._log, self._now_s = log, now_s
        self.metrics = Metrics(router.surfaces)
        self.metrics.serving(r.model for r in router.rankers)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="model")
        self._golden = [r.golden() for r in router.rankers]

    def close(self) -> None:
        """Finish what waits on the model thread (also the last log lines) and end it."""
        self._thread.shutdown(wait=True)

    async def rank(self, body: bytes, request_id: str) -> dict[str, Any]:
        """Answer one request body (see `schema.RankResponse`); an id in the body wins. Raises Refusal."""
        start = time.perf_counter()
        answer, record = await self._on_model_thread(self._answer, body, request_id, start)
        self.metrics.stage("total", time.perf_counter() - start)
        if self._log is not None:
            self._thread.submit(self._write, record)
        return answer

    async def health(self) -> tuple[bool, dict[str, Any]]:
        """Score a fixed tiny request with every champion on the model thread and compare with start-up."""
        models = [r.model.model_dump() for r in self.router.rankers]
        try:
            work = self._on_model_thread(self._probe)
            problems = await asyncio.wait_for(work, self.config.health_timeout_s)
        except TimeoutError:
            problems = [f"the model thread did not answer within {self.config.health_timeout_s:g} s"]
        status = "failing" if problems else "ok"
        unserved = list(self.router.unserved)
        return not problems, {"status": status, "problems": problems, "models": models, "unserved": unserved}

    async def _on_model_thread(self, work: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)

    def _answer(self, body: bytes, request_id: str, submitted: float) -> tuple[dict[str, Any], dict[str, Any]]:
        begin = time.perf_counter()
        self.metrics.stage("queue", begin - submitted)
        surface = None
        try:
            request = parse_request(body, self.config.max_candidates)
            surface = request.surface
            route = self.router.route(surface)
            answer, record = self._score(request, route, request_id)
        except Refusal as e:
            self.metrics.refused(surface, e.status)
            raise
        except Exception:
            self.metrics.refused(surface, 500)
            raise
        self.metrics.stage("score", time.perf_counter() - begin)
        return answer, record

    def _score(self, request: RankRequest, route: Route, request_id: str) -> tuple[dict[str, Any], dict[str, Any]]:
        ranker = route.ranker
        context = ranker.context.values(request.context)
        time_ms = int(self._now_s() * 1000) if request.time_ms is None else request.time_ms
        user = ranker.find_user(request.user_id)
        history = ranker.history(user, time_ms)
        ad_ids = [c.ad_id for c in request.candidates]
        scores = ranker.score(user, time_ms, request.surface, context, ad_ids, history)
        p = {task: scores.p[:, k] for k, task in enumerate(ranker.tasks)}
        head: dict[str, Any] = {
            "request_id": request.request_id or request_id,
            "model": ranker.model.model_dump(),
            "surface": route.surface,
            "objective": route.objective,
            "user_known": scores.user_known,
            "time_ms": time_ms,
        }
        answer = {**head, "ranked": rank(request.candidates, p, scores.known, route.objective)}
        answer["flags"] = _flags(request, scores)
        unknown = int((~scores.known).sum())
        self.metrics.answered(route.surface, len(ad_ids), unknown, scores.user_known)
        return answer, {**head, **_logged(request, scores, history, context, ranker.tasks)}

    def _write(self, record: dict[str, Any]) -> None:
        assert self._log is not None
        try:
            self._log.write(record)
        except OSError as e:  # a full disk must not stop the ranking
            self.metrics.log_failed()
            logger.warning("request %s could not be logged: %s", record["request_id"], e)

    def _probe(self) -> list[str]:
        problems = []
        for ranker, want in zip(self.router.rankers, self._golden, strict=True):
            try:
                got = ranker.golden()
            except Exception as e:  # any failure of the model path is what the probe is for
                problems.append(f"{ranker.model.name}: {type(e).__name__}: {e}")
                continue
            if not np.isfinite(got.p).all():
                problems.append(f"{ranker.model.name}: scores are not finite")
            elif not np.allclose(got.p, want.p, rtol=0, atol=1e-6):
                problems.append(f"{ranker.model.name}: scores differ from those at start")
        return problems


def _flags(request: RankRequest, scores: Scores) -> list[str]:
    found = {
        "unknown_user": not scores.user_known,
        "unknown_ads": not scores.known.all(),
        "no_history": scores.num_events == 0,
        "duplicate_candidates": len({str(c.ad_id) for c in request.candidates}) < len(request.candidates),
        "non_finite_score": not np.isfinite(scores.p).all(),
    }
    return [name for name, true in found.items() if true]


def _logged(
    request: RankRequest, scores: Scores, history: History, context: dict[str, object], tasks: tuple[str, ...]
) -> dict[str, Any]:
    """What the log adds to the answer's head: inputs in request order, and the scores [N][K]."""
    return {
        "user_id": request.user_id,
        "context": context,
        "cut": history.cut,
        "candidates": [[c.ad_id, c.bid] for c in request.candidates],
        "tasks": list(tasks),
        "p": scores.p.tolist(),
    }
