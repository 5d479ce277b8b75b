"""Where results come from: source code, commit and installed versions, as short texts and hashes."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path

from gem.errors import ConfigError
from gem.lineage.files import sha256_text

ROOT = Path(__file__).resolve().parent.parent
SOURCE_ENDINGS = (".py", ".yaml", ".cpp", ".cu")


def code_hash(paths: Iterable[str | Path], root: Path = ROOT) -> str:
    """Hex sha256 over names and contents of the source files in `paths` (files or folders below `root`).

    A stage takes it into its key, so that a change of code runs the stage again. Names are relative to
    `root`: the hash is the same in another checkout. Raises ConfigError for a path that does not exist.
    """
    digest = hashlib.sha256()
    for file in sorted(_sources(paths, root)):
        name = file.relative_to(root).as_posix() if file.is_relative_to(root) else file.name
        content = hashlib.sha256(file.read_bytes()).hexdigest()
        digest.update(f"{name}\0{content}\n".encode())
    return digest.hexdigest()


def _sources(paths: Iterable[str | Path], root: Path) -> set[Path]:
    out: set[Path] = set()
    for path in paths:
        full = root / path
        if full.is_file():
            out.add(full)
        elif full.is_dir():
            out |= {f for f in full.rglob("*") if f.suffix in SOURCE_ENDINGS and f.is_file()}
        else:
            raise ConfigError(f"code_hash: {full} does not exist; name a source file or folder")
    return out


def git_commit(root: Path = ROOT) -> str:
    """Short commit of the checkout, `+dirty` behind it if files were changed or are new.

    `unknown` outside git. A job that runs from a copy without .git is told by GEM_COMMIT.
    """
    told = os.environ.get("GEM_COMMIT", "")
    if told:
        return told
    commit = _git(root, "rev-parse", "--short=12", "HEAD")
    if not commit:
        return "unknown"
    return f"{commit}+dirty" if _git(root, "status", "--porcelain") else commit


def _git(root: Path, *args: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(root), *args], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def lock_hash(root: Path = ROOT) -> str:
    """Hex sha256 of the requirements locks in infra/requirements; of the installed versions where there are none."""
    locks = sorted((root / "infra" / "requirements").glob("*.txt"))
    if locks:
        return code_hash(locks, root)
    installed = {f"{d.metadata['Name']}=={d.version}".lower() for d in importlib.metadata.distributions()}
    return sha256_text("\n".join(sorted(installed)))
