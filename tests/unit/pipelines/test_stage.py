"""Stages: done once per key, whole or invisible, whatever stops them."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gem.errors import ConfigError, GemError
from pipelines.stage import read_stage, run_stage, stage_key

KEY = {"data": "abc", "size": 3}


class Builder:
    """Writes two files and counts how often."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, folder: Path) -> dict[str, Any]:
        self.calls += 1
        (folder / "part").mkdir()
        (folder / "part" / "a.bin").write_bytes(b"a" * 100)
        (folder / "b.json").write_text("{}")
        return {"rows_in": 5, "rows_out": 4, "share": math.nan}


def visible(root: Path) -> list[str]:
    """Everything below the stage's folder except lock files."""
    return sorted(p.relative_to(root).as_posix() for p in root.glob("*/*") if p.name != ".locks")


def test_same_key_is_skipped_other_key_is_built(tmp_path: Path) -> None:
    build = Builder()
    first = run_stage("prep", key_parts=KEY, root=tmp_path, build=build)
    again = run_stage("prep", key_parts=dict(reversed(KEY.items())), root=tmp_path, build=build)
    assert (first.skipped, again.skipped, build.calls) == (False, True, 1)
    assert again.record == first.record == {"rows_in": 5, "rows_out": 4, "share": None}
    assert again.path == first.path and again.path.parent == tmp_path / "prep"
    assert again.built_seconds == pytest.approx(first.built_seconds)
    other = run_stage("prep", key_parts={**KEY, "size": 4}, root=tmp_path, build=build)
    assert not other.skipped and other.path != first.path and build.calls == 2
    assert not run_stage("train", key_parts=KEY, root=tmp_path, build=build).skipped, "the name is part of the key"
    described = read_stage(first.path)
    assert (
        described is not None and described["key_parts"] == KEY and set(described["files"]) == {"part/a.bin", "b.json"}
    )


def _truncate(path: Path) -> None:
    (path / "part" / "a.bin").write_bytes(b"a" * 99)


def _flip(path: Path) -> None:
    (path / "part" / "a.bin").write_bytes(b"a" * 99 + b"b")


def _delete(path: Path) -> None:
    (path / "b.json").unlink()


def _forget(path: Path) -> None:
    (path / "stage.json").unlink()


