"""A whole sweep on the tiny recipe: real store, real trials on Ray Tune, real MLflow runs, what a person is told."""

from __future__ import annotations

import json
import math
import signal
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from gem.config import RunConfig, apply_overrides
from gem.data.store import FeatureStore
from gem.recipes import recipe
from tuning.__main__ import main
from tuning.judgement import FAILED, FINISHED, INTERRUPTED, NOT_STARTED, STOPPED
from tuning.ledger import Ledger
from tuning.sweep import tune_scheduler
from tuning.trial import TrialJob, train_variant

SMALL = ("--recipe", "tiny", "--set", "train.batch_impressions=64", "--budget-s", "120", "--users", "0.6")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tune") / "runs"


def results(runs: Path) -> list[dict[str, Any]]:
    return [json.loads(p.read_text()) for p in sorted(runs.glob("generated/tuning/*/result.json"))]


@pytest.fixture(scope="module")
def swept(ray_session: Any, runs: Path) -> dict[str, Any]:
    assert main(["sweep", *SMALL, "--trials", "2", "--runs", str(runs)]) == 0
    return results(runs)[-1]


def test_sweep_reports_every_trial_and_its_best(swept: dict[str, Any]) -> None:
    assert swept["complete"]
    assert not swept["interrupted"]
    assert [t["number"] for t in swept["trials"]] == [0, 1]
    own = recipe("tiny").train
    assert swept["trials"][0]["setting"] == {"train.lr_dense": own.lr_dense, "train.lr_sparse": own.lr_sparse}
    for trial in swept["trials"]:
        assert trial["status"] in (FINISHED, STOPPED)
        percents = [r["percent"] for r in trial["reports"]]
        assert percents == sorted(set(percents))
        assert all(0 < r["ne"] < 5 for r in trial["reports"])
    assert any(len(t["reports"]) > 1 for t in swept["trials"])  # so that ASHA has something to stop by
    best = swept["best"]
    finals = {t["number"]: t["reports"][-1]["ne"] for t in swept["trials"] if t["status"] == FINISHED}
    assert best["trial"] == min(finals, key=finals.__getitem__)
    changed = apply_overrides(RunConfig.from_dict(swept["config"]), best["set"])
    assert {p: getattr(changed.train, p.removeprefix("train.")) for p in best["setting"]} == best["setting"]


def test_sweep_is_nested_in_mlflow(swept: dict[str, Any]) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(swept["mlflow"]["tracking_uri"])
    parent = client.get_run(swept["mlflow"]["parent_run_id"])
    assert parent.info.status == "FINISHED"
    assert parent.data.metrics["ne"] == pytest.approx(swept["best"]["ne"])
    children = client.search_runs(
        [parent.info.experiment_id], f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'"
    )  # fmt: skip
    by_name = {run.info.run_name: run for run in children}
    assert {"preprocess", "trial-0", "trial-1"} <= set(by_name)
    for trial in swept["trials"]:
        run = by_name[f"trial-{trial['number']}"]
        assert run.info.run_id == trial["run_id"]
        assert run.info.status == "FINISHED"
        assert {k: float(v) for k, v in run.data.params.items()} == trial["setting"]
        history = client.get_metric_history(run.info.run_id, "ne")
        assert [(m.step, m.value) for m in history] == [(r["step"], r["ne"]) for r in trial["reports"]]
    assert [a.path for a in client.list_artifacts(parent.info.run_id)] == ["result.json"]


