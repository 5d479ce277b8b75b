"""The two halves of preprocess that run per shard of users: `build_shard` (raw keys) and `encode_shard` (indices).

Between them the driver fits the encoder and numbers all entities. Pure functions of files: no Ray here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gem.data import store_write
from gem.data.days import BEFORE, day_numbers, day_text
from gem.data.encoding import HOUR, SURFACE, WEEKDAY, Encoder, transform
from gem.data.fitting import Moments
from gem.data.hashing import stable_hash64
from gem.data.keys import KeyIndex
from gem.data.labels import entire_space, immature, join_log
from gem.data.sanity import count_conflicts
from gem.data.schema import Task
from gem.data.spec import DatasetSpec
from gem.data.timelines import cuts, first_of_each, timeline_order
from gem.data.vocabulary import count_values, merge_counts

EVENT_COLUMNS: dict[str, pa.DataType] = {
    "time_ms": pa.int64(),
    "known_ms": pa.int64(),
    "kind": pa.uint8(),
    "flags": pa.uint16(),
    "surface": pa.string(),
    "dwell": pa.uint8(),
    "order": pa.int64(),
    "dup": pa.int64(),
    "listed": pa.bool_(),
}


@dataclass(frozen=True)
class ShardPlan:
    """What every shard must know of the whole log, found in the first pass.

    key_types:   "user", "ad" and "key:<label>" -> "int64" or "string", over all files
    first_day, last_train_day: local days since 1970-01-01
    log_end_ms:  label with a log of its own -> latest time seen in the impressions and in that log
    """

    key_types: Mapping[str, str]
    first_day: int
    last_train_day: int
    log_end_ms: Mapping[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> ShardPlan:
        return cls(**raw)


def shard_name(shard: int) -> str:
    """Folder of one shard's fragments."""
    return f"shard-{shard:03d}"


def build_shard(spec: DatasetSpec, plan: ShardPlan, work: Path, shard: int) -> dict[str, Any]:
    """Fragments of one shard -> deduplicated, sorted events and impressions with cuts and labels, and counts.

    Writes `built/<shard>/{users,events,impressions,counts}.parquet` under `work`; `user` there is the position among
    the shard's sorted keys. Returns JSON: rows, users, duplicates, duplicate_events, moments.
    """
    name, types = shard_name(shard), plan.key_types
    impressions = _load(work / "impressions" / name, types)
    events = _load(work / "events" / name, types)
    events = _no_events(types) if events is None else events
    entities = _load(work / "users" / name, {"key": types["user"]})
    assert impressions is not None and entities is not None, "the first pass writes a fragment per file and shard"
    keys = _sorted_unique([impressions["user"], events["user"], entities["key"]])
    ad_keys = _sorted_unique([impressions["ad"], events["ad"]])
    events, raw_events = _sorted_events(_with_codes(events, keys, ad_keys)), events.num_rows
    coded = _with_codes(impressions, keys, ad_keys)
    rows = _distinct_impressions(coded)
    user, time_ms = _np(rows["user_code"]), _np(rows["time_ms"])
    columns: dict[str, Any] = {
        "impression_id": rows["impression_id"],
        "user": rows["user_code"],
        "ad": rows["ad"],
        "time_ms": rows["time_ms"],
        "day": rows["day"],
        "cut": pa.array(cuts(_np(events["user_code"]), _np(events["known_ms"]), user, time_ms)),
        "surface": rows["surface"],
    }
    columns |= {n: rows[n] for n in rows.column_names if n.startswith("ctx:")}
    labels = _labels(spec, plan, rows, work)
    columns |= {f"label_{t}": pa.array(v) for t, v in labels.items()}
    columns |= {f"true_{n[5:]}": rows[n] for n in rows.column_names if n.startswith("true:")}
    out = work / "built"
    train = pa.array(_np(rows["day"]) <= plan.last_train_day)
    train_rows = rows.filter(train)
    seen = np.bincount(_np(train_rows["user_code"]), minlength=len(keys))
    users = _user_table(keys, entities).append_column("seen", pa.array(seen, pa.int64()))
    store_write.write_table(out, f"{name}/impressions.parquet", pa.table(columns))
    kept = events.drop_columns(["user", "dup", "listed", "order", "ad_code"]).rename_columns({"user_code": "user"})
    store_write.write_table(out, f"{name}/events.parquet", kept)
    store_write.write_table(out, f"{name}/users.parquet", users)
    store_write.write_table(out, f"{name}/counts.parquet", _counts(spec, plan, train_rows, events, ad_keys))
    return {
        "users": len(keys),
        "impressions": rows.num_rows,
        "events": events.num_rows,
        "duplicates": impressions.num_rows - rows.num_rows,
        "conflicts": count_conflicts(
            (_np(coded["user_code"]), _np(coded["dup"])), (_np(coded["ad_code"]), _np(coded["time_ms"]))
        ),
        "duplicate_events": raw_events - events.num_rows,
        "duplicate_users": entities.num_rows - len(pc.unique(entities["key"])),
        "moments": _context_moments(spec, train_rows),
    }


