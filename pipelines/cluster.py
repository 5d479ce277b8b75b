"""One Ray runtime for a whole loop, started when the first stage needs it and not before."""

from __future__ import annotations

import os
import shutil
import tempfile
from types import TracebackType
from typing import Any

from gem.errors import GemError, TrainingError
from pipelines.quiet import install_filters

OBJECT_STORE_BYTES = 256 * 2**20
MIN_DECLARED_CPUS = 4  # training workers and Ray Data together need more than two logical CPUs


class Cluster:
    """Lazily connects to RAY_ADDRESS, or starts a local runtime of our own and stops only that.

    Use as a context manager; `ray()` returns the initialised module.
    """

    def __init__(self) -> None:
        self._ray: Any = None
        self._temp = ""
        self.owned = False

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self.owned:
            import ray

            ray.shutdown()
            shutil.rmtree(self._temp, ignore_errors=True)

    def ray(self) -> Any:
        if self._ray is None:
            self._ray = self._connect()
        return self._ray

    def _connect(self) -> Any:
        import ray

        install_filters()  # again: the import of Ray puts warning rules of its own before ours
        if ray.is_initialized():
            return ray
        if os.environ.get("RAY_ADDRESS"):
            ray.init(address="auto", log_to_driver=True)
            return ray
        self.owned = True  # before the start: an interrupt in the middle of it must clean up too
        self._temp = tempfile.mkdtemp(prefix="gemray-")  # short: Unix socket paths have 107 characters
        ray.init(
            address="local",
            num_cpus=max(os.cpu_count() or 1, MIN_DECLARED_CPUS),
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            _temp_dir=self._temp,
        )
        return ray

    def check_cpus(self, num_workers: int, cpus_each: float) -> None:
        """Refuse a worker group that the cluster can never place (Ray would wait for ever)."""
        have = float(self.ray().cluster_resources().get("CPU", 0))
        need = num_workers * cpus_each
        if num_workers < 1 or need > have:
            raise TrainingError(
                f"training asks for {num_workers} workers x {cpus_each:g} CPU = {need:g}, the cluster has {have:g}; "
                f"lower it with --set train.num_workers={max(int(have // cpus_each), 1)}"
            )


def result_of(ray: Any, future: Any) -> Any:
    """`ray.get`, but an error of our own is raised as it was, without the remote traceback in its text."""
    try:
        return ray.get(future)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, GemError):
            raise error.cause from None
        raise
