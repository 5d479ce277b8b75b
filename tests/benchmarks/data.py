"""Data at scale: time against a Polars program, memory, growth, storage, appending, reading. `make bench NAME=data`.

Everything lies in one temporary folder (about 6 GB at full size) that is always removed.
`python -m tests.benchmarks.data --quick` runs the same on a log of a twentieth: for trying it, not for quoting.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.benchmarks.data_equal import differences
from tests.benchmarks.data_reader import measure_reader
from tests.benchmarks.data_storage import STORAGE_WORLD, measure_storage
from tests.benchmarks.data_world import World, write_world
from tests.benchmarks.harness import Claim, Report

LIMIT_S = 1200
DAYS = 30
QUICK = 20  # times smaller
HAND, OURS = "tests.benchmarks.data_polars", "tests.benchmarks.data_build"

Row = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """The logs of one benchmark: `whole` has one day more than the comparison reads; that day is appended."""

    whole: World
    half: World
    storage: World
    rounds: int

    @classmethod
    def of(cls, quick: bool, rounds: int) -> Sizes:
        world, storage = World(), STORAGE_WORLD
        if quick:
            world, storage = smaller(world), smaller(storage)
        more = {n: getattr(world, n) * (DAYS + 1) // DAYS for n in ("events", "impressions")}
        fewer = {n: getattr(world, n) // 2 for n in ("events", "impressions", "users")}
        return cls(replace(world, days=DAYS + 1, **more), replace(world, **fewer), storage, rounds)


def smaller(world: World) -> World:
    """The same histories for fewer users."""
    return replace(world, **{n: getattr(world, n) // QUICK for n in ("events", "users", "impressions")})


def run_module(module: str, *arguments: object) -> Row:
    """Run a module in a fresh process; its last line of output, the whole process's `wall_s`, the load before it."""
    start, load = time.perf_counter(), round(os.getloadavg()[0], 1)
    command = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S, check=True)
    out: Row = json.loads(done.stdout.splitlines()[-1])
    return {**out, "wall_s": time.perf_counter() - start, "load_before": load}


def check_tail(found: Row) -> None:
    """The busiest user has some ten thousand events; what is said about long tails would be empty otherwise."""
    longest = found["timeline_max"]
    if not 8_000 <= longest <= 10_000:
        raise SystemExit(f"the longest timeline of the log has {longest} events, expected 8,000 to 10,000")
    print(found, flush=True)


def first_days(raw: Path, target: Path, days: Sequence[str]) -> Path:
    """The tables of `raw` with only the named days, as hard links."""
    for path in sorted(raw.rglob("*.parquet")):
        if path.parent == raw or path.parent.name.removeprefix("day=") in days:
            link = target / path.relative_to(raw)
            link.parent.mkdir(parents=True, exist_ok=True)
            os.link(path, link)
    return target


def compare(sizes: Sizes, temp: Path) -> tuple[list[Claim], list[Row]]:
    """Polars, ours, ours on half the log, in turns; leaves the store of the last turn at temp/ours/store."""
    whole, half = temp / "raw30", temp / "half"
    rows: list[Row] = []
    for turn in range(sizes.rounds):
        for what, module, raw, out in (
            ("polars", HAND, whole, temp / "hand"),
            ("ours", OURS, whole, temp / "ours" / "store"),
            ("ours_half", OURS, half, temp / "ours_half" / "store"),
        ):
            shutil.rmtree(out, ignore_errors=True)
            rows.append({"what": what, "turn": turn, **run_module(module, raw, out)})
            print(rows[-1], flush=True)
    check_equal(temp / "hand", temp / "ours" / "store")
    by = {w: [r for r in rows if r["what"] == w] for w in ("polars", "ours", "ours_half")}
    seconds = {w: [r["seconds"] for r in found] for w, found in by.items()}
    start_s = statistics.median(r["ray_start_s"] for r in by["ours"])
    cpu = [statistics.median(r["cpu_s"] for r in by[w]) for w in ("ours", "polars")]
    same = by["polars"][0]
    note = (
        f"ours {_spread(seconds['ours'])} s with Ray up ({start_s:.1f} s more to start it), Polars "
        f"{_spread(seconds['polars'])} s; CPU {cpu[0]:.0f} against {cpu[1]:.0f} s; outputs equal: "
        f"{same['events']:,} events, {same['impressions']:,} cuts"
    )
    peak = max(by["ours"], key=lambda r: r["peak_gb"])
    halves = f"half the log {_spread(seconds['ours_half'])} s"
    return [
        ratio("preprocess_time_vs_polars", seconds["ours"], seconds["polars"], 1.5, note),
        Claim("preprocess_peak_gb", peak["peak_gb"], 8, "<=", "GB", note=peak["peak_note"]),
        ratio("doubling_growth", seconds["ours"], seconds["ours_half"], 2.3, halves),
    ], rows


