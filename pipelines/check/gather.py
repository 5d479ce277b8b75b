"""Gather the facts of a data set: one task per file and role, summaries merged here. No finding is judged here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gem import errors
from gem.config import RunConfig
from gem.data.build.labels import immature, join_log
from gem.data.ingest import raw
from gem.data.ingest.canonical import check_spec, resolve_files
from gem.data.ingest.clock import Limits
from gem.data.ingest.contract import check_partitions, check_sums, family, read_sums
from gem.data.ingest.sources import DataFolder, RawFile, sha256
from gem.data.profile.files import EXTRA, PER_DAY, PER_TABLE, ProfileJob, plan, profile_file
from gem.data.profile.samples import KeySample, merge_columns, smallest_per_day
from gem.data.schema import DWELL_BUCKETS
from gem.data.spec import DatasetSpec, parse_spec
from pipelines.distribute import Distribute

MAX_SAMPLE = 600_000  # rows; above it fewer rows per day are kept
MIN_PER_DAY = 1_000


@dataclass
class FileFacts:
    """One raw file: name below the data folder, bytes, column -> type as it is stored."""

    name: str
    size: int
    columns: dict[str, str]
    families: dict[str, str]  # column -> kind of type, whatever its width


@dataclass
class RoleFacts:
    """All files of one table in one role (impressions, events.0, labels.x, users, ads), merged."""

    key: str
    table: str
    title: str
    raw_rows: int = 0
    rows: int = 0
    quarantined: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[tuple[str, str]]] = field(default_factory=dict)  # reason -> (file, row)
    repairs: dict[str, int] = field(default_factory=dict)
    columns: dict[str, dict[str, Any]] = field(default_factory=dict)
    contract: list[dict[str, Any]] = field(default_factory=list)
    by_day: dict[str, dict[str, Any]] = field(default_factory=dict)
    keys: dict[str, KeySample] = field(default_factory=dict)
    top_users: dict[str, int] = field(default_factory=dict)
    most: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    conflicts: int = 0
    mismatch: dict[str, Any] = field(default_factory=dict)
    differ: dict[str, int] = field(default_factory=dict)  # column -> repeated keys whose rows differ in it
    dwell: list[int] = field(default_factory=lambda: [0] * DWELL_BUCKETS)
    sample: pa.Table | None = None


@dataclass
class Facts:
    """What is known of the data set. `refused`: (where, message) of everything preprocess would refuse."""

    spec: DatasetSpec
    config: RunConfig
    files: dict[str, list[FileFacts]] = field(default_factory=dict)
    roles: dict[str, RoleFacts] = field(default_factory=dict)
    refused: list[tuple[str, str]] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)  # columns of the impression table that the spec does not use
    sample: pa.Table | None = None  # impressions with their labels and the features of their user and ad
    log_end_ms: dict[str, int] = field(default_factory=dict)  # label -> end of its log
    immature: dict[str, int] = field(default_factory=dict)  # label -> sampled impressions without a settled outcome


def gather(
    config: RunConfig,
    spec: DatasetSpec,
    data_dir: Path | str,
    work: Path,
    choose: Callable[[int], Distribute],
    now_ms: int,
) -> Facts:
    """Read everything once. `choose(bytes)` gives the way to run the tasks; `work` is an empty folder."""
    facts = Facts(spec, config)
    try:
        folder = DataFolder(data_dir)
        files = resolve_files(spec, data_dir)
        facts.files = {t: [_file_facts(spec, t, f) for f in found] for t, found in files.items()}
        _check_folder(config, spec, files, folder)
    except errors.GemError as e:
        facts.refused.append(("spec and files", str(e)))
        return facts
    facts.unused = _unused(facts)
    jobs = plan(spec, files)
    distribute = choose(sum(f.size for found in facts.files.values() for f in found))
    limits = Limits(int(config.data.max_clock_skew_s * 1000), now_ms)
    shared = {"spec": spec.model_dump(mode="json"), "work": str(work), "extra": facts.unused, "limits": limits}
    first = [j for j in jobs if j.role in ("impressions", "events")]
    _merge(facts, distribute("read", partial(_profile, shared, first), _numbered(first)), work)
    if "impressions" not in facts.roles or facts.roles["impressions"].sample is None:
        return facts
    second = [j for j in jobs if j.role not in ("impressions", "events")]
    _write_wanted(facts, work)
    _merge(facts, distribute("join", partial(_profile, shared, second), _numbered(second)), work)
    facts.sample = _joined(facts)
    return facts


def _numbered(jobs: Sequence[ProfileJob]) -> list[dict[str, Any]]:
    return [{"at": i} for i in range(len(jobs))]


def _profile(shared: Mapping[str, Any], jobs: Sequence[ProfileJob], task: Mapping[str, Any]) -> dict[str, Any]:
    """One task; a refused file is an answer, so that all others are still looked at."""
    job = jobs[task["at"]]
    try:
        return profile_file(parse_spec(shared["spec"]), job, Path(shared["work"]), shared["extra"], shared["limits"])
    except errors.GemError as e:
        return {"refused": str(e), "file": job.file.relative, "key": job.key, "number": job.number}


def _check_folder(config: RunConfig, spec: DatasetSpec, files: Mapping[str, Sequence[RawFile]], folder: Any) -> None:
    """What preprocess asks of the files as a whole. Raises SpecError and DataError."""
    check_spec(spec, files)
    check_partitions(spec, files, config.data.allow_missing_days)
    listed = read_sums(folder)
    if listed:
        found = {file.relative: file for mine in files.values() for file in mine}
        check_sums(folder, {name: sha256(file) for name, file in found.items() if name in listed})


def _file_facts(spec: DatasetSpec, table: str, file: RawFile) -> FileFacts:
    stored = raw.stored_schema(spec.tables[table], file)
    columns = dict.fromkeys(raw.header(spec.tables[table], file), "text")
    families = dict(columns)
    for name, kind in (stored.types or {}).items():
        columns[name], families[name] = str(kind), family(kind)
    return FileFacts(file.relative, file.size, columns, families)


def _unused(facts: Facts) -> list[str]:
    """Columns of the impression table that no reader reads (not nested, in every file)."""
    imp, spec = facts.spec.impressions, facts.spec
    read = {imp.user, imp.ad, imp.surface, imp.time.column, imp.id}
    read |= {f.column or f.name for f in spec.context.features}
    read |= {c for label in spec.labels.values() for c in (label.column, label.key)}
    read |= set(imp.true_probability.values())
    files = facts.files.get(imp.table, [])
    shared = [c for c in (files[0].columns if files else {}) if all(c in f.columns for f in files)]
    flat = [c for c in shared if not any("<" in f.columns[c] or "binary" in f.columns[c] for f in files)]
    return [c for c in flat if c not in read]


def _merge(facts: Facts, answers: Sequence[Mapping[str, Any]], work: Path) -> None:
    by_role: dict[str, list[Mapping[str, Any]]] = {}
    for answer in answers:
        if "refused" in answer:
            text = (f"{answer['key']}: {answer['file']}", answer["refused"])
            if text[1] not in [message for _, message in facts.refused]:
                facts.refused.append(text)
        else:
            by_role.setdefault(answer["key"], []).append(answer)
    for key, mine in by_role.items():
        facts.roles[key] = _merge_role(facts.spec, key, mine, work)


def _merge_role(spec: DatasetSpec, key: str, answers: Sequence[Mapping[str, Any]], work: Path) -> RoleFacts:
    role = RoleFacts(key, *table_of(spec, key))
    samples: list[pa.Table] = []
    for answer in answers:
        role.raw_rows += answer["raw_rows"]
        role.rows += answer["rows"]
        role.conflicts += answer.get("conflicts", 0)
        sums = {"quarantined": role.quarantined, "repairs": role.repairs, "top_users": role.top_users}
        for name, into in (sums | {"differ": role.differ}).items():
            for k, n in answer.get(name, {}).items():
                into[k] = into.get(k, 0) + n
        for reason, texts in answer["examples"].items():
            role.examples.setdefault(reason, []).extend((answer["file"], t) for t in texts)
        role.contract += [{**c, "file": answer["file"]} for c in answer["contract"]]
        _add_days(role.by_day, answer.get("by_day", {}))
        _add_mismatch(role, answer)
        role.dwell = [a + b for a, b in zip(role.dwell, answer.get("dwell", [0] * DWELL_BUCKETS), strict=True)]
        for step in ("second", "day"):
            role.most.setdefault(step, []).extend(answer.get(f"most_per_{step}", []))
        with np.load(work / f"{answer['number']:05d}.npz") as arrays:
            names = {n.rsplit("|", 1)[0] for n in arrays.files}
            mine = {n: KeySample.from_arrays(n, arrays) for n in names}
        for name, sample in mine.items():
            role.keys[name] = KeySample.merge([role.keys[name], sample]) if name in role.keys else sample
        if (work / f"{answer['number']:05d}.parquet").exists():
            samples = [_trim(key, [*samples, pq.read_table(work / f"{answer['number']:05d}.parquet")])]
    names = list(dict.fromkeys(n for a in answers for n in a["columns"]))
    role.columns = {n: merge_columns(a["columns"][n] for a in answers if n in a["columns"]) for n in names}
    for found in role.most.values():
        found.sort(key=lambda m: -m["events"])
    role.sample = samples[0] if samples else None
    return role


def table_of(spec: DatasetSpec, key: str) -> tuple[str, str]:
    """The raw table behind a role's key, and what a person calls the role."""
    kind, _, which = key.partition(".")
    if kind == "events":
        source = spec.events[int(which)]
        return source.table, f"{source.kind} events"
    if kind == "labels":
        return str(spec.labels[which].table), str(spec.labels[which].table)
    if kind == "impressions":
        return spec.impressions.table, kind
    table = str((spec.users if kind == "users" else spec.ads).table)
    return table, table


