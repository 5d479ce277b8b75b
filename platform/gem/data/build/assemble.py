"""The driver's part of preprocess: plan a window from what its files hold, and finish the store with its manifest.

cut_file (per file) -> plan_window -> collect_shard (per shard) -> fit_window -> merge_shard (per shard)
-> finish_store
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gem.config import DataConfig, config_hash
from gem.data.build import quarantine, store_write
from gem.data.build.entities import Fitted
from gem.data.build.merge import CAPPED
from gem.data.build.pieces import Places
from gem.data.build.shard_plan import RebuildNeeded, ShardPlan
from gem.data.days import Split, choose_split, day_number, missing_days
from gem.data.encoding import Encoder
from gem.data.fitting import table_figures
from gem.data.schema import OOV
from gem.data.spec import DatasetSpec

Record = dict[str, Any]


HOT_SHARE, HOT_PER_SECOND = 0.1, 10  # a user above either is flagged: of all events; events within one second


def plan_window(
    spec: DatasetSpec, config: DataConfig, records: Sequence[Record], parent: Mapping[str, Any] | None, num_shards: int
) -> tuple[ShardPlan, Split]:
    """Plan of the second pass and the split over all days so far. Raises DataError if no split is possible."""
    before = parent or {"rows": {"impressions_by_day": {}}, "key_types": {}, "log_end_ms": {}, "windows": []}
    days: dict[str, int] = dict(before["rows"]["impressions_by_day"])
    types: dict[str, str] = dict(before["key_types"])
    latest: dict[str, int] = dict(before["log_end_ms"])
    for record in records:
        for day, count in record.get("days", {}).items():
            days[day] = days.get(day, 0) + count
        for name, kind in record["types"].items():
            types[name] = kind if types.get(name, kind) == kind else "string"
        job = record["job"]
        if job["role"] in ("impressions", "labels") and "max_time_ms" in record:
            latest[job["label"]] = max(latest.get(job["label"], record["max_time_ms"]), record["max_time_ms"])
    split = choose_split(dict(sorted(days.items())), config)
    last_train_day = day_number(split.train_days[-1])
    if parent and last_train_day < int(parent["last_train_day"]):
        raise RebuildNeeded(f"training ends on {split.train_days[-1]}, before that of the store")
    labels = [name for name, label in spec.labels.items() if label.table]
    ends = {n: max(latest[""], latest.get(n, latest[""])) for n in labels}
    plan = ShardPlan(
        key_types={"user": "int64", "ad": "int64", **{f"key:{n}": "int64" for n in labels}, **types},
        first_day=int(parent["first_day"]) if parent else day_number(min(days)),
        last_train_day=last_train_day,
        num_shards=num_shards,
        log_end_ms={"": latest[""], **ends},
        settled_ms={n: int(before["log_end_ms"].get(n, -1)) for n in labels},
        window=len(before["windows"]),
        max_rows_per_user_day=config.max_rows_per_user_day,
        max_skew_ms=int(config.max_clock_skew_s * 1000),
    )
    return plan, split


def finish_store(
    spec: DatasetSpec,
    places: Places,
    fitted: Fitted,
    passes: tuple[Sequence[Record], Sequence[Record], Mapping[str, store_write.Entry]],
    about: tuple[ShardPlan, Split, Mapping[str, Mapping[str, str]], Mapping[str, Any] | None],
) -> tuple[dict[str, Any], str]:
    """Write the quarantine files and, last, the manifest. Returns (manifest, store hash).

    `passes`: records of the first pass, of the second, and the partition files that the third wrote. `about`: the plan,
    the split, sha256 of the raw files by table, and the manifest of the store before.
    """
    store = places.store
    (first, second), (partitions, lost) = passes[:2], _without_capped(passes[2])
    plan, split, inputs, parent = about
    written = {
        **fitted.files,
        **partitions,
        **quarantine.write(store, places.work, plan.window, set_aside(first, second)),
    }
    files = {**(parent["files"] if parent else {}), **written}
    days = sorted({day_of(f) for f in files if f.startswith("impressions/")})
    window = {
        "number": plan.window,
        "parent": store_write.manifest_hash(parent) if parent else None,
        "vocabulary_version": fitted.encoder.vocabulary_version,
        "inputs": {t: dict(found) for t, found in inputs.items()},
        "rows": _window_rows(first, second, lost),
        "days": sorted({d for r in first for d in r.get("days", {})}),
        "files": {f: e["sha256"] for f, e in sorted(written.items())},
    }
    name = f"windows/{plan.window:05d}.json"
    files[name] = store_write.write_text(store, name, store_write.canonical_json(window))
    manifest = {
        "version": store_write.VERSION,
        "schema_hash": fitted.encoder.schema.hash,
        "zone": spec.impressions.zone,
        "vocabulary_version": fitted.encoder.vocabulary_version,
        "spec_hash": config_hash(spec.model_dump(mode="json")),
        "split": split.to_dict(),
        "days": days,
        "missing_days": missing_days(days),
        "num_shards": plan.num_shards,
        "first_day": plan.first_day,
        "key_types": dict(plan.key_types),
        "log_end_ms": dict(plan.log_end_ms),
        "last_train_day": plan.last_train_day,
        "files": dict(sorted(files.items())),
        **_totals(files, days, fitted, (first, second, lost), parent),
        "vocab": _vocabulary(spec, store, fitted, list(files), [split.validation_day, split.test_day]),
        "world": bool(spec.impressions.true_probability),
        "inputs": _all_inputs(inputs, parent),
        "windows": [
            *(parent["windows"] if parent else []),
            {k: window[k] for k in window if k not in ("files", "inputs")},
        ],
        "forgotten": parent["forgotten"] if parent else [],
    }
    return manifest, store_write.write_manifest(store, manifest)


def _totals(
    files: Mapping[str, store_write.Entry],
    days: Sequence[str],
    fitted: Fitted,
    passes: tuple[Sequence[Record], Sequence[Record], Mapping[str, int]],
    parent: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Counts over all windows. `passes`: records of the first pass and of the second, rows that the third dropped."""
    first, second, lost = passes
    rows_by_day = {d: sum(files[f]["rows"] for f in store_write.paths_of(files, "impressions", d)) for d in days}
    before = parent or {"rows": {}, "quarantined": {}, "repairs": {}, "hot_users": []}
    old = before["rows"]

    def add(name: str, source: str) -> int:
        return int(old.get(name, 0)) + sum(int(s[source]) for s in second)

    rows = {
        "raw": _added(old.get("raw", {}), _raw_rows(first)),
        "impressions": sum(rows_by_day.values()),
        "impressions_by_day": rows_by_day,
        "events": sum(files[f]["rows"] for f in files if f.startswith("timelines/")),
        "users": fitted.num_users,
        "ads": fitted.num_ads,
        "duplicate_events": add("duplicate_events", "duplicate_events"),
        "conflicting_events": add("conflicting_events", "conflicting_events"),
        "conflicts": add("conflicts", "conflicts"),
        "duplicate_users": add("duplicate_users", "duplicate_users"),
        "duplicate_ads": int(old.get("duplicate_ads", 0)) + fitted.duplicate_ads,
        "capped": add("capped", "capped") + lost["impressions"],
        "capped_events": add("capped_events", "capped_events") + lost["events"],
    }
    found = quarantine.by_table(set_aside(first, second))
    merged = {t: _added(before["quarantined"].get(t, {}), found.get(t, {})) for t in {*before["quarantined"], *found}}
    repairs = _added(before["repairs"], _repairs(first, second))
    return {
        "rows": rows,
        "quarantined": dict(sorted(merged.items())),
        "repairs": dict(sorted(repairs.items())),
        "duplicates": int(before.get("duplicates", 0)) + sum(int(s["duplicates"]) for s in second),
        "hot_users": _hot_users(before["hot_users"], second),
    }


