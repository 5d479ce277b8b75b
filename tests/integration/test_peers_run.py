"""The peers' commands in their own environment, end to end on a small store. Skipped where that environment is absent.

`python -m tests.benchmarks.peers.environment` makes it.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.benchmarks.peers.environment import present, run_module, run_python
from tests.benchmarks.peers.export import Options, export
from tests.benchmarks.peers.exported import Exported, read_result
from tests.unit.data.random_store import Shape, write_store

pytestmark = [
    pytest.mark.skipif(
        not present(), reason="no environment for the peers; python -m tests.benchmarks.peers.environment makes it"
    ),
    pytest.mark.timeout(600),
]

# Starting takes seconds (FuxiCTR imports Ray and polars), so runs that may share a process do.
SEVERAL = (
    "import json, sys; from tests.benchmarks.peers import run_peer; [run_peer.main(a) for a in json.loads(sys.argv[1])]"
)
ARMS = {"fuxictr": ("din", "dcnv2", "masknet", "finalmlp", "wukong"), "rechub": ("din", "dcnv2", "mmoe")}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export whose clicks follow the number `slot` of the context, so that every model can learn them."""
    store = write_store(tmp_path_factory.mktemp("peers") / "store", Shape(num_users=400, num_ads=30))
    days = store.days
    store.manifest["split"] = {"train_days": [days[0]], "validation_day": days[1], "test_day": days[2]}  # type: ignore[index]
    folder = tmp_path_factory.mktemp("exported")
    meta = export(store, folder, Options(history=5))
    labels = np.load(folder / "labels.npy")
    labels[:, 0] = np.load(folder / "numeric.npy")[:, meta["numeric"].index("slot")] > 0
    np.save(folder / "labels.npy", labels)
    return folder


def options(data: Path, out: Path, **settings: object) -> list[str]:
    named = [f"--{n.replace('_', '-')}={v}" for n, v in settings.items()]
    return [f"--data={data}", f"--out={out}", *named]


@pytest.mark.parametrize("library", list(ARMS))
def test_every_peer_learns_what_can_be_learned(data: Path, tmp_path: Path, library: str) -> None:
    names = [f"{library}_{n}" for n in ARMS[library]]
    small = {"epochs": 6, "batch_size": 32, "lr": 0.005, "dim": 8, "hidden": "32,16", "layers": 2}
    run_python(["-c", SEVERAL, json.dumps([options(data, tmp_path / f"{n}.npz", arm=n, **small) for n in names])])
    exported = Exported.open(data)
    for name in names:
        found, record = read_result(tmp_path / f"{name}.npz")
        for split in ("validation", "test"):
            rows = exported.split(split)
            assert found[split].shape == (rows.stop - rows.start,)
            assert ((found[split] >= 0) & (found[split] <= 1)).all()
        assert record["figures"]["test"]["auc"] > 0.9, name
        assert record["parameters"]["tables"] > 0 < record["parameters"]["dense"]


def test_trees_learn_what_can_be_learned(data: Path, tmp_path: Path) -> None:
    params = {"num_leaves": 7, "min_data_in_leaf": 5}
    run_module("lightgbm_arm", options(data, tmp_path / "a.npz", params=json.dumps(params)))
    assert read_result(tmp_path / "a.npz")[1]["figures"]["test"]["auc"] > 0.9


def test_a_seed_gives_one_result_and_speed_is_measured(data: Path, tmp_path: Path) -> None:
    small = {"arm": "fuxictr_din", "batch_size": 64, "dim": 8, "hidden": "16,8", "seed": 3}
    speed = {**small, "mode": "speed", "steps": 4, "history": 3}
    files = [tmp_path / f"{i}.npz" for i in range(3)]
    calls = [options(data, f, **s) for f, s in zip(files, (small, small, speed), strict=True)]
    run_python(["-c", SEVERAL, json.dumps(calls)])
    (first, _), (second, _), (nothing, record) = map(read_result, files)
    assert (first["test"] == second["test"]).all()
    assert nothing == {} and record["steps"] == 4 and record["history"] == 3
    assert record["impressions_per_s"] == pytest.approx(4 * 64 / record["seconds"])


def test_an_arm_nobody_knows_is_refused(data: Path, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="invalid choice: 'deepctr'"):
        run_module("run_peer", options(data, tmp_path / "a.npz", arm="deepctr"))
