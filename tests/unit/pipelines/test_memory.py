"""Peak memory counts children once, follows orphans, and costs little."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time

import pytest

from pipelines.memory import PeakMemory

MB = 1024 * 1024
HOLD = "import sys; block = b'x' * (200 << 20); print('ready', flush=True); sys.stdin.readline()"


def child(code: str) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline().strip() == "ready"
    return process


def finish(process: subprocess.Popen[str]) -> None:
    process.communicate("\n", timeout=20)


def test_memory_of_a_child_is_in_the_peak_and_stays_there() -> None:
    with PeakMemory(interval_s=60) as memory:
        before = memory.sample().total_mb
        process = child(HOLD)
        during = memory.sample().total_mb
        finish(process)
        after = memory.sample().total_mb
    assert 195 < during - before < 260
    assert after < during - 190
    assert memory.peak_mb == pytest.approx(during)
    assert memory.peak is not None and memory.peak.num_processes == 2
    assert "2 processes" in memory.note


def test_the_thread_sees_what_happens_between() -> None:
    with PeakMemory(interval_s=0.05) as memory:
        start = memory.peak_mb
        process = child(HOLD)
        deadline_s = time.monotonic() + 20
        while memory.peak_mb - start < 195 and time.monotonic() < deadline_s:
            time.sleep(0.05)
        finish(process)
    assert memory.peak_mb - start > 195


def test_a_process_whose_parent_died_is_still_counted() -> None:
    hold = "block = b'x' * (200 << 20); print('up', flush=True); import time; time.sleep(60)"
    middle = (
        "import os, subprocess, sys\n"
        f"p = subprocess.Popen([sys.executable, '-c', {hold!r}], stdout=subprocess.PIPE)\n"
        "p.stdout.readline(); print('ready', flush=True); print(p.pid, flush=True); sys.stdin.readline(); os._exit(0)"
    )
    with PeakMemory(interval_s=60) as memory:
        process = child(middle)
        assert process.stdout is not None
        orphan = int(process.stdout.readline())
        assert memory.sample().num_processes == 3
        finish(process)
        try:
            after = memory.sample()
        finally:
            os.kill(orphan, 9)
    assert after.num_processes == 2 and after.total_mb > 200


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps_rollup"), reason="PSS needs Linux")
def test_shared_pages_are_counted_once() -> None:
    """100 MB shared by this process and three forks add 100 MB, not 400."""
    with PeakMemory(interval_s=60) as memory:
        before = memory.sample()
        block = mmap.mmap(-1, 100 * MB)  # anonymous, shared with forks
        block[:] = b"x" * (100 * MB)
        code = "import sys; print('ready', flush=True); sys.stdin.readline()"
        others = [child(code) for _ in range(2)]
        touched, told = os.pipe()
        pid = os.fork()
        if pid == 0:
            block[::4096]  # map every page here too
            os.write(told, b"1")
            time.sleep(30)
            os._exit(0)
        os.read(touched, 1)
        during = memory.sample()
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        for other in others:
            finish(other)
        block.close()
    assert during.exact
    assert 95 < during.shared_mb - before.shared_mb < 115


def test_sampling_slows_down_rather_than_cost_a_percent() -> None:
    start_s = time.process_time()
    with PeakMemory(interval_s=0.001):
        time.sleep(1.5)
    # a sample takes some milliseconds: unbounded, the thread would have used most of the 1.5 s
    assert time.process_time() - start_s < 0.3
