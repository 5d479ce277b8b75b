"""Speed and memory of training steps against FuxiCTR's DIN and Wukong, on one log. `make bench NAME=throughput`.

Every measurement is a process of its own with a fixed number of threads: warm-up steps, then steps for some seconds,
each from rows in memory to updated weights. Arms take turns (A B C A B C …): what else the machine does meets all.
Equal on both sides: rows, fields and vocabularies, embedding width 32, history length, batch of 1,024 impressions.

Ours encodes a user's history once for all of the user's impressions in a batch, peers once an impression; so how many
impressions a user has in a batch matters to ours alone. The headline has PER_USER = 8 (an ads user meets several to
dozens of ads a day and a batch holds whole users of a day or more); 1, 2 and 16 stand beside it.

`python -m tests.benchmarks.throughput --quick` runs our side only, for seconds: for trying it, not for quoting.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks.harness import Claim, Report
from tests.benchmarks.throughput_log import LogSize, write_log
from tests.benchmarks.throughput_peers import Peers

HISTORIES, GOALS = (50, 200, 1000), {50: 1.0, 200: 5.0, 1000: 15.0}
SHORT, LONG, LONG_COST = 100, 1000, 3.0
PER_USER, OTHERS = 8, (1, 2, 16)
BATCH = 1024
LIMIT_S = 300  # of one process
OURS, PEER_DIN, PEER_WUKONG, OUR_DIN = "gem", "fuxictr_din", "fuxictr_wukong", "our_din"

Row = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """What one process measures."""

    arm: str
    history: int
    threads: int = 1
    per_user: int = PER_USER


@dataclass(frozen=True)
class Plan:
    """How much is measured. `rounds` of everything the claims rest on; the rest once or twice, or not at all."""

    rounds: int
    seconds: float
    size: LogSize
    histories: tuple[int, ...] = HISTORIES
    peers: bool = True

    def turns(self) -> Iterator[list[Setting]]:
        """Rounds of settings; arms that are compared stand side by side."""
        arms = (OURS, PEER_DIN) if self.peers else (OURS,)
        for turn in range(self.rounds):
            one = [Setting(arm, h) for h in self.histories for arm in arms]
            one += [Setting(OURS, SHORT)]
            if not self.peers:
                yield one
                continue
            if turn < 2:
                one += [Setting(arm, h, threads=2) for h in self.histories for arm in arms]
            if turn == 0:
                one += [Setting(arm, h) for h in self.histories for arm in (PEER_WUKONG, OUR_DIN)]
                one += [Setting(OURS, h, per_user=k) for h in self.histories for k in OTHERS]
            yield one


def measure(plan: Plan, log: Path, peers: Peers) -> list[Row]:
    """All turns; a row per process. An arm that fails is noted once and left out from then on."""
    rows: list[Row] = []
    failed: set[tuple[str, int]] = set()
    for turn, settings in enumerate(plan.turns()):
        for s in settings:
            if (s.arm, s.history) in failed:
                continue
            row: Row = {**asdict(s), "turn": turn, "load_before": round(os.getloadavg()[0], 1)}
            try:
                row |= peers.run(s, BATCH, plan.seconds) if s.arm.startswith("fuxictr") else run_ours(s, plan, log)
            except (subprocess.SubprocessError, OSError, ValueError, RuntimeError) as e:
                failed.add((s.arm, s.history))
                row["error"] = str(e)[-800:]
            if "peak_mb" in row:
                row["above_imports_mb"] = row["peak_mb"] - row["imports_mb"]
            rows.append(row)
            print({k: round(v, 1) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    return rows


def run_ours(s: Setting, plan: Plan, log: Path) -> Row:
    """Our model, or our own DIN, in a fresh process."""
    arch = "din" if s.arm == OUR_DIN else s.arm
    given = ("--arch", arch, "--history", s.history, "--per-user", s.per_user, "--threads", s.threads)
    command = [sys.executable, "-m", "tests.benchmarks.throughput_ours", log, *given]
    return run_json([*command, "--batch", BATCH, "--seconds", plan.seconds], s.threads)


def run_json(command: Sequence[object], threads: int) -> Row:
    """Run a command with so many threads; the JSON of its last line."""
    env = {**os.environ, **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))}
    done = subprocess.run(list(map(str, command)), env=env, capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode:
        raise ValueError(f"{command[2]} ended with {done.returncode}: {done.stderr}")
    out: Row = json.loads(done.stdout.splitlines()[-1])
    return out


class Found:
    """The rows of a benchmark, asked by setting."""

    def __init__(self, rows: list[Row]) -> None:
        self.rows = [r for r in rows if "error" not in r]
        self.errors = {(r["arm"], r["history"]): r["error"] for r in rows if "error" in r}

    def values(self, s: Setting, name: str) -> list[float]:
        """A figure in every turn, in order."""
        return [r[name] for r in self.rows if all(r[k] == v for k, v in asdict(s).items())]

    def ratio(self, top: Setting, bottom: Setting, name: str) -> tuple[float, float, float] | None:
        """Median over median, and the extremes of the turns' own ratios; None if one was not measured."""
        a, b = self.values(top, name), self.values(bottom, name)
        if not a or not b:
            return None
        each = [x / y for x, y in zip(a, b, strict=False)]
        return statistics.median(a) / statistics.median(b), min(each), max(each)

    def claim(
        self, name: str, pair: tuple[Setting, Setting], figure: str, bound: tuple[float, str], note: str
    ) -> Claim:
        """A ratio as a claim; without a value it says which arm failed."""
        found = self.ratio(*pair, figure)
        if found is None:
            missing = [s for s in pair if not self.values(s, figure)]
            why = "; ".join(f"{s.arm}: {self.errors.get((s.arm, s.history), 'not run')}" for s in missing)
            return Claim(name, None, bound[0], bound[1], note=why)
        return Claim(name, found[0], bound[0], bound[1], low=found[1], high=found[2], note=note)