def _without_capped(partitions: Mapping[str, store_write.Entry]) -> tuple[dict[str, store_write.Entry], dict[str, int]]:
    """(entries as the manifest has them, impressions and events that the cap took in the third pass)."""
    lost = {"impressions": 0, "events": 0}
    for path, entry in partitions.items():
        lost["impressions" if path.startswith("impressions/") else "events"] += int(entry.get(CAPPED, 0))
    return {path: {k: v for k, v in e.items() if k != CAPPED} for path, e in partitions.items()}, lost


def _window_rows(first: Sequence[Record], second: Sequence[Record], lost: Mapping[str, int]) -> dict[str, Any]:
    """Counts of one window; `lost` are rows that the third pass dropped: whichever they were, so many fewer came in."""
    names = (
        "impressions",
        "events",
        "new_users",
        "duplicates",
        "duplicate_events",
        "conflicts",
        "capped",
        "capped_events",
    )
    rows: dict[str, Any] = {n: sum(int(s[n]) for s in second) for n in names}
    for kind, capped in (("impressions", "capped"), ("events", "capped_events")):
        rows[kind], rows[capped] = rows[kind] - lost[kind], rows[capped] + lost[kind]
    return {"raw": _raw_rows(first), **rows, "quarantined": quarantine.by_table(set_aside(first, second))}


def set_aside(first: Sequence[Record], second: Sequence[Record]) -> list[Record]:
    """All records of quarantined rows: of the files, and of rows that contradict each other."""
    return [*first, *(c for s in second for c in s["conflict_records"])]


def _hot_users(old: Sequence[Mapping[str, Any]], second: Sequence[Record]) -> list[dict[str, Any]]:
    """Users a person should look at: a tenth of a window's events or more, ten events within a second, or capped."""
    found, num_events = [dict(u) for u in old], sum(int(s["events"]) for s in second)
    for user in (u for s in second for u in s["hot_users"]):
        share = user["events"] / max(1, num_events)
        if user["capped"] or share >= HOT_SHARE or user["peak_per_s"] >= HOT_PER_SECOND:
            found.append({**user, "share": round(share, 4)})
    best: dict[str, dict[str, Any]] = {}
    for user in found:
        known = best.get(user["user"])
        if known is None or user["events"] > known["events"]:
            best[user["user"]] = user
    return sorted(best.values(), key=lambda u: (-u["events"], u["user"]))[:20]


