"""`python -m serving`: load the champions of a data set, start Ray Serve, serve until Ctrl-C."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from gem.errors import ConfigError, GemError
from serving.config import ServingConfig

APP = "gem-rank"


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 after Ctrl-C or SIGTERM, 2 for an error a person can mend."""
    config = _config(argv)
    try:
        return _serve(config)
    except GemError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2


def _config(argv: Sequence[str] | None) -> ServingConfig:
    d = ServingConfig()
    parser = argparse.ArgumentParser(prog="python -m serving", description="Serve the champions over HTTP.")
    parser.add_argument("--host", default=d.host, help="address to listen on (default: this machine only)")
    parser.add_argument("--port", type=int, default=d.port)
    parser.add_argument("--runs", default=d.runs, help="runs folder of the pipeline")
    parser.add_argument("--dataset", default=d.dataset, help="data set name, or its spec file")
    parser.add_argument("--replicas", type=int, default=d.num_replicas)
    parser.add_argument("--no-request-log", action="store_true", help="do not write answered requests to disk")
    a = parser.parse_args(argv)
    try:
        return ServingConfig(
            runs=a.runs, dataset=_dataset_name(a.dataset), host=a.host, port=a.port, num_replicas=a.replicas,
            log_requests=not a.no_request_log,
        )  # fmt: skip
    except GemError as e:
        parser.error(str(e))


def _dataset_name(text: str) -> str:
    from gem.data.spec import load_spec

    return load_spec(Path(text)).name if text.endswith((".yaml", ".yml")) else text


def _serve(config: ServingConfig) -> int:
    from serving.example import example_request
    from serving.fleet import find_champions, load_scorers
    from serving.router import Router

    _check_port(config)
    models = find_champions(config)
    router = Router(load_scorers(models))  # everything that can be wrong is found here, before Ray starts
    example = json.dumps(example_request(router), separators=(",", ":"))
    for name in router.unserved:
        print(f'note: surface "{name}" has no champion; requests for it are answered with 503', file=sys.stderr)
    stop = _stop_event()
    with RayServe(config) as serve:
        serve.run(models)
        url = f"http://{config.host}:{config.port}"
        served = ", ".join(f"{m.name} v{m.version}" for m in models)
        print(f"serving {served}\nready at {url}  (docs: {url}/docs, health: {url}/healthz, metrics: {url}/metrics)")
        print(f"try: curl -s {url}/v1/rank -d {shlex.quote(example)}", flush=True)
        stop.wait()
        print("stopping", flush=True)
    return 0


class RayServe:
    """Serve on a Ray cluster: one of our own (stopped afterwards), or the one RAY_ADDRESS names (left running)."""

    def __init__(self, config: ServingConfig) -> None:
        self.config = config
        self.own = not os.environ.get("RAY_ADDRESS")
        self.metrics_dir = config.folder / f"metrics-{os.getpid()}"

    def __enter__(self) -> RayServe:
        import ray

        self.metrics_dir.mkdir(parents=True, exist_ok=True)
        ray.init(
            address="local" if self.own else None, namespace="serving", include_dashboard=False if self.own else None,
            log_to_driver=False, logging_level="ERROR", runtime_env={"env_vars": self.env()},
        )  # fmt: skip
        cpus = ray.cluster_resources().get("CPU", 0.0)
        wanted = self.config.num_replicas * self.config.replica_cpus
        if wanted > cpus:
            self.__exit__()
            raise ConfigError(
                f"{self.config.num_replicas} replicas of {self.config.replica_cpus:g} CPU need {wanted:g} CPUs, Ray has "
                f"{cpus:g}; start fewer with --replicas"
            )
        return self

    def env(self) -> dict[str, str]:
        """Environment of the replicas: where the code is, shared metric files, one thread for NumPy."""
        paths = [p for p in sys.path if p and Path(p).is_dir()]
        return {
            "PYTHONPATH": os.pathsep.join([str(Path.cwd()), *paths]),
            "PROMETHEUS_MULTIPROC_DIR": str(self.metrics_dir),
            "OMP_NUM_THREADS": str(self.config.torch_threads),
        }

    def run(self, models: Sequence[object]) -> None:
        """Deploy and wait until every replica answers."""
        from ray import serve

        from serving.app import serve_application

        c = self.config
        options = {"host": c.host, "port": c.port, "request_timeout_s": c.request_timeout_s}
        serve.start(http_options=options, logging_config={"log_level": "WARNING", "enable_access_log": False})
        serve.run(serve_application(c, models), name=APP, route_prefix="/")

    def __exit__(self, *_: object) -> None:
        import ray
        from ray import serve

        try:
            if self.own:
                serve.shutdown()
            else:
                serve.delete(APP)
        finally:
            ray.shutdown()
            shutil.rmtree(self.metrics_dir, ignore_errors=True)


def _stop_event() -> threading.Event:
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    return stop


def _check_port(config: ServingConfig) -> None:
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind((config.host, config.port))
        except OSError as e:
            raise ConfigError(
                f"cannot listen on {config.host}:{config.port} ({e.strerror}); stop what uses it or choose --port"
            ) from None


if __name__ == "__main__":
    sys.exit(main())
