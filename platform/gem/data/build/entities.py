"""The driver's work between the passes: number users and ads, fit or grow the encoder, write the entity tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gem.data.build import store_write
from gem.data.build.counting import (
    AD_EVENT,
    AD_SHOWN,
    USER,
    add_entities,
    add_values,
    entity_totals,
    merged_moments,
    value_groups,
)
from gem.data.build.outcomes import outcome_path
from gem.data.build.pieces import Places, has_piece, load_pieces, read_piece
from gem.data.build.shard_plan import ShardPlan
from gem.data.build.stale import check_stale
from gem.data.build.store_write import Entry
from gem.data.build.timelines import Bools
from gem.data.encoding import ID_FIELD, Encoder
from gem.data.fitting import EntityCounts, TrainCounts, fit_encoder, grow_encoder
from gem.data.ingest.canonical import SINCE, log_time
from gem.data.ingest.canonical_events import ITEM_MARK, item_features
from gem.data.keys import KeyIndex
from gem.data.schema import OOV
from gem.data.spec import DatasetSpec, EntitySpec
from gem.data.vocabulary import COUNTS

Side = Literal["user", "ad"]


@dataclass(frozen=True)
class Fitted:
    """What fitting leaves for the last pass and the manifest. `first_new[s]`: index of shard s's first new user."""

    encoder: Encoder
    counts: TrainCounts
    first_new: tuple[int, ...]
    files: Mapping[str, Entry]
    num_users: int
    num_ads: int
    duplicate_ads: int


def fit_window(spec: DatasetSpec, plan: ShardPlan, places: Places, shards: Sequence[Mapping[str, Any]]) -> Fitted:
    """Fit the encoder on the first window, grow it on later ones, and write everything that is not per shard."""
    store = places.store
    files = _write_outcomes(spec, plan, places)
    old_values = _stored(store, store_write.VALUE_COUNTS)
    values = add_values(
        old_values,
        [read_piece(places.built(s) / "values") for s in range(len(shards))],
        plan.last_train_day,
    )
    old_users = _stored(store, store_write.RAW_USERS)
    users = _user_table(spec, plan, places, old_users, len(shards))
    old_ads = _stored(store, store_write.RAW_ADS)
    ads, duplicate_ads = _ad_table(spec, plan, places, old_ads, len(shards))
    known = 0 if old_users is None else old_users.num_rows
    firsts = 1 + known + np.cumsum([0, *(int(s["new_users"]) for s in shards)])[:-1]
    entities = add_entities(
        _stored(store, store_write.ENTITY_COUNTS),
        _by_index(places, ads, firsts.tolist()),
        plan.last_train_day,
    )
    before = (_stored(store, store_write.USERS), _stored(store, store_write.ADS))
    unknown = (_unknown(before[0], "user", users.num_rows), _unknown(before[1], "ad", ads.num_rows))
    counts = _train_counts(plan, (users, ads), (values, entities), shards, unknown)
    old = Encoder.load(store) if before[0] is not None else None
    encoder = fit_encoder(spec, counts) if old is None else grow_encoder(spec, old, counts)
    if old is not None and old_values is not None:
        check_stale(spec, (old, encoder), old_values)
    files |= encoder.save(store)
    texts = {
        store_write.SPEC: spec.model_dump_json(indent=1),
        store_write.SCHEMA: store_write.canonical_json(encoder.schema.to_dict()),
    }
    tables: dict[str, Callable[[], pa.Table]] = {
        store_write.VALUE_COUNTS: lambda: values,
        store_write.ENTITY_COUNTS: lambda: entities,
        store_write.RAW_USERS: lambda: users,
        store_write.RAW_ADS: lambda: ads,
        store_write.USERS: lambda: _encoded(encoder, "user", users, before[0], old_users),
        store_write.ADS: lambda: _encoded(encoder, "ad", ads, before[1], old_ads),
    }
    files |= {name: store_write.write_text(store, name, text) for name, text in texts.items()}
    with ThreadPoolExecutor() as pool:
        entries = pool.map(lambda item: store_write.write_table(store, item[0], item[1]()), tables.items())
        files |= dict(zip(tables, entries, strict=True))
    return Fitted(encoder, counts, tuple(firsts.tolist()), files, users.num_rows, ads.num_rows, duplicate_ads)


def with_unknown(table: pa.Table) -> pa.Table:
    """The table below one row of nulls: entity 0, whom nobody knows."""
    nothing = pa.table({f.name: pa.nulls(1, f.type) for f in table.schema})
    return pa.concat_tables([nothing, table]).combine_chunks()


def _stored(store: Path, relative: str) -> pa.Table | None:
    path = store / relative
    return store_write.read_table(path) if path.is_file() else None


def _unknown(encoded: pa.Table | None, side: Side, size: int) -> Bools | None:
    """[size] entities whose id has no row yet: new ones, and those that were too rare."""
    if encoded is None or pa.types.is_nested(encoded.schema.field(ID_FIELD[side]).type):
        return None
    out = np.ones(size, np.bool_)
    out[: encoded.num_rows - 1] = encoded[ID_FIELD[side]].to_numpy()[1:] == OOV
    return out


