"""What a finished loop has to say: the content of summary.json."""

from __future__ import annotations

import shlex
from typing import Any

import numpy as np

from gem.data.store import FeatureStore
from pipelines.evaluate import results_of
from pipelines.loop import GENERATED, Loop
from pipelines.provenance import git_commit
from pipelines.summary import stage_summary

HISTORY_EDGES = (0, 1, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000)
FROM_EVALUATION = ("tasks", "by_surface", "by_day", "calibration_curve")


def build_summary(loop: Loop, promoted: dict[str, Any], figures: dict[str, Any]) -> dict[str, Any]:
    """Everything the closing table and the report show, as `pipelines.summary.Summary` describes it."""
    store = FeatureStore.open(loop.store, verify=False)
    results = results_of(loop.done["evaluate"])
    models = {}
    for name, found in promoted.pop("models").items():
        vertical = name != loop.model_name()
        parents = loop.parents(store.hash)
        models[name] = {
            "kind": "vertical" if vertical else "foundation",
            "group": _group(loop, name),
            "parents": {
                "data": parents.data, "store": str(loop.store), "commit": parents.commit,
                "teacher": loop.done["generate-knowledge"].record["teacher"] if vertical else "",
                "run_id": loop.runs_of.get("distill" if vertical else "pretrain", ""),
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
            **{k: record[k] for k in ("duplicates", "vocab", "missing_days", "repairs")},
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


def _group(loop: Loop, name: str) -> str:
    store_groups = FeatureStore.open(loop.store, verify=False).schema.surface_groups
    return next((g for g in store_groups if loop.model_name(g) == name), "")
