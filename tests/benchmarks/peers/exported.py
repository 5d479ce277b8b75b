"""Read side of `export`, and quick figures; needs numpy only, so it runs in both environments."""

from __future__ import annotations

import json
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Exported:
    """A folder written by `export.export`; arrays are mapped, not read."""

    folder: Path
    meta: dict[str, Any]

    @classmethod
    def open(cls, folder: Path) -> Exported:
        return cls(folder, json.loads((folder / "meta.json").read_text(encoding="utf-8")))

    def array(self, name: str) -> NDArray[Any]:
        return np.load(self.folder / f"{name}.npy", mmap_mode="r")

    def split(self, name: str) -> slice:
        """Rows of "train", "validation" or "test"; an empty slice where the store has no split."""
        start, stop = self.meta["splits"].get(name, (0, 0))
        return slice(start, stop)

    def target(self, task: str) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Label and mask of a task on the entire space, [N] each. Raises ValueError for an unknown task."""
        if task not in self.meta["tasks"]:
            raise ValueError(f"target: got {task!r}; the export has {self.meta['tasks']}")
        k = self.meta["tasks"].index(task)
        return self.array("labels")[:, k].astype(np.float32), self.array("mask")[:, k].astype(np.float32)


def auc_and_ne(y: NDArray[np.floating], p: NDArray[np.floating]) -> dict[str, float]:
    """AUC (ties one half) and normalised entropy, for a first look; NaN where there is one class only."""
    if not len(y) or y.min() == y.max():
        return {"auc": float("nan"), "ne": float("nan")}
    _, place, counts = np.unique(p, return_inverse=True, return_counts=True)
    rank = (np.cumsum(counts) - (counts - 1) / 2.0)[place]
    positives = float(y.sum())
    auc = (rank[y > 0].sum() - positives * (positives + 1) / 2) / (positives * (len(y) - positives))
    q, rate = np.clip(p.astype(np.float64), 1e-7, 1 - 1e-7), float(y.mean())
    loss = -np.where(y > 0, np.log(q), np.log1p(-q)).mean()
    return {"auc": float(auc), "ne": float(loss / -(rate * np.log(rate) + (1 - rate) * np.log1p(-rate)))}


def quick_figures(data: Exported, task: str, probabilities: dict[str, NDArray[Any]]) -> dict[str, dict[str, float]]:
    """AUC and NE of each split's probabilities over the rows whose outcome is known."""
    label, mask = data.target(task)
    out = {}
    for split, p in probabilities.items():
        rows = data.split(split)
        known = mask[rows] > 0
        out[split] = auc_and_ne(label[rows][known], p[known])
    return out


def peak_rss_mb() -> float:
    """Largest resident memory of this process so far, MB (10^6 bytes); not that of the process which started it."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    return next(int(n.split()[1]) * 1024 / 1e6 for n in lines if n.startswith("VmHWM:"))


def write_result(out: Path, arrays: dict[str, NDArray[Any]], record: dict[str, Any]) -> None:
    """Write arrays and the record (as JSON text under the key "record") to one .npz; print the record."""
    out.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(record)
    np.savez(out, record=np.array(text), **arrays)
    print(text, flush=True)


def read_result(path: Path) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """The arrays ("validation", "test": probabilities) and the record of a run."""
    with np.load(path) as found:
        return {n: found[n] for n in found.files if n != "record"}, json.loads(str(found["record"]))
