"""Make `.venv` from a committed lock. Standard library only: it runs before anything is installed.

    python3 infra/bootstrap.py [--lock infra/requirements/cpu.txt] [--venv .venv]

Nothing is done while the stamp `.venv/.lock-<sha256 of the lock>` is there. A `.venv` that already holds exactly the
lock is only stamped. Every other one, also one whose making was killed, is made anew. The stamp is written last.
"""

import sys

OLDEST = (3, 11)
if sys.version_info < OLDEST:  # the file must parse on older ones to come this far
    sys.exit(
        "setup: python3 is %d.%d, at least 3.11 is needed. Install one and run: make setup PYTHON=python3.11"  # noqa: UP031
        % tuple(sys.version_info[:2])
    )

import argparse  # noqa: E402
import fcntl  # noqa: E402
import hashlib  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import re  # noqa: E402
import subprocess  # noqa: E402
import time  # noqa: E402
from pathlib import Path  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_LOCK = ROOT / "infra" / "requirements" / "cpu.txt"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
NOT_LOCKED = {"pip"}  # comes with the venv; nothing of ours imports it
IMPORTS = ("torch", "fbgemm_gpu", "torchrec", "ray", "mlflow", "pyarrow")  # tried before the stamp, if in the lock

# Run by the interpreter of the venv: prints {name: version} of all distributions whose recorded files all exist.
INVENTORY = """
import importlib.metadata as m, json
out = {}
for d in m.distributions():
    files = d.files
    whole = files is not None and all(f.locate().exists() for f in files if not f.name.endswith(".pyc"))
    out[d.metadata["Name"] or str(d)] = d.version if whole else "incomplete"
print(json.dumps(out))
"""


class SetupError(Exception):
    """Set-up cannot go on; the message says what to do."""


def normal(name: str) -> str:
    """The one spelling of a distribution's name (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_lock(path: Path) -> dict[str, str]:
    """The lock as {name: version}; SetupError for a line that is not `name==version`."""
    pins: dict[str, str] = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        text = line.split("#")[0].strip()
        if not text:
            continue
        name, pinned, version = text.partition("==")
        if not pinned or not re.fullmatch(r"[\w.-]+", name) or not re.fullmatch(r"[\w.!+]+", version):
            raise SetupError(f'{path.name}:{number}: "{text}" is not name==version. Pin every package of the lock.')
        pins[normal(name)] = version
    return pins


def stamp_path(venv: Path, lock: Path) -> Path:
    """Where the sign stands that `venv` was made whole from exactly this lock."""
    return venv / f".lock-{hashlib.sha256(lock.read_bytes()).hexdigest()}"


def interpreter(venv: Path) -> Path:
    return venv / "bin" / "python"


def inventory(venv: Path) -> dict[str, str]:
    """{name: version} of what the venv holds; empty when its interpreter does not run."""
    try:
        done = subprocess.run([interpreter(venv), "-I", "-c", INVENTORY], capture_output=True, text=True, timeout=300)
    except OSError:
        return {}
    if done.returncode != 0:
        return {}
    # +cpu, +cu130: the local part of a version is the index's choice of build
    return {normal(n): v.partition("+")[0] for n, v in json.loads(done.stdout).items() if normal(n) not in NOT_LOCKED}


def runs(venv: Path) -> bool:
    """Whether the interpreter of the venv still starts (its base Python may be gone)."""
    try:
        return subprocess.run([interpreter(venv), "-I", "-c", ""], capture_output=True, timeout=60).returncode == 0
    except OSError:
        return False


def write_paths(venv: Path) -> None:
    """Put the source root and the repository root on the venv's import path (Ray workers share the interpreter)."""
    text = f"{ROOT / 'platform'}\n{ROOT}\n"
    for site in (venv / "lib").glob("python3.*/site-packages"):
        target = site / "gem-source.pth"
        if not target.exists() or target.read_text() != text:
            target.write_text(text)


def make_venv(venv: Path) -> None:
    print(f"setup: making {venv.name} with Python {sys.version.split()[0]}", flush=True)
    done = subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], capture_output=True, text=True)
    if done.returncode != 0:
        detail = (done.stdout + done.stderr).strip()
        raise SetupError(
            f"python3 cannot make a virtual environment:\n{detail}\n"
            "On Debian and Ubuntu: apt-get install python3-venv, then run make setup again."
        )


