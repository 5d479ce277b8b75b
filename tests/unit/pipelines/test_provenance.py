"""Provenance: a change of code or lock changes the hash, a move of the checkout does not."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from gem.errors import ConfigError
from pipelines.provenance import code_hash, git_commit, lock_hash


def checkout(root: Path) -> Path:
    (root / "pkg" / "sub").mkdir(parents=True)
    (root / "pkg" / "a.py").write_text("x = 1\n")
    (root / "pkg" / "sub" / "b.py").write_text("y = 2\n")
    (root / "infra" / "requirements").mkdir(parents=True)
    (root / "infra" / "requirements" / "cpu.txt").write_text("torch==2.13.0\n")
    return root


def test_code_hash_follows_names_and_contents_only(tmp_path: Path) -> None:
    one, two = checkout(tmp_path / "one"), checkout(tmp_path / "two")
    before = code_hash(["pkg"], one)
    assert before == code_hash(["pkg"], two)
    assert before == code_hash(["pkg/sub", "pkg/a.py"], one), "order and granularity do not matter"
    (one / "pkg" / "__pycache__").mkdir()
    (one / "pkg" / "__pycache__" / "a.cpython-311.pyc").write_bytes(b"x")
    assert code_hash(["pkg"], one) == before
    (one / "pkg" / "sub" / "b.py").write_text("y = 3\n")
    assert code_hash(["pkg"], one) != before
    shutil.move(two / "pkg" / "a.py", two / "pkg" / "c.py")
    assert code_hash(["pkg"], two) != before
    with pytest.raises(ConfigError, match="does not exist"):
        code_hash(["pgk"], one)


def test_lock_hash_follows_the_lock(tmp_path: Path) -> None:
    root = checkout(tmp_path)
    before = lock_hash(root)
    (root / "infra" / "requirements" / "cpu.txt").write_text("torch==2.13.1\n")
    assert lock_hash(root) != before
    assert len(lock_hash(tmp_path / "nothing")) == 64, "installed versions stand in for a missing lock"


def test_git_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GEM_COMMIT", raising=False)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    root = checkout(tmp_path / "repo")
    assert git_commit(root) == "unknown"

    def git(*args: str) -> str:
        who = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "core.hooksPath=/dev/null"]
        return subprocess.run(["git", "-C", str(root), *who, *args], check=True, capture_output=True, text=True).stdout

    git("init", "-q")
    assert git_commit(root) == "unknown", "no commit yet"
    git("add", "-A")
    git("commit", "-q", "-m", "one")
    commit = git_commit(root)
    assert git("rev-parse", "HEAD").startswith(commit) and len(commit) == 12
    (root / "pkg" / "new.py").write_text("")
    assert git_commit(root) == f"{commit}+dirty"
    monkeypatch.setenv("GEM_COMMIT", "told")
    assert git_commit(root) == "told"
