"""Stage 1: raw tables to a feature store, on Ray Data. All work on rows lives in `gem.data`; this distributes it.

files  -> cut_file      (one task per part of a file)  checked rows, in pieces by user shard
       -> collect_shard (one task per shard)           duplicates, order, counts
driver -> fit_window                                   users and ads numbered, encoder fitted or grown, entity tables
       -> merge_shard   (one task per shard)           cuts, labels, day partitions
driver -> finish_store                                 quarantine files and the manifest, last

A window of new files is added to the store before, whose files are linked, so that the cost follows the window. The
pieces of the first two passes stay where they are when a run is stopped: run again, it goes on behind them.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from gem import errors
from gem.config import RunConfig
from gem.data.build import quarantine, store_write
from gem.data.build.assemble import finish_store, plan_window
from gem.data.build.collect import collect_shard
from gem.data.build.entities import fit_window
from gem.data.build.forgotten import Forgotten
from gem.data.build.fragments import CutSettings, FileJob, cut_file, plan_files
from gem.data.build.merge import STAGED, merge_shard
from gem.data.build.pieces import Places
from gem.data.build.sanity import check_distinct, check_settled
from gem.data.build.shard_plan import RebuildNeeded, ShardPlan
from gem.data.ingest.canonical import check_spec, resolve_files
from gem.data.ingest.clock import Limits
from gem.data.ingest.contract import check_partitions, check_sums
from gem.data.ingest.sources import DataFolder, RawFile, sha256
from gem.data.spec import DatasetSpec, parse_spec
from pipelines.distribute import Distribute, Task, in_threads, on_ray_data, resumable, warm_up

Progress = Callable[[str], None]
Files = Mapping[str, Sequence[RawFile]]
Hashes = Mapping[str, Mapping[str, str]]
WORK, WINDOW = ".pieces", "window.json"
BYTES_PER_SHARD = 96 << 20  # of raw files
SHARDS_STEP, MAX_SHARDS = 4, 1024  # a multiple of four: shards end together on two or four cores
SMALL_WINDOW = 128 << 20  # bytes of new files that are added in this process: Ray would take longer to start
_RECORDED = (
    "rows", "days", "missing_days", "split", "vocab", "vocabulary_version", "repairs", "world", "num_shards",
    "hot_users",
)  # fmt: skip


@dataclass(frozen=True)
class Base:
    """What a store is built on.

    parent: the store before, whose raw files are all still there. hashes: table -> relative path -> sha256 of all raw
    files, if known. work: folder for the pieces; kept when the build is stopped.
    """

    parent: Path | None = None
    hashes: Hashes | None = None
    forgotten: Forgotten = field(default_factory=Forgotten)
    work: Path | None = None


def preprocess(
    config: RunConfig,
    spec: DatasetSpec,
    data_dir: str | Path,
    out: Path,
    progress: Progress,
    base: Base | None = None,
    start_ray: Callable[[], Any] | None = None,
) -> dict[str, Any]:
    """Build the feature store in `out` and return the stage record.

    Ray must be initialised, or `start_ray` do it; a small window that is added to a store does without.
    Raises SpecError (spec and files disagree) and DataError (unusable files, no split, too much in quarantine).
    """
    base = base or Base()
    files = resolve_files(spec, data_dir)
    small = base.parent is not None and _new_bytes(files, base) <= SMALL_WINDOW
    if not small:
        if start_ray is not None:
            start_ray()
        warm_up()
    return _build_checked(config, spec, (data_dir, files), out, (progress, in_threads if small else on_ray_data), base)


def _new_bytes(files: Files, base: Base) -> int:
    """Size of the raw files that the parent store does not hold."""
    known = store_write.read_manifest(base.parent)["inputs"] if base.parent else {}
    return sum(f.size for found in _without(files, known, base.hashes).values() for f in found)


def build_store(
    config: RunConfig,
    spec: DatasetSpec,
    paths: tuple[str | Path, Path],
    progress: Progress,
    distribute: Distribute,
    base: Base | None = None,
) -> dict[str, Any]:
    """`preprocess` with another way to run tasks; `paths` is (data_dir, out)."""
    data_dir, out = paths
    return _build_checked(
        config, spec, (data_dir, resolve_files(spec, data_dir)), out, (progress, distribute), base or Base()
    )


def _build_checked(
    config: RunConfig,
    spec: DatasetSpec,
    data: tuple[str | Path, Files],
    out: Path,
    run: tuple[Progress, Distribute],
    base: Base,
) -> dict[str, Any]:
    """Check the files as a whole, then build; anew where the window cannot be added."""
    (data_dir, files), out = data, out.resolve()
    check_spec(spec, files)
    check_partitions(spec, files, config.data.allow_missing_days)
    hashes = base.hashes or {t: {f.relative: sha256(f) for f in found} for t, found in files.items()}
    check_sums(DataFolder(data_dir), {path: sha for found in hashes.values() for path, sha in found.items()})
    try:
        return _build(config, spec, (files, hashes), out, run, base)
    except RebuildNeeded as reason:
        run[0](f"building anew: {reason}")
        shutil.rmtree(out)
        shutil.rmtree(base.work or out / WORK, ignore_errors=True)
        return _build(config, spec, (files, hashes), out, run, replace(base, parent=None))


def _build(
    config: RunConfig,
    spec: DatasetSpec,
    inputs: tuple[Files, Hashes],
    out: Path,
    run: tuple[Progress, Distribute],
    base: Base,
) -> dict[str, Any]:
    files, hashes = inputs
    parent = store_write.read_manifest(base.parent) if base.parent else None
    fresh = _without(files, parent["inputs"] if parent else {}, hashes)
    work = base.work or out / WORK
    new = {t: {f.relative: hashes[t][f.relative] for f in found} for t, found in fresh.items()}
    _resume(out, work, {"parent": store_write.manifest_hash(parent) if parent else None, "files": new})
    if parent and base.parent:
        store_write.link_files(base.parent, out, parent["files"])
    shared = {"spec": spec.model_dump(mode="json"), "store": str(out), "work": str(work)}
    fitted, passes, about = _run_passes(config, spec, (fresh, parent), shared, run, base.forgotten)
    manifest, digest = finish_store(spec, Places(out, work), fitted, passes, (*about, new, parent))
    shutil.rmtree(work)
    return _record(manifest, digest)


def _resume(out: Path, work: Path, window: Mapping[str, Any]) -> None:
    """Keep the pieces that an interrupted build of the same window left; nothing else of it is of use.

    Raises DataError if `out` is a finished store, which is never changed.
    """
    if (out / store_write.MANIFEST).is_file():
        raise errors.DataError(f"{out}: a finished feature store stands there; build into an empty folder")
    for left in out.iterdir() if out.is_dir() else ():
        if left != work:
            shutil.rmtree(left) if left.is_dir() else left.unlink()
    mark, text = work / WINDOW, store_write.canonical_json(window)
    if not mark.is_file() or mark.read_text(encoding="utf-8") != text:
        shutil.rmtree(work, ignore_errors=True)
        store_write.write_text(work, WINDOW, text)


def _run_passes(
    config: RunConfig,
    spec: DatasetSpec,
    data: tuple[Files, Mapping[str, Any] | None],
    shared: dict[str, Any],
    run: tuple[Progress, Distribute],
    forgotten: Forgotten,
) -> tuple[Any, Any, Any]:
    """(fitted, (records of first and second pass, partition entries), (plan, split))."""
    (fresh, parent), (progress, distribute) = data, run
    places = Places(Path(shared["store"]), Path(shared["work"]))
    num_shards = int(parent["num_shards"]) if parent else _num_shards(config, fresh)
    limits = Limits(max_skew_ms=int(config.data.max_clock_skew_s * 1000), now_ms=int(time.time() * 1000))
    cut = {"num_shards": num_shards, "limits": asdict(limits), "forgotten": forgotten.to_dict()}
    jobs = plan_files(spec, fresh)
    progress(f"reading {len({j.file.uri for j in jobs})} files of {len({j.table for j in jobs})} tables")
    go_on = resumable(distribute, places.work, progress)
    first = go_on("read", partial(_cut, shared, cut), [j.to_dict() for j in jobs])
    quarantine.check(first, config.data.max_quarantine_share, places.work, places.store.parent.parent)
    plan, split = plan_window(spec, config.data, first, parent, num_shards)
    check_settled(spec, split, plan.log_end_ms)
    shared["plan"] = plan.to_dict()

    progress(f"sorting {num_shards} user shards; test day {split.test_day}")
    tasks: list[Task] = [{"shard": s} for s in range(num_shards)]
    second = go_on("build", partial(_collect, shared), tasks)
    check_distinct(spec, second, parent)
    if parent and any(s["outran"] for s in second):
        raise RebuildNeeded("outcomes that the store has stand before impressions of theirs that come only now")
    progress(f"{'growing' if parent else 'fitting'} vocabularies on {len(split.train_days)} training days")
    fitted = fit_window(spec, plan, places, second)
    progress(f"writing partitions of {fitted.num_users} users and {fitted.num_ads} ads")
    tasks = [{"shard": s, "first_new": u} for s, u in enumerate(fitted.first_new)]
    third = distribute("merge", partial(_merge, shared), tasks)
    shutil.rmtree(places.store / STAGED, ignore_errors=True)
    partitions = {path: entry for files_of_shard in third for path, entry in files_of_shard.items()}
    return fitted, (first, second, partitions), (plan, split)


def _num_shards(config: RunConfig, files: Files) -> int:
    if config.data.num_shards:
        return config.data.num_shards
    size = sum(f.size for found in files.values() for f in found)
    return min(MAX_SHARDS, SHARDS_STEP * max(1, -(-size // (SHARDS_STEP * BYTES_PER_SHARD))))


def _without(files: Files, known: Hashes, hashes: Hashes | None) -> dict[str, list[RawFile]]:
    """Files that are not among the known ones, by path and content."""

    def is_known(table: str, file: RawFile) -> bool:
        have = known.get(table, {}).get(file.relative)
        return have is not None and (hashes is None or hashes[table][file.relative] == have)

    return {t: [f for f in found if not is_known(t, f)] for t, found in files.items()}


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
        "windows": len(manifest["windows"]),
        "store_hash": digest,
        **{k: manifest[k] for k in _RECORDED},
    }


def _places(shared: dict[str, Any]) -> Places:
    return Places(Path(shared["store"]), Path(shared["work"]))


def _cut(shared: dict[str, Any], cut: dict[str, Any], task: Task) -> Task:
    settings = CutSettings(cut["num_shards"], Limits(**cut["limits"]), Forgotten.from_dict(cut["forgotten"]))
    return cut_file(parse_spec(shared["spec"]), FileJob.from_dict(task), Path(shared["work"]), settings)


def _collect(shared: dict[str, Any], task: Task) -> Task:
    plan = ShardPlan.from_dict(shared["plan"])
    return collect_shard(parse_spec(shared["spec"]), plan, _places(shared), task["shard"])


def _merge(shared: dict[str, Any], task: Task) -> Task:
    plan = ShardPlan.from_dict(shared["plan"])
    return merge_shard(parse_spec(shared["spec"]), plan, _places(shared), task["shard"], task["first_new"])
