"""The judgement of a sweep without running one: who wins, who cannot, what is kept and what is said."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gem.config import RunConfig, apply_overrides
from gem.errors import ConfigError, TrainingError
from gem.recipes import recipe
from pipelines.console import Console
from tuning import judgement as j
from tuning.__main__ import main
from tuning.judgement import Report, TrialRecord
from tuning.ledger import Ledger, own_error
from tuning.sweep import Brake, SweepOptions, check_cpus, check_options, commands
from tuning.trial import VALIDATION_ROWS, light_model, light_training, select_rows


def trial(number: int, *points: tuple[int, float | None], status: str = "", **setting: Any) -> TrialRecord:
    """A trial whose reports are (percent, ne); a step per percent."""
    record = TrialRecord(number, setting or {"train.lr_dense": number / 10})
    record.reports = [Report(percent, percent, ne) for percent, ne in points]
    record.status = status or j.ended_status(record)
    return record


def test_last_report_decides_and_the_lowest_is_kept_with_its_step() -> None:
    """Tune's own best result would show trial 1 with the NE of one moment and the figures of another."""
    overfits = trial(1, (25, 0.95), (50, 0.90), (100, 1.05))
    steady = trial(2, (25, 0.99), (50, 0.97), (100, 0.96))
    assert j.best_trial([overfits, steady]) is steady
    assert overfits.lowest() == Report(50, 50, 0.90)
    assert overfits.judged() == Report(100, 100, 1.05)
    assert "was lower on the way (0.9000 at step 50 of 100)" in " ".join(j.verdict([overfits]))
    assert len(j.verdict([trial(0, (25, 0.99), (100, 0.96))])) == 2


def test_trials_are_compared_level() -> None:
    """A low NE after a quarter of the data says nothing about the end; the one that got farther wins."""
    early = trial(1, (25, 0.90))
    assert early.status == j.STOPPED
    assert j.best_trial([early, trial(2, (25, 0.99), (100, 0.95))]).number == 2
    assert j.best_trial([early, trial(2, (26, 0.91))]).number == 1  # both after one part of four
    assert j.best_trial([early, trial(2, (52, 0.91))]).number == 2


def test_equal_ne_goes_to_fewer_steps_then_to_the_lower_number() -> None:
    slow, quick, later = trial(1, (100, 0.9)), trial(2, (100, 0.9)), trial(3, (100, 0.9))
    quick.reports = later.reports = [Report(100, 7, 0.9)]
    assert j.best_trial([later, slow, quick]) is quick


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, None, "0.1"])
def test_ne_that_is_no_number_never_wins(bad: Any) -> None:
    report = j.make_report({"percent": 100, "step": 9, "ne": bad, "ne_click": math.nan, "rows_per_s": 5})
    assert report == Report(100, 9, None, {"rows_per_s": 5.0})
    diverged = TrialRecord(1, {}, reports=[Report(25, 2, 0.1), report])
    diverged.status = j.ended_status(diverged)
    assert diverged.status == j.DIVERGED
    good = trial(2, (100, 0.999))
    assert j.best_trial([diverged, good]) is good
    assert j.best_trial([diverged]) is None


def test_failed_trial_never_wins_whatever_it_reported() -> None:
    failed, good = trial(1, (25, 0.1), (100, 0.1), status=j.FAILED), trial(2, (25, 0.9))
    assert j.best_trial([failed, good]) is good
    assert j.best_trial([failed, trial(3, status=j.NOT_STARTED)]) is None
    assert j.best_trial([]) is None


@pytest.mark.parametrize("status", [j.OUT_OF_TIME, j.INTERRUPTED])
def test_cut_off_trial_is_judged_by_what_it_reported(status: str) -> None:
    assert j.best_trial([trial(1, (50, 0.9), status=status), trial(2, status=status)]).number == 1


def test_all_failed_gives_the_first_reason() -> None:
    first = trial(0, status=j.FAILED, **{"train.lr_dense": 9.0})
    first.error = "TrainingError: no impressions"
    second = trial(1, status=j.FAILED)
    second.error = "other"
    assert j.why_no_winner([first, second], 9) == (
        "no usable trial: all 2 failed. Trial 0 (lr_dense=9.0): TrainingError: no impressions"
    )
    assert "1 of 2 diverged" in j.why_no_winner([trial(0, (25, None)), trial(1, status=j.NOT_STARTED)], 9)
    assert j.why_no_winner([trial(0, status=j.OUT_OF_TIME)], 9).startswith("no trial reported within 9.0 s")


def test_own_setting_is_compared_level_or_not_at_all() -> None:
    won = trial(1, (26, 0.95), (51, 0.90), (100, 0.85))
    cut = trial(0, (25, 1.00), status=j.INTERRUPTED)
    assert j.verdict([cut, won])[-1] == (
        "the recipe's own setting: 1.0000 after 25 %; the best had 0.9500 there (-5.00 % NE)"
    )
    assert j.verdict([trial(0, (76, 1.0), status=j.INTERRUPTED), won])[-1].endswith("after 76 %, not comparable")
    assert j.verdict([trial(0, status=j.FAILED), won])[-1] == "the recipe's own setting cannot be judged (failed)"


