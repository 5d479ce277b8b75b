"""The chain on disk: every link found by path, believed by hash, shown with its facts."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from gem.data.build.store_write import manifest_hash
from gem.lineage.bundle import Parents, save_bundle
from gem.lineage.chain import ChainRecord, headline, walk
from gem.lineage.files import relocated
from pipelines.lineage_view import format_chain
from pipelines.stage import run_stage
from tests.unit.lineage.test_bundle import EXTRA, toy_info, toy_weights


def toy_store(folder: Path) -> str:
    """A store of two small files with a true manifest; returns its hash."""
    (folder / "entities").mkdir(parents=True)
    (folder / "entities" / "users.parquet").write_bytes(b"u" * 10)
    (folder / "spec.json").write_text(json.dumps({"name": "toy", "source": "https://example.org", "licence": "CC0"}))
    manifest = {
        "version": 1,
        "spec_hash": "5" * 64,
        "split": {"train_days": ["2030-01-01", "2030-01-02", "2030-01-03"], "test_day": "2030-01-05"},
        "days": ["2030-01-01", "2030-01-02", "2030-01-03", "2030-01-04", "2030-01-05"],
        "num_shards": 2,
        "files": {"entities/users.parquet": {"sha256": "0" * 64, "bytes": 10, "rows": 1}},
        "rows": {"impressions": 12345},
        "quarantined": {"clicks": {"null_user": 3, "null_ad": 4}},
        "duplicates": 2,
        "world": False,
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return manifest_hash(manifest)


def toy_chain(root: Path) -> tuple[Path, str, Path, str]:
    """Store, teacher and student as a loop leaves them; returns (student, hash, teacher, hash)."""
    stage = run_stage(
        "preprocess",
        key_parts={"raw": "f" * 64},
        root=root,
        build=lambda folder: {"hash": toy_store(folder / "store")},
    )
    parents = Parents(
        data=stage.record["hash"],
        data_path=str(stage.path / "store"),
        commit="0123456789ab+dirty",
        lock="b" * 64,
        code="c",
    )
    info = toy_info(parents=parents, metrics={"click": {"ne": 0.8, "auc": {"value": 0.7}}})
    teacher_hash = save_bundle(root / "gem", info, toy_weights(), EXTRA)
    own = dataclasses.replace(parents, teacher=teacher_hash, teacher_path=str(root / "gem"))
    student = toy_info(name="gem-feed", kind="vertical", group="feed", parents=own)
    student_hash = save_bundle(root / "gem-feed", student, toy_weights(), EXTRA)
    return root / "gem-feed", student_hash, root / "gem", teacher_hash


def test_whole_chain_in_order_with_facts(tmp_path: Path) -> None:
    student, student_hash, _, teacher_hash = toy_chain(tmp_path)
    records = walk(student, student_hash)
    assert [(r.step, r.name, r.problem) for r in records] == [
        ("data", "toy", ""),
        ("features", "store", ""),
        ("teacher", "gem", ""),
        ("student", "gem-feed", ""),
    ]
    data, features, teacher, last = records
    assert data.facts["source"] == "https://example.org" and data.facts["raw"] == "f" * 64
    assert features.facts["days"] == "2030-01-01 to 2030-01-05" and features.facts["quarantined"] == 7
    assert (teacher.hash, last.hash) == (teacher_hash, student_hash)
    assert teacher.facts["metrics"] == {"click ne": 0.8, "click auc": 0.7}


def test_broken_links_are_reported_not_raised(tmp_path: Path) -> None:
    student, student_hash, teacher, _ = toy_chain(tmp_path)
    weights = (teacher / "weights.safetensors").read_bytes()
    (teacher / "weights.safetensors").write_bytes(weights[:-1] + b"?")
    assert "weights.safetensors was changed" in walk(student, student_hash)[2].problem
    users = next(tmp_path.glob("preprocess/*/store/entities/users.parquet"))
    users.write_bytes(b"u" * 9)
    assert "users.parquet is missing or changed" in walk(student, student_hash)[1].problem
    users.write_bytes(b"u" * 10)
    manifest = users.parent.parent / "manifest.json"
    raw = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**raw, "duplicates": 0}))
    assert "the model was made of" in walk(student, student_hash)[1].problem
    (student / "spec.json").unlink()
    only = walk(student, student_hash)
    assert len(only) == 1 and "spec.json is missing" in only[0].problem


def test_relative_parent_paths_are_found_below_the_roots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    student, student_hash, _, _ = toy_chain(Path("runs"))
    assert all(not r.problem for r in walk(student, student_hash))
    student = student.absolute()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert any(r.problem for r in walk(student, student_hash))
    assert all(not r.problem for r in walk(student, student_hash, roots=(tmp_path,)))


def test_parents_are_found_after_their_runs_folder_was_moved(tmp_path: Path) -> None:
    student, student_hash, _, _ = toy_chain(tmp_path / "runs" / "toy")
    moved = (tmp_path / "runs").rename(tmp_path / "elsewhere")
    student = moved / student.relative_to(tmp_path / "runs")
    assert any(r.problem for r in walk(student, student_hash))
    records = walk(student, student_hash, roots=(moved, moved.parent))
    assert all(not r.problem for r in records) and all(str(moved) in r.path for r in records[1:])
    users = next(moved.glob("toy/preprocess/*/store/entities/users.parquet"))
    users.write_bytes(b"u" * 9)
    assert walk(student, student_hash, roots=(moved,))[1].problem, "found is not yet believed"


def test_relocated_prefers_the_path_itself_then_the_longest_tail(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for folder in ("old/toy/store", "runs/toy/store", "runs/store"):
        (tmp_path / folder).mkdir(parents=True)
    old = tmp_path / "old" / "toy" / "store"
    assert relocated(str(old), runs) == old
    shutil.rmtree(tmp_path / "old")
    assert relocated(str(old), runs) == runs / "toy" / "store"
    assert relocated("toy/store", runs) == relocated("before/toy/store", runs) == runs / "toy" / "store"
    assert relocated("other/store", runs) == runs / "store"
    for gone in ("/no/where", "no/where", "../runs/gone/../store", "x/../store"):
        assert relocated(gone, runs) == Path(gone)


@pytest.mark.parametrize(
    ("metrics", "shown"),
    [
        ({}, {}),
        ({"tasks": {"click": {"ne": {"value": 0.5, "low": 0.4}, "rows": 7}}}, {"click ne": 0.5}),
        ({"tasks": {"click": {"ne": None, "auc": {"value": None}}}, "note": "x"}, {}),
    ],
)
def test_headline(metrics: dict[str, Any], shown: dict[str, float]) -> None:
    assert headline(metrics) == shown


def test_view_shows_every_link_in_a_frame(tmp_path: Path) -> None:
    student, student_hash, _, teacher_hash = toy_chain(tmp_path)
    deployment = ChainRecord(
        "deployment", "gem-feed", student_hash, "file:///x", {"alias": "champion", "reasons": ("one " * 40, "two")}
    )
    text = format_chain([*walk(student, student_hash), deployment])
    titles = [line.split()[1].rstrip(":") for line in text.splitlines() if line.startswith("┌─")]
    assert titles == ["data", "features", "teacher", "student", "deployment"]
    assert teacher_hash[:12] in text and teacher_hash[:13] not in text
    for fact in ("2030-01-01 to 2030-01-03", "12,345", "click ne 0.8000", "0123456789ab+dirty", "champion", "two"):
        assert fact in text, fact
    assert len({len(line) for line in text.splitlines() if line[:1] in "┌│└"}) == 1, "the frame is straight"
    broken = format_chain([dataclasses.replace(deployment, problem="gone")])
    assert "gone" in broken and "1 of 1 links cannot be verified" in broken