def _trim(key: str, tables: list[pa.Table]) -> pa.Table:
    """Merge samples within the bound on memory."""
    rows = pa.concat_tables(tables, promote_options="permissive")
    if key == "impressions":
        rows = smallest_per_day(rows, PER_DAY)
        days = len(np.unique(rows["day"].to_numpy()))
        if rows.num_rows > MAX_SAMPLE:
            rows = smallest_per_day(rows, max(MIN_PER_DAY, MAX_SAMPLE // days))
    elif "random" in rows.column_names and rows.num_rows > PER_TABLE:
        random = np.flatnonzero(rows["random"].to_numpy(zero_copy_only=False))
        hashes = rows["key"].to_numpy()[random]
        mask = np.zeros(rows.num_rows, np.bool_)
        mask[random[np.argsort(hashes, kind="stable")[:PER_TABLE]]] = True
        rows = rows.set_column(rows.column_names.index("random"), "random", pa.array(mask))
    return rows


def _add_days(into: dict[str, dict[str, Any]], found: Mapping[str, Mapping[str, Any]]) -> None:
    for day, one in found.items():
        mine = into.setdefault(day, {"rows": 0, "hours": [0] * 24, "nulls": {}})
        mine["rows"] += one["rows"]
        mine["hours"] = [a + b for a, b in zip(mine["hours"], one["hours"], strict=True)]
        for name, n in one["nulls"].items():
            mine["nulls"][name] = mine["nulls"].get(name, 0) + n


def _add_mismatch(role: RoleFacts, answer: Mapping[str, Any]) -> None:
    if "day_mismatch" in answer:
        mine = role.mismatch or {"rows": 0, "hours": [0] * 24}
        found = answer["day_mismatch"]
        hours = [a + b for a, b in zip(mine["hours"], found["hours"], strict=True)]
        role.mismatch = {"rows": mine["rows"] + found["rows"], "hours": hours}


def _write_wanted(facts: Facts, work: Path) -> None:
    """The keys whose rows of the other tables are needed beside the sampled impressions."""
    sample = facts.roles["impressions"].sample
    assert sample is not None
    columns = {"users": "user", "ads": "ad"} | {
        f"labels.{n}": f"key:{n}" for n, la in facts.spec.labels.items() if la.table
    }
    for key, column in columns.items():
        np.save(work / f"wanted-{key}.npy", np.unique(pc.fill_null(sample[column], 0).to_numpy()))


def _joined(facts: Facts) -> pa.Table:
    """The sampled impressions with labels (`label:<task>`) and entity features (`users:<f>`, `ads:<f>`)."""
    sample = facts.roles["impressions"].sample
    assert sample is not None
    for name, label in facts.spec.labels.items():
        if label.table:
            sample = sample.append_column(f"label:{name}", pa.array(_log_label(facts, name, sample)))
    for side, column in (("users", "user"), ("ads", "ad")):
        role = facts.roles.get(side)
        if role is None or role.sample is None or not role.sample.num_rows:
            continue
        keys, first = np.unique(role.sample["key"].to_numpy(), return_index=True)
        wanted = sample[column].to_numpy()
        at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
        rows = pa.array(first[at], mask=keys[at] != wanted)
        for name in role.sample.column_names[2:]:
            sample = sample.append_column(f"{side}:{name}", role.sample[name].take(rows))
    return sample


def _log_label(facts: Facts, name: str, sample: pa.Table) -> np.ndarray[Any, Any]:
    """Label of the sampled impressions from a log of its own, int8 [N]; -1 where not settled."""
    label, role = facts.spec.labels[name], facts.roles.get(f"labels.{name}")
    time_ms = sample["time_ms"].to_numpy()
    end = facts.roles["impressions"].columns["time_ms"].get("max", 0)
    log_key, log_time = pa.array([], pa.int64()), np.zeros(0, np.int64)
    if role is not None and role.sample is not None:
        log_key = pa.array(role.sample["key"].to_numpy().view(np.int64))
        log_time = role.sample["time_ms"].to_numpy()
        end = max(end, role.columns["time_ms"].get("max", 0))
    facts.log_end_ms[name] = end
    own = sample[f"key:{name}"]
    codes = pc.fill_null(own, 0).to_numpy().view(np.int64)
    key = pa.array(codes, mask=own.is_null().to_numpy())
    value = join_log(key, time_ms, (log_key, log_time), label.window_hours)
    if not label.complete:
        young = immature(time_ms, label.window_hours, end)
        facts.immature[name] = int(young.sum())
        value[young] = -1
    return value


__all__ = ["EXTRA", "Distribute", "Facts", "FileFacts", "RoleFacts", "gather", "table_of"]
