"""One frozen configuration for the server; every limit a request can meet stands here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gem.errors import ConfigError

MAX_CANDIDATES = 2000
MAX_BODY_BYTES = 1_000_000


@dataclass(frozen=True)
class ServingConfig:
    """Where the models are, how many replicas serve them, and the limits of a request."""

    runs: str = "runs"
    dataset: str = "generated"  # name of the data set (of its spec)
    host: str = "127.0.0.1"
    port: int = 8000
    num_replicas: int = 2
    replica_cpus: float = 0.5  # logical CPUs Ray reserves per replica
    torch_threads: int = 1  # of the one model thread of a replica
    max_candidates: int = MAX_CANDIDATES
    max_body_bytes: int = MAX_BODY_BYTES
    max_ongoing_requests: int = 8  # per replica; the rest waits at the proxy
    max_queued_requests: int = 64  # per proxy; beyond it 503 with Retry-After
    retry_after_s: int = 1
    request_timeout_s: float = 10.0
    health_timeout_s: float = 5.0
    log_requests: bool = True
    max_log_bytes: int = 64_000_000  # per replica; then the file is rotated once

    def __post_init__(self) -> None:
        positive = ("num_replicas", "replica_cpus", "torch_threads", "max_candidates", "max_body_bytes")
        for name in (*positive, "max_ongoing_requests", "request_timeout_s", "health_timeout_s", "max_log_bytes"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"serving {name}: must be above 0, got {getattr(self, name)}")
        if not 0 < self.port < 65536:
            raise ConfigError(f"serving port: must be within 1..65535, got {self.port}")

    @property
    def folder(self) -> Path:
        """Where this server writes (request logs, shared metric files)."""
        return Path(self.runs).absolute() / self.dataset / "serving"
