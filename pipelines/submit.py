"""Run the loop as a Ray job on a cluster: `python -m pipelines.submit --address http://head:8265 -- run …`.

What a person does on the Ray dashboard, by command. The source is uploaded (no build, no install), the job's output
is shown as it comes, and the exit status is the job's. Authentication: Ray's token, from `RAY_AUTH_TOKEN`,
`RAY_AUTH_TOKEN_PATH` or Ray's own token file; it is on unless `RAY_AUTH_MODE=disabled` is set on both sides.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gem.errors import JobError

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_ADDRESS = "http://127.0.0.1:8265"
# gitignore patterns; a leading slash means the root only (`data` alone would take gem's room of that name along).
EXCLUDES = ["/.git", "/.venv", "/runs", "/mlruns", "/data", "/tests/benchmarks/out", "*.db", "*.parquet",
            "**/__pycache__", "**/.*_cache", "/.hypothesis"]  # fmt: skip
FORWARDED = ("MLFLOW_TRACKING_URI", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN")
PATH_OPTIONS = ("--data-dir", "--dataset")
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Job:
    """What to run and where; `arguments` are those of `python -m pipelines`."""

    address: str
    arguments: tuple[str, ...]
    python: str = ""  # interpreter on the cluster; empty = ours when the head is this machine, else `python`
    runs_dir: str = ""  # where the job writes; empty = `runs` of this checkout
    entrypoint: str = ""  # a whole shell command instead of `python -m pipelines …`
    timeout_s: float = 24 * 3600.0
    env: dict[str, str] = field(default_factory=dict)


def check_address(address: str) -> str:
    """Return the address of the jobs API without a trailing slash; JobError when it is not an http(s) URL."""
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise JobError(
            f'--address "{address}": expected the address of the Ray dashboard, http://<head>:8265. '
            "ray:// and host:6379 are other services of the head."
        )
    return address.rstrip("/")


def entrypoint(job: Job) -> str:
    """The shell command that the cluster runs. Paths that exist here are sent as absolute ones."""
    if job.entrypoint:
        return job.entrypoint
    local = urlsplit(job.address).hostname in LOOPBACK
    python = job.python or (sys.executable if local else "python")
    return shlex.join([python, "-m", "pipelines", *_absolute_paths(job.arguments)])


def _absolute_paths(arguments: Sequence[str]) -> list[str]:
    """The job runs in another folder: data named relative to this one must be named in full."""
    out: list[str] = []
    for previous, argument in zip(["", *arguments], arguments, strict=False):
        outside = Path(argument).exists() and not Path(argument).resolve().is_relative_to(ROOT)
        out.append(str(Path(argument).resolve()) if previous in PATH_OPTIONS and outside else argument)
    return out


def runtime_env(job: Job) -> dict[str, Any]:
    """The job's environment: the source of this checkout, importable without an install."""
    env = {
        "PYTHONPATH": "platform:.",
        "PYTHONUNBUFFERED": "1",
        "GEM_RUNS_DIR": str(Path(job.runs_dir or ROOT / "runs").resolve()),
        "GEM_COMMIT": _commit(),
    }
    env |= {name: os.environ[name] for name in FORWARDED if os.environ.get(name)}
    return {"working_dir": str(ROOT), "excludes": EXCLUDES, "env_vars": env | job.env}


