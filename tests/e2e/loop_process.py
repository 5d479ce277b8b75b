"""The loop as a person runs it: a command in a process of its own, watched, interrupted, waited for."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import psutil

ROOT = Path(__file__).resolve().parents[2]
NOT_OURS = ("RAY_ADDRESS", "MLFLOW_TRACKING_URI", "GEM_RUNS_DIR", "GEM_VERBOSE", "PYTHONWARNINGS")
# Lines that Ray prefixes with the process they come from, and what a library says that nobody asked.
NOISE = re.compile(r"\(\w+ pid=\d+|Traceback|[Ww]arning|DEBUG|INFO|ERROR|FutureWarning|Exception")


@dataclass(frozen=True)
class Finished:
    """A command that ended: its exit status, both streams, and how long it took."""

    status: int
    out: str
    err: str
    seconds: float

    @property
    def noise(self) -> list[str]:
        """Lines of either stream that a person should not see."""
        return [line for line in (self.out + self.err).splitlines() if NOISE.search(line)]


class Command:
    """`python -m pipelines ...` in a session of its own; use as a context manager, it is ended in any case."""

    def __init__(self, folder: Path, *words: str) -> None:
        self._out, self._err = folder / "out.txt", folder / "err.txt"
        environ = {k: v for k, v in os.environ.items() if k not in NOT_OURS}
        environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "platform"), str(ROOT)])
        self._family: set[psutil.Process] = set()
        self._start = time.monotonic()
        with self._out.open("w") as out, self._err.open("w") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "pipelines", *words],
                cwd=ROOT, env=environ, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True,
            )  # fmt: skip

    def __enter__(self) -> Command:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self.process.poll() is None:
            self._look()
            for process in [*self._family, psutil.Process(self.process.pid)]:
                _kill(process)
            self.process.wait(30)

    @property
    def out(self) -> str:
        return self._out.read_text()

    def wait_until(self, seen: Callable[[], bool], what: str, timeout_s: float) -> None:
        """Wait until `seen()`, at most `timeout_s`; fails at once when the command ends first."""
        end = time.monotonic() + timeout_s
        while not seen():
            assert self.process.poll() is None, f"ended before {what}:\n{self.out}\n{self._err.read_text()}"
            assert time.monotonic() < end, f"no {what} within {timeout_s:.0f} s:\n{self.out}\n{self._err.read_text()}"
            time.sleep(0.05)

    def interrupt(self) -> None:
        """Ctrl-C: SIGINT to the whole foreground group, as a terminal sends it."""
        self._look()
        os.killpg(self.process.pid, signal.SIGINT)

    def finish(self, timeout_s: float) -> Finished:
        """Wait for the end, at most `timeout_s`."""
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout_s:.0f} s:\n{self.out}") from None
        seconds = time.monotonic() - self._start
        return Finished(self.process.returncode, self.out, self._err.read_text(), seconds)

    def left_over(self, timeout_s: float = 30) -> list[str]:
        """Processes of the command that still run after it ended, given `timeout_s` to go."""
        end = time.monotonic() + timeout_s
        while True:
            left = [_name(p) for p in self._family | _session(self.process.pid) if _runs(p)]
            if not left or time.monotonic() > end:
                return left
            time.sleep(0.2)

    def _look(self) -> None:
        """Remember all descendants: after the end nothing tells whose they were."""
        try:
            self._family |= set(psutil.Process(self.process.pid).children(recursive=True))
        except psutil.Error:
            return


def run_command(folder: Path, *words: str, timeout_s: float = 600) -> Finished:
    """Run a command to its end."""
    with Command(folder, *words) as command:
        return command.finish(timeout_s)


def _session(session: int) -> set[psutil.Process]:
    found = set()
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session and process.pid != session:
                found.add(process)
        except (OSError, psutil.Error):
            continue
    return found


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _name(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {' '.join(process.cmdline())[:100]}"
    except psutil.Error:
        return str(process.pid)


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.Error:
        return
