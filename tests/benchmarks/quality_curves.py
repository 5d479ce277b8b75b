"""Sections of the quality benchmark: NE against compute, distance to the Bayes limit, one model or one per surface."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gem.metrics import Metric
from gem.metrics.bootstrap import UserSums
from tests.benchmarks.harness import Claim
from tests.benchmarks.quality_arms import GEM, SCALED, helped, scaling, seeds
from tests.benchmarks.quality_bench import CLICK, CONVERSION, Bench, Rows, Unmeasured, unmeasured
from tests.benchmarks.quality_data import GENERATED, KUAIRAND, TEST, VALIDATION
from tests.benchmarks.quality_runs import Finished, Spec
from tests.benchmarks.quality_sections import as_json
from tests.benchmarks.quality_stats import (
    LOWER_BOUND,
    Curve,
    Floats,
    compute_multiplier,
    excess_ratio,
    interval,
    mean_metric,
    relative_excess,
    reverse_multiplier,
)

REST = "other"  # the group of small surfaces


@dataclass(frozen=True)
class Family:
    """The sizes of a family, smallest compute first: training FLOPs, CPU seconds, sums of every seed by day."""

    dims: list[int]
    flops: list[float]
    cpu_s: list[float]
    sums: dict[str, list[list[UserSums]]]

    def curve(self, day: str) -> Curve:
        return Curve(tuple(self.flops), tuple(mean_metric(arm, "ne") for arm in self.sums[day]))

    def cpu_curve(self, day: str) -> Curve:
        """NE against CPU seconds of whole runs, whatever they were spent on: counting, look-ups and reading too."""
        return Curve(tuple(self.cpu_s), self.curve(day).ne)

    @property
    def best(self) -> int:
        """The size with the lowest NE on the validation day."""
        return int(np.argmin(self.curve(VALIDATION).ne))


def spent(runs: Sequence[Finished]) -> tuple[float, float]:
    """Training FLOPs and CPU seconds of a run, means."""
    flops, cpu_s = (float(np.mean([r.record[c] for r in runs])) for c in ("train_flops", "cpu_s"))
    return flops, cpu_s


@dataclass(frozen=True)
class Scaling:
    """At least four sizes per family, one chosen setting each: NE, and compute for equal NE."""

    name: str = "scaling"

    def tuning(self, bench: Bench) -> Sequence[Spec]:
        return [run for arch in SCALED for run in bench.trials(arch)]

    def sizes(self, bench: Bench) -> dict[tuple[str, int], list[Any]]:
        chosen = {arch: bench.chosen(arch) for arch in SCALED}
        return scaling(bench.base, chosen, bench.options.scaling_seeds)

    def final(self, bench: Bench) -> Sequence[Spec]:
        return [run for runs in self.sizes(bench).values() for run in runs]

    def family(self, bench: Bench, arch: str) -> Family:
        """Sorted by training FLOPs. Raises Unmeasured unless every size has a finished run."""
        meter, found = bench.meters[KUAIRAND], []
        for (name, dim), specs in self.sizes(bench).items():
            if name == arch:
                runs = bench.finished(specs)
                flops, cpu_s = spent(runs)
                found.append((flops, dim, cpu_s, {d: meter.sums(runs, CLICK, day=d) for d in (VALIDATION, TEST)}))
        found.sort(key=lambda item: item[0])
        sums = {d: [f[3][d] for f in found] for d in (VALIDATION, TEST)}
        return Family([f[1] for f in found], [f[0] for f in found], [f[2] for f in found], sums)

    def report(self, bench: Bench) -> tuple[list[Claim], Rows]:
        meter, rows = bench.meters[KUAIRAND], []
        for (arch, dim), specs in self.sizes(bench).items():
            row = meter.row(self.name, specs[0].arm, bench.workshop.results(specs), CLICK)
            rows.append({**row, "family": arch, "dim": dim})
        bench.show("scaling: click, test day", rows)
        claims = []
        for arch, goal, sense in (("dlrm", 4.0, ">="), ("din", 1.0, ">")):
            name = f"compute_multiplier_vs_{arch}"
            try:
                claim, row = self.multiplier(bench, arch, goal, sense)
                claims.append(claim)
                rows.append(row)
            except Unmeasured as e:
                claims.append(unmeasured(name, goal, e, sense))
        return claims, rows + self.equal_inputs(bench)

    def equal_inputs(self, bench: Bench) -> Rows:
        """The multiplier over the baselines that were given GEM's inputs: runs of the ablation, of one size each and
        with the settings tuned without those inputs.
        """
        rows: Rows = []
        for name, (arch, change) in helped(bench.base).items():
            try:
                ours, setting = self.family(bench, GEM), bench.chosen(arch)
                count = bench.options.few_seeds
                runs = bench.finished(seeds(bench.base, arch, setting, count, arm=name, model=dict(change)))
            except Unmeasured as e:
                bench.say(f"  multiplier over {name}: {e}")
                continue
            flops, cpu_s = spent(runs)
            theirs = Family(
                [bench.base.model.dim], [flops], [cpu_s], {TEST: [bench.meters[KUAIRAND].sums(runs, CLICK)]}
            )
            found = self.spread(bench, ours, theirs, lambda a, b: compute_multiplier(a, b, 0)[0])
            _, how = compute_multiplier(ours.curve(TEST), theirs.curve(TEST), 0)
            cpu, _ = compute_multiplier(ours.cpu_curve(TEST), theirs.cpu_curve(TEST), 0)
            row = {"section": self.name, "arm": f"gem against {name}", "task": CLICK, "cpu_multiplier": cpu}
            rows.append(row | {"multiplier": as_json(found), "how": how})
            bench.say(f"  multiplier over {name}: {as_json(found)}, {how}; by CPU {cpu}")
        return rows

    def multiplier(self, bench: Bench, arch: str, goal: float, sense: str) -> tuple[Claim, dict[str, Any]]:
        """Compute of the baseline's best size (validation day) over GEM's for the same NE on the test day."""
        ours, theirs = self.family(bench, GEM), self.family(bench, arch)
        row: dict[str, Any] = {"section": self.name, "arm": f"gem against {arch}", "task": CLICK}
        for name, family in ((GEM, ours), (arch, theirs)):
            curve = family.curve(TEST)
            level, fall, fit = curve.line()
            row[name] = {"dims": family.dims, "flops": family.flops, "ne": curve.ne,
                         "validation_ne": family.curve(VALIDATION).ne, "best_dim": family.dims[family.best],
                         "fit": f"NE = {level:.4f} - {fall:.5f} log10(FLOPs), R2 {fit:.2f}"}  # fmt: skip
        value, how = compute_multiplier(ours.curve(TEST), theirs.curve(TEST), theirs.best)
        back, back_how = reverse_multiplier(ours.curve(TEST), theirs.curve(TEST), ours.best)
        found = self.spread(bench, ours, theirs, lambda a, b: compute_multiplier(a, b, theirs.best)[0])
        on_validation = compute_multiplier(ours.curve(VALIDATION), theirs.curve(VALIDATION), theirs.best)
        cpu, cpu_how = compute_multiplier(ours.cpu_curve(TEST), theirs.cpu_curve(TEST), theirs.best)
        row |= {"multiplier": as_json(found), "how": how, "cpu_multiplier": cpu, "cpu_how": cpu_how,
                "on_validation": on_validation,
                "at_gem_best": {"value": back if math.isfinite(back) else None, "how": back_how}}  # fmt: skip
        at = f"at NE {theirs.curve(TEST).ne[theirs.best]:.4f}, {arch}'s best (dim {theirs.dims[theirs.best]})"
        least = "at least this: gem's smallest is better already; " if how == LOWER_BOUND else f"{how}; "
        far = (
            f"needs {back:.3g} times gem's ({back_how})" if math.isfinite(back) else "never gets there (its fit rises)"
        )
        note = f"{least}{at}; for gem's best NE {arch} {far}; by CPU seconds of whole runs {cpu:.2f} ({cpu_how})"
        return Claim(f"compute_multiplier_vs_{arch}", value, goal, sense, "x", found.low, found.high, note), row

    def spread(self, bench: Bench, ours: Family, theirs: Family, statistic: Callable[[Curve, Curve], float]) -> Metric:
        """A statistic of both curves on the test day, with its interval."""
        split = len(ours.flops)

        def of(ne: Floats) -> float:
            return statistic(Curve(tuple(ours.flops), tuple(ne[:split])), Curve(tuple(theirs.flops), tuple(ne[split:])))

        return interval([*ours.sums[TEST], *theirs.sums[TEST]], "ne", of, bench.options.num_bootstrap)


@dataclass(frozen=True)
class Generated:
    """GEM and DIN on the generated world, whose true probabilities are known: how far above the Bayes NE."""

    name: str = "generated"
    archs: tuple[str, ...] = (GEM, "din")

    def tuning(self, bench: Bench) -> Sequence[Spec]:
        return [run for arch in self.archs for run in bench.trials(arch, GENERATED)]

    def runs(self, bench: Bench, arch: str) -> list[Any]:
        setting = bench.chosen(arch, GENERATED)
        return seeds(bench.base, arch, setting, bench.options.seeds, dataset=GENERATED)

    def final(self, bench: Bench) -> Sequence[Spec]:
        return [run for arch in self.archs for run in self.runs(bench, arch)]

    def report(self, bench: Bench) -> tuple[list[Claim], Rows]:
        meter, claims = bench.meters[GENERATED], []
        rows = [r for arch in self.archs for r in bench.trial_rows(self.name, bench.trials(arch, GENERATED))]
        for task in (CLICK, CONVERSION):
            truth = meter.truth(task)
            bayes = mean_metric(truth, "ne")
            found = {arch: bench.finished(self.runs(bench, arch), bench.options.seeds) for arch in self.archs}
            shown = [meter.row(self.name, arch, runs, task) for arch, runs in found.items()]
            bench.show(f"generated: {task}, test day, Bayes NE {bayes:.4f}", shown)
            sums = [meter.sums(found[arch], task) for arch in self.archs]
            ratio = interval([*sums, truth], "ne", excess_ratio, bench.options.num_bootstrap)
            excess = {arch: mean_metric(s, "ne") - bayes for arch, s in zip(self.archs, sums, strict=True)}
            rows += [*shown, {"section": self.name, "arm": "gem against din", "task": task, "bayes_ne": bayes,
                              "excess": excess, "ratio": as_json(ratio)}]  # fmt: skip
            if task == CLICK:
                note = f"NE above Bayes: gem {excess[GEM]:.4f}, din {excess['din']:.4f}; Bayes NE {bayes:.4f}"
                claims.append(
                    Claim("bayes_excess_vs_din", ratio.value, 0.5, "<=", low=ratio.low, high=ratio.high, note=note)
                )
        return claims, rows


@dataclass(frozen=True)
class Surfaces:
    """One model for all surfaces, against one per surface, and against all rows thrown together without a surface."""

    name: str = "surfaces"

    def names(self, bench: Bench) -> list[str]:
        """Surfaces with a group of their own."""
        schema = bench.meters[KUAIRAND].days.schema
        return [g for g in schema.surface_groups if g != REST and g in schema.surfaces]

    def tuning(self, bench: Bench) -> Sequence[Spec]:
        alone = [run for surface in self.names(bench) for run in bench.trials(GEM, KUAIRAND, surface)]
        return [*bench.trials(GEM), *alone]

    def variants(self, bench: Bench, surface: str) -> dict[str, list[Any]]:
        """Label -> runs: ours, naive merge, the surface's own model (tuned for itself)."""
        setting, options = bench.chosen(GEM), bench.options
        count = options.seeds if self.counts(bench, surface) else options.few_seeds
        merged = {"surface_adapters": False}
        alone = bench.chosen(GEM, KUAIRAND, surface)
        return {
            GEM: seeds(bench.base, GEM, setting, count),
            "own model": seeds(bench.base, GEM, alone, count, arm="own model", surface=surface),
            "naive merge": seeds(bench.base, GEM, setting, count, arm="naive merge", model=merged, merged=True),
        }

    def counts(self, bench: Bench, surface: str) -> bool:
        """Whether the claim is about this surface."""
        return bool(bench.meters[KUAIRAND].known(CLICK, TEST, surface).size > bench.options.min_surface_rows)

    def final(self, bench: Bench) -> Sequence[Spec]:
        out: list[Spec] = []
        for surface in self.names(bench):
            try:
                out += [run for runs in self.variants(bench, surface).values() for run in runs]
            except Unmeasured as e:
                bench.workshop.failed[f"own model {surface}"] = str(e)
        return out

    def report(self, bench: Bench) -> tuple[list[Claim], Rows]:
        rows: Rows = []
        for surface in self.names(bench):
            try:
                rows += self.one(bench, surface)
            except Unmeasured as e:
                bench.say(f"  surface {surface}: {e}")
        bench.show("surfaces: test day, NE against the surface's own base rate", rows)
        against = [r for r in rows if "gem_ne_excess" in r and r["arm"] == "own model" and r["task"] == CLICK]
        for r in against:
            e = r["gem_ne_excess"]
            if e["value"] is not None and e["low"] is not None:
                span = f"{100 * e['value']:+.2f} % [{100 * e['low']:+.2f}, {100 * e['high']:+.2f}]"
                bench.say(f"  {r['surface']}: NE of gem {span} against the surface's own model")
        return [self.claim(bench, against)], rows

    def one(self, bench: Bench, surface: str) -> Rows:
        """Rows of a surface."""
        meter, rows = bench.meters[KUAIRAND], []
        for task in (CLICK, CONVERSION):
            sums = {}
            for name, specs in self.variants(bench, surface).items():
                runs = bench.finished(specs, at_least=0)
                if not runs:
                    rows.append(meter.row(self.name, name, runs, task, surface))
                    continue
                sums[name] = meter.sums(runs, task, surface)
                row = meter.row(self.name, name, runs, task, surface)
                if name != GEM:
                    draws = bench.options.num_bootstrap
                    row["gem_ne_excess"] = as_json(interval([sums[GEM], sums[name]], "ne", relative_excess, draws))
                rows.append(row)
        return rows

    def claim(self, bench: Bench, rows: Rows) -> Claim:
        """The worst of the large surfaces."""
        name = "worst_surface_vs_single"
        large = [r for r in rows if self.counts(bench, r["surface"]) and r["gem_ne_excess"]["value"] is not None]
        wanted = [s for s in self.names(bench) if self.counts(bench, s)]
        if len(large) < len(wanted) or not wanted:
            limit = bench.options.min_surface_rows
            why = f"{len(large)} of {len(wanted)} surfaces with more than {limit} test rows were measured"
            return unmeasured(name, 0, why, "<=", by="low")
        worst = max(large, key=lambda r: r["gem_ne_excess"]["low"])
        found = worst["gem_ne_excess"]
        note = f"relative NE of gem above {worst['surface']}'s own model; {len(large)} surface(s) are large enough"
        return Claim(name, found["value"], 0, "<=", low=found["low"], high=found["high"], by="low", note=note)