def claims(found: Found, histories: Sequence[int] = HISTORIES) -> list[Claim]:
    """Speed and memory against FuxiCTR's DIN at every length, and what a long history costs."""
    out = []
    for h in histories:
        ours, din = Setting(OURS, h), Setting(PEER_DIN, h)
        out.append(found.claim(f"speed_vs_din_{h}", (ours, din), "impressions_per_s", (GOALS[h], ">="),
                               speed_note(found, ours, din)))  # fmt: skip
    for h in histories:
        ours, din = Setting(OURS, h), Setting(PEER_DIN, h)
        out.append(found.claim(f"memory_vs_din_{h}", (ours, din), "above_imports_mb", (1.0, "<="),
                               memory_note(found, ours, din)))  # fmt: skip
    pair = Setting(OURS, SHORT), Setting(OURS, LONG)  # speeds: the short one's over the long one's is a cost
    note = f"cost of an impression, {PER_USER} impressions a user; by CPU time {_times(found, *pair)}"
    return [*out, found.claim("history_1000_vs_100_cost", pair, "impressions_per_s", (LONG_COST, "<="), note)]


def speed_note(found: Found, ours: Setting, din: Setting) -> str:
    """The speeds themselves, by CPU time, with two threads, against the other arms and at other amortisations."""
    h = ours.history

    def speed(s: Setting) -> str:
        values = found.values(s, "impressions_per_s")
        return f"{statistics.median(values):,.0f}" if values else "?"

    two = [Setting(s.arm, h, threads=2) for s in (ours, din)]
    others = ", ".join(
        f"{k}: {statistics.median(v) / statistics.median(d):.1f}x"
        for k in OTHERS
        if (v := found.values(Setting(OURS, h, per_user=k), "impressions_per_s"))
        and (d := found.values(din, "impressions_per_s"))
    )
    return (
        f"{speed(ours)} against {speed(din)} impressions/s; by CPU time {_times(found, ours, din)}; two threads "
        f"{_times(found, *two, 'impressions_per_s')} ({speed(two[0])}); Wukong {speed(Setting(PEER_WUKONG, h))}, our "
        f"DIN {speed(Setting(OUR_DIN, h))}; with other impressions a user: {others or '?'}"
    )


def _times(found: Found, top: Setting, bottom: Setting, figure: str = "impressions_per_cpu_s") -> str:
    ratio = found.ratio(top, bottom, figure)
    return "?" if ratio is None else f"{ratio[0]:.2f}x [{ratio[1]:.2f}, {ratio[2]:.2f}]"


def memory_note(found: Found, ours: Setting, din: Setting) -> str:
    """Peaks of the whole processes: FuxiCTR's imports more than ours, so the claim is about what comes on top."""

    if not found.values(ours, "peak_mb") or not found.values(din, "peak_mb"):
        return ""
    peaks = [statistics.median(found.values(s, "peak_mb")) for s in (ours, din)]
    bases = [statistics.median(found.values(s, "imports_mb")) for s in (ours, din)]
    return (
        f"above imports; peak {peaks[0]:,.0f} against {peaks[1]:,.0f} MB ({peaks[0] / peaks[1]:.2f}x), of which "
        f"imports {bases[0]:,.0f} and {bases[1]:,.0f}"
    )


def main() -> None:
    """Write the log, take the turns, write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="our side only, one short round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="of stepping in every process")
    parser.add_argument("--data-dir", help="not read: the log is made")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leave through the folder's removal
    plan = Plan(given.rounds, given.seconds, LogSize())
    if given.quick:
        plan = Plan(1, 0.5, LogSize(users=1024, longest=200), histories=(50,), peers=False)
    size = plan.size
    spread = f"{size.longest:,} to {2 * size.longest:,} events"
    about = f"made log: {size.users:,} users of {spread}, {PER_USER} impressions a user"
    report = Report("throughput-quick" if given.quick else "throughput", about)
    with tempfile.TemporaryDirectory(prefix="gem-bench-") as name:
        log = Path(name) / "log"
        write_log(log, size)
        report.rows = measure(plan, log, Peers(log, Path(name), PER_USER))
    report.claims = claims(Found(report.rows), plan.histories)
    report.finish()


if __name__ == "__main__":
    main()
