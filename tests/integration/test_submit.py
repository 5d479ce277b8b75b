"""The jobs API end to end: a real local head with token authentication, our client as a process of its own."""

from __future__ import annotations

import shlex
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipelines.summary import read_summary
from tests.integration.local_head import LocalHead, free_ports

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def head() -> Iterator[LocalHead]:
    with LocalHead(token="0123456789abcdef0123456789abcdef") as started:
        yield started


def run_submit(head: LocalHead, root: Path, *arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pipelines.submit", "--address", head.address, "--timeout-s", "330", *arguments]
    env = head.env(PYTHONPATH=f"{root / 'platform'}:{root}", **changes)
    return subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=360)


def test_head_has_authentication_on(head: LocalHead) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"{head.address}/api/jobs/", timeout=20)
    assert refused.value.code == 401


def test_job_imports_uploaded_source_and_joins_the_cluster(head: LocalHead, repo_root: Path, tmp_path: Path) -> None:
    """The job sees gem from the upload (not from this checkout), its environment, and the cluster; workers see gem."""
    code = (
        "import os, ray, gem, pipelines; ray.init(address='auto', log_to_driver=False); "
        "f = ray.remote(num_cpus=1)(lambda: __import__('gem').__file__); "
        "print('DRIVER', gem.__file__); print('WORKER', ray.get(f.remote(), timeout=100)); "
        "print('RUNS', os.environ['GEM_RUNS_DIR']); print('GIT', os.path.exists('.git'), os.path.exists('.venv'))"
    )
    command = shlex.join([sys.executable, "-c", code])
    # Ray's own client would follow RAY_ADDRESS, to nowhere, in spite of the explicit address.
    nowhere = "http://127.0.0.1:9"
    done = run_submit(head, repo_root, "--runs-dir", str(tmp_path), "--entrypoint", command, RAY_ADDRESS=nowhere)
    assert done.returncode == 0, done.stdout + done.stderr
    said = dict(line.split(" ", 1) for line in done.stdout.splitlines() if line.split(" ")[0].isupper())
    assert "working_dir_files" in said["DRIVER"]
    assert said["WORKER"] == said["DRIVER"]
    assert said["RUNS"] == str(tmp_path)
    assert said["GIT"] == "False False"
    assert "SUCCEEDED" in done.stdout


def test_the_whole_loop_runs_as_a_job(head: LocalHead, repo_root: Path, tmp_path: Path) -> None:
    """What `make submit` does, on a head with two CPUs: the summary lies where the job was told to write."""
    done = run_submit(head, repo_root, "--runs-dir", str(tmp_path), "--", "run", "--recipe", "tiny")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "SUCCEEDED" in done.stdout
    summary = read_summary(tmp_path / "latest")
    assert set(summary["models"]) >= {"generated-gem", "generated-vm-feed"}
    assert all(stage["run_id"] for stage in summary["stages"].values())


def test_failing_job_gives_failing_status_and_its_output(head: LocalHead, repo_root: Path) -> None:
    done = run_submit(head, repo_root, "--entrypoint", "echo before the end; exit 3")
    assert done.returncode == 1
    assert "before the end" in done.stdout
    assert "FAILED" in done.stdout


def test_wrong_token_is_refused(head: LocalHead, repo_root: Path) -> None:
    done = run_submit(head, repo_root, "--entrypoint", "true", RAY_AUTH_TOKEN="f" * 32)
    assert done.returncode == 2
    assert "the token of this machine was refused" in done.stderr
    assert "Traceback" not in done.stderr


def test_missing_token_is_refused(head: LocalHead, repo_root: Path, tmp_path: Path) -> None:
    """HOME is a folder without a token file; the variable is not set."""
    done = run_submit(head, repo_root, "--entrypoint", "true", RAY_AUTH_TOKEN="", HOME=str(tmp_path))
    assert done.returncode == 2
    assert "no token was found here" in done.stderr


def test_nobody_at_the_address(head: LocalHead, repo_root: Path) -> None:
    port = free_ports(1)[0]
    done = run_submit(head, repo_root, "--address", f"http://127.0.0.1:{port}", "--entrypoint", "true")
    assert done.returncode == 2
    assert "no Ray jobs API answers there" in done.stderr
    assert "ray start --head" in done.stderr
