"""What a person is told to type exists: make targets, modules, help lines."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.house.rules import ROOT, makefile_targets, readme_commands, tracked_files

READMES = [p for p in tracked_files() if p.name == "README.md"]
THEIRS = {"venv", "json.tool", "pip", "pytest", "ruff", "mypy", "http.server"}


def test_every_target_is_phony_and_has_a_help_line() -> None:
    """Folders are called serving, tuning, tests: a target that is not .PHONY might do nothing."""
    rules, phony, helped = makefile_targets((ROOT / "Makefile").read_text())
    assert rules == phony == helped
    assert {"setup", "pipeline", "serve", "tune", "test", "check", "bench", "lineage", "submit"} <= rules


def run_make(*arguments: str) -> subprocess.CompletedProcess[str]:
    """make as a person types it, also when these tests run below another make (which says where it goes)."""
    command = ["make", "--no-print-directory", *arguments]
    env = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES")}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)


def test_make_help_prints_one_line_for_every_target() -> None:
    rules, _, _ = makefile_targets((ROOT / "Makefile").read_text())
    done = run_make("help")
    assert done.returncode == 0
    lines = done.stdout.splitlines()[:-1]
    assert {line.split()[0] for line in lines} == rules
    assert len(lines) == len(rules)
    assert "SET=" in done.stdout.splitlines()[-1]


def dry(*arguments: str) -> list[str]:
    done = run_make("-n", *arguments)
    assert done.returncode == 0, done.stderr
    return [" ".join(line.split()) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (["pipeline"], ".venv/bin/python -m pipelines run"),
        (
            ["pipeline", "DATASET=kuairand", "DATA_DIR=a b", "RECIPE=big", "SET=train.epochs=2 model.dim=8"],
            '.venv/bin/python -m pipelines run --dataset "kuairand" --data-dir "a b" --recipe "big" '
            '--set "train.epochs=2" --set "model.dim=8"',
        ),
        (["serve"], ".venv/bin/python -m serving"),
        (["serve", "PORT=8001"], '.venv/bin/python -m serving --port "8001"'),
        (["serve", "DATASET=kuairand"], '.venv/bin/python -m serving --dataset "kuairand"'),
        (["tune"], ".venv/bin/python -m tuning sweep"),
        (["lineage", "NAME=gem-feed"], '.venv/bin/python -m pipelines lineage "gem-feed"'),
        (
            ["submit", "RAY_ADDRESS=http://h:8265", "DATASET=kuairand"],
            '.venv/bin/python -m pipelines.submit --address "http://h:8265" -- run --dataset "kuairand"',
        ),
    ],
)
def test_variables_reach_the_command_and_only_those_given(arguments: list[str], command: str) -> None:
    assert command in dry(*arguments)


def test_bench_asks_for_a_name() -> None:
    done = run_make("-o", "setup", "bench")
    assert done.returncode == 2
    assert "make bench NAME=x with x one of:" in done.stdout


@pytest.mark.parametrize("path", READMES, ids=str)
def test_readme_commands_exist(path: object) -> None:
    makes, modules = readme_commands((ROOT / str(path)).read_text())
    rules, _, _ = makefile_targets((ROOT / "Makefile").read_text())
    assert makes - rules == set()
    ours = {m for m in modules if m not in THEIRS and m.split(".")[0] not in THEIRS}
    missing = [m for m in sorted(ours) if not _module_exists(m)]
    assert missing == []


def _module_exists(name: str) -> bool:
    base = ROOT.joinpath(*name.split("."))
    return base.with_suffix(".py").is_file() or (base / "__main__.py").is_file()


def test_there_are_readmes() -> None:
    assert len(READMES) >= 3
