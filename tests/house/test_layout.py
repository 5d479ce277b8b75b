"""The tree as it stands: rooms, arrows, budgets, docstrings, words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.house import rules
from tests.house.rules import ROOT, python_files, tracked_files

FOLDERS = {"platform", "pipelines", "serving", "tuning", "infra", "tests", ".ci"}
TEXT = {".py", ".md", ".toml", ".txt", ".yaml", ".yml", ".sh", ".json", ".html", ".cfg", ""}
# Words about other people's files, verbatim.
NOT_OURS = {Path("LICENSE")}


def hold(rule: Callable[[Path, str], list[str]], files: list[Path]) -> None:
    found = [c for p in files for c in rule(p, (ROOT / p).read_text(encoding="utf-8"))]
    if found:
        pytest.fail("\n".join(found), pytrace=False)


def test_no_other_top_level_folder() -> None:
    assert {p.parts[0] for p in tracked_files() if len(p.parts) > 1} <= FOLDERS


def test_platform_is_a_source_root_and_never_a_package() -> None:
    """With an __init__.py it would shadow the standard library's `platform`: `import uuid` dies."""
    assert not (ROOT / "platform" / "__init__.py").exists()
    assert {p.parts[1] for p in tracked_files() if p.parts[0] == "platform"} == {"gem"}


def test_every_package_folder_has_an_init() -> None:
    folders = {p.parent for p in python_files("platform/gem", *rules.RIM)}
    assert [str(f) for f in sorted(folders) if not (ROOT / f / "__init__.py").exists()] == []


def test_arrows() -> None:
    hold(rules.arrow_complaints, python_files("platform", *rules.RIM))


def test_budgets() -> None:
    hold(rules.budget_complaints, python_files())


def test_public_things_of_gem_have_docstrings() -> None:
    hold(rules.docstring_complaints, python_files("platform"))


def test_nothing_unfinished_and_no_machine_paths() -> None:
    files = [p for p in tracked_files() if p.suffix in TEXT and p not in NOT_OURS]
    hold(rules.text_complaints, files)


def test_test_files_have_unique_names() -> None:
    names = [p.name for p in python_files("tests") if p.name != "conftest.py" and "benchmarks" not in p.parts]
    twice = sorted({n for n in names if names.count(n) > 1})
    assert twice == []


@pytest.mark.parametrize("folder", ["unit", "integration"])
def test_there_is_something_to_read(folder: str) -> None:
    """The rules above pass on an empty list; this one does not."""
    assert [p for p in python_files(f"tests/{folder}") if p.name.startswith("test_")]
