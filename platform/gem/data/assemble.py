"""The driver's part of preprocess: reduce per-file and per-shard records, fit, number entities, finish the store.

cut_file (per file) -> plan_shards -> build_shard (per shard) -> fit_store -> encode_shard (per shard)
-> finish_store
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gem.config import DataConfig, config_hash
from gem.data import quarantine, store_write
from gem.data.days import Split, choose_split, day_number, missing_days
from gem.data.encoding import Encoder
from gem.data.fitting import EntityCounts, Moments, TrainCounts, fit_encoder
from gem.data.keys import KeyIndex
from gem.data.rows import SideRows
from gem.data.schema import OOV
from gem.data.shards import ShardPlan, merged_counts, shard_name
from gem.data.spec import DatasetSpec
from gem.data.vocabulary import COUNTS, as_text

Record = dict[str, Any]


@dataclass(frozen=True)
class FittedStore:
    """What fitting leaves for the last pass and the manifest. `first_user[s]` is the index of shard s's first user."""

    encoder: Encoder
    first_user: tuple[int, ...]
    files: Mapping[str, store_write.Entry]
    num_users: int
    num_ads: int
    duplicate_ads: int


def plan_shards(config: DataConfig, records: Sequence[Record]) -> tuple[ShardPlan, Split, dict[str, int]]:
    """Plan of the second pass, the split, and raw impressions per day. Raises DataError if no split is possible."""
    days: dict[str, int] = {}
    types: dict[str, str] = {}
    latest: dict[str, int] = {}
    for record in records:
        for day, count in record.get("days", {}).items():
            days[day] = days.get(day, 0) + count
        for name, kind in record["types"].items():
            types[name] = kind if types.get(name, kind) == kind else "string"
        job = record["job"]
        if job["role"] in ("impressions", "labels") and "max_time_ms" in record:
            latest[job["label"]] = max(latest.get(job["label"], record["max_time_ms"]), record["max_time_ms"])
    days = dict(sorted(days.items()))
    split = choose_split(days, config)
    labels = {record["job"]["label"] for record in records if record["job"]["role"] == "labels"}
    plan = ShardPlan(
        key_types={"user": "int64", "ad": "int64", **{f"key:{n}": "int64" for n in labels}, **types},
        first_day=day_number(min(days)),
        last_train_day=day_number(split.train_days[-1]),
        log_end_ms={n: max(latest[""], latest.get(n, latest[""])) for n in labels},
    )
    return plan, split, days


def fit_store(spec: DatasetSpec, plan: ShardPlan, work: Path, shards: Sequence[Record]) -> FittedStore:
    """Fit the encoder on training days and write encoder.json, schema.json, spec.json and the entity tables."""
    store = work.parent
    counts = merged_counts(work, len(shards))
    users = pa.concat_tables(
        [pq.read_table(work / "built" / shard_name(s) / "users.parquet") for s in range(len(shards))],
        promote_options="permissive",
    )
    seen = users["seen"].combine_chunks().to_numpy(zero_copy_only=False)
    users = users.drop_columns(["seen"])
    ads, duplicate_ads = _ad_table(plan, work, counts["ad_known"])
    shown = _aligned(ads["key"], counts.get("ad_shown", COUNTS.empty_table()))
    events = _aligned(ads["key"], counts.get("ad_event", COUNTS.empty_table()))
    encoder = fit_encoder(
        spec,
        TrainCounts(
            user=EntityCounts(users, seen, seen),
            ad=EntityCounts(ads, shown + events, shown),
            surfaces=counts.get("surface", COUNTS.empty_table()),
            context={g[4:]: t for g, t in counts.items() if g.startswith("ctx:")},
            moments=_merged_moments(shards),
            num_days=plan.last_train_day - plan.first_day + 1,
        ),
    )
    texts = {
        store_write.SPEC: spec.model_dump_json(indent=1),
        store_write.SCHEMA: store_write.canonical_json(encoder.schema.to_dict()),
        store_write.ENCODER: encoder.to_json(),
    }
    tables = {
        store_write.USERS: encoder.encode_entities("user", _with_unknown(users)),
        store_write.ADS: encoder.encode_entities("ad", _with_unknown(ads)),
    }
    files = {name: store_write.write_text(store, name, text) for name, text in texts.items()}
    files |= {name: store_write.write_table(store, name, table) for name, table in tables.items()}
    firsts = np.cumsum([1, *(s["users"] for s in shards)])[:-1]
    return FittedStore(encoder, tuple(firsts.tolist()), files, users.num_rows, ads.num_rows, duplicate_ads)


