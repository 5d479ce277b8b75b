"""The chain of a model, walked on disk: raw data, features, teacher, student. Every link is checked by hash."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gem.errors import GemError, StoreError
from gem.lineage.bundle import BundleInfo, read_bundle
from gem.lineage.files import relocated

STAGE_FILE = "stage.json"  # written by pipelines.stage beside what a stage built
STEPS = ("data", "features", "teacher", "student", "deployment")


@dataclass(frozen=True)
class ChainRecord:
    """One link. `facts` are small values to show; `problem` is empty when the link is whole."""

    step: str
    name: str
    hash: str
    path: str
    facts: dict[str, Any] = field(default_factory=dict)
    problem: str = ""


def walk(bundle: Path, expected_hash: str | None = None, roots: Sequence[Path] = ()) -> list[ChainRecord]:
    """Records from the raw data to this bundle, oldest first. Broken links are reported, never raised.

    roots: folders against which relative parent paths are tried, after the working directory, and below
    which parents are looked for that were moved together with a root. The recorded hash decides whether
    what is found there is the parent.
    """
    info, record = _model(bundle, expected_hash, "model")
    if info is None:
        return [record]
    models = [record]
    if info.parents.teacher:
        path = _find(info.parents.teacher_path, roots)
        _, teacher = _model(path, info.parents.teacher, "teacher")
        models.insert(0, teacher)
    return [*_store(_find(info.parents.data_path, roots), info), *models]


def _find(text: str, roots: Sequence[Path]) -> Path:
    tried = [Path(text), *(r / text for r in roots), *(relocated(text, r) for r in roots)]
    return next((p for p in tried if p.exists()), tried[0])


def _model(path: Path, expected_hash: str | None, otherwise: str) -> tuple[BundleInfo | None, ChainRecord]:
    """The record of a bundle; step `otherwise` where it is too broken to say what it is."""
    try:
        info, got = read_bundle(path, expected_hash=expected_hash)
    except GemError as e:
        return None, ChainRecord(otherwise, path.name, expected_hash or "", str(path), problem=str(e))
    facts = {
        "kind": info.kind,
        "group": info.group,
        "created": info.created_utc,
        "recipe": info.config.recipe,
        "commit": info.parents.commit,
        "code": info.parents.code[:12],
        "lock": info.parents.lock[:12],
        "metrics": headline(info.metrics),
    }
    step = "student" if info.kind == "vertical" else "teacher"
    return info, ChainRecord(step, info.name, got, str(path), {k: v for k, v in facts.items() if v})


def headline(metrics: Mapping[str, Any]) -> dict[str, float]:
    """NE, AUC and calibration per task, wherever a metrics tree keeps them as numbers or {"value": number}."""
    out: dict[str, float] = {}
    tasks = metrics.get("tasks", metrics)
    for task, values in tasks.items() if isinstance(tasks, Mapping) else ():
        for name in ("ne", "auc", "calibration"):
            got = values.get(name) if isinstance(values, Mapping) else None
            got = got.get("value") if isinstance(got, Mapping) else got
            if isinstance(got, (int, float)):
                out[f"{task} {name}"] = float(got)
    return out


def _store(path: Path, info: BundleInfo) -> list[ChainRecord]:
    want = info.parents.data
    try:
        manifest = _json(path / "manifest.json")
        spec = _json(path / "spec.json")
        got = _store_hash(path, manifest)
    except (GemError, OSError, ValueError) as e:
        problem = f"the feature store cannot be read: {e}"
        return [ChainRecord("data", "", "", ""), ChainRecord("features", path.name, want, str(path), problem=problem)]
    problem = "" if got == want else f"the store has hash {got[:16]}, the model was made of {want[:16]}"
    stage = _stage(path)
    days = [str(d) for d in manifest.get("days", [])]
    quarantined = manifest.get("quarantined", {})
    facts = {
        "days": f"{days[0]} to {days[-1]}" if days else "",
        "split": manifest.get("split"),
        "rows": manifest.get("rows"),
        "shards": manifest.get("num_shards"),
        "duplicates": manifest.get("duplicates"),
        "quarantined": sum(sum(r.values()) for r in quarantined.values()) if isinstance(quarantined, dict) else 0,
        "stage": stage.get("key", "")[:16],
    }
    raw = {
        "dataset": spec.get("name"),
        "source": "generated" if manifest.get("world") else spec.get("source"),
        "licence": spec.get("licence"),
        "spec": str(manifest.get("spec_hash", ""))[:12],
        **{k: v for k, v in stage.get("key_parts", {}).items() if isinstance(v, (str, int, float))},
    }
    return [
        ChainRecord("data", str(spec.get("name", "")), str(manifest.get("spec_hash", "")), "", _told(raw)),
        ChainRecord("features", path.name, got, str(path), _told(facts), problem),
    ]


def _told(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in facts.items() if v not in (None, "", {}, [])}


def _stage(path: Path) -> dict[str, Any]:
    """stage.json of the stage that built `path`, from the folder itself or the one above."""
    for folder in (path, path.parent):
        try:
            return _json(folder / STAGE_FILE)
        except (OSError, ValueError):
            continue
    return {}


def _store_hash(path: Path, manifest: Mapping[str, Any]) -> str:
    """Hash of a feature store whose files stand there with the sizes of its manifest (StoreError if not)."""
    from gem.data.build.store_write import manifest_hash

    for relative, entry in manifest.get("files", {}).items():
        file = path / relative
        if not file.is_file() or file.stat().st_size != entry["bytes"]:
            raise StoreError(f"{relative} is missing or changed")
    return manifest_hash(manifest)


def _json(path: Path) -> dict[str, Any]:
    raw = json.loads(path.read_bytes())
    if not isinstance(raw, dict):
        raise ValueError(f"{path} holds no JSON object")
    return raw
