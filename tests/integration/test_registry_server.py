"""The registry when the server is missing, silent, dying or real, and when the database is none."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gem.errors import TrackingError
from gem.lineage.registry import Registry
from tests.integration.test_registry import YES, initialised, no_server, register, registry, run_of

__all__ = ["initialised", "no_server", "registry"]  # fixtures


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port that takes connections and never says a word."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(8)
        yield listener.getsockname()[1]


def closed_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def test_missing_server_is_a_clear_error_within_seconds(tmp_path: Path, silent_port: int) -> None:
    Registry("", tmp_path / "warm").check()  # the import is not what is timed
    for port in (closed_port(), silent_port):
        uri = f"http://127.0.0.1:{port}"
        start = time.monotonic()
        with pytest.raises(TrackingError, match=rf"MLflow at {uri}: cannot connect: .*Do this: start the server"):
            Registry(uri, tmp_path / "runs").check()
        assert time.monotonic() - start < 10
    assert not [k for k in os.environ if k.startswith("MLFLOW_HTTP_REQUEST_")], "the environment is as before"


def test_environment_names_the_server_but_an_argument_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    assert Registry("", tmp_path).uri == "http://127.0.0.1:9"
    assert Registry(f"sqlite:///{tmp_path}/x.db", tmp_path).uri == f"sqlite:///{tmp_path}/x.db"


@pytest.mark.parametrize("uri", ["file:///tmp/mlruns", "./mlruns", "/tmp/mlruns", "sqlite://", "ftp://x", "databricks"])
def test_stores_that_cannot_be_used_are_refused(tmp_path: Path, uri: str) -> None:
    with pytest.raises(TrackingError, match="tracking URI"):
        Registry(uri, tmp_path)


def test_file_that_is_no_database_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").write_bytes(b"not a database at all" * 100)
    with pytest.raises(TrackingError, match="cannot open"):
        Registry("", tmp_path).check()


def test_server_that_dies_stops_no_training_and_gets_the_rest_later(registry: Registry, tmp_path: Path) -> None:
    run = registry.start_loop("toy", "loop")
    real = registry._client_or_none
    away = Registry(f"http://127.0.0.1:{closed_port()}", tmp_path / "runs")
    assert away.start_child(run, "pretrain") == "" and len(away.lost) == 1
    registry._client_or_none = away._client()
    start = time.monotonic()
    for step in range(20):
        registry.log_metrics(run, {"loss": 1.0 / (step + 1)}, step=step)
    registry.log_metrics("", {"loss": 1.0})
    assert time.monotonic() - start < 10, "a dead server is not asked again and again"
    assert registry.flush() == 20 and registry.lost == []
    registry._client_or_none = real
    registry.end(run)
    assert registry.flush() == 0
    data = run_of(registry, run)
    assert data.data.metrics["loss"] == 1.0 / 20 and data.info.status == "FINISHED"


def test_console_stays_quiet_and_working_folder_clean(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; from gem.lineage.registry import Registry\n"
        "r = Registry('', Path('runs')); r.check(); run = r.start_loop('toy', 'x'); r.log_metrics(run, {'a': 1.0})\n"
        "r.end(run); assert r.champion('gem') is None and not r.lost\n"
    )
    path = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert [p.name for p in tmp_path.iterdir()] == ["runs"]


@pytest.mark.timeout(300)
def test_real_server_stores_and_gives_back_the_bundle(tmp_path: Path) -> None:
    """With a server the bundle travels as artifacts of its run; another machine downloads and verifies it."""
    port = closed_port()
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    store = ["--backend-store-uri", f"sqlite:///{tmp_path}/server.db", "--artifacts-destination", str(tmp_path / "art")]
    with (tmp_path / "server.log").open("w") as log:
        server = subprocess.Popen([*command, *store], cwd=tmp_path, stdout=log, stderr=log, start_new_session=True)
    try:
        here = Registry(f"http://127.0.0.1:{port}", tmp_path / "here")
        deadline = time.monotonic() + 120
        while True:
            try:
                here.check()
                break
            except TrackingError:
                assert server.poll() is None and time.monotonic() < deadline, (tmp_path / "server.log").read_text()
                time.sleep(0.5)
        version = register(here, "m0")
        assert version.source.startswith("runs:/")
        here.promote("gem", "1", None, YES)
        (tmp_path / "here" / "m0").rename(tmp_path / "gone")
        there = Registry(here.uri, tmp_path / "there")
        [served] = there.champions("toy").values()
        path = there.bundle_path(served)
        assert path.is_relative_to(tmp_path / "there")
        assert there.chain("gem")[-2].hash == version.bundle_hash
        with pytest.raises(TrackingError, match="no version or alias"):
            there.version("gem", "9")
        assert there.champion("absent") is None
    finally:
        os.killpg(server.pid, 15)
        server.wait(30)
