"""The driver's work between the passes: number users and ads, fit or grow the encoder, write the entity tables."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gem.data import store_write
from gem.data.counting import TRAINING, add_counts, groups_of, merged_moments
from gem.data.encoding import Encoder
from gem.data.fitting import EntityCounts, TrainCounts, fit_encoder, grow_encoder
from gem.data.keys import KeyIndex
from gem.data.outcomes import outcome_path
from gem.data.pieces import Places, has_piece, load_pieces, read_piece
from gem.data.shard_plan import ShardPlan
from gem.data.spec import DatasetSpec, EntitySpec
from gem.data.store_write import Entry
from gem.data.vocabulary import COUNTS, as_text

ITEM = "~"  # first character of the key of an entity that is described by its own key


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
    total, held = add_counts(
        _stored(store, store_write.TOTAL),
        _stored(store, store_write.HELD),
        [read_piece(places.built(s) / "counts") for s in range(len(shards))],
        plan.last_train_day,
    )
    groups = groups_of(total)
    old_users = _stored(store, store_write.RAW_USERS)
    users = _user_table(plan, places, old_users, len(shards))
    ads, duplicate_ads = _ad_table(spec, plan, places, _stored(store, store_write.RAW_ADS), len(shards))
    counts = _train_counts(plan, users, ads, groups, shards)
    encoder = _encoder(spec, store, counts)
    files |= encoder.save(store)
    texts = {
        store_write.SPEC: spec.model_dump_json(indent=1),
        store_write.SCHEMA: store_write.canonical_json(encoder.schema.to_dict()),
    }
    tables = {
        store_write.TOTAL: total,
        store_write.HELD: held,
        store_write.RAW_USERS: users,
        store_write.RAW_ADS: ads,
        store_write.USERS: encoder.encode_entities("user", with_unknown(users)),
        store_write.ADS: encoder.encode_entities("ad", with_unknown(ads)),
    }
    files |= {name: store_write.write_text(store, name, text) for name, text in texts.items()}
    files |= {name: store_write.write_table(store, name, table) for name, table in tables.items()}
    known = 0 if old_users is None else old_users.num_rows
    firsts = 1 + known + np.cumsum([0, *(int(s["new_users"]) for s in shards)])[:-1]
    return Fitted(encoder, counts, tuple(firsts.tolist()), files, users.num_rows, ads.num_rows, duplicate_ads)


def with_unknown(table: pa.Table) -> pa.Table:
    """The table below one row of nulls: entity 0, whom nobody knows."""
    nothing = pa.table({f.name: pa.nulls(1, f.type) for f in table.schema})
    return pa.concat_tables([nothing, table]).combine_chunks()


def _stored(store: Path, relative: str) -> pa.Table | None:
    path = store / relative
    return pq.read_table(path) if path.is_file() else None


def _encoder(spec: DatasetSpec, store: Path, counts: TrainCounts) -> Encoder:
    if not (store / store_write.ENCODER).is_file():
        return fit_encoder(spec, counts)
    return grow_encoder(spec, Encoder.load(store), counts)


def _train_counts(
    plan: ShardPlan,
    users: pa.Table,
    ads: pa.Table,
    groups: Mapping[str, pa.Table],
    shards: Sequence[Mapping[str, Any]],
) -> TrainCounts:
    none = COUNTS.empty_table()
    seen = _aligned(users["key"], groups.get("user", none))
    shown = _aligned(ads["key"], groups.get("ad_shown", none))
    events = _aligned(ads["key"], groups.get("ad_event", none))
    return TrainCounts(
        user=EntityCounts(users, seen, seen),
        ad=EntityCounts(ads, shown + events, shown),
        surfaces=groups.get("surface", none),
        context={g[4:]: t for g, t in groups.items() if g.startswith("ctx:")},
        moments=merged_moments(shards),
        num_days=plan.last_train_day - plan.first_day + 1,
    )


def _aligned(keys: pa.ChunkedArray, counts: pa.Table) -> npt.NDArray[np.int64]:
    """Counts [B] in the order of `keys`, 0 where a key was not counted."""
    index = KeyIndex(pa.concat_arrays([pa.nulls(1, pa.string()), counts["value"].combine_chunks()]))
    padded = np.concatenate([[0], counts["count"].to_numpy()]).astype(np.int64)
    out: npt.NDArray[np.int64] = padded[index.index_many(as_text(keys))]
    return out


def _user_table(plan: ShardPlan, places: Places, old: pa.Table | None, num_shards: int) -> pa.Table:
    """Raw users in index order: those of the store, then each shard's new ones. The last description of a key wins."""
    folders = [places.built(s) for s in range(num_shards)]
    kind = pa.type_for_alias(plan.key_types["user"])
    new = pa.chunked_array([c for f in folders for c in read_piece(f / "users")["key"].cast(kind).chunks], kind)
    described = [read_piece(f / "described") for f in folders if has_piece(f / "described")]
    return _merged(old, new, described, kind)


