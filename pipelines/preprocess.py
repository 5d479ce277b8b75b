"""Stage 1: raw tables to a feature store, on Ray Data. All work on rows lives in `gem.data`; this distributes it.

files  -> cut_file    (one task per file)    checked rows, in fragments by user shard
       -> build_shard (one task per shard)   duplicates, timelines, cuts, labels, counts
driver -> fit_store                          encoder on training days, entity tables
       -> encode_shard (one task per shard)  day partitions
driver -> finish_store                       quarantine files and the manifest, last
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gem import errors
from gem.config import RunConfig
from gem.data import quarantine
from gem.data.assemble import finish_store, fit_store, plan_shards
from gem.data.canonical import check_spec, resolve_files
from gem.data.fragments import FileJob, cut_file, plan_files
from gem.data.sanity import check_distinct, check_settled
from gem.data.shards import ShardPlan, build_shard, encode_shard
from gem.data.spec import DatasetSpec, parse_spec

Progress = Callable[[str], None]
Distribute = Callable[[str, Callable[[dict[str, Any]], dict[str, Any]], Sequence[dict[str, Any]]], list[dict[str, Any]]]
WORK = ".fragments"
_RECORDED = ("rows", "days", "missing_days", "split", "vocab", "repairs", "world", "num_shards")


def preprocess(config: RunConfig, spec: DatasetSpec, data_dir: Path, out: Path, progress: Progress) -> dict[str, Any]:
    """Build the feature store in `out` and return the stage record. Ray must be initialised.

    Raises SpecError (spec and files disagree) and DataError (unusable files, no split, too much in quarantine).
    """
    return build_store(config, spec, (data_dir, out), progress, on_ray_data)


def build_store(
    config: RunConfig, spec: DatasetSpec, paths: tuple[Path, Path], progress: Progress, distribute: Distribute
) -> dict[str, Any]:
    """`preprocess` with another way to run tasks; `paths` is (data_dir, out)."""
    data_dir, out = paths[0], paths[1].resolve()
    files = resolve_files(spec, data_dir)
    check_spec(spec, files)
    work = out / WORK
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    shared = {"spec": spec.model_dump(mode="json"), "work": str(work), "root": str(data_dir)}
    num_shards = config.data.num_shards

    jobs = plan_files(spec, files)
    progress(f"reading {len(jobs)} files of {len({j.table for j in jobs})} tables")
    first = distribute("read", partial(_cut, shared, num_shards), [j.to_dict() for j in jobs])
    quarantine.check(first, config.data.max_quarantine_share, work, out.parent.parent)
    plan, split, _ = plan_shards(config.data, first)
    check_settled(spec, split, plan.log_end_ms)
    shared["plan"] = plan.to_dict()

    progress(f"building timelines of {num_shards} user shards; test day {split.test_day}")
    second = distribute("build", partial(_build, shared), [{"shard": s} for s in range(num_shards)])
    check_distinct(spec, second)
    progress(f"fitting vocabularies on {len(split.train_days)} training days")
    fitted = fit_store(spec, plan, work, second)
    progress(f"writing partitions of {fitted.num_users} users and {fitted.num_ads} ads")
    tasks = [{"shard": s, "first_user": u} for s, u in enumerate(fitted.first_user)]
    third = distribute("encode", partial(_encode, shared), tasks)
    partitions = {path: entry for files_of_shard in third for path, entry in files_of_shard.items()}
    manifest, digest = finish_store(spec, work, fitted, (first, second, partitions), split)
    shutil.rmtree(work)
    return _record(manifest, digest)


def _record(manifest: dict[str, Any], digest: str) -> dict[str, Any]:
    """The stage record: what a person and the later stages ask of this stage."""
    rows = manifest["rows"]
    reasons: dict[str, dict[str, int]] = manifest["quarantined"]
    return {
        "rows_in": sum(rows["raw"].values()),
        "rows_out": rows["impressions"],
        "quarantined": sum(n for table in reasons.values() for n in table.values()),
        "quarantine_reasons": reasons,
        "duplicates": manifest["duplicates"],
        "store_hash": digest,
        **{k: manifest[k] for k in _RECORDED},
    }


def _cut(shared: dict[str, Any], num_shards: int, task: dict[str, Any]) -> dict[str, Any]:
    spec = parse_spec(shared["spec"])
    return cut_file(spec, FileJob.from_dict(task), Path(shared["root"]), Path(shared["work"]), num_shards)


def _build(shared: dict[str, Any], task: dict[str, Any]) -> dict[str, Any]:
    plan = ShardPlan.from_dict(shared["plan"])
    return build_shard(parse_spec(shared["spec"]), plan, Path(shared["work"]), task["shard"])


def _encode(shared: dict[str, Any], task: dict[str, Any]) -> dict[str, Any]:
    plan = ShardPlan.from_dict(shared["plan"])
    return encode_shard(parse_spec(shared["spec"]), plan, Path(shared["work"]), task["shard"], task["first_user"])


def in_process(
    name: str, function: Callable[[dict[str, Any]], dict[str, Any]], tasks: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Run the tasks one after the other in this process (debugging, tests)."""
    return [function(task) for task in tasks]


def on_ray_data(
    name: str, function: Callable[[dict[str, Any]], dict[str, Any]], tasks: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Run the tasks on Ray Data, one block each, and return their results in task order.

    A GemError of a task comes back as that error, not wrapped in Ray's.
    """
    import ray

    if not tasks:
        return []
    rows = [{"at": i, "task": json.dumps(task)} for i, task in enumerate(tasks)]
    context = ray.data.DataContext.get_current()
    shown, context.enable_progress_bars = context.enable_progress_bars, False
    try:
        dataset = ray.data.from_items(rows, override_num_blocks=len(rows)).map(partial(_guarded, function))
        answers = sorted(dataset.take_all(), key=lambda row: row["at"])
    finally:
        context.enable_progress_bars = shown
    for answer in answers:
        if answer["error"]:
            raise getattr(errors, answer["error"])(answer["result"])
    if [a["at"] for a in answers] != list(range(len(tasks))):
        raise errors.DataError(f"preprocess: {len(answers)} of {len(tasks)} {name} tasks answered; run the stage again")
    return [json.loads(a["result"]) for a in answers]


def _guarded(function: Callable[[dict[str, Any]], dict[str, Any]], row: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"at": row["at"], "error": "", "result": json.dumps(function(json.loads(row["task"])))}
    except errors.GemError as e:
        return {"at": row["at"], "error": type(e).__name__, "result": str(e)}
