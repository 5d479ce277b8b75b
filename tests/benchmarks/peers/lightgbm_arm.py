"""Gradient-boosted trees on past-only rates, meetings, and the columns of user, ad and context (peers' environment).

`python -m tests.benchmarks.peers.lightgbm_arm --data DIR --target click --out FILE.npz [--params JSON] [--seed 0]`
writes an .npz with the probabilities of every row of "validation" and "test" and a record (`exported.read_result`).
Early stopping reads the validation day; the number of trees is all that is chosen there.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
from numpy.typing import NDArray

from tests.benchmarks.peers.exported import Exported, peak_rss_mb, quick_figures, write_result

DEFAULTS: dict[str, Any] = {
    "objective": "binary",
    "metric": "binary_logloss",
    "num_leaves": 63,
    "learning_rate": 0.03,
    "min_data_in_leaf": 50,
    "feature_fraction": 0.5,
    "bagging_fraction": 0.8,
    "bagging_freq": 1,
    "lambda_l2": 1.0,
    "max_cat_to_onehot": 8,
    "verbosity": -1,
}
CATEGORIES = 256  # a field with fewer codes is a category; larger ones speak through their rates
ROUNDS, PATIENCE = 2000, 100


def columns(data: Exported) -> tuple[NDArray[np.float32], list[str], list[str]]:
    """All columns [N, C], their names, and the names of the categories among them."""
    meta = data.meta
    small = [i for i, f in enumerate(meta["fields"]) if f["rows"] < CATEGORIES]
    categories = [meta["fields"][i]["name"] for i in small]
    # Of a multi-valued field the first value, the only one that most rows have.
    first = [f for f in meta["multi"] if f["rows"] < CATEGORIES]
    categories += [f["name"] for f in first]
    parts = [data.array("ids")[:, small], *(data.array(f"multi_{f['name']}")[:, :1] for f in first)]
    parts += [data.array(n) for n in ("numeric", "rates", "matches")]
    names = [*categories, *(f"n_{n}" for n in meta["numeric"]), *meta["rates"], *meta["matches"]]
    return np.concatenate([p.astype(np.float32) for p in parts], 1), names, categories


def fit(data: Exported, target: str, params: dict[str, Any]) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Train on the training days, stop by the validation day; probabilities of both later days, and a record."""
    x, names, categories = columns(data)
    label, mask = data.target(target)
    rows = {s: np.arange(len(label))[data.split(s)] for s in ("train", "validation", "test")}
    seen = {s: at[mask[at] > 0] for s, at in rows.items()}
    start = time.perf_counter()
    train = lightgbm.Dataset(x[seen["train"]], label[seen["train"]], feature_name=names, categorical_feature=categories)
    held = lightgbm.Dataset(x[seen["validation"]], label[seen["validation"]], reference=train)
    stop = lightgbm.early_stopping(PATIENCE, verbose=False)
    model = lightgbm.train(params, train, params.pop("num_iterations", ROUNDS), valid_sets=[held], callbacks=[stop])
    seconds = time.perf_counter() - start
    out = {s: np.asarray(model.predict(x[rows[s]]), np.float32) for s in ("validation", "test")}
    gain = sorted(zip(model.feature_importance("gain").tolist(), names, strict=True), reverse=True)
    record = {
        "seconds": seconds,
        "trees": model.best_iteration,
        "parameters": int(sum(t["num_leaves"] for t in model.dump_model()["tree_info"])),
        "columns": len(names),
        "top": [n for _, n in gain[:15]],
    }
    return out, record


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--target", default="click")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--params", type=json.loads, default={}, help="JSON, over the defaults of this file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    a = parser.parse_args()
    data = Exported.open(a.data)
    params = {**DEFAULTS, **a.params, "seed": a.seed, "num_threads": a.threads}
    cpu = time.process_time()
    probabilities, record = fit(data, a.target, dict(params))
    about = {"arm": "lightgbm", "library": f"lightgbm {lightgbm.__version__}", "target": a.target, "params": params}
    record |= {"cpu_seconds": time.process_time() - cpu, "peak_rss_mb": peak_rss_mb()}
    write_result(a.out, probabilities, about | record | {"figures": quick_figures(data, a.target, probabilities)})


if __name__ == "__main__":
    main()
