"""What a person sees while the loop runs: stage banners, progress with rate and time left, the final table.

On a terminal progress is one live bar. Anywhere else (CI logs, files, pipes) it is a plain line every
ten seconds or so, never a carriage return. Noise of the libraries is kept away in `pipelines.quiet`,
whose two functions are re-exported here.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from pipelines.quiet import install_filters, quiet_environment

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

__all__ = ["Console", "Progress", "Stage", "duration", "install_filters", "quiet_environment"]

INTERVAL_S = 10.0  # between two progress lines where there is no terminal
RATE_WINDOW_S = 15.0  # the rate is that of the last seconds, not of the whole stage
INDENT = " " * 6


def duration(seconds: float) -> str:
    """Seconds as a person writes them: "4.2 s", "1 min 05 s", "2 h 03 min"."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


class Rate:
    """Units per second over the last `RATE_WINDOW_S` seconds. Pure: the caller brings the clock."""

    def __init__(self, window_s: float = RATE_WINDOW_S) -> None:
        self._window_s = window_s
        self._points: deque[tuple[float, float]] = deque()

    def add(self, now_s: float, done: float) -> None:
        """Note that `done` units are finished at `now_s` (counts may repeat, times must not go back)."""
        self._points.append((now_s, done))
        while len(self._points) > 2 and now_s - self._points[1][0] >= self._window_s:
            self._points.popleft()

    @property
    def per_s(self) -> float | None:
        """None until two points at different times are known."""
        if len(self._points) < 2:
            return None
        (t0, n0), (t1, n1) = self._points[0], self._points[-1]
        return (n1 - n0) / (t1 - t0) if t1 > t0 and n1 >= n0 else None


class Progress:
    """Progress of one piece of work. Thread-safe; get one from `Console.progress`."""

    def __init__(self, console: Console, label: str, total: int | None, unit: str) -> None:
        self._console, self._label, self._total, self._unit = console, label, total, unit
        self._rate = Rate()
        self._done = 0
        self._note = ""
        self._lock = threading.Lock()
        self._bar: tuple[RichProgress, TaskID] | None = None
        self._start_s = self._printed_s = console.clock()
        self._rate.add(self._start_s, 0)
        if console.tty:
            self._bar = console.open_bar(label, total)

    def advance(self, num: int = 1, note: str = "") -> None:
        """`num` more units are done."""
        self.update(self._done + num, note)

    def update(self, done: int, note: str = "", *, total: int | None = None) -> None:
        """`done` units in all are done. `note`: a few words shown behind, e.g. "loss 0.312"."""
        with self._lock:
            now_s = self._console.clock()
            self._done, self._note = done, note or self._note
            self._total = self._total if total is None else total
            self._rate.add(now_s, done)
            if self._bar:
                bar, task = self._bar
                bar.update(task, completed=done, total=self._total, tail=self._tail())
            elif now_s - self._printed_s >= self._console.interval_s:
                self._printed_s = now_s
                self._console.line(self.text())

    def text(self) -> str:
        """The progress line as it stands, without a terminal's bar."""
        amount = f"{self._done:,}"
        if self._total:
            amount += f"/{self._total:,} {self._unit}  {100 * self._done / self._total:.0f} %"
        else:
            amount += f" {self._unit}"
        return "  ".join(part for part in (self._label, amount, self._tail()) if part)

    def close(self) -> None:
        """End the bar. Where lines were printed, a last one says the total and the mean rate."""
        if self._bar:
            bar, task = self._bar
            self._console.close_bar(bar, task)
        elif self._printed_s > self._start_s:
            seconds = self._console.clock() - self._start_s
            mean = f"  {_short(self._done / seconds)} {self._unit}/s" if seconds > 0 else ""
            self._console.line(f"{self._label}  {self._done:,} {self._unit} in {duration(seconds)}{mean}")

    def _tail(self) -> str:
        rate = self._rate.per_s
        parts = []
        if rate:
            parts.append(f"{_short(rate)} {self._unit}/s")
            if self._total and self._total > self._done:
                parts.append(f"{duration((self._total - self._done) / rate)} left")
        if self._note:
            parts.append(self._note)
        return "  ".join(parts)


