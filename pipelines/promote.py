"""Stage: register every bundle, let the gates decide, move the champion alias."""

from __future__ import annotations

import getpass
import time
from typing import Any

from gem.errors import GateError
from gem.lineage.gates import Decision, GateRecord, decide
from pipelines.evaluate import results_of
from pipelines.loop import Loop, ended
from pipelines.model_stages import bundle_path

FOUNDATION, VERTICAL = "pretrain", "distill"


def promote(loop: Loop) -> dict[str, Any]:
    """Register and decide for every model. Never skipped: it is cheap, and the registry may have changed.

    Returns {"models": {name: {version, promoted, reasons, ...}}, "rows_in": ..., "seconds": ...} as a stage record.
    """
    results = results_of(loop.done["evaluate"])
    out: dict[str, Any] = {}
    started = time.monotonic()
    with loop.console.stage("promote") as banner:
        run_id = loop.registry.start_child(loop.parent_run, "promote") if loop.parent_run else ""
        loop.runs_of["promote"] = run_id
        with ended(loop.registry, run_id):
            for made_by in (FOUNDATION, VERTICAL):
                for name, bundle_hash in loop.done[made_by].record["bundles"].items():
                    out[name] = _one(loop, name, made_by, bundle_hash, results[name])
                    for reason in out[name]["reasons"]:
                        if reason.startswith("refused"):
                            loop.console.line(f"{name}: {reason}")
        promoted = sum(m["promoted"] for m in out.values())
        banner.fact(f"{promoted} of {len(out)} models are champions")
        seconds = time.monotonic() - started
        loop.registry.log_metrics(run_id, {"promoted": promoted, "models": len(out), "seconds": seconds})
        loop.registry.end(run_id)
    return {"rows_in": len(out), "rows_out": promoted, "quarantined": 0, "seconds": seconds, "models": out}


def _one(loop: Loop, name: str, made_by: str, bundle_hash: str, result: dict[str, Any]) -> dict[str, Any]:
    registry = loop.registry
    bundle = bundle_path(loop, made_by, name)
    version = registry.register(bundle, bundle_hash, loop.runs_of.get(made_by, ""), loop.spec.name)
    current = registry.champion(name)
    record = {"bundle": str(bundle), "hash": bundle_hash, "version": version.version, "run_id": version.run_id}
    if current is not None and current.bundle_hash == bundle_hash:
        return {**record, "promoted": True, "reasons": ["it is the champion already"]}
    decision = _decide(loop, result)
    if not decision.promote:
        return {**record, "promoted": False, "reasons": list(decision.reasons)}
    try:
        registry.promote(name, version.version, current.version if current else None, decision, _who())
    except GateError as error:
        return {**record, "promoted": False, "reasons": [f"refused: {error}"]}
    return {**record, "promoted": True, "reasons": list(decision.reasons)}


def _decide(loop: Loop, result: dict[str, Any]) -> Decision:
    """The gates' decision; a champion that cannot be scored on these rows is named in the reasons.

    Such a champion (its own data are gone, or another test day) could not serve today's data either, so
    the challenger has to pass the absolute gates only.
    """
    challenger = GateRecord.from_dict(result["gate"])
    raw, note = result.get("champion"), result.get("champion_note", "")
    champion = GateRecord.from_dict(raw) if raw else None
    if champion is not None and champion.rows_hash != challenger.rows_hash:
        champion, note = None, "the champion's data have other rows on this test day"
    decision = decide(challenger, champion, loop.config.gates)
    if note:
        return Decision(decision.promote, (*decision.reasons, f"not compared with the champion: {note}"))
    return decision


def _who() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "unknown"
