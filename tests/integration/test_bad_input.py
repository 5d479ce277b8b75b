"""Every bad input that a person can hand to the loop, and the message that names it. Hardly any of it starts Ray."""

from __future__ import annotations

import datetime as dt
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import yaml

from gem.config import DataConfig, RunConfig, WorldConfig
from gem.data.spec import load_spec
from gem.data.store import FeatureStore
from gem.data.world.generator import generate
from gem.errors import BundleError, TrainingError
from pipelines.__main__ import main
from pipelines.cluster import Cluster
from pipelines.console import Console
from pipelines.distribute import in_process
from pipelines.evaluate import evaluate_bundle
from pipelines.generate_knowledge import Teacher
from pipelines.preprocess import build_store
from pipelines.summary import count_quarantined
from pipelines.train_workers import WorkerGroup
from pipelines.training import fit
from tests.unit.data.toy_log import toy_rows, toy_spec, write_toy
from tests.unit.serving.tiny import Tiny, build_tiny

WORLD = WorldConfig(num_users=40, num_ads=30, num_days=4, num_impressions=800, num_organic_events=400, seed=5)
Cli = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    generate(WORLD, folder)
    return folder


@pytest.fixture
def raw(world: Path, tmp_path: Path) -> Path:
    """A copy of the raw tables that a test may spoil."""
    folder = tmp_path / "raw"
    for file in sorted(p for p in world.rglob("*") if p.is_file()):
        (folder / file.relative_to(world)).parent.mkdir(parents=True, exist_ok=True)
        (folder / file.relative_to(world)).write_bytes(file.read_bytes())
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One runs folder for all commands, so that the tables of MLflow are made once."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], runs: Path) -> Iterator[Cli]:
    """The command in this process, Ray Data replaced by a plain loop: (exit status, standard error)."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr("pipelines.preprocess.on_ray_data", in_process)
    monkeypatch.setattr("pipelines.preprocess.warm_up", lambda: None)
    monkeypatch.setattr(Cluster, "ray", lambda self: None)
    before = dict(os.environ)

    def run(*words: str) -> tuple[int, str]:
        status = main([*words, "--runs", str(runs)])
        return status, capsys.readouterr().err

    try:
        yield run
    finally:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture
def spec_file(tmp_path: Path, repo_root: Path) -> Callable[[Callable[[dict[str, Any]], object]], str]:
    """Writes the spec of the generated data with one change, and returns its path."""

    def write(change: Callable[[dict[str, Any]], object]) -> str:
        spec = yaml.safe_load((repo_root / "pipelines" / "datasets" / "generated.yaml").read_text())
        spec["name"] = tmp_path.name[:40].lower().replace("_", "-").strip("-[]")
        change(spec)
        path = tmp_path / "own.yaml"
        path.write_text(yaml.safe_dump(spec))
        return str(path)

    return write


def impression_files(raw: Path) -> list[Path]:
    return sorted(raw.rglob("impressions-*.parquet"))


def rewrite(path: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    pq.write_table(change(pq.read_table(path)), path)


def assert_says(text: str, pattern: str) -> None:
    assert re.search(pattern, text), text


def with_column(table: pa.Table, name: str, values: Any) -> pa.Table:
    return table.set_column(table.column_names.index(name), name, values)


# ---- the command line ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--dataset", "generatd"], 'data.dataset "generatd" is neither .* Did you mean "generated"\\?'),
        (["--dataset", "kuairand"], "data set kuairand: say where its files are: DATA_DIR=folder"),
        (["--dataset", "kuairand", "--data-dir", "no/such"], "data.data_dir no/such: no such folder; give the folder"),
        (["--set", "train.lr_dens=1"], '--set train.lr_dens: no field "lr_dens". Did you mean "lr_dense"\\?'),
        (["--set", "trian.lr_dense=1"], 'no field "trian". Did you mean "train"\\?'),
        (["--set", "train.epochs=many"], '--set train.epochs: "many" is not a int'),
        (["--recipe", "tinny"], 'no recipe "tinny". Did you mean "tiny"\\?'),
    ],
)
def test_words_that_are_misspelt_get_the_nearest(cli: Cli, words: list[str], says: str) -> None:
    status, err = cli("run", *words)
    assert status == 1
    assert err.startswith("error: ") and len(err.splitlines()) == 1
    assert_says(err, says)


def test_a_missing_mlflow_server_is_said_before_any_stage(
    cli: Cli, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow  # noqa: F401  # its import, seconds on a busy machine, is not what is timed

    before = sorted(p.name for p in runs.glob("*"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    start = time.monotonic()
    status, err = cli("run", "--recipe", "tiny")
    assert status == 1 and time.monotonic() - start < 10
    assert_says(err, "error: MLflow at http://127.0.0.1:9: cannot connect: .*start the server, correct MLFLOW_TRACKING")
    assert sorted(p.name for p in runs.glob("*")) == before


# ---- spec and files --------------------------------------------------------------------------------


def test_a_misspelt_column_gets_the_nearest_name(cli: Cli, spec_file: Any, raw: Path) -> None:
    spec = spec_file(lambda s: s["context"]["features"][0].update(column="devise"))
    status, err = cli("preprocess", "--dataset", spec, "--data-dir", str(raw))
    assert status == 1
    assert_says(err, 'context.features.device: table "impressions" has no column "devise". Did you mean "device"\\?')


@pytest.mark.parametrize(
    ("column", "why"), [("clicked", "listed in|the label click|flag click"), ("p_click", "outcomes|true probability")]
)
def test_an_outcome_is_refused_as_a_feature(cli: Cli, spec_file: Any, raw: Path, column: str, why: str) -> None:
    feature = {"name": "peek", "column": column, "kind": "categorical"}
    spec = spec_file(lambda s: s["context"]["features"].append(feature))
    status, err = cli("preprocess", "--dataset", spec, "--data-dir", str(raw))
    assert status == 1
    assert_says(err, f'context.features.peek: column "{column}" is an outcome \\(.*({why}).*sees the answer')


def test_seconds_declared_as_milliseconds_are_refused_with_the_year(cli: Cli, spec_file: Any, raw: Path) -> None:
    file = impression_files(raw)[1]
    rewrite(file, lambda t: with_column(t, "time_ms", pc.divide(t["time_ms"], 1000)))
    status, err = cli("preprocess", "--dataset", spec_file(lambda s: None), "--data-dir", str(raw))
    assert status == 1
    assert_says(err, f"{file.name}.*`ms` \\(milliseconds\\) was declared, but .* is the year 1970")
    assert_says(err, "fit seconds \\(year 20[0-9][0-9]\\): set `unit: s` in the spec")


def test_an_empty_file_is_refused_and_a_file_without_rows_is_not(
    cli: Cli, spec_file: Any, raw: Path, runs: Path
) -> None:
    first, last = impression_files(raw)[0], impression_files(raw)[-1]
    rewrite(first, lambda t: t.slice(0, 0))
    status, err = cli("preprocess", "--dataset", spec_file(lambda s: None), "--data-dir", str(raw))
    assert (status, err) == (0, "")
    whole = last.read_bytes()
    last.write_bytes(b"")
    status, err = cli("preprocess", "--dataset", spec_file(lambda s: None), "--data-dir", str(raw))
    assert status == 1
    assert_says(
        err, f"{last.name}: the file is empty \\(0 bytes\\).*header and no rows; write the file again or delete"
    )
    last.write_bytes(whole[:-20])
    status, err = cli("preprocess", "--dataset", spec_file(lambda s: None), "--data-dir", str(raw))
    assert status == 1
    assert_says(err, f"{last.name}: truncated or no Parquet file")


def test_a_log_of_one_day_cannot_be_split(cli: Cli, spec_file: Any, raw: Path) -> None:
    for file in raw.rglob("impressions-*.parquet"):
        if file not in impression_files(raw)[:1]:
            file.unlink()
    one = impression_files(raw)
    days = {dt.datetime.fromtimestamp(t / 1000, dt.UTC).date() for t in pq.read_table(one[0])["time_ms"].to_pylist()}
    assert len(days) == 1
    status, err = cli("preprocess", "--dataset", spec_file(lambda s: None), "--data-dir", str(raw))
    assert status == 1
    assert_says(
        err, f"test day {days.pop()} is the first day of the log.*At least three days of impressions are needed"
    )


# ---- rows ------------------------------------------------------------------------------------------


def test_exact_duplicates_are_dropped_and_counted(world: Path, repo_root: Path, tmp_path: Path) -> None:
    spec = load_spec(repo_root / "pipelines" / "datasets" / "generated.yaml")
    record = build_store(RunConfig(data=DataConfig(num_shards=2)), spec, (world, tmp_path / "s"), _silent, in_process)
    rows = [r for f in impression_files(world) for r in pq.read_table(f).to_pylist()]
    good = [r for r in rows if r["user_id"] is not None]
    once = {r["impression_id"] for r in good}
    assert len(good) > len(once), "the generated world has duplicates to find"
    assert record["duplicates"] == len(good) - len(once)
    assert record["quarantined"] == len(rows) - len(good) and record["rows_out"] == len(once)
    store = FeatureStore.open(tmp_path / "s")
    stored = store.impressions(store.days).impression_id.tolist()
    assert len(stored) == len(set(stored)) == len(once) and set(stored) == once


def test_bad_rows_go_to_a_file_with_reasons_and_are_counted(tmp_path: Path) -> None:
    rows = toy_rows()
    rows["shows"] = [{**r, "person": r["person"] if r["person"] is not None else 0} for r in rows["shows"]]
    spoilt = [
        ({"person": None}, "null_user"),
        ({"person": None, "slot": float("nan")}, "null_user"),  # the first reason counts, the row once
        ({"item": None}, "null_ad"),
        ({"slot": float("nan")}, "nan_numeric"),
        ({"slot": float("inf")}, "nan_numeric"),
        ({"clicked": 7}, "bad_label"),
    ]
    for i, (change, _) in enumerate(spoilt):
        rows["shows"].append({**rows["shows"][0], "show_id": 90_000 + i, **change})
    data = write_toy(tmp_path / "raw", rows)
    with (data / "people.csv").open("a") as file:
        file.write("77,too,many,fields\n")
    record = build_store(RunConfig(data=DataConfig(num_shards=2)), toy_spec(), (data, tmp_path / "store"), _silent,
                         in_process)  # fmt: skip
    found = record["quarantine_reasons"]
    assert found == {"shows": {"null_user": 2, "null_ad": 1, "nan_numeric": 2, "bad_label": 1},
                     "people": {"unparsable": 1}}  # fmt: skip
    assert record["quarantined"] == count_quarantined(found) == 7
    kept = pq.read_table(tmp_path / "store" / "quarantine" / "shows-00000.parquet").to_pylist()
    got = {json.loads(r["row"])["show_id"]: r["reason"] for r in kept}
    assert got == {90_000 + i: reason for i, (_, reason) in enumerate(spoilt)}
    assert {r["file"] for r in kept} <= {"shows-0.parquet", "shows-1.parquet"}
    lines = pq.read_table(tmp_path / "store" / "quarantine" / "people-00000.parquet").to_pylist()
    assert [(json.loads(r["row"]), r["reason"], r["file"]) for r in lines] == [
        ({"line": "77,too,many,fields"}, "unparsable", "people.csv")
    ]
    store = FeatureStore.open(tmp_path / "store")
    assert not set(store.impressions(store.days).impression_id.tolist()) & {90_000 + i for i in range(len(spoilt))}


def test_above_the_threshold_the_run_stops_and_leaves_the_rows_to_look_at(
    cli: Cli, spec_file: Any, raw: Path, runs: Path
) -> None:
    for file in impression_files(raw):
        rewrite(file, every_second_user_null)
    spec = spec_file(lambda s: s.update(name="half-null"))
    status, err = cli("preprocess", "--dataset", spec, "--data-dir", str(raw))
    assert status == 1
    path = runs / "half-null" / "quarantine-impressions.parquet"
    assert_says(err, 'table "impressions": [0-9]+ of [0-9]+ rows were quarantined \\((4[89]|5[0-9])\\.[0-9]%\\), ')
    assert "allowed are 5.0% (data.max_quarantine_share)" in err and str(path) in err
    kept = pq.read_table(path)
    assert set(kept["reason"].to_pylist()) == {"null_user"} and kept.num_rows > 100
    left = [p.name for p in (runs / "half-null" / "preprocess").iterdir()]
    assert left == [".locks"], "no store, whole or half, is left"
    status, err = cli("preprocess", "--dataset", spec, "--data-dir", str(raw), "--set", "data.max_quarantine_share=0.9")
    assert (status, err) == (0, "")


def every_second_user_null(table: pa.Table) -> pa.Table:
    users = [None if i % 2 else user for i, user in enumerate(table["user_id"].to_pylist())]
    return with_column(table, "user_id", pa.array(users, pa.int64()))


def _silent(text: str) -> None:
    pass


# ---- bundles and clusters --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return build_tiny(tmp_path_factory.mktemp("tiny"))


def flipped(folder: Path, bundle: Path) -> Path:
    """A copy of a bundle with one bit of one weight turned."""
    copy = folder / bundle.name
    copy.mkdir(parents=True)
    for file in bundle.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    weights = copy / "weights.safetensors"
    data = bytearray(weights.read_bytes())
    data[-5] ^= 1
    weights.write_bytes(data)
    return copy


def test_a_damaged_bundle_is_refused_by_knowledge_and_evaluation(tiny: Tiny, tmp_path: Path) -> None:
    model = tiny.models[0]
    damaged = flipped(tmp_path, Path(model.path))
    split = tiny.store.split
    days = (split.validation_day, split.test_day)
    with pytest.raises(BundleError, match=r"weights.safetensors"):
        evaluate_bundle(str(tiny.store_path), str(damaged), model.bundle_hash, days)
    with pytest.raises(BundleError, match=r"weights.safetensors"):
        Teacher(str(tiny.store_path), str(damaged), model.bundle_hash, str(tmp_path))
    with pytest.raises(BundleError, match=r"its hash is [0-9a-f]{16}, expected 0{16}; it is another bundle"):
        Teacher(str(tiny.store_path), model.path, "0" * 64, str(tmp_path))


def test_more_workers_than_the_cluster_has_cpus_are_refused_with_numbers(ray_session: Any, tmp_path: Path) -> None:
    group = WorkerGroup(store="", out=str(tmp_path / "out"), checkpoints=str(tmp_path / "checkpoints"), tasks=())
    start = time.monotonic()
    with pytest.raises(TrainingError, match=r"64 workers x 1 CPU = 64, the cluster has 4; .*train.num_workers=4"):
        fit(Cluster(), Console(), group, 64, tmp_path / "ray")
    with pytest.raises(TrainingError, match=r"training asks for 0 workers"):
        fit(Cluster(), Console(), group, 0, tmp_path / "ray")
    assert time.monotonic() - start < 10, "said at once, not waited for"