def check_equal(by_hand: Path, store: Path) -> None:
    """Stop the benchmark if the two hold other timelines or cuts: their times could not be compared."""
    found = differences(by_hand, store)
    if found:
        raise SystemExit("the Polars program and the store differ:\n" + "\n".join(found))


def append(sizes: Sizes, temp: Path) -> tuple[list[Claim], list[Row]]:
    """One day added to the store of 30 against a build of all 31, in turns; Ray's start is in neither."""
    rows: list[Row] = []
    for turn in range(sizes.rounds):
        for what, parent in (("append", [temp / "ours" / "store"]), ("rebuild", [])):
            out = temp / what / "store"
            shutil.rmtree(out, ignore_errors=True)
            rows.append({"what": what, "turn": turn, **run_module(OURS, temp / "raw31", out, *parent)})
            print(rows[-1], flush=True)
    added, built = ([r["seconds"] for r in rows if r["what"] == w] for w in ("append", "rebuild"))
    run_module(HAND, temp / "raw31", temp / "hand31")
    check_equal(temp / "hand31", temp / "append" / "store")
    note = f"one day in {_spread(added)} s, all 31 in {_spread(built)} s"
    return [ratio("append_vs_rebuild", added, built, 1 / 15, note)], rows


def storage(sizes: Sizes, temp: Path) -> tuple[list[Claim], list[Row]]:
    """Bytes per impression against copied histories, at a mean history of about 1,000."""
    write_world(sizes.storage, temp / "long")
    run_module(OURS, temp / "long", temp / "long_store" / "store")
    found = measure_storage(temp / "long_store" / "store", temp / "copied")
    note = (
        f"mean history {found['mean_history']:.0f}; {found['store_bytes_per_impression']:.0f} B against "
        f"{found['copied_by_time_bytes_per_impression']:.0f} B, rows as logs come; {found['ratio_by_user']:.1f}x "
        "against rows sorted by user"
    )
    return [Claim("storage_ratio", found["ratio_by_time"], 50, note=note)], [{"what": "storage", **found}]


def reader(sizes: Sizes, temp: Path) -> tuple[list[Claim], list[Row]]:
    """Impressions per second that the training reader feeds on one core; on a store of its own."""
    found = measure_reader(sizes.rounds)
    note = (
        f"one core, mean history {found['mean_history']:.0f}, batches of {found['batch']} with "
        f"{found['rows_per_user']:.1f} impressions a user; {found['sparse']['impressions_per_s']:,.0f} with "
        f"{found['sparse']['rows_per_user']:.1f}; {found['impressions_per_cpu_s']:,.0f} by CPU time"
    )
    between = {"low": found["low"], "high": found["high"]}
    claim = Claim("reader_impressions_per_s", found["impressions_per_s"], 200_000, note=note, **between)
    return [claim], [{"what": "reader", **found}]


def ratio(name: str, top: Sequence[float], bottom: Sequence[float], goal: float, note: str) -> Claim:
    """Median over median; low and high are the extremes of the turns' own ratios."""
    each = [a / b for a, b in zip(top, bottom, strict=True)]
    value = statistics.median(top) / statistics.median(bottom)
    return Claim(name, value, goal, "<=", low=min(each), high=max(each), note=note)


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.1f} [{min(values):.1f}, {max(values):.1f}]"


def main() -> None:
    """Run all parts and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a twentieth of the size")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--data-dir", help="not read: the log is made")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leave through the folder's removal
    sizes = Sizes.of(given.quick, given.rounds)
    about = f"made log: {sizes.whole.events * DAYS // (DAYS + 1):,} events, {sizes.whole.users:,} users"
    report = Report("data-quick" if given.quick else "data", about)
    with tempfile.TemporaryDirectory(prefix="gem-bench-") as name:
        temp = Path(name)
        report.rows.append({"what": "log", **write_world(sizes.whole, temp / "raw31")})
        check_tail(report.rows[-1])
        report.rows.append({"what": "half log", **write_world(sizes.half, temp / "half")})
        first_days(temp / "raw31", temp / "raw30", sizes.whole.day_names()[:DAYS])
        for part in (compare, append, storage, reader):
            claims, rows = part(sizes, temp)
            report.claims += claims
            report.rows += rows
    report.finish()


if __name__ == "__main__":
    main()