def test_failed_trial_is_recorded_and_not_fatal(
    swept: dict[str, Any], runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", *SMALL, "--trials", "2", "--vary", "train.negative_keep=1.0,1e-9", "--runs", str(runs)]) == 0
    said = capsys.readouterr().out
    assert "[2/3] preprocess\n      skipped: inputs unchanged" in said
    assert "the recipe's own setting: nothing to change" in said
    assert "Traceback" not in said
    assert [p.name for p in sorted(runs.glob("generated/tuning/*/*"))] == ["result.json"] * len(results(runs))
    good, bad = results(runs)[-1]["trials"]
    assert (good["status"], bad["status"], bad["setting"]) == (FINISHED, FAILED, {"train.negative_keep": 1e-9})
    assert bad["error"].startswith("TrainingError: negative_keep 1e-09 keeps none of ")


def test_all_trials_failing_is_an_error_with_the_first_reason(
    swept: dict[str, Any], runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vary = ("--set", "train.negative_keep=1e-9", "--vary", "train.lr_sparse=0.01..0.1")
    assert main(["sweep", *SMALL, "--trials", "2", *vary, "--runs", str(runs)]) == 1
    error = capsys.readouterr().err
    assert "error: no usable trial: all 2 failed. Trial 0 (lr_sparse=" in error
    assert "): TrainingError: negative_keep 1e-09 keeps none of " in error
    assert results(runs)[-1]["best"] is None


def test_ctrl_c_keeps_what_was_finished_and_frees_the_cluster(
    ray_session: Any, swept: dict[str, Any], runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    original = Ledger.ended

    def end_and_interrupt(self: Ledger, *given: Any, **more: Any) -> None:
        original(self, *given, **more)
        signal.raise_signal(signal.SIGINT)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ledger, "ended", end_and_interrupt)
        assert main(["sweep", *SMALL, "--trials", "4", "--runs", str(runs)]) == 130
    kept = results(runs)[-1]
    statuses = [t["status"] for t in kept["trials"]]
    assert kept["interrupted"]
    assert len([s for s in statuses if s in (FINISHED, STOPPED)]) == 1
    assert {INTERRUPTED, NOT_STARTED} <= set(statuses)
    assert "interrupted: 1 of 4 trials had ended and are kept" in capsys.readouterr().out
    end = time.monotonic() + 30
    while ray_session.available_resources().get("CPU") != 4.0 and time.monotonic() < end:
        time.sleep(0.2)
    assert ray_session.available_resources()["CPU"] == 4.0


def test_own_setting_is_never_stopped_early_but_stops_others() -> None:
    scheduler = tune_scheduler()
    scheduler.set_search_properties("ne", "min")
    trials = [types.SimpleNamespace(trial_id=str(n), config={"number": n}) for n in range(4)]
    for one in trials:
        scheduler.on_trial_add(None, one)

    def decide(number: int, percent: int, ne: float) -> str:
        return str(scheduler.on_trial_result(None, trials[number], {"percent": percent, "ne": ne}))

    assert decide(1, 25, 0.5) == "CONTINUE"
    assert decide(0, 25, 0.9) == "CONTINUE"  # worse than trial 1, yet it goes on
    assert decide(2, 25, 0.95) == "STOP"
    assert decide(3, 25, math.nan) == "CONTINUE"  # no number is no reason for ASHA; the trial ends itself
    assert decide(0, 50, 0.8) == "CONTINUE"
    assert decide(1, 50, 0.9) == "STOP"  # worse than the own setting
    assert decide(0, 100, 0.8) == "STOP"


def test_reports_are_those_of_the_training_loop_and_the_test_day_stays_closed(
    swept: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the same model stepped by hand to the same step, scored by the formula of NE."""
    opened: list[str] = []
    original = FeatureStore.impressions

    def spy(self: FeatureStore, days: Any = None) -> Any:
        opened.extend(self.days if days is None else days)
        return original(self, days)

    monkeypatch.setattr(FeatureStore, "impressions", spy)
    config = apply_overrides(recipe("tiny"), ["train.batch_impressions=64"])
    job = TrialJob(swept["store"], config.to_dict(), [], users=0.6, seed=1, scratch=str(tmp_path))
    reports: list[dict[str, float]] = []
    train_variant(job, {"train.lr_dense": 0.01, "model.rank": 8}, reports.append)
    split = FeatureStore.open(swept["store"]).split
    assert set(opened) == {*split.train_days, split.validation_day}
    assert not dist.is_initialized()
    assert list(tmp_path.iterdir()) == []
    assert [r["percent"] for r in reports][-1] == 100
    assert len(reports) >= 3
    setting = ["train.lr_dense=0.01", "student.rank=8"]
    for report in (reports[0], reports[-1]):
        by_hand = ne_by_hand(swept["store"], apply_overrides(config, setting), int(report["step"]))
        assert report["ne"] == pytest.approx(by_hand, rel=1e-6)


def ne_by_hand(store_path: str, config: RunConfig, num_steps: int) -> float:
    """Click NE on the validation rows after `num_steps` single steps of the learner."""
    from gem.model.ranker import Ranker, ranker_weights
    from gem.training.data import StoreReader
    from gem.training.loop import Job, make_learner
    from gem.training.plan import plan_epoch

    store = FeatureStore.open(store_path)
    split = store.split
    impressions = store.impressions([*split.train_days, split.validation_day])
    lucky = np.random.default_rng(1).random(int(impressions.user.max()) + 1)[impressions.user] < 0.6
    rows = np.flatnonzero(lucky & (impressions.day < len(split.train_days)))
    validation = np.flatnonzero(lucky & (impressions.day == len(split.train_days)))
    size = config.student
    reader = StoreReader(store, store.timelines(), impressions, size.max_history, align=size.align)
    plan = plan_epoch(
        impressions.user[rows].astype(np.int64), impressions.day[rows].astype(np.int64),
        batch_size=64, window_days=1, seed=config.train.seed, epoch=0,
    )  # fmt: skip
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        learner = make_learner(Job("hand", config.student, config.train, rows), store.schema, len(plan))
        for i in range(num_steps):
            learner.step(reader.batch(rows[plan.batch(i)]), plan.batch(i).size)
        model = Ranker(store.schema, config.student)
        model.load_state_dict(ranker_weights(learner.model.state_dict(), learner.tables.weights()))
    finally:
        dist.destroy_process_group()
    model.eval()
    batch = reader.batch(validation)
    p = 1 / (1 + np.exp(-model(batch).logits[:, 0].detach().numpy().astype(np.float64)))
    y = batch.labels[:, 0].numpy()
    rate = y.mean()
    loss = -(y * np.log(p) + (1 - y) * np.log1p(-p)).mean()
    return float(loss / -(rate * np.log(rate) + (1 - rate) * np.log1p(-rate)))
