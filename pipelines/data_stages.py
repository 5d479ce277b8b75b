"""Stages that make data: the generated world (if no data are given) and the feature store."""

from __future__ import annotations

import contextlib
import errno
import shutil
import time
from pathlib import Path
from typing import Any

from gem.data.ingest.canonical import check_spec, resolve_files
from gem.errors import DataError, SpecError
from pipelines.console import Stage
from pipelines.loop import DATA_CODE, GENERATED, Loop, code_key, plain, progress_line
from pipelines.stage import KEY_CHARS, StageResult, stage_key
from pipelines.windows import file_hashes, find_parent, key_part, read_forgotten, unchanged_list

GENERATOR_CODE = ("platform/gem/data", "platform/gem/config.py")
WORK = ".work-"  # pieces of a store that is being built, by its key
ABANDONED_S = 7 * 86_400


def generate(loop: Loop) -> StageResult:
    """Write the generated ads world; only for the embedded default data."""
    from gem.data.world.generator import generate as write_world

    world = loop.config.data.world

    def build(out: Path, stage: Stage) -> dict[str, Any]:
        report = write_world(world, out)
        rows = report.impressions + report.organic_events + report.conversions
        return {"rows_in": 0, "rows_out": rows, "quarantined": 0, "headline": f"{report.impressions:,} impressions"}

    parts = {"world": plain(world), "code": code_key(GENERATOR_CODE)}
    result = loop.stage("generate", parts, build)
    loop.data_dir = result.path
    return result


def preprocess(loop: Loop) -> StageResult:
    """Raw tables to a feature store (timelines, cuts, encoded entities).

    New files are added to the last store that holds all the others. An interrupted build goes on where it stopped.
    """
    from pipelines.distribute import DISK_FULL
    from pipelines.preprocess import Base
    from pipelines.preprocess import preprocess as build_store

    files = resolve_files(loop.spec, loop.data_dir)
    check_spec(loop.spec, files)  # contradictions are said before any work
    home = loop.root / "preprocess"
    forgotten = read_forgotten(loop.root)
    settings = {k: v for k, v in plain(loop.config.data).items() if k not in ("dataset", "data_dir", "world")}
    parts: dict[str, Any] = {
        "spec": loop.spec.model_dump(mode="json"), "files": file_hashes(files, loop.runs), "settings": settings,
        "code": code_key(DATA_CODE), "forgotten": key_part(forgotten),
    }  # fmt: skip
    work = home / f"{WORK}{stage_key('preprocess', parts)[:KEY_CHARS]}"

    until_committed = contextlib.ExitStack()

    def build(out: Path, stage: Stage) -> dict[str, Any]:
        say = progress_line(loop.console, "")
        base = Base(find_parent(home, parts, loop.spec, say), parts["files"], forgotten, work)
        try:
            record = build_store(loop.config, loop.spec, loop.data_dir, out, say, base, loop.cluster.ray)
            until_committed.enter_context(unchanged_list(loop.root, forgotten))
            return record
        except (DataError, SpecError):  # the same files and settings get the same answer: nobody comes back for these
            shutil.rmtree(work, ignore_errors=True)
            raise
        except OSError as e:
            if e.errno != errno.ENOSPC:
                raise
            shutil.rmtree(work, ignore_errors=True)
            raise DataError(DISK_FULL) from None

    with until_committed:
        result = loop.stage("preprocess", parts, build)
    _sweep(home, work)
    return result


def _sweep(home: Path, own: Path) -> None:
    """Remove pieces that nobody came back for."""
    for left in home.glob(f"{WORK}*"):
        if left != own and time.time() - left.stat().st_mtime > ABANDONED_S:
            shutil.rmtree(left, ignore_errors=True)


def needs_world(loop: Loop) -> bool:
    return loop.config.data.dataset == GENERATED and not loop.config.data.data_dir
