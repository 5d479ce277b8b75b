"""`python -m pipelines run` on the tiny recipe, once, looked at from every side; then again, and with one change."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from gem.data.store import FeatureStore
from gem.lineage.bundle import Bundle, load_bundle
from gem.lineage.registry import Registry
from pipelines.__main__ import main
from pipelines.evaluate import evaluate_bundle
from pipelines.summary import METRIC_NAMES, read_summary
from serving.config import ServingConfig
from serving.fleet import find_champions, load_scorers
from serving.scorer import Scorer
from tests.e2e.loop_process import Finished, run_command

# The tiny models are bad on purpose (seconds of training): gates wide open, so that there are champions.
OPEN = ("--set", "gates.max_ne=9", "--set", "gates.min_calibration=0.01", "--set", "gates.max_calibration=100")
WORDS = ("run", "--recipe", "tiny", *OPEN)
STAGES = ("generate", "preprocess", "pretrain", "generate-knowledge", "distill", "evaluate", "promote")
FM = "generated-gem"

pytestmark = pytest.mark.timeout(900)


@dataclass(frozen=True)
class Ran:
    """A finished loop: what was said, and the summary that stood in runs/latest behind it."""

    runs: Path
    finished: Finished
    summary: dict[str, Any]

    @property
    def verticals(self) -> dict[str, Any]:
        return {n: m for n, m in self.summary["models"].items() if m["kind"] == "vertical"}

    def bundle(self, name: str) -> Bundle:
        model = self.summary["models"][name]
        return load_bundle(Path(model["bundle"]), expected_hash=model["hash"])

    @property
    def store(self) -> FeatureStore:
        return FeatureStore.open(Path(self.bundle(FM).info.parents.data_path))


def run_loop(runs: Path, folder: Path, *more: str) -> Ran:
    folder.mkdir(parents=True)
    finished = run_command(folder, *WORDS, *more, "--runs", str(runs), timeout_s=600)
    assert finished.status == 0, finished.out + finished.err
    return Ran(runs, finished, json.loads((runs / "latest" / "summary.json").read_text()))


@pytest.fixture(scope="module", autouse=True)
def _environment() -> Iterator[None]:
    """No server and no runs folder of the caller's; what a command sets in this process goes again."""
    before = dict(os.environ)
    os.environ.pop("MLFLOW_TRACKING_URI", None)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(scope="module")
