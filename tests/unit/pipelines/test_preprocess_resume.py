"""A build that is stopped, at whatever place, leaves nothing to see and is taken up where it stood."""

from __future__ import annotations

import errno
import io
import itertools
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gem.config import DataConfig, RunConfig
from gem.data.store import FeatureStore
from gem.errors import DataError
from pipelines import data_stages, preprocess
from pipelines.console import Console
from pipelines.distribute import in_process
from pipelines.loop import Loop
from pipelines.preprocess import Base, build_store
from pipelines.stage import StageResult
from tests.unit.data.regular_log import END, END_MS, FIRST, LOG, day_rows, deliver, write_first
from tests.unit.data.window_log import DAY_MS, oracle, read_back

CONFIG = RunConfig(data=DataConfig(num_shards=3))
NEXT = {**day_rows(4), "buys": [*day_rows(4)["buys"], END | {"at": END_MS + DAY_MS}]}


class Stopped(Exception):
    """Stands for whatever ends a process."""


class Counting:
    """Runs tasks in this process and remembers them; calls `stop` when it has run `limit`."""

    def __init__(self, limit: int | None = None, stop: Callable[[], None] | None = None) -> None:
        self.limit, self.stop = limit, stop
        self.ran: list[tuple[str, int]] = []

    def __call__(self, name: str, function: Any, tasks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        out = []
        for task in tasks:
            if len(self.ran) == self.limit:
                self.stop() if self.stop else self._raise()
            out.append(function(task))
            inner = task.get("task", task)
            self.ran.append((name, inner["number"] if name == "read" else inner["shard"]))
        return out

    def _raise(self) -> None:
        raise Stopped


def build(folder: Path, run: Any, base: Base | None = None) -> dict[str, Any]:
    return build_store(CONFIG, LOG.spec(), (folder / "raw", folder / "store"), lambda text: None, run, base)


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Raw files of two windows, the stores that come of them undisturbed, and the tasks of each."""
    folder = tmp_path_factory.mktemp("clean")
    write_first(folder / "raw")
    first, second = Counting(), Counting()
    one = build(folder, first)
    shutil.copytree(folder / "raw", folder / "more" / "raw")
    deliver(folder / "more" / "raw", "next", **NEXT)
    two = build(folder / "more", second, Base(folder / "store"))
    hashes = (one["store_hash"], two["store_hash"])
    return SimpleNamespace(folder=folder, hashes=hashes, tasks=(first.ran, second.ran))


@pytest.mark.parametrize(("window", "limit"), [(0, 3), (0, 12), (1, 0), (1, 7), (1, 10)])
def test_d19_a_build_that_was_stopped_goes_on_where_it_stood(
    clean: SimpleNamespace, tmp_path: Path, window: int, limit: int
) -> None:
    tasks = clean.tasks[window]
    raw = (clean.folder / "more" if window else clean.folder) / "raw"
    shutil.copytree(raw, tmp_path / "raw")
    base = Base(clean.folder / "store" if window else None, work=tmp_path / "work")
    broken, rest = Counting(limit), Counting()
    with pytest.raises(Stopped):
        build(tmp_path, broken, base)
    assert not (tmp_path / "store" / "manifest.json").exists()
    record = build(tmp_path, rest, base)
    assert record["store_hash"] == clean.hashes[window]
    again = [t for t in rest.ran if t in broken.ran]
    assert {name for name, _ in again} <= {"merge"}, "a task with a result was run again"
    assert sorted({*broken.ran, *rest.ran}) == sorted(tasks) and not (tmp_path / "work").exists()
    FeatureStore.open(tmp_path / "store", verify=True)


def test_d19_pieces_of_another_window_are_not_taken_up(clean: SimpleNamespace, tmp_path: Path) -> None:
    """The store that the window was to be added to has gone, or there is another file by now."""
    shutil.copytree(clean.folder / "more" / "raw", tmp_path / "raw")
    with pytest.raises(Stopped):
        build(tmp_path, Counting(8), Base(clean.folder / "store", work=tmp_path / "work"))
    record = build(tmp_path, in_process, Base(work=tmp_path / "work"))
    shows, lines = oracle({t: [*FIRST[t], *NEXT[t]] for t in FIRST}, LOG)
    seen, told = read_back(tmp_path / "store")
    assert seen == shows and {u: sorted(e) for u, e in told.items()} == lines and record["windows"] == 1
    with pytest.raises(DataError, match="a finished feature store stands there"):
        build(tmp_path, in_process, Base(work=tmp_path / "work"))


def test_d19_a_merge_that_is_cut_off_between_two_files_is_finished(
    clean: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray runs a task again whose worker died: some of its files stand in the store by then."""
    shutil.copytree(clean.folder / "more" / "raw", tmp_path / "raw")
    real = Path.replace

    def retried(name: str, function: Any, tasks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        if name != "merge":
            return in_process(name, function, tasks)
        for task, fails in zip(tasks, (2, 7, 8), strict=True):
            left = iter(range(fails, -1000, -1))

            def cut_off(path: Path, target: Path, left: Iterator[int] = left) -> Path:
                if next(left) == 0:
                    raise Stopped
                return real(path, target)

            monkeypatch.setattr(Path, "replace", cut_off)
            with pytest.raises(Stopped):
                function(task)
            monkeypatch.setattr(Path, "replace", real)
        return in_process(name, function, tasks)

    assert build(tmp_path, retried, Base(clean.folder / "store"))["store_hash"] == clean.hashes[1]


def make_loop(runs: Path, raw: Path, said: list[str] | None = None) -> Any:
    """A loop that has all that its preprocess stage asks for, and no Ray."""
    console = Console(file=io.StringIO())
    console.warn = (said if said is not None else []).append  # type: ignore[method-assign]
    config = replace(CONFIG, data=replace(CONFIG.data, data_dir=str(raw)))
    cluster: Any = SimpleNamespace(ray=lambda: None)
    registry: Any = SimpleNamespace(end=lambda run_id, status: None)
    return Loop(config, LOG.spec(), raw, runs, console, cluster, registry)


def run(loop: Any, counting: Counting, monkeypatch: pytest.MonkeyPatch) -> StageResult:
    for name in ("on_ray_data", "in_threads"):
        monkeypatch.setattr(preprocess, name, counting)
    monkeypatch.setattr(preprocess, "warm_up", lambda: None)
    return data_stages.preprocess(loop)


def visible(runs: Path) -> list[Path]:
    return sorted((runs / "windows" / "preprocess").glob("[0-9a-f]*"))


def full_at(what: int | str) -> Callable[[Path, Path], Path]:
    """A disk on which one file, by number from now on or by name, finds no room: half of it is written."""
    real, written = Path.replace, itertools.count(1)

    def publish(path: Path, target: Path) -> Path:
        if what in (next(written), target.name):
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return real(path, target)

    return publish


def test_disk_full_at_any_file_leaves_the_store_before(
    clean: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(clean.folder / "raw", tmp_path / "raw")
    before = run(make_loop(tmp_path / "runs", tmp_path / "raw"), Counting(), monkeypatch)
    assert before.record["store_hash"] == clean.hashes[0]
    deliver(tmp_path / "raw", "next", **NEXT)
    for fails in (2, 9, 20, 30, "manifest.json"):  # the first is the list of hashes, which a run can do without
        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", full_at(fails))
            with pytest.raises(DataError, match=r"the disk is full: .* stores before it stand as they were"):
                run(make_loop(tmp_path / "runs", tmp_path / "raw"), Counting(), monkeypatch)
        assert visible(tmp_path / "runs") == [before.path]
        home = tmp_path / "runs" / "windows" / "preprocess"
        assert not [*home.glob(".tmp-*"), *home.glob(".work-*")]  # nothing goes on filling the disk
        FeatureStore.open(before.path, verify=True)
    after = run(make_loop(tmp_path / "runs", tmp_path / "raw"), Counting(), monkeypatch)
    assert after.record["store_hash"] == clean.hashes[1] and len(visible(tmp_path / "runs")) == 2
    FeatureStore.open(after.path, verify=True)


def _builder(folder: Path, number: int) -> None:
    """Build when asked to; stop in the middle of the first pass until `on` is there."""

    def held() -> None:
        (folder / f"held-{number}").touch()
        while not (folder / f"on-{number}").exists():
            time.sleep(0.01)
        counting.limit = None

    counting = Counting(4, held)
    (folder / f"ready-{number}").touch()
    while not (folder / f"go-{number}").exists():
        time.sleep(0.01)
    with pytest.MonkeyPatch.context() as patch:
        result = run(make_loop(folder / "runs", folder / "raw"), counting, patch)
    (folder / f"done-{number}").write_text(f"{result.skipped} {len(counting.ran)}")


@pytest.fixture(scope="module", autouse=True)
def builders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[Any]]]:
    """Two processes that import while other tests run, and wait."""
    folder = tmp_path_factory.mktemp("builders")
    spawn = multiprocessing.get_context("spawn")
    found = [spawn.Process(target=_builder, args=(folder, i), daemon=True) for i in range(2)]
    for process in found:
        process.start()
    yield folder, found
    for process in found:
        process.kill()
        process.join()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 40
    while not condition():
        assert time.monotonic() < deadline, "waited 40 s"
        time.sleep(0.01)


def test_d19_of_two_builders_one_builds_the_other_waits_and_a_killed_one_is_taken_over(
    clean: SimpleNamespace, builders: tuple[Path, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, (killed, _) = builders
    shutil.copytree(clean.folder / "raw", folder / "raw")
    said: list[str] = []

    def go_on(text: str) -> None:  # called while the first process holds the key
        said.append(text)
        assert visible(folder / "runs") == []
        os.kill(killed.pid, signal.SIGKILL)

    (folder / "go-0").touch()
    wait_for((folder / "held-0").exists)
    loop, mine = make_loop(folder / "runs", folder / "raw"), Counting()
    loop.console.warn = go_on
    result = run(loop, mine, monkeypatch)
    assert len(said) == 1 and "another process is building the same result" in said[0]
    assert result.record["store_hash"] == clean.hashes[0] and not result.skipped
    assert len(mine.ran) == len(clean.tasks[0]) - 4, "what the killed one had finished was done again"
    home = folder / "runs" / "windows" / "preprocess"
    assert visible(folder / "runs") == [result.path] and not [*home.glob(".tmp-*"), *home.glob(".work-*")]

    deliver(folder / "raw", "next", **NEXT)
    (folder / "go-1").touch()
    wait_for((folder / "held-1").exists)
    loop.console.warn = lambda text: (folder / "on-1").touch()
    late = Counting()
    result = run(loop, late, monkeypatch)
    wait_for((folder / "done-1").exists)
    assert result.skipped and not late.ran and result.record["store_hash"] == clean.hashes[1]
    assert (folder / "done-1").read_text() == f"False {len(clean.tasks[1])}"
    assert len(visible(folder / "runs")) == 2