def _encoded(encoder: Encoder, side: Side, raw: pa.Table, encoded: pa.Table | None, old: pa.Table | None) -> pa.Table:
    """Encoded entities below the unknown one. Of `encoded`, as the store before has them, rows stay that cannot differ:
    described as before (`old`), and nothing in them unknown."""
    kinds = {f.name: f.kind for f in encoder.features[side]}
    simple = all(k != "multi" for k in kinds.values())
    if encoded is None or old is None or not simple or old.schema != raw.schema:
        return encoder.encode_entities(side, with_unknown(raw))
    again = np.ones(raw.num_rows, np.bool_)
    same = raw.slice(0, old.num_rows)
    again[: old.num_rows] = _differ(same, old)
    for name in (ID_FIELD[side], *(n for n, k in kinds.items() if k == "categorical")):
        if pa.types.is_nested(encoded.schema.field(name).type):
            continue  # open vocabularies know every value
        again[: old.num_rows] |= encoded[name].to_numpy()[1:] == OOV
    rows = np.flatnonzero(again)
    fresh = encoder.encode_entities(side, raw.take(pa.array(rows))).cast(encoded.schema)
    at = np.arange(raw.num_rows + 1)
    at[rows + 1] = encoded.num_rows + np.arange(len(rows))
    return pa.concat_tables([encoded, fresh]).combine_chunks().take(pa.array(at))


def _differ(a: pa.Table, b: pa.Table) -> Bools:
    """[B] rows that differ in any column; nulls are equal."""
    out = np.zeros(a.num_rows, np.bool_)
    for name in a.column_names:
        if a[name].equals(b[name]):
            continue
        if pa.types.is_nested(a.schema.field(name).type):
            return np.ones(a.num_rows, np.bool_)
        unequal = pc.fill_null(pc.not_equal(a[name], b[name]), False).to_numpy()
        out |= unequal | (a[name].is_null().to_numpy() != b[name].is_null().to_numpy())
    return out


def _train_counts(
    plan: ShardPlan,
    tables: tuple[pa.Table, pa.Table],
    counts: tuple[pa.Table, pa.Table],
    shards: Sequence[Mapping[str, Any]],
    unknown: tuple[Bools | None, ...],
) -> TrainCounts:
    (users, ads), (values, entities) = tables, counts
    groups = value_groups(values)
    seen = entity_totals(entities, USER, users.num_rows)
    shown, events = (entity_totals(entities, group, ads.num_rows) for group in (AD_SHOWN, AD_EVENT))
    return TrainCounts(
        user=EntityCounts(users, seen, seen, unknown[0]),
        ad=EntityCounts(ads, shown + events, shown, unknown[1]),
        surfaces=groups.get("surface", COUNTS.empty_table()),
        context={g[4:]: t for g, t in groups.items() if g.startswith("ctx:")},
        moments=merged_moments(shards),
        num_days=plan.last_train_day - plan.first_day + 1,
    )


def _by_index(places: Places, ads: pa.Table, firsts: Sequence[int]) -> list[pa.Table]:
    """Counts of entities by entity index, of every shard; `firsts` are the indices of the shards' first new users."""
    ad_index = KeyIndex(pa.concat_arrays([pa.nulls(1, ads["key"].type), ads["key"].combine_chunks()]))
    out = []
    for shard, first in enumerate(firsts):
        table = read_piece(places.built(shard) / "entities")
        path = places.store / store_write.index_path(shard)
        old = (
            store_write.read_table(path, columns=["user"])["user"].to_numpy()
            if path.is_file()
            else np.zeros(0, np.int32)
        )
        new = read_piece(places.built(shard) / "users").num_rows
        users = np.concatenate([old, np.arange(first, first + new, dtype=np.int32)])
        mine = ad_index.index_many(read_piece(places.built(shard) / "ads")["key"])
        code, is_user = table["index"].to_numpy(), table["group"].to_numpy() == USER
        index = np.empty(len(code), np.int32)
        index[is_user], index[~is_user] = users[code[is_user]], mine[code[~is_user]]
        out.append(table.set_column(2, "index", pa.array(index)))
    return out


def _user_table(spec: DatasetSpec, plan: ShardPlan, places: Places, old: pa.Table | None, num_shards: int) -> pa.Table:
    """Raw users in index order: those of the store, then each shard's new ones."""
    folders = [places.built(s) for s in range(num_shards)]
    kind = pa.type_for_alias(plan.key_types["user"])
    new = pa.chunked_array([c for f in folders for c in read_piece(f / "users")["key"].cast(kind).chunks], kind)
    described = [read_piece(f / "described") for f in folders if has_piece(f / "described")]
    return _merged(old, new, described, kind, log_time(spec, spec.users.table) is not None)


