"""The peers' virtual environment: made once, and again when requirements.txt or the Python version changes.

`peers_python()` returns its interpreter; run modules of this folder with it from the root of the repository.
`python -m tests.benchmarks.peers.environment` makes it and prints the path.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
REQUIREMENTS = Path(__file__).parent / "requirements.txt"
HOME = ROOT / "tests" / "benchmarks" / "out" / "peers-venv"
DONE = "made-from"  # file in the environment with the key it was made from, written last


def key(requirements: Path = REQUIREMENTS) -> str:
    """Hash of the requirements and of the Python version."""
    text = requirements.read_bytes() + f"python {sys.version_info.major}.{sys.version_info.minor}".encode()
    return hashlib.sha256(text).hexdigest()


def present(home: Path = HOME, requirements: Path = REQUIREMENTS) -> bool:
    """Whether the environment is complete and of these requirements."""
    done = home / DONE
    return done.is_file() and done.read_text(encoding="ascii") == key(requirements)


def peers_python(home: Path = HOME, requirements: Path = REQUIREMENTS) -> Path:
    """The environment's Python; made first if it is absent, half made or of other requirements (minutes).

    Processes that come meanwhile wait. Raises RuntimeError with the end of pip's output if it fails.
    """
    python = home / "bin" / "python"
    home.parent.mkdir(parents=True, exist_ok=True)
    with (home.parent / f"{home.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if present(home, requirements):
            return python
        shutil.rmtree(home, ignore_errors=True)
        _call([sys.executable, "-m", "venv", str(home)])
        _call([str(python), "-m", "pip", "install", "--quiet", "-r", str(requirements)])
        (home / DONE).write_text(key(requirements), encoding="ascii")
    return python


def peers_environment(threads: int = 1) -> dict[str, str]:
    """Environment variables for a run: few threads, and none of our own import paths."""
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return kept | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}


def run_module(module: str, arguments: list[str], threads: int = 1) -> None:
    """Run `python -m tests.benchmarks.peers.<module>` of the peers' environment to its end.

    Raises RuntimeError with the end of its output if it fails.
    """
    run_python(["-m", f"tests.benchmarks.peers.{module}", *arguments], threads)


def run_python(arguments: list[str], threads: int = 1) -> None:
    """Run the peers' interpreter with these arguments, from the root of the repository, as `run_module` does."""
    _call([str(peers_python()), *arguments], peers_environment(threads))


def _call(command: list[str], environment: dict[str, str] | None = None) -> None:
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: ended with {done.returncode}\n{(done.stdout + done.stderr)[-2000:]}")


if __name__ == "__main__":
    print(peers_python())
