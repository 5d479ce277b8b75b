"""Stages that make data: the generated world (if no data are given) and the feature store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gem.data.canonical import check_spec, resolve_files
from gem.lineage.files import sha256_file
from pipelines.console import Stage
from pipelines.loop import DATA_CODE, GENERATED, Loop, code_key, plain, progress_line
from pipelines.stage import StageResult

GENERATOR_CODE = ("platform/gem/data", "platform/gem/config.py")


def generate(loop: Loop) -> StageResult:
    """Write the generated ads world; only for the embedded default data."""
    from gem.data.generator import generate as write_world

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
    """Raw tables to a feature store (timelines, cuts, encoded entities)."""
    from pipelines.preprocess import preprocess as build_store

    files = resolve_files(loop.spec, loop.data_dir)
    check_spec(loop.spec, files)  # contradictions are said before any work
    inputs = file_hashes(files, loop.data_dir)
    settings = {k: v for k, v in plain(loop.config.data).items() if k not in ("dataset", "data_dir", "world")}

    def build(out: Path, stage: Stage) -> dict[str, Any]:
        loop.cluster.ray()
        return build_store(loop.config, loop.spec, loop.data_dir, out, progress_line(loop.console, ""))

    parts = {
        "spec": loop.spec.model_dump(mode="json"), "files": inputs, "settings": settings, "code": code_key(DATA_CODE),
    }  # fmt: skip
    return loop.stage("preprocess", parts, build)


def file_hashes(files: Mapping[str, Sequence[Path]], data_dir: Path) -> dict[str, dict[str, str]]:
    """Table -> path below the data folder -> sha256: what the raw inputs of a stage are."""
    return {
        table: {f.relative_to(data_dir).as_posix(): sha256_file(f) for f in found} for table, found in files.items()
    }


def needs_world(loop: Loop) -> bool:
    return loop.config.data.dataset == GENERATED and not loop.config.data.data_dir