def _ad_table(
    spec: DatasetSpec, plan: ShardPlan, places: Places, old: pa.Table | None, num_shards: int
) -> tuple[pa.Table, int]:
    """Raw ads in index order: those of the store, then the new ones by key; and how many descriptions repeat a key."""
    kind, is_log = pa.type_for_alias(plan.key_types["ad"]), log_time(spec, spec.ads.table) is not None
    table = load_pieces(places.work / "ads", {"key": plan.key_types["ad"]})
    described = [] if table is None else [table]
    chunks = [c for s in range(num_shards) for c in read_piece(places.built(s) / "ads")["key"].cast(kind).chunks]
    chunks += [c for d in described for c in d["key"].chunks]
    keys = pc.unique(pa.chunked_array(chunks, kind))
    items = _described_by_key(spec.ads, keys, is_log)
    if old is not None:
        keys = keys.filter(pc.invert(pc.is_in(keys, value_set=old["key"].cast(kind).combine_chunks())))
    keys = keys.take(pc.sort_indices(keys))
    repeats = sum(d.num_rows - len(pc.unique(d["key"])) for d in described)
    return _merged(old, pa.chunked_array([keys], kind), [*described, *items], kind, is_log), repeats


def _described_by_key(entity: EntitySpec, keys: pa.Array, is_log: bool) -> list[pa.Table]:
    """Features of items: events without an ad carry them as JSON in their key."""
    if not pa.types.is_string(keys.type):
        return []
    marked = keys.filter(pc.starts_with(keys, ITEM_MARK))
    described = {key: item for key in marked.to_pylist() if (item := item_features(key)) is not None}
    if not described:
        return []
    items, values = pa.array(list(described), pa.string()), list(described.values())
    columns: dict[str, Any] = {"key": items} | ({SINCE: np.zeros(len(items), np.int64)} if is_log else {})
    for feature in entity.features:
        if feature.kind not in ("categorical", "multi"):
            continue
        found = [v.get(feature.name) for v in values]
        if feature.kind == "multi":
            columns[feature.name] = pa.array([None if v is None else [str(v)] for v in found], pa.list_(pa.string()))
        else:
            columns[feature.name] = pa.array([None if v is None else str(v) for v in found], pa.string())
    return [pa.table(columns)]


def _merged(
    old: pa.Table | None, new: pa.ChunkedArray, described: Sequence[pa.Table], kind: pa.DataType, is_log: bool
) -> pa.Table:
    """One row per key, old keys first; features of the last description, of the store where there is no new one.

    In a log (`is_log`) the earliest counts, of equal ones the first: a later one would tell the rows before what comes.
    """
    keys = new if old is None else pa.chunked_array([*old["key"].cast(kind).chunks, *new.chunks], kind)
    keys = keys.combine_chunks()
    tables = [_storable(t.set_column(0, "key", t["key"].cast(kind))) for t in described]
    if old is not None:
        tables.insert(0, old.set_column(0, "key", old["key"].cast(kind)))
    if not tables:
        return pa.table({"key": keys})
    if not described and old is not None:
        nothing = {f.name: pa.nulls(len(new), f.type) for f in old.schema if f.name != "key"}
        return pa.concat_tables([tables[0], pa.table({"key": new, **nothing})]).combine_chunks()
    table = pa.concat_tables(tables, promote_options="permissive").combine_chunks()
    if is_log:
        since = table[SINCE]
        order = pc.array_sort_indices(since.combine_chunks())  # stable, nulls last: no row of the log describes those
        order = order.slice(0, len(since) - since.null_count)
    else:
        order = pa.array(np.arange(table.num_rows - 1, -1, -1))  # index_in finds the first: turn it round
    at = order.take(pc.index_in(keys, value_set=table["key"].take(order).combine_chunks()))
    return pa.table({"key": keys, **{n: table[n].take(at) for n in table.column_names if n != "key"}}).combine_chunks()


def _storable(table: pa.Table) -> pa.Table:
    """Vectors as lists of any length: Arrow cannot read a fixed-size list from Parquet if one of them is null."""
    for at, f in enumerate(table.schema):
        if pa.types.is_fixed_size_list(f.type):
            table = table.set_column(at, f.name, table[f.name].cast(pa.list_(f.type.value_type)))
    return table


def _write_outcomes(spec: DatasetSpec, plan: ShardPlan, places: Places) -> dict[str, Entry]:
    """The window's rows of every label log, into the store."""
    out: dict[str, Entry] = {}
    for task, label in spec.labels.items():
        rows = (
            load_pieces(places.work / "labels" / task, {"key": plan.key_types[f"key:{task}"]}) if label.table else None
        )
        if rows is not None:
            rows = rows.sort_by([("key", "ascending"), ("time_ms", "ascending")])
            path = outcome_path(task, plan.window)
            out[path] = store_write.write_table(
                places.store,
                path,
                rows.select(["key", "time_ms"]).sort_by([("key", "ascending"), ("time_ms", "ascending")]),
            )
    return out


__all__ = ["Fitted", "fit_window", "with_unknown"]
