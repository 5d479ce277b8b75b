"""Prometheus metrics of the server. Labels are surfaces, models and status codes: bounded by design.

With PROMETHEUS_MULTIPROC_DIR set before the process starts, all replicas of a machine share one set of
files and every scrape sees the sum, whichever replica answers it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from serving.schema import ModelRef

MULTIPROC_ENV = "PROMETHEUS_MULTIPROC_DIR"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_COUNTS = (1, 10, 50, 100, 200, 500, 1000, 2000)


class Metrics:
    """Counters and histograms of one replica; `text()` renders those of all replicas of the machine."""

    def __init__(self, surfaces: Iterable[str]) -> None:
        self._surfaces = frozenset(surfaces)
        self.registry = CollectorRegistry()
        r = self.registry
        self._requests = Counter(
            "gem_rank_requests_total", "Ranking requests by answer.", ["surface", "status"], registry=r
        )
        self._seconds = Histogram(
            "gem_rank_seconds", "Time per stage.", ["stage"], buckets=_SECONDS, registry=r
        )  # fmt: skip
        self._candidates = Histogram(
            "gem_rank_candidates", "Candidates per answered request.", ["surface"], buckets=_COUNTS, registry=r
        )
        self._users = Counter("gem_rank_unknown_users_total", "Requests of unseen users.", ["surface"], registry=r)
        self._ads = Counter("gem_rank_unknown_ads_total", "Unseen candidate ads.", ["surface"], registry=r)
        self._log_errors = Counter("gem_request_log_errors_total", "Requests that could not be logged.", registry=r)
        self._models = Gauge(
            "gem_model_info", "Champions being served; the value is always 1.",
            ["model", "version", "bundle"], registry=r, multiprocess_mode="livemax",
        )  # fmt: skip

    def refused(self, surface: str | None, status: int) -> None:
        """Count a request that was not answered. Surfaces nobody knows share one label."""
        self._requests.labels(surface if surface in self._surfaces else "unknown", str(status)).inc()

    def answered(self, surface: str, num_candidates: int, unknown_ads: int, user_known: bool) -> None:
        self._requests.labels(surface, "200").inc()
        self._candidates.labels(surface).observe(num_candidates)
        self._ads.labels(surface).inc(unknown_ads)
        self._users.labels(surface).inc(0 if user_known else 1)

    def stage(self, stage: str, seconds: float) -> None:
        """`stage`: total, queue (waiting for the model thread) or score."""
        self._seconds.labels(stage).observe(seconds)

    def log_failed(self) -> None:
        self._log_errors.inc()

    def serving(self, models: Iterable[ModelRef]) -> None:
        """Announce the champions."""
        for m in models:
            self._models.labels(m.name, m.version, m.bundle_hash[:12]).set(1)

    def text(self) -> bytes:
        """Prometheus text format."""
        if MULTIPROC_ENV not in os.environ:
            return generate_latest(self.registry)
        shared = CollectorRegistry()
        MultiProcessCollector(shared)  # type: ignore[no-untyped-call]
        return generate_latest(shared)
