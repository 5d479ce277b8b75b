"""The shared runtime is what the other tests count on: local, 4 declared CPUs, token on, our source in its workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def test_workers_see_our_source_and_one_thread_each(ray_session: Any, repo_root: Path) -> None:
    @ray_session.remote(num_cpus=1)
    def look() -> tuple[str, str, str]:
        import os
        import platform

        import gem

        return str(gem.__file__), platform.system(), os.environ.get("OMP_NUM_THREADS", "")

    source, system, threads = ray_session.get(look.remote(), timeout=120)
    assert Path(source) == repo_root / "platform" / "gem" / "__init__.py"
    assert system
    assert threads == "1"


def test_functions_of_test_modules_can_be_sent(ray_session: Any) -> None:
    assert ray_session.get(ray_session.remote(double).remote(21), timeout=120) == 42


def double(x: int) -> int:
    return 2 * x


def test_declared_cpus_are_enough_for_training_beside_data(ray_session: Any) -> None:
    assert ray_session.cluster_resources()["CPU"] == 4.0


def test_authentication_is_on(ray_session: Any) -> None:
    from ray._private.authentication.authentication_utils import is_token_auth_enabled

    assert is_token_auth_enabled()
