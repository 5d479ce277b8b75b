"""Ways to run the tasks of a pass: on Ray Data, in threads, one after the other; and to go on behind an interruption.

A task and its result are plain JSON values, so that every way is the same to those who give and take them.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from gem import errors

Task = dict[str, Any]
Distribute = Callable[[str, Callable[[Task], Task], Sequence[Task]], list[Task]]
DISK_FULL = (
    "the disk is full: the store was not finished and its pieces are removed, stores before it stand as they were. "
    "Preprocess needs about three times the size of the raw files beside the runs folder; free space and run again"
)
BLOCKS_PER_CORE = 4
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
_KEEP = 1 << 30  # bytes of freed memory that a worker keeps for the next task


def resumable(distribute: Distribute, work: Path, say: Callable[[str], None]) -> Distribute:
    """Run only the tasks that have no result under `work`/done yet."""

    def run(name: str, function: Callable[[Task], Task], tasks: Sequence[Task]) -> list[Task]:
        done = work / "done"
        done.mkdir(exist_ok=True)
        files = [done / f"{name}-{i:05d}.json" for i in range(len(tasks))]
        left = [i for i, file in enumerate(files) if not file.is_file()]
        if len(left) < len(files):
            say(f"{len(files) - len(left)} of {len(files)} {name} tasks were finished by an interrupted run")
        distribute(name, partial(_noted, function), [{"task": tasks[i], "done": str(files[i])} for i in left])
        return [json.loads(file.read_text(encoding="utf-8")) for file in files]

    return run


def _noted(function: Callable[[Task], Task], task: Task) -> Task:
    result = function(task["task"])
    path = Path(task["done"])
    beside = path.with_suffix(".tmp")
    beside.write_text(json.dumps(result), encoding="utf-8")
    beside.replace(path)
    return {}


def in_process(name: str, function: Callable[[Task], Task], tasks: Sequence[Task]) -> list[Task]:
    """Run the tasks one after the other in this process (debugging, tests)."""
    return [function(task) for task in tasks]


def in_threads(name: str, function: Callable[[Task], Task], tasks: Sequence[Task]) -> list[Task]:
    """Run the tasks in threads of this process: Arrow and NumPy let go of the interpreter where the time goes."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(function, tasks))


def on_ray_data(name: str, function: Callable[[Task], Task], tasks: Sequence[Task]) -> list[Task]:
    """Run the tasks on Ray Data and return their results in task order.

    A block is a handful of tasks, dealt in turn. Declared CPUs may be more than there are: a block asks for so many of
    them that no more run at once than the machines have cores. A GemError of a task comes back as that error, not
    wrapped in Ray's.
    """
    import ray

    if not tasks:
        return []
    cores = _cores(ray)
    num_blocks = min(len(tasks), BLOCKS_PER_CORE * cores)
    order = sorted(range(len(tasks)), key=lambda i: (i % num_blocks, i))
    rows = [{"at": i, "task": json.dumps(tasks[i])} for i in order]
    context = ray.data.DataContext.get_current()
    before = context.enable_progress_bars, context.op_resource_reservation_enabled
    # Results are a few bytes: nothing is to be reserved for them, for which Ray would start one task at a time.
    context.enable_progress_bars, context.op_resource_reservation_enabled = False, False
    try:
        dataset = ray.data.from_items(rows, override_num_blocks=num_blocks)
        pool = ray.data.TaskPoolStrategy(size=num_blocks)
        dataset = dataset.map(partial(_guarded, function), compute=pool, num_cpus=_cpus_each(ray, cores))
        answers = sorted(dataset.take_all(), key=lambda row: row["at"])
    finally:
        context.enable_progress_bars, context.op_resource_reservation_enabled = before
    for answer in answers:
        if answer["error"]:
            raise getattr(errors, answer["error"])(answer["result"])
    if [a["at"] for a in answers] != list(range(len(tasks))):
        raise errors.DataError(f"preprocess: {len(answers)} of {len(tasks)} {name} tasks answered; run the stage again")
    return [json.loads(a["result"]) for a in answers]


def _cores(ray: Any) -> int:
    """Tasks that may run at once: CPUs declared to Ray, but no more than this machine's cores on every node."""
    nodes = max(1, sum(1 for node in ray.nodes() if node["Alive"]))
    return max(1, int(min(ray.cluster_resources().get("CPU", 1), (os.cpu_count() or 1) * nodes)))


def _cpus_each(ray: Any, cores: int) -> int:
    """Declared CPUs that one of `cores` tasks asks for, so that no more of them fit at once."""
    return max(1, int(ray.cluster_resources().get("CPU", cores) // cores))


def warm_up() -> None:
    """Let the workers import what the tasks need while the driver looks at files. Ray must be initialised.

    Plain tasks whose results nobody waits for: nothing is said if the run ends before they do.
    """
    import ray

    cores = _cores(ray)
    ready = ray.remote(num_cpus=_cpus_each(ray, cores))(_ready)
    for _ in range(cores):
        ready.remote()


def _ready() -> str:
    import ray.data  # with all that Ray Data needs in a worker

    import gem.data.build.fragments  # what all passes build on

    return f"{ray.data.__name__} {gem.data.build.fragments.__name__}"


@lru_cache(maxsize=1)
def _keep_memory() -> bool:
    """Ask glibc to keep freed memory: tasks free and ask for the same large arrays again, and the kernel would have to
    clear every page of them anew (a fifth of the time)."""
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        return bool(mallopt(_M_MMAP_THRESHOLD, _KEEP) and mallopt(_M_TRIM_THRESHOLD, _KEEP))
    except (OSError, AttributeError):  # another C library
        return False


def _guarded(function: Callable[[Task], Task], row: dict[str, Any]) -> dict[str, Any]:
    import pyarrow as pa

    if _keep_memory():
        pa.set_memory_pool(pa.system_memory_pool())
    try:
        return {"at": row["at"], "error": "", "result": json.dumps(function(json.loads(row["task"])))}
    except errors.GemError as e:
        return {"at": row["at"], "error": type(e).__name__, "result": str(e)}
    except OSError as e:
        if e.errno != errno.ENOSPC:
            raise
        return {"at": row["at"], "error": "DataError", "result": DISK_FULL}
