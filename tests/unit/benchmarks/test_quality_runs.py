"""Runs of the quality benchmark: what a key depends on, how results are kept, choices that do not see the test day."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gem.config import ModelConfig, TrainConfig
from tests.benchmarks.quality import NAMES, finite, sections_of
from tests.benchmarks.quality_arms import (
    BASELINES,
    GEM,
    Base,
    ablations,
    grid_of,
    model_of,
    our_run,
    seeds,
    sized,
    trials,
)
from tests.benchmarks.quality_bench import Bench, Options, Unmeasured
from tests.benchmarks.quality_data import TEST, VALIDATION
from tests.benchmarks.quality_peers import GBDT, NETWORKS, peer_trials, to_logits
from tests.benchmarks.quality_runs import Finished, OurRun, Workshop, bare_code, check_logits, label, make_one

BASE = Base()


@dataclass(frozen=True)
class ToyRun:
    """A run that costs nothing; `goes` says what happens."""

    arm: str
    value: float
    goes: str = "well"
    dataset: str = "toy"

    def identity(self) -> dict[str, Any]:
        return {k: v for k, v in asdict(self).items() if k != "arm"}

    def make(self, store: Path, folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        if self.goes == "raises":
            raise RuntimeError("command: ended with 1\nno memory")
        value = np.nan if self.goes == "diverges" else self.value
        return {"flops": 1}, {day: np.full((2, 1), value, np.float32) for day in (VALIDATION, TEST)}


def workshop(folder: Path, said: list[str] | None = None) -> Workshop:
    return Workshop(folder, {"toy": (folder, "store-hash"), "kuairand": (folder, "k")}, 1, (said or []).append)


def make(shop: Workshop, run: ToyRun) -> dict[str, Any]:
    return make_one(run, shop.folder, shop.folder, shop.key(run))


# Keys and files


def test_the_label_is_not_part_of_the_key(tmp_path: Path) -> None:
    shop = workshop(tmp_path)
    run = our_run(BASE, GEM, {}, 1)
    assert shop.key(run) == shop.key(replace(run, arm="history 128"))


@pytest.mark.parametrize(
    "other",
    [
        {"train": replace(BASE.train, seed=2)}, {"model": replace(BASE.model, dim=16)}, {"surface": "tab1"},
        {"merged": True},
    ],
)  # fmt: skip
def test_the_key_depends_on_what_shapes_the_weights(tmp_path: Path, other: dict[str, Any]) -> None:
    shop, run = workshop(tmp_path), OurRun(GEM, "kuairand", ModelConfig(), TrainConfig())
    assert shop.key(run) != shop.key(replace(run, **other))


def test_the_key_depends_on_the_data(tmp_path: Path) -> None:
    run = ToyRun("a", 1.0)
    shop, other = workshop(tmp_path), workshop(tmp_path)
    other.stores["toy"] = (tmp_path, "another hash")
    assert shop.key(run) != other.key(run)


def test_comments_and_docstrings_do_not_change_code_but_numbers_do() -> None:
    code = 'def f():\n    """Says."""\n    return 1  # one\n'
    assert bare_code(code) == bare_code("def f():\n\n    return 1\n")
    assert bare_code(code) != bare_code(code.replace("1  #", "2  #"))


def test_a_finished_run_is_found_again_and_not_made_twice(tmp_path: Path) -> None:
    shop, run = workshop(tmp_path), ToyRun("a", 0.5)
    assert shop.find(run) is None and len(shop.missing([run, run])) == 1
    assert make(shop, run)["cpu_s"] >= 0
    found = workshop(tmp_path).find(run)
    assert found is not None and found.record["flops"] == 1 and found.record["arm"] == "a"
    assert found.validation.tolist() == found.test.tolist() == [[0.5], [0.5]]
    assert shop.missing([run]) == {}
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".json", ".npz"]


@pytest.mark.parametrize(("goes", "why"), [("raises", "no memory"), ("diverges", "2 logits of the validation day")])
def test_a_failed_run_leaves_no_result_but_its_reason(tmp_path: Path, goes: str, why: str) -> None:
    shop, run = workshop(tmp_path), ToyRun("a", 0.5, goes)
    assert why in make(shop, run)["error"]
    assert shop.find(run) is None
    assert [p.suffix for p in tmp_path.iterdir()] == [".failed"]


def test_expected_time_is_that_of_the_arm_or_of_all(tmp_path: Path) -> None:
    shop = workshop(tmp_path)
    assert shop.expected_s([ToyRun("a", 1.0)]) == 60
    (tmp_path / "x.json").write_text(json.dumps({"arm": "a", "cpu_s": 10}), encoding="utf-8")
    (tmp_path / "y.json").write_text(json.dumps({"arm": "b", "cpu_s": 30}), encoding="utf-8")
    assert shop.expected_s([ToyRun("a", 1.0), ToyRun("b", 2.0), ToyRun("c", 3.0)]) == 10 + 30 + 20


def test_diverged_logits_are_refused() -> None:
    check_logits({"test": np.zeros((2, 1), np.float32)})
    with pytest.raises(ValueError, match="1 logits of the test day"):
        check_logits({"test": np.array([[0.0], [np.inf]], np.float32)})


def test_labels_name_arm_data_and_seed() -> None:
    assert label(our_run(BASE, GEM, {}, 3, surface="tab1")) == "kuairand gem tab1 seed 3"


# Choices


class BlindMeter:
    """Knows validation only: NE is the run's first validation logit."""

    def validation_ne(self, run: Finished, task: str, surface: str = "") -> float:
        return float(run.validation[0, 0])


