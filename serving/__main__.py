"""`python -m serving`: load the champions of a data set, start Ray Serve, serve until Ctrl-C."""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from gem.errors import GemError
from serving.config import ServingConfig


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 after Ctrl-C or SIGTERM, 2 for an error a person can mend."""
    config = _config(argv)
    try:
        return _serve(config)
    except KeyboardInterrupt:
        return 0
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
    from gem.data.store import FeatureStore
    from serving.example import example_request
    from serving.fleet import find_champions, load_scorers
    from serving.router import Router
    from serving.server import RayServe, check_port, on_signals

    check_port(config)
    models = find_champions(config)
    router = Router(load_scorers(models))  # everything that can be wrong is found here, before Ray starts
    store = FeatureStore.open(Path(models[0].store_path), verify=False)  # verified by load_scorers
    example = json.dumps(example_request(router, store), separators=(",", ":"))
    for name in router.unserved:
        print(f'note: surface "{name}" has no champion; requests for it are answered with 503', file=sys.stderr)
    with RayServe(config) as serve:
        try:
            serve.run(models)
            url = f"http://{config.host}:{config.port}"
            print(f"serving {', '.join(f'{m.name} v{m.version}' for m in models)}")
            print(f"ready at {url}  (docs: {url}/docs, health: {url}/healthz, metrics: {url}/metrics)")
            print(f"try: curl -s {url}/v1/rank -d {shlex.quote(example)}", flush=True)
            threading.Event().wait()
        finally:
            on_signals(signal.SIG_IGN)  # a second Ctrl-C must not leave half a cluster behind
            print("stopping", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
