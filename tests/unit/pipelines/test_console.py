"""Progress and banners, by an injected clock; the noise filters drop what is known and nothing else."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import subprocess
import sys
import time
import warnings

import pytest

from pipelines import quiet
from pipelines.console import Console, Rate, duration, install_filters, quiet_environment


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def plain_console(**options: object) -> tuple[Console, io.StringIO, Clock]:
    out, clock = io.StringIO(), Clock()
    return Console(("preprocess", "pretrain"), file=out, clock=clock, **options), out, clock  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0.0 s"), (59.94, "59.9 s"), (59.96, "1 min 00 s"), (65.4, "1 min 05 s"), (7380, "2 h 03 min")],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_rate_is_that_of_the_last_seconds() -> None:
    rate = Rate(window_s=10)
    assert rate.per_s is None
    for second in range(101):  # 5 per second for 50 s, then 20 per second
        rate.add(second, 5 * min(second, 50) + 20 * max(0, second - 50))
    assert rate.per_s == pytest.approx(20)


def test_progress_without_a_terminal_is_a_line_per_interval_and_no_carriage_return() -> None:
    console, out, clock = plain_console(interval_s=10)
    with console.progress("reading", total=1000, unit="rows") as progress:
        for _ in range(50):  # 50 s in steps of 1 s, 10 rows each
            clock.now_s += 1
            progress.advance(10, note="loss 0.312")
    text = out.getvalue()
    assert "\r" not in text and "\x1b" not in text
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert len(lines) == 6  # at 10, 20, 30, 40, 50 s and the closing line
    # 10 rows/s; at 50 s 500 of 1000 rows are done and 500 rows are 50 s of work
    assert lines[4] == "reading 500/1,000 rows 50 % 10 rows/s 50.0 s left loss 0.312"
    assert lines[5] == "reading 500 rows in 50.0 s 10 rows/s"


def test_short_work_prints_no_progress_lines() -> None:
    console, out, clock = plain_console()
    with console.progress("reading", total=10) as progress:
        clock.now_s += 3
        progress.update(10)
    assert out.getvalue() == ""


def test_progress_without_total_and_with_standing_clock() -> None:
    console, out, _ = plain_console(interval_s=0)
    with console.progress("reading", unit="files") as progress:
        progress.update(3)
    assert out.getvalue().strip() == "reading  3 files"


def test_banners_number_the_stages_and_say_how_they_ended() -> None:
    console, out, clock = plain_console()
    with console.stage("pretrain", "2 workers") as stage:
        clock.now_s += 61
        stage.fact("120,000 rows")
    with console.stage("preprocess") as stage:
        stage.skip()
    with pytest.raises(ValueError, match="broken"), console.stage("extra"):
        raise ValueError("broken")
    with pytest.raises(KeyboardInterrupt), console.stage("pretrain"):
        raise KeyboardInterrupt
    assert out.getvalue().splitlines() == [
        "[2/2] pretrain  2 workers",
        "      done in 1 min 01 s  120,000 rows",
        "[1/2] preprocess",
        "      skipped: inputs unchanged",
        "extra",
        "      failed (ValueError) after 0.0 s",
        "[2/2] pretrain",
        "      interrupted after 0.0 s",
    ]


def test_terminal_draws_a_bar_and_markup_in_text_stays_text() -> None:
    out = io.StringIO()
    console = Console(("one",), file=out, tty=True)
    with console.stage("one"), console.progress("[red]reading", total=10) as progress:
        progress.update(5)
        time.sleep(0.25)  # the display draws ten times a second
        console.line("loss [bold]0.3[/bold]")
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    assert "[1/1] one" in text and "loss [bold]0.3[/bold]" in text and "[red]reading" in text
    assert "5/10" in text


def test_ci_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert Console(file=Terminal()).tty
    monkeypatch.setenv("CI", "true")
    assert not Console(file=Terminal()).tty


@pytest.fixture
def clean_filters(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """Undo what install_filters does to warnings, loggers and the environment."""
    monkeypatch.delenv(quiet.VERBOSE_ENV, raising=False)
    monkeypatch.delenv("PYTHONWARNINGS", raising=False)
    names = [None if rule.logger == "root" else rule.logger for rule in quiet.LOG_RULES] + list(quiet.LEVEL_FLOORS)
    loggers = {name: logging.getLogger(name) for name in names}
    before = {name: (list(logger.filters), logger.level) for name, logger in loggers.items()}
    with warnings.catch_warnings():
        yield
    for name, (filters, level) in before.items():
        loggers[name].filters[:] = filters
        loggers[name].setLevel(level)


def test_log_filter_drops_the_known_line_but_never_an_error(
    clean_filters: None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    environ: dict[str, str] = {}
    install_filters(environ)
    install_filters(environ)
    logger = logging.getLogger("ray._private.authentication.authentication_token_setup")
    assert sum(isinstance(f, quiet.NoiseFilter) for f in logger.filters) == 1
    known = "Token authentication is enabled for this Ray cluster."
    logger.warning(known)
    logger.error(known)
    logger.warning("Token authentication is disabled for this Ray cluster.")
    logging.getLogger("torchrec.distributed.embeddingbag").info("Validating input features...")
    logging.getLogger("torchrec.distributed.embeddingbag").error("table broken")
    logging.getLogger().info("Successfully loaded: 'fbgemm_gpu_py.so'")
    logging.getLogger().info("step 10 loss 0.3")
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        ("ERROR", known),
        ("WARNING", "Token authentication is disabled for this Ray cluster."),
        ("ERROR", "table broken"),
        ("INFO", "step 10 loss 0.3"),
    ]


SEEN_IN_WORKERS = [
    "Successfully loaded: 'fbgemm_gpu_config.so'",
    "Setting up process group for: env:// [rank=0, world_size=2]",
    "- (ip=192.0.2.2, pid=7545) world_rank=0, local_rank=0, node_rank=0",
    "[TBE=2a4d35fc-6eed-497e-8062-d25ccfc0ef3d] Feature Gates: [('TBE_V2', False)]",
    "#    Rank     HBM (GB)     DDR (GB)     Perf (ms)   #",
    "#" * 120,
    "/x/torchrec/distributed/embeddingbag.py:823: FutureWarning: `broadcast_buffers` is deprecated. Use",
    "  self._lookups[i] = DistributedDataParallel(",
    "[rank0]:W1130 16:00 torch/fx/_symbolic_trace.py:56] is_fx_tracing will return true for both fx",
    "[2026-11-30 16:00:23,089 E 7415 7445] core_worker.cc:2465: Actor with class name: 'PreemptionWatcher' and ID: "
    "'fc' has constructor arguments in the object store and max_restarts > 0. If the arguments",
]
MUST_BE_SEEN = [
    "ValueError: Sum of lengths must equal the number of values, but got 2 and 3",
    "Traceback (most recent call last):",
    '  File "/x/torchrec/distributed/embeddingbag.py", line 1812, in input_dist',
    "torch.OutOfMemoryError: Successfully loaded: 'fbgemm_gpu",
    "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.",
    "[2026-11-30 16:00:23 E 1 1] core_worker.cc:99: Lost connection to the raylet",
    "step 10 loss 0.31",
    "# a comment a user prints",
    "WARNING: loss is not finite, step skipped",
]


def test_ray_driver_skips_known_worker_lines_only() -> None:
    """Ray's own rule: shown if the allow list matches, else hidden if the skip list matches."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_DEDUP")}
    code = "from pipelines.quiet import quiet_environment as q; import json; print(json.dumps(q()))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**env, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    found = json.loads(done.stdout)
    skip, allow = re.compile(found["RAY_DEDUP_LOGS_SKIP_REGEX"]), re.compile(found["RAY_DEDUP_LOGS_ALLOW_REGEX"])

    def hidden(line: str) -> bool:
        return not allow.search(line) and bool(skip.search(line))

    assert [line for line in SEEN_IN_WORKERS if not hidden(line)] == []
    assert [line for line in MUST_BE_SEEN if hidden(line)] == []


