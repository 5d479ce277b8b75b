"""The arms of the quality benchmark: which models, which settings each may try, which parts are taken out.

Every arm has a grid of the same number of settings, written down before any of them was run; which one an arm gets is
decided on the validation day by the click NE of one seed. What is not in the grid is equal for all: batch, one
thread, rows, features. Several passes always mean fresh tables in each (`TrainConfig.fresh_tables`), for peers too.
What GEM's own design was tried with on the validation day before (RESULTS.md says it) is in nobody's budget.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from gem.config import ModelConfig, TrainConfig
from tests.benchmarks.quality_data import GENERATED, KUAIRAND
from tests.benchmarks.quality_runs import OurRun

Setting = dict[str, Any]  # field of TrainConfig or "model.<field>" -> value
TUNED_SEED = 1
GEM = "gem"
BASELINES = ("lr", "dlrm", "dcnv2", "din", "wukong")


def _grid(*settings: tuple[float, float, int]) -> tuple[Setting, ...]:
    """Learning rates of the dense part and of the tables, per step, and passes."""
    return tuple({"lr_dense": dense, "lr_sparse": sparse, "epochs": epochs} for dense, sparse, epochs in settings)


RATES = _grid(
    (1.2e-3, 0.1, 2), (1.2e-3, 0.1, 1), (2.4e-3, 0.1, 2), (1.2e-3, 0.1, 3), (1.2e-3, 0.05, 3), (4.8e-3, 0.05, 2)
)
# Logistic regression has little beside its tables: their rate is what there is to tune, and one pass is all they get.
RATES_LR = _grid((5e-3, 0.1, 1), (5e-3, 0.03, 1), (5e-3, 0.3, 1), (5e-3, 0.01, 1), (2e-2, 0.1, 1), (2e-2, 0.03, 1))
SCALED = (GEM, "dlrm", "din")
DIMS = (8, 16, 32, 64)
HISTORIES = (8, 32, 512, 128, 1)


@dataclass(frozen=True)
class Base:
    """The model and training that all arms are variations of."""

    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    dims: tuple[int, ...] = DIMS


def model_of(base: Base, arch: str) -> ModelConfig:
    """The configuration of an architecture at the common width: baselines without counts and surface adapters.

    They are parts of GEM that the published baselines do not have; `helped` gives them. Surface is an input of all.
    """
    if arch == GEM:
        return base.model
    small = {"dim": 4} if arch == "lr" else {}  # one weight per task is read of a row; more would be dead weight
    return replace(base.model, arch=arch, counts=False, past=False, surface_adapters=False, **small)


def grid_of(arch: str, trials: int) -> tuple[Setting, ...]:
    """The settings an architecture may try, the first `trials` of its list."""
    grid = RATES_LR if arch == "lr" else RATES
    if not 1 <= trials <= len(grid):
        raise SystemExit(f"--trials: got {trials}; allowed: 1 to {len(grid)}, the settings written down per family")
    return grid[:trials]


def our_run(base: Base, arch: str, setting: Setting, seed: int, **more: Any) -> OurRun:
    """One run. more: arm (label, default the architecture), dataset, surface, merged; model and train (fields)."""
    model, train = more.pop("model", {}), replace(base.train, **{**setting, **more.pop("train", {}), "seed": seed})
    given = {"arm": arch, "dataset": KUAIRAND, **more}
    return OurRun(model=replace(model_of(base, arch), **model), train=train, **given)


def trials(base: Base, arch: str, count: int, **more: Any) -> list[OurRun]:
    """The tuning runs of an architecture, one seed."""
    return [our_run(base, arch, setting, TUNED_SEED, **more) for setting in grid_of(arch, count)]


def seeds(base: Base, arch: str, setting: Setting, count: int, **more: Any) -> list[OurRun]:
    """The same setting with seeds 1, 2, …; the first is the tuning run's."""
    return [our_run(base, arch, setting, TUNED_SEED + i, **more) for i in range(count)]


def ablations(base: Base) -> dict[str, Mapping[str, Any]]:
    """What is taken out of GEM (or put in): label -> changed fields of its model."""
    full = base.model
    changes: dict[str, dict[str, Any]] = {
        "no cross-layer attention": {"cross_layer": False},
        "interleaving pooled": {"interleaving": "pooled"},
        "interleaving separate": {"interleaving": "separate"},
        "interleaving one_way": {"interleaving": "one_way"},
        "no match counts": {"counts": False},
        "no past counts": {"past": False},
        "no surface adapters": {"surface_adapters": False},
        "no summaries, every event read": {"num_levels": 1, "window": full.max_history},
    }
    for length in HISTORIES:
        # The window reads one by one what the model reads at all, as far as it does so at its own length.
        window = length if full.window >= full.max_history else min(full.window, length)
        # One level reads exactly so many; with summaries what is read begins at a whole block.
        levels = {"num_levels": 1} if length <= full.window else {}
        changes[f"history {length}"] = {"max_history": length, "window": max(window, 1), **levels}
    changes |= {
        "events attend to each other": {"event_attention": True},
        "no learned queries": {"num_pma": 0},
        "no recent tokens": {"num_recent": 0},
    }
    return {name: c for name, c in changes.items() if any(getattr(full, f) != v for f, v in c.items())}


def helped(base: Base) -> dict[str, tuple[str, Mapping[str, Any]]]:
    """Baselines given what is GEM's own, to tell the interaction from the inputs: label -> (arch, changed fields)."""
    given = {"counts": True, "past": True, "surface_adapters": True}
    return {f"{arch} with gem's inputs": (arch, given) for arch in BASELINES if arch != "lr"}


def sized(model: ModelConfig, dim: int) -> dict[str, Any]:
    """All widths of a model scaled with the embedding width; layers and history as they are."""

    def scaled(width: int, least: int) -> int:
        return max(round(width * dim / model.dim), least)

    heads = max(min(model.num_heads, dim // 4), 1)
    return {
        "dim": dim,
        "num_heads": heads,
        "num_fmb": scaled(model.num_fmb, 2),
        "num_lcb": scaled(model.num_lcb, 2),
        "rank": scaled(model.rank, 2),
        "mlp_hidden": scaled(model.mlp_hidden, 8),
        "representation_dim": scaled(model.representation_dim, 8),
    }


def scaling(base: Base, setting: Mapping[str, Setting], count: int) -> dict[tuple[str, int], list[OurRun]]:
    """(family, dim) -> runs of that size with the family's chosen setting."""
    return {
        (arch, dim): seeds(base, arch, setting[arch], count, arm=f"{arch} dim {dim}", model=sized(base.model, dim))
        for arch in SCALED
        for dim in base.dims
    }


def setting_of(run: OurRun) -> Setting:
    """The tuned fields of a run."""
    return {name: value for name, value in asdict(run.train).items() if name in RATES[0]}


def generated_trials(base: Base, count: int) -> dict[str, list[OurRun]]:
    """Tuning runs on the generated world."""
    return {arch: trials(base, arch, count, dataset=GENERATED) for arch in (GEM, "din")}
