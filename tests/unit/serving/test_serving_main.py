"""What stops the server before it starts, and what a person reads then. No Ray and no MLflow here."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from serving.__main__ import main
from serving.server import remove_stale


@pytest.fixture
def port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@pytest.fixture(autouse=True)
def _local_tracking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def test_no_runs_says_run_the_pipeline(tmp_path: Path, port: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--runs", str(tmp_path / "runs"), "--port", str(port)]) == 2
    assert 'run "make pipeline DATASET=generated" first' in capsys.readouterr().err
    assert not (tmp_path / "runs").exists(), "a look must not leave a database behind"


def test_a_taken_port_is_named_before_anything_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with taken_port() as port:
        assert main(["--runs", str(tmp_path), "--port", str(port)]) == 2
    err = capsys.readouterr().err
    assert f"cannot listen on 127.0.0.1:{port}" in err and "--port" in err


@pytest.mark.parametrize(("option", "value", "says"), [("--port", "0", "port"), ("--replicas", "0", "num_replicas")])
def test_impossible_options(option: str, value: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([option, value])
    assert caught.value.code == 2 and says in capsys.readouterr().err


def test_a_spec_file_stands_for_its_name(tmp_path: Path, port: int, capsys: pytest.CaptureFixture[str]) -> None:
    spec = Path(__file__).parents[3] / "pipelines/datasets/kuairand.yaml"
    assert main(["--runs", str(tmp_path), "--port", str(port), "--dataset", str(spec)]) == 2
    assert "DATASET=kuairand" in capsys.readouterr().err


def test_metric_files_of_killed_servers_are_removed(tmp_path: Path) -> None:
    for name in ("metrics-999999999", "metrics-1", "other"):
        (tmp_path / name).mkdir()
    remove_stale(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics-1", "other"]


class taken_port:
    """A port that somebody listens on."""

    def __enter__(self) -> int:
        self.socket = socket.socket()
        self.socket.bind(("127.0.0.1", 0))
        self.socket.listen()
        return int(self.socket.getsockname()[1])

    def __exit__(self, *_: object) -> None:
        self.socket.close()