def _commit() -> str:
    """The commit of this checkout (the upload has no .git), with `-dirty` for uncommitted changes, or ''."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(git, capture_output=True, text=True, timeout=30)
        return done.stdout.strip() if done.returncode == 0 else ""
    return ""


@contextlib.contextmanager
def _address_wins() -> Iterator[None]:
    """Ray lets these variables override an explicit address; here what was asked for wins."""
    names = ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS")
    saved = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(saved)


def connect(address: str) -> Any:
    """A client of the jobs API; JobError when nothing answers or the token is missing or wrong."""
    address = check_address(address)
    import requests
    from ray.exceptions import AuthenticationError
    from ray.job_submission import JobSubmissionClient

    try:
        with _address_wins():
            client = JobSubmissionClient(address)
            client.list_jobs()  # /api/version answers without a token, this does not
            return client
    except AuthenticationError as error:
        invalid = "invalid" in error.message.lower()
        missing = "the token of this machine was refused" if invalid else "no token was found here"
        raise JobError(
            f"{address}: the cluster asks for its token and {missing}. Set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to "
            "the token of that cluster (on its head: `ray get-auth-token`)."
        ) from None
    except (ConnectionError, requests.exceptions.RequestException, RuntimeError) as error:
        text = (str(error).splitlines() or [type(error).__name__])[0]
        raise JobError(
            f"{address}: no Ray jobs API answers there ({text}). Give RAY_ADDRESS=http://<head>:8265, the address of "
            "the dashboard; on this machine `ray start --head` starts a cluster with one."
        ) from None


def submit(job: Job) -> int:
    """Upload the source, run the job, show its output; return 0 when it succeeded and 1 when it failed or stopped.

    Raises JobError when the cluster cannot be reached, refuses the token or the upload, or the time is over.
    """
    client = connect(job.address)
    try:
        job_id = client.submit_job(entrypoint=entrypoint(job), runtime_env=runtime_env(job), metadata={"name": "gem"})
    except (RuntimeError, ValueError, ConnectionError) as error:
        raise JobError(f"{job.address}: the job was not accepted: {error}") from None
    print(f"submitted {job_id}: {entrypoint(job)}", flush=True)
    try:
        status = asyncio.run(_follow(client, job_id, time.monotonic() + job.timeout_s))
    except KeyboardInterrupt:
        print(f"\nthe job goes on; to stop it: ray job stop --address {job.address} {job_id}", flush=True)
        return 130
    info = client.get_job_info(job_id)
    ended = str(status)
    print(
        f"job {job_id}: {ended}" + (f" ({info.message})" if ended != "SUCCEEDED" and info.message else ""), flush=True
    )
    return 0 if ended == "SUCCEEDED" else 1


async def _follow(client: Any, job_id: str, deadline: float) -> Any:
    """Print the job's output until it ends; a broken log stream is taken up again where it broke."""
    shown = 0
    while True:
        skip = shown
        with contextlib.suppress(RuntimeError, OSError):
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                async for text in client.tail_job_logs(job_id):
                    fresh, skip = text[skip:], max(0, skip - len(text))
                    print(fresh, end="", flush=True)
                    shown += len(fresh)
        status = await asyncio.to_thread(client.get_job_status, job_id)
        if status.is_terminal():
            return status
        if time.monotonic() > deadline:
            raise JobError(f"job {job_id} still runs and the time to wait for it is over; it was not stopped")
        await asyncio.sleep(1.0)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of `python -m pipelines.submit`; what stands after `--` goes to `python -m pipelines`."""
    parser = argparse.ArgumentParser(prog="python -m pipelines.submit", description=__doc__.splitlines()[0])
    parser.add_argument("--address", default=os.environ.get("RAY_ADDRESS") or DEFAULT_ADDRESS)
    parser.add_argument("--python", default="", help="interpreter on the cluster")
    parser.add_argument("--runs-dir", default="", help="where the job writes; all nodes must see it")
    parser.add_argument("--entrypoint", default="", help="a shell command instead of `python -m pipelines …`")
    parser.add_argument("--timeout-s", type=float, default=Job.timeout_s)
    parser.add_argument("arguments", nargs="*", default=[], help="of `python -m pipelines`, after `--`")
    given = parser.parse_args(argv)
    os.environ.setdefault("RAY_AUTH_MODE", "token")  # read once, when ray is imported
    job = Job(
        address=given.address,
        arguments=tuple(given.arguments) or ("run",),
        python=given.python,
        runs_dir=given.runs_dir,
        entrypoint=given.entrypoint,
        timeout_s=given.timeout_s,
    )
    try:
        return submit(job)
    except JobError as error:
        print(f"submit: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