def test_flags_turn_the_recipe_into_the_winner() -> None:
    own = trial(0, (100, 0.95), **{"train.lr_dense": 1e-3, "train.batch_impressions": 1024})
    won = trial(1, (100, 0.94), **{"train.lr_dense": 0.002, "train.batch_impressions": 1024})
    assert j.flags([own, won]) == ["train.lr_dense=0.002"]
    assert "-1.05 % NE" in " ".join(j.verdict([own, won]))
    assert j.flags([own]) == []
    assert j.verdict([own])[-1] == "that is the recipe's own setting: nothing to change"


def test_printed_commands_mean_the_winning_config() -> None:
    fixed, found = ["train.epochs=2", "data.validation_day=2022-05-05"], ["train.lr_dense=0.002", "model.rank=4"]
    config = apply_overrides(recipe("tiny"), ["data.dataset=my spec.yaml", "data.data_dir=a b", *fixed])
    direct, made = (shlex.split(line) for line in commands(config, fixed, found))
    want = apply_overrides(config, found)
    assert direct[:3] == ["python", "-m", "pipelines"]
    pairs = list(zip(direct[4::2], direct[5::2], strict=True))
    given = dict(pairs)
    sets = [f"data.dataset={given['--dataset']}", f"data.data_dir={given['--data-dir']}"]
    assert apply_overrides(recipe(given["--recipe"]), sets + [v for k, v in pairs if k == "--set"]) == want
    variables = dict(word.split("=", 1) for word in made[2:])
    assert variables == {
        "DATASET": "my spec.yaml", "DATA_DIR": "a b", "RECIPE": "tiny", "SET": " ".join([*fixed, *found]),
    }  # fmt: skip
    assert commands(RunConfig(), [], ["train.lr_dense=0.002"])[1] == '  make pipeline SET="train.lr_dense=0.002"'
    assert commands(RunConfig(), fixed, []) == []


def test_table_fits_and_has_the_best_on_top() -> None:
    paths = [f"model.quite_a_long_field_name_{i}" for i in range(8)]
    trials = [trial(i, (100, 1 - i / 10), **dict.fromkeys(paths, 0.123456789)) for i in range(3)]
    trials.append(trial(3, (25, None), **dict.fromkeys(paths, 1)))
    lines = j.table(trials).splitlines()
    assert max(map(len, lines)) <= 100
    assert [x.split()[0] for x in lines[2:]] == ["2", "1", "0", "3"]
    assert lines[2].startswith("2 *")
    assert "nan" in lines[-1]
    assert "diverged" in lines[-1]


def test_short_names_stay_unique() -> None:
    assert j.short_names(["train.seed", "model.rank"]) == {"train.seed": "seed", "model.rank": "rank"}
    assert set(j.short_names(["train.seed", "student_train.seed"]).values()) == {"train.seed", "student_train.seed"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"trials": 0}, "--trials 0: at least 1"),
        ({"budget_s": 0.0}, "--budget-s 0: must be above 0"),
        ({"budget_s": math.nan}, "--budget-s nan: must be above 0"),
        ({"users": 0.0}, "--users 0: a share"),
        ({"users": 1.5}, r"--users 1\.5: a share"),
        ({"concurrent": -1}, "--concurrent -1"),
    ],
)
def test_options_that_make_no_sweep_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_options(dataclasses.replace(SweepOptions(), **change))


def test_brake_counts_from_the_first_question() -> None:
    now = [100.0]
    brake = Brake(5, clock=lambda: now[0])
    assert not brake.stops()
    now[0] = 104.9
    assert not brake.stops()
    now[0] = 105.0
    assert brake.stops()
    assert not brake.pulled
    other = Brake(5, clock=lambda: 0.0)
    other.pulled = True
    assert other.stops()