def finish_store(
    spec: DatasetSpec,
    work: Path,
    fitted: FittedStore,
    passes: tuple[Sequence[Record], Sequence[Record], Mapping[str, store_write.Entry]],
    split: Split,
) -> tuple[dict[str, Any], str]:
    """Write the quarantine files and, last, the manifest. Returns (manifest, store hash).

    `passes`: records of the first pass, of the second, and all partition files of the third.
    """
    store = work.parent
    first, second, partitions = passes
    files = {**fitted.files, **partitions, **quarantine.write(store, work, first)}
    days = sorted({day_of(f) for f in files if f.startswith("impressions/")})
    rows_by_day = {d: sum(files[f]["rows"] for f in store_write.paths_of(files, "impressions", d)) for d in days}
    held_out = [split.validation_day, split.test_day]
    manifest = {
        "version": store_write.VERSION,
        "schema_hash": fitted.encoder.schema.hash,
        "spec_hash": config_hash(spec.model_dump(mode="json")),
        "split": split.to_dict(),
        "days": days,
        "missing_days": missing_days(days),
        "num_shards": len(second),
        "files": dict(sorted(files.items())),
        "rows": {
            "raw": _raw_rows(first),
            "impressions": sum(rows_by_day.values()),
            "impressions_by_day": rows_by_day,
            "events": sum(s["events"] for s in second),
            "users": fitted.num_users,
            "ads": fitted.num_ads,
            "duplicate_events": sum(s["duplicate_events"] for s in second),
            "duplicate_users": sum(s["duplicate_users"] for s in second),
            "duplicate_ads": fitted.duplicate_ads,
        },
        "quarantined": quarantine.by_table(first),
        "repairs": _repairs(first),
        "duplicates": sum(s["duplicates"] for s in second),
        "vocab": unknown_rates(store, fitted.encoder, list(files), held_out),
        "world": bool(spec.impressions.true_probability),
    }
    return manifest, store_write.write_manifest(store, manifest)


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
        rows = pq.read_table(path, columns=["user", "ad", "surface", *names])
        for field in encoder.schema.context.fields:
            column = rows["surface" if field.name == "surface" else f"{store_write.CONTEXT_PREFIX}{field.name}"]
            values = (pc.list_flatten(column) if field.multi else column).to_numpy()
            _tally(met, field.table, int((values == OOV).sum()), len(values))
        for name, indices in used.items():
            indices.append(rows[name].to_numpy())
    sides = (("user", encoder.schema.user, store_write.USERS), ("ad", encoder.schema.ad, store_write.ADS))
    for name, side, relative in sides:
        table = pq.read_table(store / relative)
        rows_of_side = SideRows(side, {c: table[c].combine_chunks() for c in table.column_names}, table.num_rows)
        taken = rows_of_side.take(np.concatenate([np.zeros(0, np.int64), *used[name]]))
        for field in side.fields:
            values = taken.ids[field.name].numpy()
            _tally(met, field.table, int((values == OOV).sum()), len(values))
    return {
        table: {"rows": rows, "unknown_rate": round(met[table][0] / max(1, met[table][1]), 6)}
        for table, rows in sorted(encoder.schema.tables().items())
    }


def _tally(met: dict[str, list[int]], table: str, unknown: int, total: int) -> None:
    at = met.setdefault(table, [0, 0])
    at[0] += unknown
    at[1] += total


def _ad_table(plan: ShardPlan, work: Path, known: pa.Table) -> tuple[pa.Table, int]:
    """One row per ad of the entity tables or the log, sorted by key, features null where nobody described it."""
    kind = pa.type_for_alias(plan.key_types["ad"])
    parts = []
    for path in sorted((work / "ads").glob("*.parquet")):
        table = pq.read_table(path)
        parts.append(table.set_column(0, "key", table["key"].cast(kind)))
    described = pa.concat_tables(parts, promote_options="permissive").combine_chunks()
    keys = pc.unique(pa.chunked_array([*described["key"].chunks, known["value"].combine_chunks().cast(kind)], kind))
    keys = keys.take(pc.sort_indices(keys))
    first = described["key"].combine_chunks() if described.num_rows else pa.array([], kind)
    position = pc.index_in(keys, value_set=first)
    features = [n for n in described.column_names if n != "key"]
    table = pa.table({"key": keys, **{n: described[n].take(position) for n in features}})
    return table, described.num_rows - len(pc.unique(first))


def _aligned(keys: pa.ChunkedArray, counts: pa.Table) -> Any:
    """Counts [B] in the order of `keys`, 0 where a key was not counted."""
    index = KeyIndex(pa.concat_arrays([pa.nulls(1, pa.string()), counts["value"].combine_chunks()]))
    padded = np.concatenate([[0], counts["count"].to_numpy()])
    return padded[index.index_many(as_text(keys))]


def _with_unknown(table: pa.Table) -> pa.Table:
    """The table below one row of nulls: entity 0, whom nobody knows."""
    nothing = pa.table({f.name: pa.nulls(1, f.type) for f in table.schema})
    return pa.concat_tables([nothing, table]).combine_chunks()


def _merged_moments(shards: Sequence[Record]) -> dict[str, Moments]:
    out: dict[str, Moments] = {}
    for shard in shards:
        for name, (count, mean, m2) in shard["moments"].items():
            out[name] = out.get(name, Moments()).merge(Moments(count, mean, m2))
    return out


def _raw_rows(records: Sequence[Record]) -> dict[str, int]:
    """Table -> data rows in its files (each file once, in whatever roles it was read)."""
    by_file = {(r["job"]["table"], r["job"]["file"]): int(r["raw_rows"]) for r in records}
    out: dict[str, int] = {}
    for (table, _), rows in sorted(by_file.items()):
        out[table] = out.get(table, 0) + rows
    return out


def _repairs(records: Sequence[Record]) -> dict[str, int]:
    out: dict[str, int] = {}
    for record in records:
        for what, count in record["repairs"].items():
            out[what] = out.get(what, 0) + int(count)
    return dict(sorted(out.items()))
