"""Stage: score every model on the test day and measure it, beside its champion on the same rows."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gem.data.store import FeatureStore
from gem.lineage.files import relocated
from gem.lineage.gates import GateRecord, TaskScore
from gem.lineage.registry import ModelVersion
from pipelines.cluster import result_of
from pipelines.console import Stage
from pipelines.loop import MODEL_CODE, Loop, code_key
from pipelines.model_stages import bundle_path
from pipelines.stage import StageResult
from pipelines.summary import task_summary
from pipelines.train_workers import rows_of_group

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from gem.data.store import Impressions

RESULTS = "results.json"
CODE = (*MODEL_CODE, "pipelines/evaluate.py", "pipelines/summary.py")
NUM_BOOTSTRAP = 200
CURVE_BINS = 10


def evaluate(loop: Loop) -> StageResult:
    """Measure all models of this loop and, where they can be scored, the champions they would replace."""
    models = {name: made_by for made_by in ("pretrain", "distill") for name in loop.done[made_by].record["bundles"]}
    hashes = {name: loop.done[made_by].record["bundles"][name] for name, made_by in models.items()}
    champions = {name: c for name in models if (c := loop.registry.champion(name)) and c.bundle_hash != hashes[name]}

    def build(out: Path, stage: Stage) -> dict[str, Any]:
        ray = loop.cluster.ray()
        store = FeatureStore.open(loop.store.absolute(), verify=False)
        days = (store.split.validation_day, store.split.test_day)
        score = ray.remote(num_cpus=1)(evaluate_bundle)
        paths = {n: str(bundle_path(loop, made_by, n).absolute()) for n, made_by in models.items()}
        waiting = {n: score.remote(str(store.path), paths[n], hashes[n], days) for n in models}
        beside = {n: _champion(loop, c, score, store) for n, c in champions.items()}
        results: dict[str, Any] = {}
        with loop.console.progress("models", len(models), "models") as bar:
            for name, future in waiting.items():
                results[name] = result_of(ray, future)
                bar.advance(1, name)
        for name, (record, why) in ((n, _resolve(ray, b)) for n, b in beside.items()):
            results[name] |= {"champion": record, "champion_note": why}
        (out / RESULTS).write_text(json.dumps(results))
        rows = max(t["rows"] for r in results.values() for t in r["tasks"].values())
        return {"rows_in": rows, "rows_out": rows, "quarantined": 0, "headline": _headline(results[loop.model_name()])}

    parts = {"models": hashes, "champions": {n: c.bundle_hash for n, c in champions.items()}, "code": code_key(CODE)}
    return loop.stage("evaluate", parts, build)


def results_of(stage: StageResult) -> dict[str, Any]:
    """What the evaluate stage wrote: model name -> measured record."""
    found: dict[str, Any] = json.loads((stage.path / RESULTS).read_text())
    return found


def evaluate_bundle(store_path: str, bundle_path: str, bundle_hash: str, days: tuple[str, str]) -> dict[str, Any]:
    """Score one bundle on its group's impressions and measure it (runs in a Ray worker).

    days: (the day before, the test day). The first shows drift and decides nothing.
    Returns tasks, by_surface, by_day, calibration_curve, without_hot_users (see summary.json) and the gate record.
    """
    import numpy as np
    import torch

    from gem.lineage.bundle import load_bundle
    from gem.model.calibration import calibrated_probabilities, calibration_from_dict
    from gem.model.ranker import Ranker
    from gem.training.data import StoreReader
    from gem.training.predict import predict

    torch.set_num_threads(1)
    store = FeatureStore.open(Path(store_path), verify=False)
    bundle = load_bundle(Path(bundle_path), expected_hash=bundle_hash, schema=store.schema)
    info = bundle.info
    config = info.config.student if info.kind == "vertical" else info.config.model
    model = Ranker(store.schema, config)
    bundle.load_into(model)
    imp = store.impressions(days)
    at = np.flatnonzero(rows_of_group(store, imp, info.group))
    reader = StoreReader(store, store.timelines(), imp, config.max_history, align=config.align)
    scores = predict(model, reader, at)
    p = calibrated_probabilities(
        store.schema, scores.logits, imp.surface[at].astype(np.int64), calibration_from_dict(info.calibration)
    )
    return measure(store, imp.take(at), p, info.name, bundle_hash)


def measure(
    store: FeatureStore, imp: Impressions, p: NDArray[np.float64], name: str, bundle_hash: str
) -> dict[str, Any]:
    """Metrics of predictions p [N, K] on the last day of `imp`, by surface, and by day; the gate record."""
    import numpy as np

    from gem.metrics.calibration import calibration_curve
    from gem.metrics.evaluate import evaluate as measure_rows
    from gem.metrics.ne import normalized_entropy

    schema = store.schema
    is_test = imp.day == len(imp.days) - 1
    hot = flagged(store, imp)
    surface = np.asarray(schema.surfaces)[imp.surface]
    names = ("tasks", "by_surface", "by_day", "calibration_curve", "without_hot_users")
    out: dict[str, Any] = {name: {} for name in names}

    def block(use: NDArray[np.bool_], k: int, num_bootstrap: int) -> dict[str, Any]:
        at = np.flatnonzero(use & (imp.mask[:, k] > 0))
        y, task = imp.labels[at, k], schema.tasks[k].name
        bayes = normalized_entropy(y, imp.true[task][at]) if task in imp.true and at.size else None
        found = measure_rows(imp.user[at], y, p[at, k], num_bootstrap=num_bootstrap)
        base = float(y.mean()) if at.size else None
        return task_summary(int(at.size), base, found, bayes.value if bayes else None)

    for k, task in enumerate(schema.tasks):
        out["tasks"][task.name] = block(is_test, k, NUM_BOOTSTRAP)
        if (is_test & hot).any():
            out["without_hot_users"][task.name] = block(is_test & ~hot, k, NUM_BOOTSTRAP)
        for s in np.unique(surface[is_test]):
            out["by_surface"].setdefault(str(s), {})[task.name] = block(is_test & (surface == s), k, NUM_BOOTSTRAP)
        for d, day in enumerate(imp.days):
            out["by_day"].setdefault(day, {})[task.name] = block(imp.day == d, k, 50)
        known = is_test & (imp.mask[:, k] > 0)
        out["calibration_curve"][task.name] = calibration_curve(imp.labels[known, k], p[known, k], CURVE_BINS)
    out["gate"] = GateRecord(name, bundle_hash, _rows_hash(imp, is_test), _scores(out["tasks"])).to_dict()
    return out


def flagged(store: FeatureStore, imp: Impressions) -> NDArray[np.bool_]:
    """[N] impressions of users whom preprocess flagged (`hot_users` of the manifest): they may be no people."""
    import numpy as np
    import pyarrow as pa

    users = store.users.index_many(pa.array([u["user"] for u in store.manifest["hot_users"]], pa.string()))
    found: NDArray[np.bool_] = np.isin(imp.user, users[users > 0])
    return found


def _scores(tasks: dict[str, Any]) -> dict[str, TaskScore]:
    return {
        name: TaskScore(
            t["ne"]["value"],
            t["calibration"]["value"],
            t["auc"]["value"],
            t["rows"],
            t["calibration"]["low"],
            t["calibration"]["high"],
        )
        for name, t in tasks.items()
    }


def _rows_hash(imp: Impressions, use: NDArray[np.bool_]) -> str:
    """Names the exact evaluation rows: sha256 over impression ids and labels, in id order."""
    import numpy as np

    at = np.flatnonzero(use)
    at = at[np.argsort(imp.impression_id[at], kind="stable")]
    digest = hashlib.sha256(np.ascontiguousarray(imp.impression_id[at]).tobytes())
    digest.update(np.ascontiguousarray(imp.labels[at]).tobytes())
    digest.update(np.ascontiguousarray(imp.mask[at]).tobytes())
    return digest.hexdigest()


def _champion(loop: Loop, champion: ModelVersion, score: Any, store: FeatureStore) -> tuple[Any, str]:
    """A future with the champion's result on today's rows, or None and the reason why there is none.

    A champion of the same encoding reads today's store; one of another encoding needs its own.
    """
    from gem.errors import GemError
    from gem.lineage.bundle import read_bundle

    try:
        path = loop.registry.bundle_path(champion)
        info, _ = read_bundle(path, expected_hash=champion.bundle_hash)
    except GemError as error:
        return None, f"champion version {champion.version} cannot be read: {error}"
    own = relocated(info.parents.data_path, loop.registry.runs)
    reads = str(store.path) if info.schema.hash == store.schema.hash else str(own)
    days = (store.split.validation_day, store.split.test_day)
    return score.remote(reads, str(path), champion.bundle_hash, days), ""


def _resolve(ray: Any, pending: tuple[Any, str]) -> tuple[dict[str, Any] | None, str]:
    """Wait for a champion's gate record; one that cannot be scored on these rows is said, not fatal."""
    future, note = pending
    if future is None:
        return None, note
    try:
        return ray.get(future)["gate"], ""
    except ray.exceptions.RayTaskError as error:
        return None, f"the champion cannot be scored on these rows: {error.cause}"


def _headline(result: dict[str, Any]) -> str:
    first = next(iter(result["tasks"].values()))
    ne, auc = first["ne"]["value"], first["auc"]["value"]
    return f"foundation model NE {ne:.4f}, AUC {auc:.4f}" if ne is not None and auc is not None else ""