def pip_install(venv: Path, total: int, *arguments: str) -> None:
    """Run pip install, showing how far it is; the full output goes to setup.log in the venv."""
    log_path = venv / "setup.log"
    command = [str(interpreter(venv)), "-m", "pip", "--disable-pip-version-check", "--no-input", "install", *arguments]
    seen = 0
    with log_path.open("a") as log:
        pip = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert pip.stdout is not None
        for line in pip.stdout:
            log.write(line)
            if line.startswith(("Collecting ", "Processing ", "Requirement already")):
                seen += 1
                show(f"setup: fetching {min(seen, total)} of {total} packages", last=seen == total, step=seen % 40 == 0)
            elif line.startswith("Installing collected"):
                show("setup: unpacking", last=True, step=True)
        pip.wait()
    if pip.returncode != 0:
        log_lines = log_path.read_text().splitlines()
        errors = [x for x in log_lines if x.startswith("ERROR")] or log_lines
        raise SetupError("pip failed:\n  " + "\n  ".join(errors[-8:]) + f"\nAll of its output: {log_path}")


def show(text: str, last: bool, step: bool) -> None:
    """One line that moves on a terminal, a few lines elsewhere."""
    if sys.stdout.isatty():
        print(f"\r\033[K{text}", end="\n" if last else "", flush=True)
    elif last or step:
        print(text, flush=True)


def torch_is_cuda(venv: Path) -> bool:
    """Whether the installed torch is a CUDA build, read from its version file (importing it could fail)."""
    for path in (venv / "lib").glob("python3.*/site-packages/torch/version.py"):
        return re.search(r"^cuda\b[^=]*= *['\"]", path.read_text(), re.MULTILINE) is not None
    return False


def install(venv: Path, lock: Path, pins: dict[str, str]) -> None:
    if "fbgemm-gpu" in pins:  # CUDA: only torch's own metadata knows which nvidia packages it needs
        pip_install(venv, 40, "--constraint", str(lock), f"torch=={pins['torch']}")
    pip_install(venv, len(pins), "--no-deps", "--requirement", str(lock))
    if "fbgemm-gpu-cpu" in pins and torch_is_cuda(venv):
        index = os.environ.get("TORCH_CPU_INDEX", TORCH_CPU_INDEX)
        print(f"setup: the index gave a CUDA build of torch, fetching the CPU build from {index}", flush=True)
        torch = f"torch=={pins['torch']}"
        pip_install(venv, 1, "--no-deps", "--force-reinstall", "--index-url", index, torch)


def try_imports(venv: Path, pins: dict[str, str]) -> None:
    """Import the packages that break in known ways; SetupError with the last line of what they said."""
    wanted = [m for m in IMPORTS if {normal(m), normal(m) + "-cpu"} & set(pins)]
    if not wanted:
        return
    print(f"setup: trying {', '.join(wanted)}", flush=True)
    command = [interpreter(venv), "-W", "ignore", "-c", "import " + ", ".join(wanted)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise SetupError(f"the packages are installed but do not import: {last}\nSee infra/requirements/README.md.")


def ensure(venv: Path, lock: Path) -> str:
    """Bring `venv` to the lock and return what was done: `current`, `adopted` or `installed`."""
    if not lock.is_file():
        names = sorted(p.stem for p in DEFAULT_LOCK.parent.glob("*.txt") if p.stem != "in")
        raise SetupError(f'no lock "{lock}". Allowed: LOCK=' + " or LOCK=".join(names))
    pins = read_lock(lock)
    stamp = stamp_path(venv, lock)
    if stamp.exists() and runs(venv):
        write_paths(venv)
        return "current"
    for old in venv.glob(".lock-*"):
        old.unlink()
    done = "adopted"
    if not runs(venv) or inventory(venv) != pins:
        make_venv(venv)
        install(venv, lock, pins)
        done = "installed"
    write_paths(venv)
    try_imports(venv, pins)
    stamp.write_text("")
    return done


def main() -> int:
    parser = argparse.ArgumentParser(description="Make .venv from a committed lock.")
    parser.add_argument("--lock", type=Path, default=DEFAULT_LOCK)
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    options = parser.parse_args()
    started = time.monotonic()
    guard = os.open(options.venv.absolute().parent, os.O_RDONLY)  # two makes at once: the second waits here
    try:
        fcntl.flock(guard, fcntl.LOCK_EX)
        done = ensure(options.venv.absolute(), options.lock.absolute())
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    finally:
        os.close(guard)
    if done != "current":
        note = " (`pip check` names fbgemm-gpu as missing: expected)" if done == "installed" else ""
        print(f"setup: {options.venv.name} {done} in {time.monotonic() - started:.0f} s{note}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