def test_user_settings_win(clean_filters: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_DATA_LOG_LEVEL", "DEBUG")
    monkeypatch.setenv("PYTHONWARNINGS", "error::UserWarning")
    found = quiet_environment()
    assert found["RAY_DATA_LOG_LEVEL"] == "DEBUG"
    assert found["PYTHONWARNINGS"].endswith(",error::UserWarning")
    monkeypatch.setenv("PYTHONWARNINGS", found["PYTHONWARNINGS"])
    assert quiet_environment()["PYTHONWARNINGS"] == found["PYTHONWARNINGS"]  # twice changes nothing
    monkeypatch.setenv(quiet.VERBOSE_ENV, "1")
    assert quiet_environment() == {}


def test_python_accepts_our_warning_entries() -> None:
    """Python prints "Invalid -W option ignored" for entries it cannot read; and the filter works in a child."""
    code = (
        "import warnings; warnings.warn('`broadcast_buffers` is deprecated. Use x', FutureWarning);"
        "warnings.warn('`something_else` is deprecated', FutureWarning)"
    )
    env = {**os.environ, "PYTHONWARNINGS": quiet_environment().get("PYTHONWARNINGS", "")}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert "Invalid" not in done.stderr
    assert "broadcast_buffers" not in done.stderr.split("`something_else`")[0]
    assert "something_else" in done.stderr
