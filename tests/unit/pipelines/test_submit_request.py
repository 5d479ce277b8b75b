"""What is sent to the cluster, without a cluster."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from gem.errors import JobError
from pipelines.submit import Job, check_address, entrypoint, main, runtime_env


def test_loopback_uses_our_interpreter_elsewhere_the_clusters() -> None:
    here = shlex.split(entrypoint(Job("http://127.0.0.1:8265", ("run",))))
    there = shlex.split(entrypoint(Job("http://head.example:8265", ("run",))))
    named = shlex.split(entrypoint(Job("http://127.0.0.1:8265", ("run",), python="python3.12")))
    assert here == [sys.executable, "-m", "pipelines", "run"]
    assert there == ["python", "-m", "pipelines", "run"]
    assert named[0] == "python3.12"


def test_data_outside_the_checkout_is_sent_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative folder would not exist in the job's working folder; names and overrides stay as they are."""
    (tmp_path / "my data").mkdir()
    monkeypatch.chdir(tmp_path)
    arguments = ("run", "--dataset", "kuairand", "--data-dir", "my data", "--set", "train.epochs=2")
    words = shlex.split(entrypoint(Job("http://h:1", arguments)))[3:]
    assert words == ["run", "--dataset", "kuairand", "--data-dir", str(tmp_path / "my data"), "--set", "train.epochs=2"]


def test_spec_inside_the_checkout_stays_relative(repo_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(repo_root)
    words = shlex.split(entrypoint(Job("http://h:1", ("run", "--dataset", "pyproject.toml"))))
    assert words[-1] == "pyproject.toml"


def test_environment_carries_source_path_runs_and_tracking(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow.example:5000")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "not to be sent")
    sent = runtime_env(Job("http://h:1", ("run",), runs_dir=str(tmp_path), env={"A": "b"}))
    assert sent["env_vars"]["PYTHONPATH"] == "platform:."
    assert sent["env_vars"]["GEM_RUNS_DIR"] == str(tmp_path)
    assert sent["env_vars"]["MLFLOW_TRACKING_URI"] == "http://mlflow.example:5000"
    assert sent["env_vars"]["A"] == "b"
    assert {"/.git", "/.venv", "/runs"} <= set(sent["excludes"])
    assert "not to be sent" not in str(sent)


@pytest.mark.parametrize("bad", ["head:6379", "ray://head:10001", "http://", ""])
def test_other_addresses_are_refused_with_the_right_form(bad: str) -> None:
    with pytest.raises(JobError, match="expected the address of the Ray dashboard"):
        check_address(bad)


def test_trailing_slash_is_dropped() -> None:
    assert check_address("https://head:8265/") == "https://head:8265"


def test_command_line_reports_the_error_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--address", "ray://head:10001", "--", "run"]) == 2
    assert capsys.readouterr().err.startswith('submit: --address "ray://head:10001": expected')