class Stage:
    """One stage of the loop while it runs; handed out by `Console.stage`."""

    def __init__(self, console: Console, name: str) -> None:
        self._console, self.name = console, name
        self._facts: list[str] = []
        self._skipped = ""

    def fact(self, text: str) -> None:
        """A few words for the stage's closing line, e.g. "150,000 rows"."""
        self._facts.append(text)

    def skip(self, reason: str = "inputs unchanged") -> None:
        """The stage's result was found finished."""
        self._skipped = reason

    def closing(self, seconds: float) -> str:
        """The closing line of a stage that ended well."""
        head = f"skipped: {self._skipped}" if self._skipped else f"done in {duration(seconds)}"
        return "  ".join([head, *self._facts])


class Console:
    """Writes the run to one stream.

    stages: the names in order, for "[2/6]". file: default standard output. tty: default asks the
    stream (and `TERM`/`CI`). interval_s: between progress lines without a terminal.
    """

    def __init__(
        self,
        stages: Sequence[str] = (),
        *,
        file: TextIO | None = None,
        tty: bool | None = None,
        interval_s: float = INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stages = tuple(stages)
        self._file = file
        self.tty = _is_terminal(self.file) if tty is None else tty
        self.interval_s = interval_s
        self.clock = clock
        self._live: RichProgress | None = None
        self._bars = 0
        self._lock = threading.RLock()

    @property
    def file(self) -> TextIO:
        """The stream; standard output is looked up at each use, so that redirections are seen."""
        return self._file if self._file is not None else sys.stdout

    def line(self, text: str = "", *, style: str = "", indent: bool = True) -> None:
        """One line of text (or several), never markup."""
        body = "\n".join((INDENT if indent and part else "") + part for part in text.split("\n"))
        with self._lock:
            if self.tty:
                self._rich().print(body, style=style or None, markup=False, highlight=False, soft_wrap=True)
            else:
                print(body, file=self.file, flush=True)

    def warn(self, text: str) -> None:
        """Something the user should read though the run goes on."""
        self.line(f"warning: {text}", style="yellow")

    @contextmanager
    def stage(self, name: str, detail: str = "") -> Iterator[Stage]:
        """Banner before, one closing line after; a failure is named and passed on."""
        position = f"[{self.stages.index(name) + 1}/{len(self.stages)}] " if name in self.stages else ""
        self.line(f"{position}{name}" + (f"  {detail}" if detail else ""), style="bold", indent=False)
        stage, start_s = Stage(self, name), self.clock()
        try:
            yield stage
        except BaseException as error:
            what = "interrupted" if isinstance(error, KeyboardInterrupt) else f"failed ({type(error).__name__})"
            self.line(f"{what} after {duration(self.clock() - start_s)}", style="red")
            raise
        self.line(stage.closing(self.clock() - start_s), style="green")

    @contextmanager
    def progress(self, label: str, total: int | None = None, unit: str = "rows") -> Iterator[Progress]:
        """Progress of a long piece of work; `with console.progress("reading", 120_000) as p: p.update(n)`."""
        progress = Progress(self, label, total, unit)
        try:
            yield progress
        finally:
            progress.close()

    def open_bar(self, label: str, total: int | None) -> tuple[RichProgress, TaskID]:
        """A bar in the one live display (terminal only)."""
        from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn
        from rich.progress import Progress as RichProgress

        with self._lock:
            if self._live is None:
                columns = (
                    SpinnerColumn(),
                    TextColumn("{task.description}", markup=False),
                    BarColumn(bar_width=24),
                    MofNCompleteColumn(),
                    TextColumn("{task.fields[tail]}", markup=False),
                )
                self._live = RichProgress(*columns, console=self._rich(), transient=True)
                self._live.start()
            self._bars += 1
            return self._live, self._live.add_task(INDENT[2:] + label, total=total, tail="")

    def close_bar(self, bar: RichProgress, task: TaskID) -> None:
        """Remove a bar; the display ends with the last one."""
        with self._lock:
            bar.remove_task(task)
            self._bars -= 1
            if self._bars == 0 and self._live is not None:
                self._live.stop()
                self._live = None

    def _rich(self) -> Any:
        from rich.console import Console as RichConsole

        if self._live is not None:
            return self._live.console
        return RichConsole(file=self.file, force_terminal=True)


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _is_terminal(file: TextIO) -> bool:
    if os.environ.get("TERM") == "dumb" or os.environ.get("CI", "") not in ("", "0", "false"):
        return False
    return bool(getattr(file, "isatty", lambda: False)())
