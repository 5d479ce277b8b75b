"""Ray Serve as a context: start or join a cluster, deploy, and clean up what was started."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gem.errors import ConfigError
from serving.config import ServingConfig
from serving.fleet import ServedModel

APP = "gem-rank"


class RayServe:
    """Serve on a Ray cluster: one of our own (stopped afterwards), or the one RAY_ADDRESS names (left running)."""

    def __init__(self, config: ServingConfig) -> None:
        self.config = config
        self.own = not os.environ.get("RAY_ADDRESS")
        self.metrics_dir = config.folder / f"metrics-{os.getpid()}"
        self._deployed = False

    def __enter__(self) -> RayServe:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "Task ServeController.graceful_shutdown failed")
        import ray
        from ray import serve  # noqa: F401  (its import sets the level of its logger)

        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        remove_stale(self.config.folder)
        self.metrics_dir.mkdir(parents=True, exist_ok=True)
        ray.init(
            address="local" if self.own else None, namespace="serving", include_dashboard=False if self.own else None,
            log_to_driver=False, logging_level="ERROR",
        )  # fmt: skip
        cpus = ray.cluster_resources().get("CPU", 0.0)
        wanted = self.config.num_replicas * self.config.replica_cpus
        if wanted > cpus:
            raise ConfigError(
                f"{self.config.num_replicas} replicas of {self.config.replica_cpus:g} CPU need {wanted:g} CPUs, "
                f"Ray has {cpus:g}; start fewer with --replicas"
            )
        on_signals(_interrupt)  # after ray.init, which puts a handler of its own on SIGTERM

    def env(self) -> dict[str, str]:
        """Environment of the replicas: where the code is, shared metric files, one thread for NumPy."""
        paths = [p for p in sys.path if p and Path(p).is_dir()]
        return {
            "PYTHONPATH": os.pathsep.join([str(Path.cwd()), *paths]),
            "PROMETHEUS_MULTIPROC_DIR": str(self.metrics_dir),
            "OMP_NUM_THREADS": str(self.config.torch_threads),
        }

    def run(self, models: Sequence[ServedModel]) -> None:
        """Deploy and wait until every replica answers."""
        from ray import serve

        from serving.app import serve_application

        c = self.config
        self._deployed = True
        options = {"host": c.host, "port": c.port, "request_timeout_s": c.request_timeout_s}
        serve.start(http_options=options, logging_config={"log_level": "WARNING", "enable_access_log": False})
        serve.run(serve_application(c, models, self.env()), name=APP, route_prefix="/")

    def __exit__(self, *_: object) -> None:
        import ray
        from ray import serve

        try:
            if ray.is_initialized() and self._deployed:
                serve.shutdown() if self.own else serve.delete(APP)
        finally:
            ray.shutdown()
            shutil.rmtree(self.metrics_dir, ignore_errors=True)


def remove_stale(folder: Path) -> None:
    """Remove metric files of servers that were killed."""
    for path in folder.glob("metrics-*"):
        pid = path.name.removeprefix("metrics-")
        if pid.isdecimal() and not Path(f"/proc/{pid}").exists() and Path("/proc").exists():
            shutil.rmtree(path, ignore_errors=True)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def on_signals(action: Any) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, action)


def check_port(config: ServingConfig) -> None:
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind((config.host, config.port))
        except OSError as e:
            raise ConfigError(
                f"cannot listen on {config.host}:{config.port} ({e.strerror}); stop what uses it or choose --port"
            ) from None
