"""Shared fixtures: one Ray runtime for all tests that need one, and where the real data stand."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Before the first import of ray or torch. A token of our own keeps Ray's authentication on and the home folder clean.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(16))
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.pop("RAY_ADDRESS", None)  # a runtime of the tests' own, never a cluster that happens to be named

# A shell that starts the tests in the background makes them, and all they start, deaf to SIGINT.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Seconds one test may take, by folder; generous, since shared machines are slow. `@pytest.mark.timeout` wins.
TIMEOUTS = {"unit": 60, "contract": 60, "property": 120, "house": 240, "numerics": 300, "integration": 300, "e2e": 900}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Bound every test by its folder, and mark those that use the Ray session."""
    for item in items:
        folder = item.path.relative_to(ROOT / "tests").parts[0] if item.path.is_relative_to(ROOT / "tests") else ""
        if item.get_closest_marker("timeout") is None and folder in TIMEOUTS:
            item.add_marker(pytest.mark.timeout(TIMEOUTS[folder]))
        names = getattr(item, "fixturenames", ())
        if "ray_session" in names:
            item.add_marker(pytest.mark.ray)
        if "kuairand_dir" in names:
            item.add_marker(pytest.mark.kuairand)


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The root of the repository."""
    return ROOT


@pytest.fixture(scope="session")
def ray_session() -> Iterator[Any]:
    """The one Ray runtime of a test run: local, own folder, 4 declared CPUs, no dashboard, shut down at the end.

    4 declared CPUs on any machine: two Train workers and Ray Data together need more than 2, or they wait for ever.
    """
    import ray

    # Short, and not under pytest's long temporary folder: Unix socket paths may have 107 characters.
    temp = tempfile.mkdtemp(prefix="gemray-")
    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=True,
        logging_level="ERROR",
        object_store_memory=300 * 2**20,
        _temp_dir=temp,
    )
    try:
        yield ray
    finally:
        ray.shutdown()
        shutil.rmtree(temp, ignore_errors=True)


@pytest.fixture(scope="session")
def kuairand_dir() -> Path:
    """The folder of the KuaiRand-Pure tables, or a skip that says how to get there."""
    base = os.environ.get("GEM_DATA_DIR")
    folder = (Path(base) if base else ROOT.parent / "shared" / "data") / "kuairand"
    if not (folder / "log_standard.parquet").is_file():
        pytest.skip(f"no KuaiRand tables under {folder}: set GEM_DATA_DIR to the folder that holds kuairand/")
    return folder