def first(_environment: None, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    base = tmp_path_factory.mktemp("loop")
    return run_loop(base / "runs", base / "first")


@pytest.fixture(scope="module")
def again(first: Ran) -> Ran:
    """The same command once more."""
    return run_loop(first.runs, first.runs.parent / "again")


@pytest.fixture(scope="module")
def changed(again: Ran) -> Ran:
    """One setting of the students' training changed."""
    return run_loop(again.runs, again.runs.parent / "changed", "--set", "student_train.lr_dense=0.0011")


@pytest.fixture(scope="module")
def client(first: Ran) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(first.summary["mlflow"]["tracking_uri"])


# ---- the summary -----------------------------------------------------------------------------------


def test_every_stage_says_seconds_and_rows(first: Ran) -> None:
    stages = first.summary["stages"]
    assert tuple(stages) == STAGES
    for name, stage in stages.items():
        assert stage["seconds"] > 0 and not stage["skipped"], name
        assert isinstance(stage["rows_in"], int) and stage["rows_out"] > 0 and stage["quarantined"] >= 0, name
    assert sum(s["seconds"] for s in stages.values()) <= first.summary["seconds"]
    assert first.summary["seconds"] <= first.finished.seconds
    assert stages["generate-knowledge"]["teacher_passes_per_impression"] == 1.0
    assert stages["generate-knowledge"]["rows_out"] == stages["preprocess"]["rows_out"]
    assert 300 < first.summary["peak_rss_mb"] < 8192
    read_summary(first.runs / "latest")  # and it fits its schema


def test_duplicates_and_null_users_are_counted_as_an_independent_count_does(first: Ran) -> None:
    raw = raw_impressions(first.runs)
    users = [r for r in raw if r["user_id"] is not None]
    duplicates = len(users) - len({r["impression_id"] for r in users})
    nulls = len(raw) - len(users)
    assert duplicates > 0 and nulls > 0, "the generated world has both"
    assert first.summary["data"]["duplicates"] == duplicates
    assert first.summary["data"]["quarantined"] == {"impressions": {"null_user": nulls}}
    stage = first.summary["stages"]["preprocess"]
    assert stage["quarantined"] == nulls and stage["rows_out"] == len(raw) - duplicates - nulls
    report = (first.runs / "latest" / "report.html").read_text()
    assert "null_user" in report and f"{duplicates} dropped" in report


def test_every_model_has_metrics_with_intervals_beside_the_bayes_limit(first: Ran) -> None:
    models = first.summary["models"]
    groups = first.store.schema.surface_groups
    assert len(groups) >= 2 and {m["group"] for m in first.verticals.values()} == set(groups)
    assert models[FM]["kind"] == "foundation" and len(models) == 1 + len(groups)
    for name, model in models.items():
        assert set(model["tasks"]) == {"click", "conversion"}
        for task, found in model["tasks"].items():
            for metric in METRIC_NAMES:
                value, low, high = (found[metric][k] for k in ("value", "low", "high"))
                assert value is not None and low <= value <= high and low < high, (name, task, metric)
            assert 0 < found["bayes_ne"] < 1 and found["rows"] > 100
    rows = {n: m["tasks"]["click"]["rows"] for n, m in models.items()}
    assert sum(rows[n] for n in first.verticals) == rows[FM], "every test impression belongs to one vertical model"


def test_the_split_is_in_time(first: Ran) -> None:
    split = first.summary["split"]
    assert max(split["train_days"]) < split["validation_day"] < split["test_day"] == first.store.days[-1]
    assert first.summary["models"][FM]["by_day"].keys() == {split["validation_day"], split["test_day"]}


def test_runs_latest_and_the_report_are_named_in_the_output(first: Ran) -> None:
    latest = first.runs / "latest"
    assert latest.is_symlink() and not os.path.isabs(os.readlink(latest))
    report = Path(first.summary["report"])
    assert report.resolve() == (latest / "report.html").resolve() and report.stat().st_size > 20_000
    said = first.finished.out.rstrip().splitlines()
    assert said[-1] == f"report   {report}" and "  make serve" in said[-8:]
    html = report.read_text()
    assert "<svg" in html or "data:image" in html
    assert not re.search(r"""(src|href)=["']https?://""", html), "one file, nothing from elsewhere"


def test_the_output_has_every_stage_and_no_noise(first: Ran) -> None:
    assert first.finished.noise == []
    assert first.finished.err == ""
    heads = [line for line in first.finished.out.splitlines() if line.startswith("[")]
    assert heads == [f"[{i}/{len(STAGES)}] {name}" for i, name in enumerate(STAGES, 1)]
    assert "\r" not in first.finished.out and "\x1b" not in first.finished.out


# ---- lineage ---------------------------------------------------------------------------------------


def test_mlflow_has_a_parent_with_a_child_per_stage(first: Ran, client: Any) -> None:
    parent = client.get_run(first.summary["mlflow"]["parent_run_id"])
    assert parent.info.status == "FINISHED" and parent.data.tags["recipe"] == "tiny"
    assert parent.data.params["model.dim"] == "16" and parent.data.metrics["seconds"] > 0
    assert parent.data.metrics[f"{FM}/click/ne"] == first.summary["models"][FM]["tasks"]["click"]["ne"]["value"]
    artifacts = {a.path for a in client.list_artifacts(parent.info.run_id)}
    assert {"summary.json", "report.html"} <= artifacts
    children = client.search_runs(
        [parent.info.experiment_id], f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'", max_results=100
    )
    assert {c.data.tags["stage"]: c.info.run_id for c in children} == {
        name: stage["run_id"] for name, stage in first.summary["stages"].items()
    }
    assert {c.info.status for c in children} == {"FINISHED"}
    assert all(c.data.metrics["seconds"] > 0 for c in children)


@pytest.mark.parametrize("stage", STAGES[1:-1])
def test_runs_name_the_data_they_were_made_of_by_hash(first: Ran, client: Any, stage: str) -> None:
    run = client.get_run(first.summary["stages"][stage]["run_id"])
    (data,) = run.inputs.dataset_inputs
    assert data.dataset.name == "generated" and data.dataset.digest == first.store.hash[:36]
    assert {t.key: t.value for t in data.tags}["data_hash"] == first.store.hash


def test_bundles_load_and_their_parents_exist(first: Ran) -> None:
    teacher = first.bundle(FM)
    assert teacher.info.parents.data == first.store.hash and teacher.info.parents.teacher == ""
    for name in first.verticals:
        info = first.bundle(name).info
        assert info.parents.teacher == teacher.hash and info.parents.data == first.store.hash
        assert load_bundle(Path(info.parents.teacher_path)).hash == teacher.hash
        assert set(info.calibration) == {"click", "conversion"}


def test_registered_versions_are_champions_of_this_loop(first: Ran) -> None:
    champions = Registry(runs=first.runs).champions("generated")
    assert set(champions) == set(first.summary["models"])
    for name, model in first.summary["models"].items():
        assert model["promoted"] and champions[name].bundle_hash == model["hash"]
        made_by = "pretrain" if name == FM else "distill"
        assert champions[name].run_id == first.summary["stages"][made_by]["run_id"]
    assert {champions[n].tags["teacher_hash"] for n in first.verticals} == {first.summary["models"][FM]["hash"]}


def test_lineage_prints_the_whole_chain(first: Ran, capsys: pytest.CaptureFixture[str]) -> None:
    for name in (FM, *first.verticals):
        assert main(["lineage", name, "--runs", str(first.runs)]) == 0
        said = capsys.readouterr().out
        steps = ["data", "features", "teacher", *(["student"] if name != FM else []), "deployment"]
        assert re.findall(r"^┌─ (\w+)", said, re.M) == steps
        assert "!!" not in said and first.store.hash[:12] in said and first.summary["models"][FM]["hash"][:12] in said
    assert main(["lineage", "generated-gm", "--runs", str(first.runs)]) == 1
    assert 'model "generated-gm" has no version or alias "champion"' in capsys.readouterr().err


# ---- serving ---------------------------------------------------------------------------------------


def raw_impressions(runs: Path) -> list[dict[str, Any]]:
    files = sorted(runs.glob("generated/generate/*/**/impressions-*.parquet"))
    assert files
    return [row for f in files for row in pq.read_table(f).to_pylist()]


@pytest.fixture(scope="module")
def scorers(first: Ran) -> dict[str, Scorer]:
    """Champions as the server loads them, by model name."""
    return {s.model.name: s for s in load_scorers(find_champions(ServingConfig(runs=str(first.runs))))}


def test_served_scores_equal_offline_scores_of_the_same_bundle(
    first: Ran, scorers: dict[str, Scorer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Raw rows of the test day through the server's scorer, against what `evaluate` scored."""
    seen: dict[str, Any] = {}

    def keep(store: Any, imp: Any, p: Any, name: str, bundle_hash: str) -> dict[str, Any]:
        seen[name] = dict(zip(imp.impression_id.tolist(), p, strict=True))
        return {}

    monkeypatch.setattr("pipelines.evaluate.measure", keep)
    split = first.store.split
    rows = {r["impression_id"]: r for r in raw_impressions(first.runs) if r["user_id"] is not None}
    for name in first.verticals:
        model = first.summary["models"][name]
        evaluate_bundle(str(first.store.path), model["bundle"], model["hash"], (split.validation_day, split.test_day))
        scorer, picked = scorers[name], sorted(seen[name])[:: max(len(seen[name]) // 80, 1)]
        got = np.array([ask(scorer, rows[i]) for i in picked])
        want = np.array([seen[name][i] for i in picked])
        assert len(picked) >= 80 and np.std(want[:, 0]) > 0.005, "a constant would prove nothing"
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


def ask(scorer: Scorer, row: dict[str, Any]) -> Any:
    user = scorer.find_user(row["user_id"])
    context = {"device": row["device"], "slot": row["slot"]}
    history = scorer.history(user, row["time_ms"])
    return scorer.score(user, row["time_ms"], row["surface"], context, [row["ad_id"]], history).p[0]


# ---- the same command again ------------------------------------------------------------------------


def test_the_same_command_again_skips_every_stage_and_keeps_the_champions(first: Ran, again: Ran) -> None:
    stages = again.summary["stages"]
    assert [n for n in STAGES if not stages[n]["skipped"]] == ["promote"], "which is cheap, and always looks"
    assert sum(s["seconds"] for s in stages.values()) < sum(s["seconds"] for s in first.summary["stages"].values()) / 4
    for name, model in again.summary["models"].items():
        before = first.summary["models"][name]
        assert (model["hash"], model["version"]) == (before["hash"], before["version"])
        assert model["promoted"] and model["reasons"] == ["it is the champion already"]
        assert model["tasks"] == before["tasks"]
    assert again.summary["mlflow"]["parent_run_id"] != first.summary["mlflow"]["parent_run_id"]
    assert len((again.runs / "audit.jsonl").read_text().splitlines()) == len(first.summary["models"])


def test_another_setting_of_the_students_runs_only_what_follows_from_it(again: Ran, changed: Ran) -> None:
    stages = changed.summary["stages"]
    assert {n: s["skipped"] for n, s in stages.items()} == {
        "generate": True, "preprocess": True, "pretrain": True, "generate-knowledge": True,
        "distill": False, "evaluate": False, "promote": False,
    }  # fmt: skip
    assert changed.finished.noise == []
    assert changed.summary["models"][FM]["hash"] == again.summary["models"][FM]["hash"]
    for name, model in changed.verticals.items():
        assert model["hash"] != again.summary["models"][name]["hash"] and int(model["version"]) == 2
        compared = [r for r in model["reasons"] if "against the champion" in r]
        assert len(compared) == 2, "both tasks are compared with the champion on the same rows"
        champion = Registry(runs=changed.runs).champion(name)
        assert champion is not None and champion.version == ("2" if model["promoted"] else "1")