def _half_written(path: Path) -> None:
    text = (path / "stage.json").read_text()
    (path / "stage.json").write_text(text[: len(text) // 2])


@pytest.mark.parametrize("damage", [_truncate, _flip, _delete, _forget, _half_written])
def test_damaged_result_is_built_again(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    build = Builder()
    path = run_stage("prep", key_parts=KEY, root=tmp_path, build=build).path
    damage(path)
    again = run_stage("prep", key_parts=KEY, root=tmp_path, build=build)
    assert not again.skipped and build.calls == 2
    assert (path / "part" / "a.bin").read_bytes() == b"a" * 100
    assert run_stage("prep", key_parts=KEY, root=tmp_path, build=build).skipped


@pytest.mark.parametrize("error", [ValueError("broken"), OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_stopped_build_leaves_nothing_and_can_be_repeated(tmp_path: Path, error: BaseException) -> None:
    def fail(folder: Path) -> dict[str, Any]:
        (folder / "half.bin").write_bytes(b"x")
        raise error

    with pytest.raises(type(error)):
        run_stage("prep", key_parts=KEY, root=tmp_path, build=fail)
    assert visible(tmp_path) == []
    assert not run_stage("prep", key_parts=KEY, root=tmp_path, build=Builder()).skipped


def test_failed_rebuild_does_not_bring_the_damaged_result_back(tmp_path: Path) -> None:
    path = run_stage("prep", key_parts=KEY, root=tmp_path, build=Builder()).path
    _truncate(path)

    def fail(folder: Path) -> dict[str, Any]:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        run_stage("prep", key_parts=KEY, root=tmp_path, build=fail)
    assert not run_stage("prep", key_parts=KEY, root=tmp_path, build=Builder()).skipped


def _slow_build(root: Path, log: Path, seconds: float) -> None:
    def build(folder: Path) -> dict[str, Any]:
        with log.open("a") as f:
            f.write(f"{os.getpid()}\n")
        (folder / "x.bin").write_bytes(b"x")
        time.sleep(seconds)
        return {"pid": os.getpid()}

    result = run_stage("prep", key_parts=KEY, root=root, build=build)
    with log.with_suffix(".done").open("a") as f:
        f.write(f"{result.record['pid']} {result.skipped}\n")


def _start(root: Path, log: Path, seconds: float) -> Any:
    process = multiprocessing.get_context("spawn").Process(target=_slow_build, args=(root, log, seconds))
    process.start()
    return process


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "waited 20 s"
        time.sleep(0.02)


def test_two_processes_build_a_key_once(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    both = [_start(tmp_path / "runs", log, 0.5) for _ in range(2)]
    for process in both:
        process.join(30)
        assert process.exitcode == 0
    builders = log.read_text().split()
    assert len(builders) == 1
    done = sorted(log.with_suffix(".done").read_text().splitlines(), key=lambda line: line.endswith("True"))
    assert done == [f"{builders[0]} False", f"{builders[0]} True"], "the second got the first one's result"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_signal_in_the_middle_then_a_restart_continues(tmp_path: Path, number: signal.Signals) -> None:
    root, log = tmp_path / "runs", tmp_path / "log.txt"
    process = _start(root, log, 60)
    _wait_for(lambda: bool(list(root.glob("prep/.tmp-*/x.bin"))))
    assert process.pid is not None
    os.kill(process.pid, number)
    process.join(20)
    assert process.exitcode not in (0, None)
    left = visible(root)
    if number is signal.SIGKILL:
        assert len(left) == 1 and left[0].startswith("prep/.tmp-"), "nobody could clean up, but nothing is visible"
    else:
        assert left == []
    result = run_stage("prep", key_parts=KEY, root=root, build=Builder())
    assert not result.skipped
    assert visible(root) == [f"prep/{result.path.name}"], "the dead builder's leftovers are gone"


def test_leftovers_of_other_keys_go_only_if_their_builder_is_dead(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    dead = root / "prep" / ".tmp-0123456789abcdef-1"
    dead.mkdir(parents=True)
    process = _start(root, tmp_path / "log.txt", 60)
    _wait_for(lambda: bool(list(root.glob("prep/.tmp-*/x.bin"))))
    run_stage("prep", key_parts={"other": 1}, root=root, build=Builder())
    assert not dead.exists()
    assert list(root.glob("prep/.tmp-*/x.bin")), "a living builder is left alone"
    process.terminate()
    process.join(20)


def test_waiting_is_told(tmp_path: Path) -> None:
    process = _start(tmp_path / "runs", tmp_path / "log.txt", 1.0)
    _wait_for(lambda: bool(list((tmp_path / "runs").glob("prep/.tmp-*/x.bin"))))
    told: list[str] = []
    result = run_stage("prep", key_parts=KEY, root=tmp_path / "runs", build=Builder(), on_wait=told.append)
    process.join(20)
    assert result.skipped and len(told) == 1 and "another process is building" in told[0]


def test_signal_handler_is_given_back(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    run_stage("prep", key_parts=KEY, root=tmp_path, build=Builder())
    assert signal.getsignal(signal.SIGTERM) is before


def test_misuse_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="finite plain JSON"):
        stage_key("prep", {"path": Path("x")})
    with pytest.raises(ConfigError, match="finite plain JSON"):
        stage_key("prep", {"lr": math.nan})

    def link(folder: Path) -> dict[str, Any]:
        (folder / "link").symlink_to("/etc")
        return {}

    def own_record(folder: Path) -> dict[str, Any]:
        (folder / "stage.json").write_text("{}")
        return {}

    for build, words in (
        (link, "symbolic link"),
        (own_record, r"stage\.json, which belongs"),
        (lambda folder: {"x": Path("y")}, "record must be plain JSON"),
    ):
        with pytest.raises(GemError, match=words):
            run_stage("prep", key_parts=KEY, root=tmp_path, build=build)
    assert visible(tmp_path) == []


def test_key_is_stable_across_releases() -> None:
    """Computed by hand from the documented form; a change here makes every user build everything again."""
    import hashlib

    text = json.dumps({"parts": {"data": "abc", "size": 3}, "stage": "prep", "version": 1}, separators=(",", ":"))
    assert stage_key("prep", KEY) == hashlib.sha256(text.encode()).hexdigest()
