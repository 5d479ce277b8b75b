"""Profile of one raw file in one role: counts as JSON, key samples and sampled rows as files in a work folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gem.data.build.duplicates import find_duplicates
from gem.data.days import DAY_MS, HOUR_MS, NO_DAY, day_text, local_ms, parse_days
from gem.data.hashing import combine64
from gem.data.ingest import canonical, raw
from gem.data.ingest.canonical import Canonical
from gem.data.ingest.clock import Limits
from gem.data.ingest.sources import RawFile
from gem.data.profile.checks import check_rows
from gem.data.profile.samples import (
    MAX_KEYS,
    KeySample,
    column_summary,
    hash_keys,
    hash_rows,
    smallest_per_day,
    top_values,
)
from gem.data.schema import DWELL_BUCKETS
from gem.data.spec import DatasetSpec, FeatureSpec

PER_DAY = 20_000  # sampled impressions
PER_TABLE = 20_000  # sampled entities
MAX_ROW_KEYS = 1 << 20  # repeats are rare: the sample that counts them is larger
MAX_EXAMPLES = 3
MAX_EXAMPLE_CHARS = 240
_NOT_SHOWN = {"impressions": ["day"], "users": [canonical.SINCE], "ads": [canonical.SINCE]}
EXTRA = "column:"  # features made of columns that the spec does not name
Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class ProfileJob:
    """Read one file (or a part of it) in one role; `source` and `label` as in `fragments.FileJob`."""

    number: int
    role: str
    table: str
    file: RawFile
    part: Any = None
    source: int = -1
    label: str = ""

    @property
    def key(self) -> str:
        """Name of the role: impressions, events.0, labels.conversion, users, ads."""
        return ".".join(str(p) for p in (self.role, self.label if self.source < 0 else self.source) if p != "")


def plan(spec: DatasetSpec, files: Mapping[str, Sequence[RawFile]]) -> list[ProfileJob]:
    """Every (file, role) to read; large files in parts."""
    uses: list[tuple[str, str | None, int, str]] = [("impressions", spec.impressions.table, -1, "")]
    uses += [("events", source.table, i, "") for i, source in enumerate(spec.events)]
    uses += [("labels", label.table, -1, name) for name, label in spec.labels.items() if label.table]
    uses += [("users", spec.users.table, -1, ""), ("ads", spec.ads.table, -1, "")]
    cuts: dict[RawFile, list[Any]] = {}
    out: list[ProfileJob] = []
    for role, table, source, label in uses:
        for file in files.get(table, []) if table else []:
            if file not in cuts:
                found = raw.parts(spec.tables[str(table)], file)
                cuts[file] = found if len(found) > 1 else [None]
            for part in cuts[file]:
                out.append(ProfileJob(len(out), role, str(table), file, part, source, label))
    return out


def profile_file(
    spec: DatasetSpec, job: ProfileJob, work: Path, extra: Sequence[str], limits: Limits
) -> dict[str, Any]:
    """Read and summarise one job; returns JSON and writes `<number>.npz` and `<number>.parquet` to `work`.

    extra: columns of the impression table that the spec does not use. limits: for clocks that run ahead. Entities and
    label logs keep the rows whose key stands in `work/wanted-<role>.npy`. Raises what the canonical readers raise.
    """
    got = _read(spec, job, extra, limits)
    got.rows = got.rows.drop_columns([n for n in _NOT_SHOWN.get(job.role, ()) if n in got.rows.column_names])
    out: dict[str, Any] = {
        "number": job.number,
        "key": job.key,
        "file": job.file.relative,
        "raw_rows": got.raw_rows,
        "rows": got.rows.num_rows,
        "repairs": got.counts,
        **_quarantined(got.quarantined),
        "columns": {n: column_summary(got.rows[n]) for n in got.rows.column_names if n not in ("dup", "order")},
        "contract": check_rows(spec, job.role, job.source, got.rows, limits.now_ms),
    }
    arrays: Arrays = {}
    sample: pa.Table | None = None
    if job.role == "impressions":
        sample = _impressions(spec, got.rows, out, arrays)
    elif job.role == "events":
        _events(spec, job, got.rows, out, arrays)
    else:
        sample = _keyed(spec, job, got.rows, (out, arrays), work)
    np.savez(work / f"{job.number:05d}.npz", allow_pickle=False, **arrays)
    if sample is not None:
        pq.write_table(sample, work / f"{job.number:05d}.parquet", compression="lz4")
    return out


def _read(spec: DatasetSpec, job: ProfileJob, extra: Sequence[str], limits: Limits) -> Canonical:
    args: dict[str, Any] = {"part": job.part, "limits": limits}
    if job.role == "impressions":
        features = [FeatureSpec(name=EXTRA + c, column=c, kind="categorical") for c in extra]
        context = spec.context.model_copy(update={"features": [*spec.context.features, *features]})
        return canonical.read_impressions(spec.model_copy(update={"context": context}), job.file, **args)
    if job.role == "events":
        return canonical.read_events(spec, job.source, job.file, **args)
    if job.role == "labels":
        return canonical.read_label_log(spec, job.label, job.file, **args)
    return canonical.read_entities(spec, "user" if job.role == "users" else "ad", job.file, **args)


def _quarantined(rows: pa.Table) -> dict[str, Any]:
    counted = {r["values"]: r["counts"] for r in pc.value_counts(rows["reason"]).to_pylist()}
    examples = {}
    for reason in counted:
        texts = rows["row"].filter(pc.equal(rows["reason"], reason)).slice(0, MAX_EXAMPLES).to_pylist()
        examples[reason] = [t[:MAX_EXAMPLE_CHARS] for t in texts]
    return {"quarantined": counted, "examples": examples}


def _impressions(spec: DatasetSpec, rows: pa.Table, out: dict[str, Any], arrays: Arrays) -> pa.Table:
    imp = spec.impressions
    time_ms = rows["time_ms"].to_numpy()
    wall = local_ms(time_ms, imp.zone)
    day = (wall // DAY_MS).astype(np.int32)
    if imp.day and f"ctx:{EXTRA}{imp.day}" in rows.column_names:
        own = parse_days(rows[f"ctx:{EXTRA}{imp.day}"], f'{out["file"]}, column "{imp.day}"')
        wrong = (own != NO_DAY) & (own != day)
        hours = np.bincount((wall[wrong] % DAY_MS) // HOUR_MS, minlength=24)
        out["day_mismatch"] = {"rows": int(wrong.sum()), "hours": hours.tolist()}
        day = np.where(own == NO_DAY, day, own)
    out["by_day"] = _by_day(rows, day, wall)
    user, ad = hash_keys(rows["user"]), hash_keys(rows["ad"])
    dup = rows["dup"].to_numpy().astype(np.uint64)
    ads = ad.view(np.int64)
    again = find_duplicates([user.view(np.int64), dup.view(np.int64)], [time_ms, ads], [time_ms, ads])
    out["conflicts"] = int(again.conflict.sum())
    out["top_users"] = top_values(rows["user"])
    out["differ"] = _differ(rows)
    keys = {"user": user, "ad": ad, "dup": combine64(dup), "row": hash_rows(rows)}
    for name, hashes in keys.items():
        arrays |= KeySample.of(hashes, MAX_ROW_KEYS if name in ("dup", "row") else MAX_KEYS).to_arrays(name)
    sample: dict[str, Any] = {"rank": keys["dup"], "day": day, "time_ms": time_ms, "user": user, "ad": ad}
    for name in rows.column_names:
        if name.startswith(("ctx:", "label:")) or name == "surface":
            sample[name] = rows[name]
        if name.startswith("key:"):
            sample[name] = pa.array(hash_keys(rows[name]), mask=rows[name].is_null().to_numpy())
            arrays |= KeySample.of_column(rows[name]).to_arrays(name)
        if name.startswith("ctx:") or name == "surface":
            arrays |= _values(name, rows[name])
    return smallest_per_day(pa.table(sample), PER_DAY)


def _differ(rows: pa.Table) -> dict[str, int]:
    """Column -> duplicate keys whose rows differ in it."""
    import polars as pl

    plain = [n for n in rows.column_names if not pa.types.is_nested(rows.schema.field(n).type)]
    frame = pl.from_arrow(rows.select(plain))
    assert isinstance(frame, pl.DataFrame)
    again = frame.filter(pl.col("dup").is_duplicated())
    if not again.height:
        return {}
    counts = again.group_by("dup").agg(pl.exclude("dup").n_unique()).select(pl.exclude("dup").gt(1).sum())
    return {name: int(n) for name, n in counts.to_dicts()[0].items() if n}


def _values(name: str, column: pa.ChunkedArray) -> Arrays:
    """Sample of the distinct values of a categorical column."""
    if not pa.types.is_string(column.type):
        return {}
    return KeySample.of_column(column).to_arrays(f"value:{name}")


def _by_day(rows: pa.Table, day: npt.NDArray[np.int32], wall: npt.NDArray[np.int64]) -> dict[str, Any]:
    """Day -> rows, activity by local hour [24], nulls by column."""
    days, code = np.unique(day, return_inverse=True)
    code = code.reshape(-1)
    hours = np.bincount(code * 24 + (wall % DAY_MS) // HOUR_MS, minlength=24 * len(days)).reshape(-1, 24)
    out = {
        day_text(d): {"rows": int(h.sum()), "hours": h.tolist(), "nulls": {}} for d, h in zip(days, hours, strict=True)
    }
    for name in rows.column_names:
        if rows[name].null_count:
            nulls = np.bincount(code[rows[name].is_null().to_numpy()], minlength=len(days))
            for d, n in zip(days.tolist(), nulls.tolist(), strict=True):
                out[day_text(d)]["nulls"][name] = n
    return out


def _events(spec: DatasetSpec, job: ProfileJob, rows: pa.Table, out: dict[str, Any], arrays: Arrays) -> None:
    source = spec.events[job.source]
    user, time_ms = hash_keys(rows["user"]), rows["time_ms"].to_numpy()
    arrays |= KeySample.of(user).to_arrays("user")
    arrays |= KeySample.of_column(rows["ad"]).to_arrays("ad")
    arrays |= KeySample.of(combine64(rows["dup"].to_numpy().astype(np.uint64))).to_arrays("dup")
    out["top_users"] = top_values(rows["user"])
    out["dwell"] = np.bincount(rows["dwell"].to_numpy(), minlength=DWELL_BUCKETS).tolist()
    if source.list_before:
        return
    wall = local_ms(time_ms, spec.impressions.zone)
    out["by_day"] = _by_day(rows.select(["surface"]), (wall // DAY_MS).astype(np.int32), wall)
    _, first = np.unique(rows["dup"].to_numpy(), return_index=True)
    for name, step in (("second", 1000), ("day", DAY_MS)):
        out[f"most_per_{name}"] = _most(rows["user"], user[first], wall[first] // step, first)


def _most(
    users: pa.ChunkedArray, user: npt.NDArray[np.uint64], when: npt.NDArray[np.int64], first: npt.NDArray[np.int64]
) -> list[dict[str, Any]]:
    """The users with most events at one `when` each, most first (a user once)."""
    if not len(user):
        return []
    order = np.lexsort((when, user))
    new = np.ones(len(order), np.bool_)
    new[1:] = (user[order[1:]] != user[order[:-1]]) | (when[order[1:]] != when[order[:-1]])
    starts = np.flatnonzero(new)
    sizes = np.diff(np.append(starts, len(order)))
    found: dict[str, int] = {}
    for at in np.argsort(-sizes, kind="stable")[:50].tolist():
        found.setdefault(str(users[int(first[order[starts[at]]])].as_py()), int(sizes[at]))
    return [{"user": u, "events": n} for u, n in list(found.items())[:5]]


def _keyed(
    spec: DatasetSpec, job: ProfileJob, rows: pa.Table, into: tuple[dict[str, Any], Arrays], work: Path
) -> pa.Table:
    """Key sample, value samples and the wanted rows of an entity table or a label log."""
    out, arrays = into
    key = hash_keys(rows["key"])
    arrays |= KeySample.of(key).to_arrays("key")
    for name in rows.column_names[1:]:
        arrays |= _values(name, rows[name])
    if job.role == "labels" and rows.num_rows:
        wall = local_ms(rows["time_ms"].to_numpy(), spec.impressions.zone)
        out["by_day"] = _by_day(rows.select(["time_ms"]), (wall // DAY_MS).astype(np.int32), wall)
    wanted = np.load(work / f"wanted-{job.key}.npy")
    chosen = np.isin(key, wanted)
    random = np.zeros(len(key), np.bool_)
    random[np.argsort(key, kind="stable")[:PER_TABLE]] = True
    keep = pa.array(chosen | (random & (job.role != "labels")))
    columns = [n for n in rows.column_names[1:] if not pa.types.is_fixed_size_list(rows.schema.field(n).type)]
    table = pa.table({"key": key, "random": random} | {n: rows[n] for n in columns})
    return table.filter(keep)
