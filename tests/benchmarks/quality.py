"""Quality of GEM against baselines and peers on KuaiRand, its parts, its scaling, its distance to the Bayes limit.

`make bench NAME=quality DATA_DIR=…`, or `python -m tests.benchmarks.quality --sections arms,peers --trials 4`.

Train to 05-04, choose on 05-05, report 05-06. Every arm has the same number of tuning trials (one seed, validation
NE), then `--seeds` seeds of the chosen setting; all pass the same calibration. Finished runs are kept under
`out/quality/runs`: an interrupted benchmark goes on where it was, and sections can be run one at a time.
`--plan` prints how many runs are left and about how long they take; `--quick` tries everything on a tiny made world.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gem.config import DataConfig
from gem.recipes import recipe
from tests.benchmarks.harness import DEFAULT_DATA, OUT, Claim, Report
from tests.benchmarks.quality_arms import Base
from tests.benchmarks.quality_bench import Bench, Options, Section, Unmeasured
from tests.benchmarks.quality_curves import Generated, Scaling, Surfaces
from tests.benchmarks.quality_data import GENERATED, KUAIRAND, KUAIRAND_DAYS, open_days, prepare_store
from tests.benchmarks.quality_measure import Meter
from tests.benchmarks.quality_peers import prepare
from tests.benchmarks.quality_runs import Workshop
from tests.benchmarks.quality_sections import PEERS, Ablation, Arms, Epochs, Peers

NAMES = ("arms", "peers", "ablation", "epochs", "scaling", "generated", "surfaces")
NEEDS_KUAIRAND = tuple(n for n in NAMES if n != "generated")
USUAL_PEERS = tuple(p for p in PEERS if p != "rechub_dcnv2")  # FuxiCTR's is the same network
# What a section claims, with its goal, for when it cannot be run at all.
CLAIMS = {
    "arms": (("auc_over_gbdt", 0.01), ("ne_gain_over_best_peer", 0.0), ("ne_gain_over_best_peer_long_view", 0.0)),
    "scaling": (("compute_multiplier_vs_dlrm", 4.0), ("compute_multiplier_vs_din", 1.0)),
    "generated": (("bayes_excess_vs_din", 0.5),),
    "surfaces": (("worst_surface_vs_single", 0.0),),
}
say = partial(print, flush=True)


def sections_of(names: Sequence[str], peers: Sequence[str]) -> list[Section]:
    """The sections by name, in order. SystemExit for one that does not exist."""
    unknown = [n for n in names if n not in NAMES] + [p for p in peers if p not in PEERS]
    if unknown:
        raise SystemExit(f"got {unknown}; sections are {', '.join(NAMES)}; peers are {', '.join(PEERS)}")
    others = Peers(arms=tuple(peers))
    every: list[Section] = [Arms(peers=others), others, Ablation(), Epochs(), Scaling(), Generated(), Surfaces()]
    return [s for s in every if s.name in names]


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    data = Path(os.environ.get("GEM_DATA_DIR") or DEFAULT_DATA)
    parser.add_argument("--data-dir", type=Path, default=data, help="folder that holds kuairand/")
    parser.add_argument("--sections", default=",".join(NAMES))
    parser.add_argument("--peers", default=",".join(USUAL_PEERS), help=f"run and compared with, of {', '.join(PEERS)}")
    parser.add_argument("--seeds", type=int, default=Options.seeds)
    parser.add_argument("--trials", type=int, default=Options.trials)
    parser.add_argument("--workers", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--plan", action="store_true", help="only print how many runs are left")
    parser.add_argument("--stored", action="store_true", help="make no run, report what is finished")
    parser.add_argument("--quick", action="store_true", help="a tiny world and tiny models; figures mean nothing")
    parser.add_argument("--folder", type=Path, default=OUT / "quality", help="where stores and finished runs are kept")
    return parser.parse_args(argv)


def make_bench(given: argparse.Namespace, names: Sequence[str]) -> Bench:
    """Stores, workshop and meters."""
    folder: Path = given.folder.resolve()
    config = recipe("tiny" if given.quick else "default")
    base = Base(config.model, config.train, (4, 8, 12, 16)) if given.quick else Base(config.model, config.train)
    options = Options(seeds=given.seeds, trials=given.trials)
    if given.quick:
        options = Options(given.seeds, given.trials, 2, 1, num_bootstrap=50, min_surface_rows=100)
    stores: dict[str, Path] = {}
    world = DataConfig(dataset=GENERATED, world=config.data.world)
    if given.quick or "generated" in names:
        stores[GENERATED] = prepare_store(world, None, folder / "stores", say)
    if given.quick:
        stores[KUAIRAND] = stores[GENERATED]
    elif set(names) & set(NEEDS_KUAIRAND):
        stores[KUAIRAND] = prepare_store(KUAIRAND_DAYS, given.data_dir / "kuairand", folder / "stores", say)
    days = {name: open_days(path) for name, path in stores.items()}
    runs = Workshop(folder / "runs", {n: (stores[n], d.store.hash) for n, d in days.items()}, given.workers, say)
    draws = 20 if given.quick else 200
    return Bench(base, options, runs, {n: Meter(n, d, draws) for n, d in days.items()})


def plan(bench: Bench, sections: Sequence[Section]) -> None:
    """Print the number of runs that are left, and about how long they take."""
    bench.planning = True
    parts = [[spec for s in sections for spec in f(s)] for f in (lambda s: s.tuning(bench), lambda s: s.final(bench))]
    bench.planning = False
    left = [len(bench.workshop.missing(specs)) for specs in parts]
    minutes = bench.workshop.expected_s([*parts[0], *parts[1]]) / 60
    options = bench.options
    say(
        f"{options.seeds} seeds, {options.trials} trials per arm: {left[0]} tuning runs to make, then about {left[1]} "
        f"of the chosen settings; about {minutes:.0f} min with {bench.workshop.workers} at a time"
    )


def make_runs(bench: Bench, sections: Sequence[Section]) -> None:
    """Tune, then run the chosen settings."""
    bench.workshop.make([spec for s in sections for spec in s.tuning(bench)], "tuning")
    final = []
    for section in sections:
        try:
            final += list(section.final(bench))
        except Unmeasured as e:
            say(f"{section.name}: {e}")
    bench.workshop.make(final, "chosen settings")


def add_to(report: Report, bench: Bench, sections: Sequence[Section]) -> None:
    """Report what is finished; what is not leaves a claim without a value."""
    for section in sections:
        try:
            claims, rows = section.report(bench)
        except Unmeasured as e:
            claims, rows = unrun(section.name, str(e)), []
        report.claims += claims
        report.rows += [finite(row) for row in rows]
    for label, why in bench.workshop.failed.items():
        report.rows.append({"section": "failed", "arm": label, "failed": why})


def unrun(section: str, why: str) -> list[Claim]:
    """The claims of a section that was not run."""
    return [Claim(name, None, goal, note=f"not measured: {why}") for name, goal in CLAIMS.get(section, ())]


def finite(value: Any) -> Any:
    """The same JSON value with null where a number is not finite."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def main(argv: Sequence[str] | None = None) -> None:
    """Run the sections and write the report."""
    given = arguments(argv)
    names = [n for n in given.sections.split(",") if n]
    sections = sections_of(names, [p for p in given.peers.split(",") if p])
    about = f"tiny made world, {given.seeds} seeds" if given.quick else (
        f"KuaiRand-Pure: train to 2022-05-04, validation 05-05, test 05-06; generated world; {given.seeds} seeds, "
        f"{given.trials} trials per arm")  # fmt: skip
    report = Report("quality-quick" if given.quick else "quality", about)
    if not given.quick and not (given.data_dir / "kuairand").is_dir():
        lost = [s for s in sections if s.name in NEEDS_KUAIRAND]
        sections = [s for s in sections if s not in lost]
        for s in lost:
            report.claims += unrun(s.name, f"no kuairand/ under {given.data_dir}")
    bench = make_bench(given, [s.name for s in sections])
    if any(s.name == "peers" for s in sections):
        prepare(bench.workshop.stores[KUAIRAND][0], bench.base.model.max_history, say)
    plan(bench, sections)
    if given.plan:
        return
    try:
        if not given.stored:
            make_runs(bench, sections)
        add_to(report, bench, sections)
    finally:
        bench.workshop.close()
    report.finish()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leave by way of the workers' end
    main()