def encode_shard(spec: DatasetSpec, plan: ShardPlan, work: Path, shard: int, first_user: int) -> dict[str, Any]:
    """Built shard -> day partitions of the store (the parent folder of `work`). Returns manifest entries by path.

    `first_user` is the entity index of the shard's first user.
    """
    store, source = work.parent, work / "built" / shard_name(shard)
    encoder = Encoder.from_json((store / store_write.ENCODER).read_text(encoding="utf-8"))
    ads = KeyIndex(pq.read_table(store / store_write.ADS, columns=["key"])["key"])
    events = pq.read_table(source / "events.parquet")
    table = pa.table(
        {
            "user": pa.array(_np(events["user"]) + first_user, pa.int32()),
            "known_ms": events["known_ms"],
            "time_ms": events["time_ms"],
            "ad": pa.array(ads.index_many(events["ad"])),
            "kind": events["kind"],
            "flags": events["flags"],
            "surface": pa.array(encoder.surface_codes(events["surface"])),
            "dwell": events["dwell"],
        }
    )
    days = _day_names(day_numbers(_np(events["known_ms"]), spec.impressions.zone), plan.first_day)
    files = store_write.write_by_day(store, "timelines", shard, table, days)
    rows = pq.read_table(source / "impressions.parquet")
    time_ms = _np(rows["time_ms"])
    raw = {n[4:]: rows[n] for n in rows.column_names if n.startswith("ctx:")}
    context = encoder.context_columns(raw, time_ms, rows["surface"])
    columns: dict[str, Any] = {
        "impression_id": rows["impression_id"],
        "user": pa.array(_np(rows["user"]) + first_user, pa.int32()),
        "ad": pa.array(ads.index_many(rows["ad"])),
        "time_ms": rows["time_ms"],
        "cut": rows["cut"],
        "surface": context.pop(SURFACE).cast(pa.int16()),
    }
    columns |= {f"{store_write.CONTEXT_PREFIX}{n}": context[n] for n in (HOUR, WEEKDAY, *raw)}
    columns |= {n: rows[n] for n in rows.column_names if n.startswith(("label_", "true_"))}
    days = _day_names(_np(rows["day"]), plan.first_day)
    return files | store_write.write_by_day(store, "impressions", shard, pa.table(columns), days)


def _load(folder: Path, types: Mapping[str, str]) -> pa.Table | None:
    """All fragments of a folder in name order, key columns cast to their type over all files."""
    parts = []
    for path in sorted(folder.glob("*.parquet")):
        table = pq.read_table(path)
        for column in types:
            if column in table.column_names:
                at = table.column_names.index(column)
                table = table.set_column(at, column, table[column].cast(types[column]))
        parts.append(table)
    return pa.concat_tables(parts, promote_options="permissive").combine_chunks() if parts else None


def _no_events(types: Mapping[str, str]) -> pa.Table:
    fields = {"user": pa.type_for_alias(types["user"]), "ad": pa.type_for_alias(types["ad"]), **EVENT_COLUMNS}
    return pa.schema(list(fields.items())).empty_table()


def _sorted_unique(columns: Sequence[pa.ChunkedArray]) -> pa.Array:
    chunks = [chunk for column in columns for chunk in column.chunks]
    distinct = pc.unique(pa.chunked_array(chunks, columns[0].type))
    return distinct.take(pc.sort_indices(distinct))


def _with_codes(table: pa.Table, keys: pa.Array, ad_keys: pa.Array) -> pa.Table:
    user = pc.index_in(table["user"], value_set=keys).cast(pa.int32())
    ad = pc.index_in(table["ad"], value_set=ad_keys).cast(pa.int32())
    return table.append_column("user_code", user).append_column("ad_code", ad)


def _sorted_events(events: pa.Table) -> pa.Table:
    """Distinct events in timeline order. Of equal ones the copy with the most flags stays, wherever it stood.

    Rows of a list keep its order; other ties are ordered by content, so that files may come in any order.
    """
    user, kind, dup = _np(events["user_code"]), _np(events["kind"]), _np(events["dup"])
    flags, dwell, order = (_np(events[n]).astype(np.int64) for n in ("flags", "dwell", "order"))
    keep = first_of_each((user, kind, dup), (-flags, -dwell, order))
    events = events.filter(pa.array(keep))
    order = np.where(_np(events["listed"]), order[keep], 0)
    ties = (order, _np(events["kind"]), _np(events["ad_code"]), _np(events["dup"]))
    user, known_ms, time_ms = (_np(events[n]) for n in ("user_code", "known_ms", "time_ms"))
    return events.take(pa.array(timeline_order(user, known_ms, time_ms, ties)))


