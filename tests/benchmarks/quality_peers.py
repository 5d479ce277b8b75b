"""Peers as runs of the quality benchmark: other libraries, in their own virtual environment, on the exported rows.

A peer learns one task at a time, on the entire space. It is tuned for each task on the validation day's NE of that
task, with as many settings as our own arms.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gem.data.store import FeatureStore
from gem.metrics.ne import P_FLOOR
from tests.benchmarks.peers.environment import peers_python, run_module
from tests.benchmarks.peers.export import Options, export
from tests.benchmarks.peers.exported import read_result
from tests.benchmarks.quality_arms import TUNED_SEED, Setting
from tests.benchmarks.quality_data import KUAIRAND, TEST, VALIDATION, fingerprint
from tests.benchmarks.quality_runs import bare_code

FOLDER = Path(__file__).parent / "peers"
GBDT = "lightgbm"
NETWORKS = (
    "fuxictr_din", "fuxictr_dcnv2", "fuxictr_masknet", "fuxictr_finalmlp", "fuxictr_wukong", "rechub_din",
    "rechub_dcnv2", "rechub_mmoe",
)  # fmt: skip
MAX_HISTORY = 128  # events exported
HISTORY = 50  # events read unless a setting says otherwise; both libraries pad to it, at its cost
# Adam's rate, passes (our tables begin the second anew, so theirs do) and the weight of the embeddings' norm.
RATES: tuple[Setting, ...] = (
    {"lr": 1e-3},
    {"lr": 1e-3, "epochs": 2},
    {"lr": 2e-3},
    {"lr": 5e-4},
    {"lr": 1e-3, "l2": 1e-5},
    {"lr": 4e-3},
)
# A reader of histories may also read longer ones.
RATES_DIN: tuple[Setting, ...] = (*RATES[:3], {"lr": 1e-3, "history": MAX_HISTORY}, *RATES[3:5])
TREES: tuple[Setting, ...] = (
    {"learning_rate": 0.03, "num_leaves": 63},
    {"learning_rate": 0.03, "num_leaves": 31},
    {"learning_rate": 0.03, "num_leaves": 127, "min_data_in_leaf": 200},
    {"learning_rate": 0.02, "num_leaves": 63, "min_data_in_leaf": 200, "feature_fraction": 0.3},
    {"learning_rate": 0.05, "num_leaves": 31, "lambda_l2": 10.0},
    {"learning_rate": 0.02, "num_leaves": 15},
)


@dataclass(frozen=True)
class PeerRun:
    """One peer trained for one task. `params` is JSON, `history` what was exported, before (`prepare`)."""

    arm: str
    dataset: str
    target: str
    params: str
    seed: int
    history: int

    @property
    def setting(self) -> Setting:
        """The tuned parameters."""
        out: Setting = json.loads(self.params)
        return out

    def identity(self) -> dict[str, Any]:
        return {**asdict(self), "code": peer_code()}

    def make(self, store: Path, folder: Path) -> tuple[dict[str, Any], dict[str, NDArray[np.float32]]]:
        with tempfile.TemporaryDirectory(prefix="gem-peer-") as temp:
            out = Path(temp) / "result.npz"
            run_module(*self.command(export_folder(store, self.history), out))
            arrays, record = read_result(out)
        logits = {day: to_logits(arrays[day])[:, None] for day in (VALIDATION, TEST)}
        return {"train_seconds": record.get("seconds"), **parameters(record), "peer": record}, logits

    def command(self, exported: Path, out: Path) -> tuple[str, list[str]]:
        """The peers' module that makes this run, and its arguments."""
        given = ["--data", str(exported), "--target", self.target, "--out", str(out), "--seed", str(self.seed)]
        if self.arm == GBDT:
            return "lightgbm_arm", [*given, "--params", self.params]
        flags = [text for name, value in self.setting.items() for text in (f"--{name}", str(value))]
        return "run_peer", ["--arm", self.arm, *given, *flags]


def parameters(record: dict[str, Any]) -> dict[str, int]:
    """Parameters of a peer; of trees, their leaves."""
    found = record.get("parameters", 0)
    if isinstance(found, dict):
        return {f"parameters_{part}": int(found[part]) for part in ("dense", "tables")}
    return {"parameters_dense": int(found)}


def to_logits(p: NDArray[Any]) -> NDArray[np.float32]:
    """Log odds of probabilities, clipped where a probability is 0 or 1."""
    clipped = np.clip(np.asarray(p, np.float64), P_FLOOR, 1 - P_FLOOR)
    return np.asarray(np.log(clipped) - np.log1p(-clipped), np.float32)


def peer_runs(arm: str, target: str, params: Setting, history: int, count: int = 1) -> list[PeerRun]:
    """One setting with seeds 1, 2, …"""
    text = json.dumps(params if arm == GBDT else {"history": HISTORY, **params}, sort_keys=True)
    length = min(history, MAX_HISTORY)
    return [PeerRun(arm, KUAIRAND, target, text, TUNED_SEED + i, length) for i in range(count)]


def peer_trials(arm: str, target: str, trials: int, history: int) -> list[PeerRun]:
    """The tuning runs of a peer for a task."""
    grid = {GBDT: TREES, "fuxictr_din": RATES_DIN}.get(arm, RATES)
    return [run for params in grid[:trials] for run in peer_runs(arm, target, params, history)]


@lru_cache(maxsize=1)
def peer_code() -> str:
    """Hash over the code and the versions that shape a peer's predictions."""
    return _hash_of(sorted(p.name for p in FOLDER.glob("*.py") if p.name != "environment.py"))


def _hash_of(names: Sequence[str]) -> str:
    files = [[n, bare_code((FOLDER / n).read_text(encoding="utf-8"))] for n in names]
    return fingerprint([files, (FOLDER / "requirements.txt").read_text(encoding="utf-8")])


def export_folder(store: Path, history: int) -> Path:
    """Where the peers' form of a store lies."""
    return store.parent / f"export-{history}"


def prepare(store: Path, history: int, say: Callable[[str], None]) -> None:
    """Make the virtual environment and write the export, unless they are there."""
    peers_python()
    length = min(history, MAX_HISTORY)
    folder = export_folder(store, length)
    made_from, code = folder / "made-from", _hash_of(["export.py", "past.py"])
    if made_from.is_file() and made_from.read_text(encoding="ascii") == code:
        return
    say(f"exporting rows for the peers, histories of {length}")
    shutil.rmtree(folder, ignore_errors=True)
    export(FeatureStore.open(store, verify=False), folder, Options(history=length))
    made_from.write_text(code, encoding="ascii")