def test_settings_are_chosen_on_validation_and_the_test_day_is_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop = workshop(tmp_path)
    runs = [ToyRun(f"a{v}", v) for v in (0.9, 0.7, 0.8)]
    for run in runs:
        make(shop, run)
    opened = []
    read = Finished._logits
    monkeypatch.setattr(Finished, "_logits", lambda self, day: opened.append(day) or read(self, day))
    bench = Bench(BASE, Options(), shop, {"toy": BlindMeter()})  # type: ignore[dict-item]
    assert bench.best(runs).spec == runs[1]
    assert set(opened) == {VALIDATION}


def test_without_a_finished_trial_nothing_is_chosen(tmp_path: Path) -> None:
    bench = Bench(BASE, Options(), workshop(tmp_path), {"toy": BlindMeter()})  # type: ignore[dict-item]
    with pytest.raises(Unmeasured, match="no trial of a"):
        bench.best([ToyRun("a", 1.0)])


# Arms


@pytest.mark.parametrize("count", [1, 4, 6])
def test_every_arm_has_the_same_number_of_different_trials(count: int) -> None:
    ours = [trials(BASE, arch, count) for arch in (GEM, *BASELINES)]
    theirs = [peer_trials(arm, "click", count, 128) for arm in (*NETWORKS, GBDT)]
    assert {len(runs) for runs in (*ours, *theirs)} == {count}
    assert all(len(set(runs)) == count for runs in (*ours, *theirs))


def test_more_trials_than_settings_are_refused() -> None:
    with pytest.raises(SystemExit, match="--trials: got 9"):
        grid_of(GEM, 9)


def test_the_first_seed_is_the_trial_itself() -> None:
    setting = grid_of("din", 2)[1]
    assert seeds(BASE, "din", setting, 5)[0] == trials(BASE, "din", 2)[1]
    assert len({run.train.seed for run in seeds(BASE, "din", setting, 5)}) == 5


def test_baselines_differ_from_gem_by_architecture_and_its_own_parts_only() -> None:
    for arch in set(BASELINES) - {"lr"}:
        found = model_of(BASE, arch)
        assert replace(found, arch=GEM, counts=True, past=True, surface_adapters=True) == replace(
            BASE.model, counts=True, past=True, surface_adapters=True
        )


def test_every_ablation_changes_something() -> None:
    for name, change in ablations(BASE).items():
        assert replace(BASE.model, **change) != BASE.model, name


def test_sizes_keep_whole_heads() -> None:
    for dim in BASE.dims:
        found = sized(BASE.model, dim)
        assert found["dim"] % found["num_heads"] == 0 and (dim // found["num_heads"]) % 2 == 0
    assert replace(BASE.model, **sized(BASE.model, BASE.model.dim)) == BASE.model


def test_probabilities_of_zero_and_one_become_finite_logits() -> None:
    found = to_logits(np.array([0.0, 0.5, 1.0]))
    assert np.isfinite(found).all() and found[1] == 0 and found[0] < -10 and found[2] > 10


def test_sections_by_name() -> None:
    assert [s.name for s in sections_of(NAMES, ["lightgbm"])] == list(NAMES)
    with pytest.raises(SystemExit, match="armz"):
        sections_of(["armz"], [])


def test_reports_hold_no_nan() -> None:
    assert finite({"a": [1.0, float("nan"), (float("inf"), "x")]}) == {"a": [1.0, None, [None, "x"]]}
