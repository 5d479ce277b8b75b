"""The registry over a real MLflow: runs, versions, promotions by several processes, and everything that fails."""

from __future__ import annotations

import math
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gem.errors import BundleError, GateError, TrackingError
from gem.lineage.bundle import save_bundle
from gem.lineage.gates import Decision
from gem.lineage.registry import ModelVersion, Registry
from tests.unit.lineage.test_bundle import EXTRA, toy_info, toy_weights
from tests.unit.lineage.test_chain import toy_chain

YES = Decision(True, ("better",))


@pytest.fixture(autouse=True)
def no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.fixture(scope="module")
def initialised(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A database with tables and nothing else; making the tables is the slow part."""
    runs = tmp_path_factory.mktemp("fresh")
    Registry("", runs).check()
    return (runs / "mlflow.db").read_bytes()


@pytest.fixture
def registry(tmp_path: Path, initialised: bytes) -> Registry:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "mlflow.db").write_bytes(initialised)
    return Registry("", tmp_path / "runs")


def register(registry: Registry, place: str, name: str = "gem", dataset: str = "toy") -> ModelVersion:
    """A new bundle (its recipe makes its hash) registered in a run of its own."""
    path = registry.runs / place
    got = save_bundle(path, toy_info(name=name, calibration={"place": place}), toy_weights(), EXTRA)
    return registry.register(path, got, registry.start_loop(dataset, place), dataset)


def run_of(registry: Registry, run_id: str) -> Any:
    import mlflow

    return mlflow.MlflowClient(registry.uri).get_run(run_id)


def test_runs_are_nested_with_inputs_params_metrics_and_artifacts(registry: Registry, tmp_path: Path) -> None:
    loop = registry.start_loop("toy", "loop", {"commit": "abc"})
    child = registry.start_child(loop, "pretrain")
    registry.log_params(child, {"model": {"dim": 8}, "many": {str(i): i for i in range(150)}, "long": "x" * 9000})
    registry.log_metrics(child, {"click": {"ne": 0.9, "auc": math.nan}, "x@y": math.inf, "none": None, "ok": True})
    registry.log_metrics(child, {f"m{i}": float(i) for i in range(2000)}, step=3)
    registry.log_inputs(child, "toy store", "d" * 64, source="runs/x/store")
    (tmp_path / "report.html").write_text("<p>")
    registry.log_artifact(child, tmp_path / "report.html", "report")
    registry.end(child)
    registry.end(loop, "FAILED")
    assert registry.lost == [] and registry.flush() == 0
    run = run_of(registry, child)
    assert run.data.tags["mlflow.parentRunId"] == loop and run.data.tags["stage"] == "pretrain"
    assert run.data.params["model.dim"] == "8" and run.data.params["many.149"] == "149"
    assert len(run.data.params["long"]) == 5000
    assert run.data.metrics["click.ne"] == 0.9 and run.data.metrics["ok"] == 1.0 and run.data.metrics["m1999"] == 1999.0
    assert not {"click.auc", "x_y", "none"} & set(run.data.metrics), "no NaN, no 1.797e308"
    assert run.data.tags["not_finite"] == "click.auc, none, x_y"
    [given] = run.inputs.dataset_inputs
    assert given.dataset.name == "toy store" and given.dataset.digest == "d" * 36
    assert {t.key: t.value for t in given.tags}["data_hash"] == "d" * 64
    assert (registry.runs / "mlartifacts" / "toy" / child / "artifacts" / "report" / "report.html").is_file()
    assert (run.info.status, run_of(registry, loop).info.status) == ("FINISHED", "FAILED")


def test_second_value_of_a_param_is_lost_not_an_error(registry: Registry) -> None:
    run = registry.start_loop("toy", "loop")
    registry.log_params(run, {"lr": 1})
    registry.log_params(run, {"lr": 2})
    registry.log_params(run, {"batch": 4})
    assert len(registry.lost) == 1 and "log params" in registry.lost[0]
    assert run_of(registry, run).data.params == {"lr": "1", "batch": "4"}


def test_register_promote_champions_rollback(registry: Registry) -> None:
    one, two, three = (register(registry, f"m{i}") for i in range(3))
    assert [v.version for v in registry.versions("gem")] == ["1", "2", "3"]
    assert one.tags["data_hash"] == "a" * 64 and one.tags["dataset"] == "toy" and one.tags["kind"] == "foundation"
    assert registry.champion("gem") is None and registry.champions() == {}
    registry.promote("gem", "1", None, YES, who="ann")
    registry.promote("gem", two.version, "1", YES)
    registry.promote("gem", three.version, "2", YES)
    assert registry.champions() == {"gem": three} == registry.champions("toy")
    assert registry.champions("other") == {}
    assert registry.rollback("gem", "too slow").to_version == "2"
    assert registry.rollback("gem", "still too slow").to_version == "1"
    with pytest.raises(GateError, match="no champion before 1"):
        registry.rollback("gem", "again")
    assert registry.version("gem", "champion") == one
    lines = [(e.action, e.from_version, e.to_version, e.bundle_hash) for e in registry.audit.read()]
    assert lines == [
        ("promote", "", "1", one.bundle_hash),
        ("promote", "1", "2", two.bundle_hash),
        ("promote", "2", "3", three.bundle_hash),
        ("rollback", "3", "2", two.bundle_hash),
        ("rollback", "2", "1", one.bundle_hash),
    ]
    assert registry.audit.read()[0].who == "ann" and registry.audit.read()[3].reasons == ("too slow",)


def test_same_bundle_keeps_its_version(registry: Registry) -> None:
    first = register(registry, "m0")
    again = registry.register(registry.runs / "m0", first.bundle_hash, "", "toy")
    assert again == first and len(registry.versions("gem")) == 1


def test_a_moved_runs_folder_keeps_its_versions_chain_and_promotions(registry: Registry) -> None:
    student, student_hash, teacher, teacher_hash = toy_chain(registry.runs / "toy")
    for bundle, got in ((teacher, teacher_hash), (student, student_hash)):
        registry.register(bundle, got, "", "toy")
    registry.promote("gem-feed", "1", None, YES)
    moved = registry.runs.rename(registry.runs.with_name("elsewhere"))
    there = Registry("", moved)
    champion = there.champions("toy")["gem-feed"]
    assert there.bundle_path(champion) == moved / "toy" / "gem-feed"
    records = there.chain("gem-feed")
    assert len(records) == 5 and not [r.problem for r in records if r.problem]
    assert there.register(moved / "toy" / "gem-feed", student_hash, "", "toy") == champion
    there.promote("gem", "1", None, YES)  # it reads every byte of the bundle where it lies now
    (moved / "toy" / "gem" / "weights.safetensors").unlink()
    assert "weights.safetensors is missing" in there.chain("gem", "1")[0].problem


REGISTRAR = """
import sys, time
from pathlib import Path
from gem.lineage.registry import Registry

runs, bundle, bundle_hash = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
registry = Registry("", runs)
registry.check()
run = registry.start_loop("toy", "loop")
versions = registry.versions
registry.versions = lambda name: (versions(name), time.sleep(0.3))[0]  # between look and make
print("ready", flush=True)
sys.stdin.readline()
for i in range(10):
    registry.log_inputs(run, f"store {i}", str(i) * 64)
print(registry.register(bundle, bundle_hash, run, "toy").version, len(registry.lost) + registry.flush(), flush=True)
"""


def test_processes_that_bring_the_same_bundle_and_data_set_share_one_version(
    registry: Registry, tmp_path: Path
) -> None:
    got = save_bundle(tmp_path / "m", toy_info(), toy_weights(), EXTRA)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-c", REGISTRAR, str(registry.runs), str(tmp_path / "m"), got]
    pipe = subprocess.PIPE
    loops = [subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=env) for _ in range(3)]
    try:
        for process in loops:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
        for process in loops:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        answers = [process.communicate(timeout=120) for process in loops]
    finally:
        for process in loops:
            process.kill()
            process.wait()
    assert [out.split() for out, _ in answers] == [["1", "0"]] * 3, answers
    assert [v.version for v in registry.versions("gem")] == ["1"]


def test_a_data_set_that_another_loop_inserted_first_is_logged_at_the_second_try(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = registry.start_loop("toy", "loop")
    client = registry._client()
    log, told = client.log_inputs, ["(sqlite3.IntegrityError) UNIQUE constraint failed: datasets.experiment_id"]

    def racing(*args: Any) -> None:
        if told:
            raise ValueError(told.pop())
        log(*args)

    monkeypatch.setattr(client, "log_inputs", racing)
    registry.log_inputs(run, "store", "d" * 64)
    assert registry.lost == [] and len(run_of(registry, run).inputs.dataset_inputs) == 1
    told.append("no such run")
    registry.log_inputs(run, "store", "e" * 64)
    assert len(registry.lost) == 1 and "no such run" in registry.lost[0], "other errors are not tried again"


def test_refused_decision_and_lost_race_change_nothing(registry: Registry) -> None:
    register(registry, "m0")
    register(registry, "m1")
    with pytest.raises(GateError, match="refused: NE too high"):
        registry.promote("gem", "1", None, Decision(False, ("refused: NE too high",)))
    registry.promote("gem", "1", "", YES)
    with pytest.raises(GateError, match="the champion is version 1, expected none"):
        registry.promote("gem", "2", None, YES)
    with pytest.raises(GateError, match="champion already"):
        registry.promote("gem", "1", "1", YES)
    with pytest.raises(TrackingError, match='no version or alias "7"'):
        registry.promote("gem", "7", "1", YES)
    assert len(registry.audit.read()) == 1


# No torch and no test module in these processes: they only do what a promoter does, each step at the same moment.
PROMOTER = """
import sys, time
from pathlib import Path
from gem.errors import GateError
from gem.lineage.gates import Decision
from gem.lineage.registry import Registry
import mlflow
runs, bundle, bundle_hash = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
def together(word): print(word, flush=True); sys.stdin.readline()
registry = Registry("", runs)
together("imported")
registry.check()
version = registry.register(bundle, bundle_hash, registry.start_loop("toy", bundle.name), "toy")
together(version.version)
verify = registry._verified
registry._verified = lambda v: (verify(v), time.sleep(0.5))  # between compare and set: a race without the lock
try:
    registry.promote("gem", version.version, None, Decision(True, ("better",)))
    print("won")
except GateError as e:
    print(e)
"""


def test_four_processes_on_a_fresh_database_and_one_promotion_wins(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    promoters = []
    for i in range(4):
        got = save_bundle(tmp_path / f"m{i}", toy_info(calibration={"place": i}), toy_weights(), EXTRA)
        command = [sys.executable, "-c", PROMOTER, str(runs), str(tmp_path / f"m{i}"), got]
        pipe = subprocess.PIPE
        promoters.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=env))

    def line(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None and process.stderr is not None
        return process.stdout.readline().strip() or process.stderr.read()

    def go() -> None:
        for process in promoters:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()

    try:
        assert [line(p) for p in promoters] == ["imported"] * 4
        go()  # all four open a database that does not exist, make the experiment and the model
        versions = [line(p) for p in promoters]
        assert sorted(versions) == ["1", "2", "3", "4"]
        go()  # all four promote
        results = dict(zip(versions, [line(p) for p in promoters], strict=True))
        assert [p.wait(60) for p in promoters] == [0] * 4
    finally:
        for process in promoters:
            process.kill()
            process.communicate()
    [winner] = [version for version, what in results.items() if what == "won"]
    losers = [what for version, what in results.items() if version != winner]
    assert all(f"the champion is version {winner}, expected none" in what for what in losers), losers
    registry = Registry("", runs)
    champion = registry.champion("gem")
    assert champion is not None and champion.version == winner
    assert [e.to_version for e in registry.audit.read()] == [winner], "one audit line for one change"


def test_ready_version_without_files_is_refused(registry: Registry) -> None:
    import mlflow

    client = mlflow.MlflowClient(registry.uri, registry_uri=registry.uri)
    client.create_registered_model("gem")
    raw = client.create_model_version("gem", "file:///nope", tags={"bundle_hash": "a" * 64})
    assert raw.status == "READY", "what MLflow says about a bundle that does not exist"
    with pytest.raises(GateError, match="file:///nope does not exist"):
        registry.promote("gem", "1", None, YES)
    client.create_model_version("gem", "file:///tmp", tags={})
    with pytest.raises(GateError, match="no tag bundle_hash"):
        registry.promote("gem", "2", None, YES)
    assert registry.champion("gem") is None and registry.audit.read() == []


def test_changed_bundle_is_neither_registered_nor_promoted_nor_rolled_back_to(registry: Registry) -> None:
    one = register(registry, "m0")
    two = register(registry, "m1")
    registry.promote("gem", "1", None, YES)
    registry.promote("gem", "2", "1", YES)
    weights = registry.runs / "m0" / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    with pytest.raises(GateError, match=r"weights\.safetensors was changed"):
        registry.rollback("gem", "try")
    with pytest.raises(BundleError, match=r"weights\.safetensors was changed"):
        registry.register(registry.runs / "m0", one.bundle_hash, "", "toy")
    with pytest.raises(BundleError, match="it is another bundle"):
        registry.register(registry.runs / "m1", one.bundle_hash, "", "toy")
    assert registry.champion("gem") == two and len(registry.audit.read()) == 2


def test_audit_that_cannot_be_written_takes_the_promotion_back(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(registry, "m0")
    register(registry, "m1")
    registry.promote("gem", "1", None, YES)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(TrackingError, match="No space left"):
            registry.promote("gem", "2", "1", YES)
    champion = registry.champion("gem")
    assert champion is not None and champion.version == "1"


def test_alias_moved_by_others_is_written_down(registry: Registry) -> None:
    import mlflow

    for i in range(3):
        register(registry, f"m{i}")
    registry.promote("gem", "1", None, YES)
    mlflow.MlflowClient(registry.uri, registry_uri=registry.uri).set_registered_model_alias("gem", "champion", "2")
    registry.promote("gem", "3", "2", YES)
    assert [(e.action, e.from_version, e.to_version) for e in registry.audit.read()] == [
        ("promote", "", "1"),
        ("observed", "1", "2"),
        ("promote", "2", "3"),
    ]


@pytest.mark.parametrize("name", ["../../etc", "/etc", "%2e%2e", "a/b", "", "a..b", "x" * 200, "a\nb"])
def test_names_that_are_paths_are_refused(registry: Registry, name: str) -> None:
    for call in (registry.champion, registry.versions, lambda n: registry.version(n, "1")):
        with pytest.raises(TrackingError, match="not allowed"):
            call(name)


def test_chain_from_data_to_deployment(registry: Registry) -> None:
    student, student_hash, teacher, teacher_hash = toy_chain(registry.runs)
    run = registry.start_loop("toy", "loop")
    registry.register(teacher, teacher_hash, run, "toy")
    registry.register(student, student_hash, run, "toy", {"stage": "distill"})
    registry.promote("gem-feed", "1", None, YES, who="ann")
    records = registry.chain("gem-feed")
    assert [r.step for r in records] == ["data", "features", "teacher", "student", "deployment"]
    assert all(not r.problem for r in records)
    assert records[2].facts["run"] == run and records[2].facts["version"] == "1"
    assert records[4].facts["alias"] == "champion" and records[4].facts["who"] == "ann"
    assert [r.step for r in registry.chain("gem", "1")] == ["data", "features", "teacher", "deployment"]
    assert registry.chain("gem", "1")[-1].facts["alias"] == "none"
    (student / "weights.safetensors").unlink()
    assert "weights.safetensors is missing" in registry.chain("gem-feed", "1")[0].problem
    with pytest.raises(TrackingError, match='model "nothing" has no version'):
        registry.chain("nothing")


def test_registry_travels_between_processes(registry: Registry) -> None:
    run = registry.start_loop("toy", "loop")
    copy = pickle.loads(pickle.dumps(registry))
    copy.log_metrics(run, {"a": 1.0})
    assert (copy.uri, copy.runs) == (registry.uri, registry.runs)
    assert run_of(registry, run).data.metrics == {"a": 1.0}