def _ad_table(
    spec: DatasetSpec, plan: ShardPlan, places: Places, old: pa.Table | None, num_shards: int
) -> tuple[pa.Table, int]:
    """Raw ads in index order: those of the store, then the new ones by key; and how many descriptions repeat a key."""
    kind = pa.type_for_alias(plan.key_types["ad"])
    table = load_pieces(places.work / "ads", {"key": plan.key_types["ad"]})
    described = [] if table is None else [table]
    chunks = [c for s in range(num_shards) for c in read_piece(places.built(s) / "ads")["key"].cast(kind).chunks]
    chunks += [c for d in described for c in d["key"].chunks]
    keys = pc.unique(pa.chunked_array(chunks, kind))
    items = _described_by_key(spec.ads, keys, described)
    if old is not None:
        keys = keys.filter(pc.invert(pc.is_in(keys, value_set=old["key"].cast(kind).combine_chunks())))
    keys = keys.take(pc.sort_indices(keys))
    repeats = sum(d.num_rows - len(pc.unique(d["key"])) for d in described)
    return _merged(old, pa.chunked_array([keys], kind), [*described, *items], kind), repeats


def _described_by_key(entity: EntitySpec, keys: pa.Array, described: Sequence[pa.Table]) -> list[pa.Table]:
    """Features of items: events without an ad carry them as JSON in their key."""
    if not pa.types.is_string(keys.type):
        return []
    items = keys.filter(pc.starts_with(keys, ITEM))
    if not len(items):
        return []
    values = [json.loads(k[len(ITEM) :]) for k in items.to_pylist()]
    columns: dict[str, Any] = {"key": items}
    for feature in entity.features:
        if feature.kind not in ("categorical", "multi"):
            continue
        found = [v.get(feature.name) for v in values]
        if feature.kind == "multi":
            columns[feature.name] = pa.array([None if v is None else [str(v)] for v in found], pa.list_(pa.string()))
        else:
            columns[feature.name] = pa.array([None if v is None else str(v) for v in found], pa.string())
    return [pa.table(columns)]


def _merged(old: pa.Table | None, new: pa.ChunkedArray, described: Sequence[pa.Table], kind: pa.DataType) -> pa.Table:
    """One row per key, old keys first; features of the last description, of the store where there is no new one."""
    keys = new if old is None else pa.chunked_array([*old["key"].cast(kind).chunks, *new.chunks], kind)
    keys = keys.combine_chunks()
    tables = [t.set_column(0, "key", t["key"].cast(kind)) for t in described]
    if old is not None:
        tables.insert(0, old.set_column(0, "key", old["key"].cast(kind)))
    if not tables:
        return pa.table({"key": keys})
    table = pa.concat_tables(tables, promote_options="permissive").combine_chunks()
    reverse = pa.array(np.arange(table.num_rows - 1, -1, -1))  # index_in finds the first: turn it round
    table = table.take(reverse)
    at = pc.index_in(keys, value_set=table["key"].combine_chunks())
    return pa.table({"key": keys, **{n: table[n].take(at) for n in table.column_names if n != "key"}}).combine_chunks()


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


__all__ = ["TRAINING", "Fitted", "fit_window", "with_unknown"]
