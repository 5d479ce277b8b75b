"""Sections of the quality benchmark on KuaiRand's arms: the headline comparison, and what each part of GEM is worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gem.metrics import Metric
from tests.benchmarks.harness import Claim
from tests.benchmarks.quality_arms import BASELINES, GEM, ablations, helped, seeds
from tests.benchmarks.quality_bench import CLICK, CONVERSION, Bench, Rows, Unmeasured, unmeasured
from tests.benchmarks.quality_data import KUAIRAND
from tests.benchmarks.quality_measure import spoken
from tests.benchmarks.quality_peers import GBDT, NETWORKS, peer_runs, peer_trials
from tests.benchmarks.quality_runs import Finished, Spec
from tests.benchmarks.quality_stats import difference, interval, mean_metric, noise_floor, per_seed, relative_gain

PEERS = (*NETWORKS, GBDT)
RESOLVED = 2.0  # standard deviations of a difference of two runs, below which a gap is called unresolved
GAIN = {CLICK: "ne_gain_over_best_peer", CONVERSION: "ne_gain_over_best_peer_long_view"}


def gem_runs(bench: Bench, count: int) -> list[Any]:
    """GEM as it is, with its chosen setting."""
    return seeds(bench.base, GEM, bench.chosen(GEM), count)


def as_json(found: Metric) -> dict[str, float | None]:
    """Value and interval of a difference."""
    return {"value": found.value, "low": found.low, "high": found.high}


CONTENDERS = 3  # peers that are run with all seeds


@dataclass(frozen=True)
class Peers:
    """Other libraries, one model per task; each tuned for its task. The figures come with those of `Arms`.

    All seeds go to the `CONTENDERS` with the lowest NE on the validation day; the others are shown with the one seed
    they were tuned with.
    """

    name: str = "peers"
    arms: tuple[str, ...] = PEERS

    def trials(self, bench: Bench, arm: str, task: str) -> list[Any]:
        return list(peer_trials(arm, task, bench.options.trials, bench.base.model.max_history))

    def seeds(self, bench: Bench, arm: str, task: str) -> list[Any]:
        setting = bench.best(self.trials(bench, arm, task), task).spec.setting
        count = bench.options.seeds if arm in self.contenders(bench, task) else 1
        return list(peer_runs(arm, task, setting, bench.base.model.max_history, count))

    def contenders(self, bench: Bench, task: str) -> list[str]:
        """The peers that come first on the validation day."""
        if bench.planning:
            return list(self.arms[:CONTENDERS])
        ne: dict[str, float] = {}
        for arm in self.arms:
            try:
                ne[arm] = bench.validation_ne(bench.best(self.trials(bench, arm, task), task), task)
            except Unmeasured:
                continue
        return sorted(ne, key=lambda arm: ne[arm])[:CONTENDERS]

    def tuning(self, bench: Bench) -> Sequence[Spec]:
        return [run for arm in self.arms for task in (CLICK, CONVERSION) for run in self.trials(bench, arm, task)]

    def final(self, bench: Bench) -> Sequence[Spec]:
        out: list[Spec] = []
        for arm in self.arms:
            for task in (CLICK, CONVERSION):
                try:
                    out += self.seeds(bench, arm, task)
                except Unmeasured as e:
                    bench.workshop.failed[f"{arm} {task}"] = str(e)
        return out

    def report(self, bench: Bench) -> tuple[list[Claim], Rows]:
        rows: Rows = []
        for arm in self.arms:
            for task in (CLICK, CONVERSION):
                specs = self.trials(bench, arm, task)
                rows += bench.trial_rows(self.name, specs, task)
        return [], rows


@dataclass(frozen=True)
class Arms:
    """GEM, the baselines in its trunk, and whatever peers have been run: seed noise first, then everyone."""

    name: str = "arms"
    peers: Peers = Peers()

    def tuning(self, bench: Bench) -> Sequence[Spec]:
        return [run for arch in (GEM, *BASELINES) for run in bench.trials(arch)]

    def final(self, bench: Bench) -> Sequence[Spec]:
        count = bench.options.seeds
        return [run for a in (GEM, *BASELINES) for run in seeds(bench.base, a, bench.chosen(a), count)]

    def found(self, bench: Bench, task: str) -> tuple[dict[str, list[Finished]], list[str]]:
        """(arm -> its finished seeds, what is missing)."""
        out, missing = {}, []
        for arm in (GEM, *BASELINES, *self.peers.arms):
            try:
                if arm in self.peers.arms:
                    specs: Sequence[Spec] = self.peers.seeds(bench, arm, task)
                else:
                    specs = seeds(bench.base, arm, bench.chosen(arm), bench.options.seeds)
                out[arm] = bench.finished(specs, at_least=len(specs))
            except Unmeasured:
                missing.append(arm)
        return out, missing

    def report(self, bench: Bench) -> tuple[list[Claim], Rows]:
        claims: list[Claim] = []
        rows = [r for arch in (GEM, *BASELINES) for r in bench.trial_rows(self.name, bench.trials(arch))]
        for task in (CLICK, CONVERSION):
            found, missing = self.found(bench, task)
            if GEM not in found:
                raise Unmeasured("gem: not all seeds were finished")
            noise = self.noise(bench, found[GEM], task)
            rows.append(noise)
            own = self.rows(bench, found, task, noise)
            bench.show(f"{spoken(KUAIRAND, task)}, test day, {len(found[GEM])} seeds", own)
            rows += own
            claims += self.claims(own, missing, task)
        return claims, rows

    def noise(self, bench: Bench, runs: Sequence[Finished], task: str) -> dict[str, Any]:
        """How far GEM differs from itself by the seed alone; printed before anything else."""
        sums = bench.meters[KUAIRAND].sums(runs, task)
        floor = {m: noise_floor(per_seed(sums, m)) for m in ("ne", "auc", "gauc", "calibration")}
        known = {m: v for m, v in floor.items() if v is not None}
        text = ", ".join(f"{m} {v:.5f}" for m, v in known.items())
        bench.say(
            f"\nseed noise floor of gem, {spoken(KUAIRAND, task)}, {len(runs)} seeds (standard deviation): {text}"
        )
        return {"section": "seed noise floor", "arm": GEM, "task": spoken(KUAIRAND, task), "sd": floor}

    def rows(self, bench: Bench, found: dict[str, list[Finished]], task: str, noise: dict[str, Any]) -> Rows:
        """One row per arm, with what GEM gains over it."""
        meter = bench.meters[KUAIRAND]
        ours = meter.sums(found[GEM], task)
        out = []
        for arm, runs in found.items():
            row = meter.row(self.name, arm, runs, task)
            if arm != GEM:
                theirs, draws = meter.sums(runs, task), bench.options.num_bootstrap
                row["gem_ne_gain"] = as_json(interval([ours, theirs], "ne", relative_gain, draws))
                row["gem_auc_gain"] = as_json(interval([ours, theirs], "auc", difference, draws))
                gap, floor = abs(mean_metric(ours, "ne") - row["ne"]["value"]), noise["sd"]["ne"]
                row["resolved"] = None if floor is None else bool(gap > RESOLVED * 2**0.5 * floor)
            out.append(row)
        return out

    def claims(self, rows: Rows, missing: list[str], task: str) -> list[Claim]:
        """Gain over the best of all others (the best on the test day: to our disadvantage), over trees, calibration."""
        name, by = GAIN[task], {row["arm"]: row for row in rows}
        others = {arm: row for arm, row in by.items() if arm != GEM}
        best = min(others, key=lambda arm: others[arm]["ne"]["value"]) if others else ""
        out = []
        if missing or not best:
            got = others[best]["gem_ne_gain"] if best else {"value": None}
            note = f"{', '.join(missing)} were not run" + (f"; over the others' best, {best}: {got}" if best else "")
            out.append(unmeasured(name, 0, note, ">", by="low"))
        else:
            gain = others[best]["gem_ne_gain"]
            left_out = [p for p in PEERS if p not in others]
            note = f"relative, over {best} ({others[best]['ne']['value']:.4f} against {by[GEM]['ne']['value']:.4f})"
            note += f"; NOT compared with {', '.join(left_out)}" if left_out else ""
            out.append(Claim(name, gain["value"], 0, ">", low=gain["low"], high=gain["high"], by="low", note=note))
        if task == CLICK and GBDT in others:
            gain = others[GBDT]["gem_auc_gain"]
            note = f"{by[GEM]['auc']['value']:.4f} against {others[GBDT]['auc']['value']:.4f}"
            out.append(Claim("auc_over_gbdt", gain["value"], 0.010, low=gain["low"], high=gain["high"], note=note))
        elif task == CLICK:
            out.append(unmeasured("auc_over_gbdt", 0.010, "lightgbm was not run"))
        own = by[GEM]["calibration"]
        each = {"low": own["low"], "high": own["high"]}
        label = f"calibration_{spoken(KUAIRAND, task)}"
        out.append(Claim(f"{label}_low", own["value"], 0.97, **each))
        out.append(Claim(f"{label}_high", own["value"], 1.03, "<=", **each))
        return out


@dataclass(frozen=True)
class Ablation:
    """GEM without each of its parts, with its chosen setting; and baselines given its counts and adapters."""

    name: str = "ablation"

    def tuning(self, bench: Bench) -> Sequence[Spec]:
        return [run for arch in (GEM, *self.helped_archs(bench)) for run in bench.trials(arch)]

    def helped_archs(self, bench: Bench) -> list[str]:
        return [arch for arch, _ in helped(bench.base).values()]

    def variants(self, bench: Bench) -> dict[str, list[Any]]:
        """Label -> runs; the first is GEM whole."""
        count = bench.options.few_seeds
        setting = bench.chosen(GEM)
        out = {GEM: seeds(bench.base, GEM, setting, count)}
        for name, change in ablations(bench.base).items():
            out[name] = seeds(bench.base, GEM, setting, count, arm=name, model=dict(change))
        for name, (arch, change) in helped(bench.base).items():
            out[name] = seeds(bench.base, arch, bench.chosen(arch), count, arm=name, model=dict(change))
        return out

    def final(self, bench: Bench) -> Sequence[Spec]:
        return [run for runs in self.variants(bench).values() for run in runs]

    def report(self, bench: Bench) -> tuple[list[Claim], Rows]:
        rows = compare_with_gem(bench, self.name, self.variants(bench))
        return [], rows


PASSES: dict[str, dict[str, Any]] = {
    "one pass": {"epochs": 1},
    "two passes, fresh tables": {"epochs": 2, "fresh_tables": True},
    "two passes, same tables": {"epochs": 2, "fresh_tables": False},
    "three passes, fresh tables": {"epochs": 3, "fresh_tables": True},
}


@dataclass(frozen=True)
class Epochs:
    """More passes over the same rows (the one-epoch phenomenon, arXiv 2209.06053): what they do to the later day."""

    name: str = "epochs"

    def tuning(self, bench: Bench) -> Sequence[Spec]:
        return bench.trials(GEM)

    def variants(self, bench: Bench) -> dict[str, list[Any]]:
        count, setting = bench.options.few_seeds, bench.chosen(GEM)
        out = {GEM: seeds(bench.base, GEM, setting, count)}
        for name, change in PASSES.items():
            out[name] = seeds(bench.base, GEM, setting, count, arm=name, train=change)
        return out

    def final(self, bench: Bench) -> Sequence[Spec]:
        return [run for runs in self.variants(bench).values() for run in runs]

    def report(self, bench: Bench) -> tuple[list[Claim], Rows]:
        return [], compare_with_gem(bench, self.name, self.variants(bench))


def compare_with_gem(bench: Bench, section: str, variants: dict[str, list[Any]]) -> Rows:
    """A row per variant and task; `ne_cost`: how much its NE is above GEM's, relative, positive: the part helps."""
    meter, rows = bench.meters[KUAIRAND], []
    for task in (CLICK, CONVERSION):
        whole = meter.sums(bench.finished(variants[GEM]), task)
        shown = []
        for name, specs in variants.items():
            runs = bench.workshop.results(specs)
            row = meter.row(section, name, runs, task)
            if name != GEM and runs:
                found = interval([whole, meter.sums(runs, task)], "ne", relative_gain, bench.options.num_bootstrap)
                row["ne_cost"] = as_json(found)
            shown.append(row)
        bench.show(f"{section}: {spoken(KUAIRAND, task)}, test day", shown)
        costs = [(r["arm"], r["ne_cost"]) for r in shown if r.get("ne_cost", {}).get("low") is not None]
        for name, cost in costs:
            span = f"[{100 * cost['low']:+.2f}, {100 * cost['high']:+.2f}]"
            bench.say(f"  {name}: NE {100 * cost['value']:+.2f} % {span} against gem")
        rows += shown
    return rows