def _vocabulary(
    spec: DatasetSpec, store: Path, fitted: Fitted, files: Sequence[str], held_out: Sequence[str]
) -> dict[str, Any]:
    rates = unknown_rates(store, fitted.encoder, files, held_out)
    report = table_figures(spec, fitted.encoder, fitted.counts)
    return {table: {**report.get(table, {}), **found} for table, found in rates.items()}


def day_of(relative: str) -> str:
    """Day of a partition path `<kind>/day=<day>/shard-000.parquet`."""
    return relative.split("/")[1].removeprefix("day=")


def unknown_rates(store: Path, encoder: Encoder, files: Sequence[str], days: Sequence[str]) -> dict[str, Any]:
    """Per embedding table its rows, and the share of look-ups in the impressions of `days` that met the OOV row."""
    names = [f"{store_write.CONTEXT_PREFIX}{f.name}" for f in encoder.schema.context.fields if f.name != "surface"]
    paths = [store / f for day in days for f in store_write.paths_of(files, "impressions", day)]
    met: dict[str, list[int]] = {}
    used: dict[str, list[Any]] = {"user": [], "ad": []}
    for path in paths:
        rows = store_write.read_table(path, columns=["user", "ad", "surface", *names])
        for field in encoder.schema.context.fields:
            column = rows["surface" if field.name == "surface" else f"{store_write.CONTEXT_PREFIX}{field.name}"]
            values = (pc.list_flatten(column) if field.multi else column).to_numpy()
            _tally(met, field.table, int((values == OOV).sum()), len(values))
        for name, indices in used.items():
            indices.append(rows[name].to_numpy())
    sides = (("user", encoder.schema.user, store_write.USERS), ("ad", encoder.schema.ad, store_write.ADS))
    for name, side, relative in sides:
        met_entities = np.bincount(np.concatenate([np.zeros(0, np.int64), *used[name]]).astype(np.int64))
        table = store_write.read_table(store / relative, columns=[f.name for f in side.fields])
        for field in side.fields:
            unknown, total = _unknown_by_entity(table[field.name])
            times = met_entities[: len(total)]
            _tally(met, field.table, int(times @ unknown[: len(times)]), int(times @ total[: len(times)]))
    return {
        table: {"rows": rows, "unknown_rate": round(met[table][0] / max(1, met[table][1]), 6)}
        for table, rows in sorted(encoder.schema.tables().items())
    }


def _unknown_by_entity(column: pa.ChunkedArray) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(OOV values, values) of each entity in one column of ids, [B]."""
    array = column.combine_chunks()
    size = len(array)
    if not pa.types.is_list(array.type) and not pa.types.is_fixed_size_list(array.type):
        return (array.to_numpy() == OOV).astype(np.int64), np.ones(size, np.int64)
    parent = pc.list_parent_indices(array).to_numpy()
    unknown = parent[pc.list_flatten(array).to_numpy() == OOV]
    return np.bincount(unknown, minlength=size), np.bincount(parent, minlength=size)


def _tally(met: dict[str, list[int]], table: str, unknown: int, total: int) -> None:
    at = met.setdefault(table, [0, 0])
    at[0] += unknown
    at[1] += total


def _all_inputs(new: Mapping[str, Mapping[str, str]], parent: Mapping[str, Any] | None) -> dict[str, dict[str, str]]:
    old = parent["inputs"] if parent else {}
    return {t: {**old.get(t, {}), **new.get(t, {})} for t in sorted({*old, *new})}


def _raw_rows(records: Sequence[Record]) -> dict[str, int]:
    """Table -> data rows in its files (each part of a file once, in whatever roles it was read)."""
    by_part = {
        (r["job"]["table"], r["job"]["file"]["uri"], str(r["job"]["part"])): int(r["raw_rows"]) for r in records
    }  # fmt: skip
    out: dict[str, int] = {}
    for (table, _, _), rows in sorted(by_part.items()):
        out[table] = out.get(table, 0) + rows
    return out


def _repairs(first: Sequence[Record], second: Sequence[Record]) -> dict[str, int]:
    """Repairs over all tables; a table read in several roles counts one in the role that found most of it."""
    found: dict[tuple[str, str], dict[str, int]] = {}
    for record in first:
        for what, count in record.get("repairs", {}).items():
            roles, role = found.setdefault((record["job"]["table"], what), {}), quarantine.role_of(record)
            roles[role] = roles.get(role, 0) + int(count)
    out: dict[str, int] = {}
    for (_, what), roles in sorted(found.items()):
        out[what] = out.get(what, 0) + max(roles.values())
    for record in second:
        out = _added(out, record.get("repairs", {}))
    return out


def _added(a: Mapping[str, int], b: Mapping[str, int]) -> dict[str, int]:
    return {k: int(a.get(k, 0)) + int(b.get(k, 0)) for k in {**a, **b}}