def test_cpus() -> None:
    assert [check_cpus(0, have) for have in (1, 2, 64)] == [1, 2, 2]
    assert check_cpus(4, 4) == 4
    with pytest.raises(ConfigError, match=r"3 trials need 3 CPUs \(1 each\), there are 2; give at most 2"):
        check_cpus(3, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--vary", "train.lr_dens=1..2"], 'Did you mean "train.lr_dense"'),
        (["--vary", "train.lr_dense=2..1"], "contradictory bounds"),
        (["--trials", "0"], "--trials 0"),
        (["--space", "arch"], 'no search space "arch"'),
        (["--dataset", "nowhere"], 'data.dataset "nowhere"'),
    ],
)
def test_command_says_what_is_wrong_before_anything_runs(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", "--runs", str(tmp_path / "runs"), *arguments]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


class FakeRegistry:
    """Remembers what would go to MLflow."""

    def __init__(self) -> None:
        self.said: list[tuple[Any, ...]] = []

    def start_child(self, parent: str, stage: str) -> str:
        return f"{parent}/{stage}"

    def __getattr__(self, name: str) -> Any:
        return lambda run, *rest, **more: self.said.append((name, run, *rest))


def make_ledger(folder: Path, num: int) -> Ledger:
    trials = [TrialRecord(i, {"train.lr_dense": float(i)}) for i in range(num)]
    return Ledger(folder, trials, {"dataset": "d"}, FakeRegistry(), "parent", Console(file=io.StringIO(), tty=False))


def test_book_is_on_disk_after_every_trial_and_survives_a_cut(tmp_path: Path) -> None:
    ledger = make_ledger(tmp_path, 4)
    for number in (0, 1, 2):
        ledger.started(number)
    ledger.reported(0, {"percent": 25, "step": 3, "ne": 0.9, "ne_click": 0.9})
    ledger.reported(0, {"percent": 100, "step": 12, "ne": 0.8, "ne_click": 0.8})
    ledger.ended(0)
    first = json.loads((tmp_path / "result.json").read_text())
    assert (first["complete"], first["dataset"], first["best"]["trial"]) == (False, "d", 0)
    ledger.reported(1, {"percent": 25, "step": 3, "ne": math.nan})
    ledger.ended(1, error="TrainingError: x")
    ledger.reported(2, {"percent": 25, "step": 3, "ne": 0.1})
    ledger.finish(j.INTERRUPTED)
    last = json.loads((tmp_path / "result.json").read_text())
    assert [t["status"] for t in last["trials"]] == [j.FINISHED, j.FAILED, j.INTERRUPTED, j.NOT_STARTED]
    assert last["complete"] is True
    assert last["trials"][1]["reports"][0]["ne"] is None
    assert last["trials"][0]["lowest"]["step"] == 12
    assert last["best"] == {
        "trial": 0, "setting": {"train.lr_dense": 0.0}, "ne": 0.8, "step": 12, "percent": 100, "set": [],
    }  # fmt: skip
    assert [p.name for p in tmp_path.iterdir()] == ["result.json"]
    ends = {run: rest for name, run, *rest in ledger.registry.said if name == "end"}
    assert ends == {"parent/trial-0": ["FINISHED"], "parent/trial-1": ["FAILED"], "parent/trial-2": ["KILLED"]}


@pytest.mark.parametrize(
    ("text", "want"),
    [
        (
            "Failure # 1 (occurred at x)\nray::f()\n  File a\ngem.errors.TrainingError: no rows\n  in the store\n",
            "TrainingError: no rows in the store",
        ),
        (
            "Failure # 1 (occurred at x)\nThe actor died unexpectedly.\n\tclass_name: f\n",
            "The actor died unexpectedly.",
        ),
        ("ValueError: inner\n\nDuring handling:\nKeyError: 'outer'\n", "KeyError: 'outer'"),
        ("", "unknown error"),
    ],
)
def test_own_error_of_a_traceback(text: str, want: str) -> None:
    assert own_error(text) == want
    assert len(own_error("ValueError: " + "x" * 9999)) == 400


def test_rows_are_those_of_the_same_users_on_both_sides() -> None:
    rng = np.random.default_rng(0)
    user, is_train = rng.integers(1, 500, 20_000).astype(np.int32), rng.random(20_000) < 0.8
    rows, validation = select_rows(user, is_train, 0.3, seed=5)
    chosen = set(user[rows])
    assert set(user[validation]) <= chosen
    assert is_train[rows].all()
    assert not is_train[validation].any()
    assert 0.2 < len(chosen) / 499 < 0.4
    assert set(rows) == set(np.flatnonzero(is_train & np.isin(user, list(chosen))))  # whole users
    every, _ = select_rows(user, is_train, 1.0, seed=5)
    assert set(every) == set(np.flatnonzero(is_train))
    assert set(rows) < set(every)


def test_a_huge_validation_day_is_cut_by_users() -> None:
    user = np.repeat(np.arange(1, 2001), 100).astype(np.int32)
    is_train = np.arange(user.size) % 2 == 0
    _, validation = select_rows(user, is_train, 1.0, seed=0)
    assert validation.size == pytest.approx(VALIDATION_ROWS, rel=0.1)
    assert set(np.bincount(user[validation])[1:]) <= {0, 50}


@pytest.mark.parametrize(("is_train", "name"), [([True, True], "validation"), ([False, False], "training")])
def test_no_rows_on_one_side_is_said(is_train: list[bool], name: str) -> None:
    with pytest.raises(TrainingError, match=f"no {name} impressions among 100%"):
        select_rows(np.array([1, 2], np.int32), np.array(is_train), 1.0, seed=0)


def test_variant_is_the_student_but_for_what_is_varied() -> None:
    config = RunConfig()
    made = light_model(config, {"model.num_layers": 3, "train.lr_dense": 0.5})
    assert made == dataclasses.replace(config.student, num_layers=3)
    assert light_training(config.train, 66).checkpoint_every_steps == 17
    assert light_training(config.train, 1).checkpoint_every_steps == 1
