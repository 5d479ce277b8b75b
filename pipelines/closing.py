"""What a finished loop has to say: the content of summary.json."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import numpy as np

from gem.data.store import FeatureStore
from gem.lineage.bundle import read_bundle
from pipelines.evaluate import results_of
from pipelines.loop import GENERATED, Loop
from pipelines.provenance import git_commit
from pipelines.summary import stage_summary

HISTORY_EDGES = (0, 1, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000)
FROM_EVALUATION = ("tasks", "by_surface", "by_day", "calibration_curve", "without_hot_users")


def build_summary(loop: Loop, promoted: dict[str, Any], figures: dict[str, Any]) -> dict[str, Any]:
    """Everything the closing table and the report show, as `pipelines.summary.Summary` describes it."""
    store = FeatureStore.open(loop.store, verify=False)
    results = results_of(loop.done["evaluate"])
    models = {}
    for name, found in promoted.pop("models").items():
        # What the bundle says, not what would be true of one made now: its stage may have been skipped.
        info, _ = read_bundle(Path(found["bundle"]), expected_hash=found["hash"])
        made_by = "distill" if info.kind == "vertical" else "pretrain"
        models[name] = {
            "kind": info.kind,
            "group": info.group,
            "parents": {
                "data": info.parents.data, "store": str(loop.store), "commit": info.parents.commit,
                "teacher": info.parents.teacher, "run_id": loop.runs_of.get(made_by, ""),
            },
            **found,
            **{k: results[name][k] for k in FROM_EVALUATION},
        }  # fmt: skip
    stages = {n: stage_summary(r.seconds, r.record, skipped=r.skipped, run_id=loop.runs_of.get(n, ""))
              for n, r in loop.done.items()}  # fmt: skip
    stages["promote"] = stage_summary(promoted["seconds"], promoted, run_id=loop.runs_of.get("promote", ""))
    record = loop.done["preprocess"].record
    return {
        **figures,
        "dataset": loop.spec.name,
        "commit": git_commit(),
        "recipe": loop.config.recipe,
        "config": loop.config.to_dict(),
        "mlflow": {"tracking_uri": loop.registry.uri, "parent_run_id": loop.parent_run},
        "stages": stages,
        "split": store.split.to_dict(),
        "models": models,
        "history_length_histogram": history_histogram(store),
        "data": {
            "quarantined": record["quarantine_reasons"],
            **{k: record[k] for k in ("duplicates", "vocab", "missing_days", "repairs", "hot_users", "windows")},
        },
        "next": next_commands(loop, any(m["promoted"] for m in models.values() if m["kind"] == "vertical")),
    }


def history_histogram(store: FeatureStore) -> dict[str, list[float]]:
    """How many events were known before each impression (all days)."""
    cuts = store.impressions(store.days).cut
    longest = int(cuts.max())
    edges = [e for e in HISTORY_EDGES if e <= longest] + [longest + 1]
    counts, _ = np.histogram(cuts, bins=np.asarray(edges, np.float64))
    return {"edges": [float(e) for e in edges], "counts": [int(c) for c in counts]}


def next_commands(loop: Loop, served: bool) -> list[str]:
    """What a person would type next; `served`: there is a vertical champion to serve."""
    data = "" if loop.config.data.dataset == GENERATED else f" DATASET={shlex.quote(loop.config.data.dataset)}"
    folder = f" DATA_DIR={shlex.quote(loop.config.data.data_dir)}" if loop.config.data.data_dir else ""
    serve = [f"make serve{data}"] if served else []
    return [*serve, f"make lineage NAME={loop.model_name()}", f"make tune{data}{folder}"]