def _distinct_impressions(rows: pa.Table) -> pa.Table:
    """Impressions without duplicates, sorted by (user, time_ms, impression_id).

    Of rows with one duplicate key the one with the most positive labels stays, wherever it stood.
    """
    ties = [-_np(rows[n]).astype(np.int64) for n in rows.column_names if n.startswith("label:")]
    ties += [_np(rows[n]).astype(np.int64) for n in ("time_ms", "ad_code", "impression_id", "day")]
    ties.append(stable_hash64(rows["surface"]).view(np.int64))
    rows = rows.filter(pa.array(first_of_each((_np(rows["user_code"]), _np(rows["dup"])), ties)))
    order = np.lexsort(tuple(_np(rows[n]) for n in ("ad_code", "impression_id", "time_ms", "user_code")))
    return rows.take(pa.array(order))


def _labels(spec: DatasetSpec, plan: ShardPlan, rows: pa.Table, work: Path) -> dict[str, npt.NDArray[np.int8]]:
    own: dict[str, npt.NDArray[np.int8]] = {}
    for task, label in spec.labels.items():
        if label.column:
            own[task] = _np(pc.fill_null(rows[f"label:{task}"], -1)).astype(np.int8)
            continue
        key = rows[f"key:{task}"].combine_chunks()
        log = _load(work / "labels" / task, {"key": plan.key_types[f"key:{task}"]})
        assert log is not None, "the first pass writes a fragment per file of a label log"
        log = log.filter(pc.is_in(log["key"], value_set=key))
        log_rows = (log["key"].combine_chunks(), _np(log["time_ms"]))
        own[task] = join_log(key, _np(rows["time_ms"]), log_rows, label.window_hours)
    out = entire_space(own, tuple(Task(n, la.given) for n, la in spec.labels.items()))
    for task, label in spec.labels.items():
        if label.table and not label.complete:
            out[task][immature(_np(rows["time_ms"]), label.window_hours, plan.log_end_ms[task])] = -1
    return out


def _user_table(keys: pa.Array, entities: pa.Table) -> pa.Table:
    """One row per key with its raw features; null where the entity table has no such user. First row of a key wins."""
    position = pc.index_in(keys, value_set=entities["key"].combine_chunks())
    features = [n for n in entities.column_names if n != "key"]
    return pa.table({"key": keys, **{n: entities[n].take(position) for n in features}})


def _counts(spec: DatasetSpec, plan: ShardPlan, train_rows: pa.Table, events: pa.Table, ad_keys: pa.Array) -> pa.Table:
    """Counts over training days: columns group, value, count. `ad_known` lists every ad of the log."""
    known = day_numbers(_np(events["known_ms"]), spec.impressions.zone) <= plan.last_train_day
    groups = {
        "surface": count_values(train_rows["surface"]),
        "ad_shown": count_values(train_rows["ad"]),
        "ad_event": count_values(events["ad"].filter(pa.array(known))),
        "ad_known": count_values(ad_keys),
    }
    for f in spec.context.features:
        if f.kind in ("categorical", "multi"):
            groups[f"ctx:{f.name}"] = count_values(train_rows[f"ctx:{f.name}"])
    parts = [t.append_column("group", pa.array([name] * t.num_rows, pa.string())) for name, t in groups.items()]
    return pa.concat_tables(parts)


def merged_counts(work: Path, num_shards: int) -> dict[str, pa.Table]:
    """Counts of all shards together: group -> table value, count."""
    table = pa.concat_tables(
        pq.read_table(work / "built" / shard_name(s) / "counts.parquet") for s in range(num_shards)
    )
    groups = pc.unique(table["group"]).to_pylist()
    return {g: merge_counts([table.filter(pc.equal(table["group"], g))]) for g in groups}


def _context_moments(spec: DatasetSpec, train_rows: pa.Table) -> dict[str, list[float]]:
    out: dict[str, list[float]] = {}
    for f in spec.context.features:
        if f.kind == "numeric":
            column = pc.fill_null(train_rows[f"ctx:{f.name}"].cast(pa.float64()), float("nan"))
            m = Moments.of(transform(f.transform, _np(column)))
            out[f.name] = [m.count, m.mean, m.m2]
    return out


def _day_names(numbers: npt.NDArray[np.int32], first_day: int) -> npt.NDArray[np.str_]:
    distinct, inverse = np.unique(numbers, return_inverse=True)
    names = np.array([day_text(n) if n >= first_day else BEFORE for n in distinct.tolist()], dtype=np.str_)
    out: npt.NDArray[np.str_] = names[inverse.reshape(-1)] if len(names) else np.empty(0, np.str_)
    return out


def _np(column: pa.Array | pa.ChunkedArray) -> npt.NDArray[Any]:
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    out: npt.NDArray[Any] = array.to_numpy(zero_copy_only=False)
    return out
