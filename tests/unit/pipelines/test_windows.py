"""Which store a window is added to, and hashes of raw files that are not read twice."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from gem.data.ingest import sources
from gem.data.ingest.raw import resolve_files
from gem.data.spec import parse_spec
from pipelines import windows
from pipelines.stage import run_stage
from pipelines.windows import file_hashes, find_parent
from tests.unit.data.toy_log import SPEC

TOY = parse_spec(SPEC)
SETTINGS = {"incremental": True, "num_shards": 4, "test_day": ""}


def parts(files: dict[str, dict[str, str]], **changes: Any) -> dict[str, Any]:
    return {"spec": SPEC, "code": "c", "forgotten": None, "settings": SETTINGS, "files": files} | changes


def finish(root: Path, key_parts: dict[str, Any]) -> Path:
    return run_stage("preprocess", key_parts=key_parts, root=root, build=lambda out: {}).path


def test_the_store_with_most_of_the_files_is_the_parent(tmp_path: Path) -> None:
    one, two = {"shows": {"a": "1"}}, {"shows": {"a": "1", "b": "2"}}
    three = {"shows": {"a": "1", "b": "2", "c": "3"}}
    finish(tmp_path, parts(one))
    best = finish(tmp_path, parts(two))
    home = tmp_path / "preprocess"
    assert find_parent(home, parts(three), TOY) == best
    assert find_parent(home, parts(three, settings=SETTINGS | {"test_day": "2024-03-09"}), TOY) == best
    for other in (
        parts(three, spec={}),
        parts(three, code="d"),
        parts(three, forgotten=["ab"]),
        parts(three, settings=SETTINGS | {"num_shards": 5}),
        parts(three, settings=SETTINGS | {"incremental": False}),
        parts({"shows": {"b": "2", "c": "3"}}),  # a file of every store is gone
        parts({"shows": {"a": "9", "b": "2"}}),  # or has changed
    ):
        assert find_parent(home, other, TOY) is None


def test_a_new_delivery_of_an_entity_table_is_added_and_one_of_a_log_is_not(tmp_path: Path) -> None:
    old = {"shows": {"a": "1"}, "people": {"people.csv": "1"}}
    parent = finish(tmp_path, parts(old))
    entities = {TOY.users.table, TOY.ads.table} - {TOY.impressions.table, *(e.table for e in TOY.events)}
    table = sorted(t for t in entities if t)[0]
    more = finish(tmp_path, parts({"shows": {"a": "1"}, table: {"f": "1", "g": "1"}}))
    assert find_parent(tmp_path / "preprocess", parts({"shows": {"a": "1"}, table: {"f": "2"}}), TOY) == more != parent


def test_a_damaged_store_is_passed_over_and_the_reason_is_said(tmp_path: Path) -> None:
    def store(files: dict[str, dict[str, str]]) -> Path:
        build = lambda out: {"rows": (out / "part.bin").write_bytes(b"1234")}  # noqa: E731
        return run_stage("preprocess", key_parts=parts(files), root=tmp_path, build=build).path

    small, large = store({"shows": {"a": "1"}}), store({"shows": {"a": "1", "b": "2"}})
    wanted, said = parts({"shows": {"a": "1", "b": "2", "c": "3"}}), []
    (large / "part.bin").write_bytes(b"1235")  # the same size
    assert find_parent(tmp_path / "preprocess", wanted, TOY, said.append) == small
    (small / "part.bin").unlink()
    assert find_parent(tmp_path / "preprocess", wanted, TOY, said.append) is None
    assert said[0] == f"adding to the store {small.name}" and "part.bin is damaged or missing" in said[1]
    changed = parts({"shows": {"a": "9", "b": "2"}})
    assert find_parent(tmp_path / "preprocess", changed, TOY, said.append) is None
    assert said[2].endswith("its raw file a has changed or is gone")


def raw_day(folder: Path, day: str, text: str) -> Path:
    path = folder / f"day={day}" / "part.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    old = time.time_ns() - 10 * 10**9
    os.utime(path, ns=(old, old))
    return path


def hashes(folder: Path) -> dict[str, dict[str, str]]:
    table = {"log": {"files": ["day=*/part.csv"]}}
    spec = TOY.model_copy(update={"tables": parse_spec(SPEC | {"tables": SPEC["tables"] | table}).tables})
    files = {"log": resolve_files(spec.model_copy(update={"tables": {"log": spec.tables["log"]}}), folder)["log"]}
    return {t: dict(found) for t, found in file_hashes(files, folder).items()}


def test_files_of_one_name_in_two_folders_are_two_inputs(tmp_path: Path) -> None:
    first = raw_day(tmp_path, "2024-01-01", "x\n1\n")
    raw_day(tmp_path, "2024-01-02", "x\n2\n")
    before = hashes(tmp_path)
    assert set(before["log"]) == {"day=2024-01-01/part.csv", "day=2024-01-02/part.csv"}
    first.write_text("x\n3\n")
    assert hashes(tmp_path) != before


def test_a_file_is_hashed_again_only_when_it_may_have_changed(tmp_path: Path, monkeypatch: Any) -> None:
    read: list[str] = []
    monkeypatch.setattr(windows, "sha256", lambda f: read.append(f.relative) or sources.sha256(f))
    path = raw_day(tmp_path, "2024-01-01", "x\n1\n")
    first = hashes(tmp_path)
    assert hashes(tmp_path) == first and len(read) == 1
    path.write_text("x\n2\n")  # of the same size, just now: within one tick of the clock, so never trusted
    second = hashes(tmp_path)
    assert second != first and hashes(tmp_path) == second and len(read) == 3
    (tmp_path / windows.HASHES).write_text("{")
    assert hashes(tmp_path) == second and json.loads((tmp_path / windows.HASHES).read_text()) == {}
