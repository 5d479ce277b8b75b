"""Second pass of preprocess, per shard of users: which rows of a window stay, in which order, and what they count.

The rows themselves stay in the pieces of the first pass; this pass writes positions into them. Users stand there as
codes: the users that the store knows already in the order of its index, then the new ones by key. A code and a user's
entity index are in the same order. Pure functions of files: no Ray here.
"""

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

from gem.data import store_write
from gem.data.counting import count_window
from gem.data.days import day_numbers
from gem.data.duplicates import Duplicates, find_duplicates
from gem.data.hashing import stable_hash64
from gem.data.pieces import Places, load_pieces, shard_name, write_piece
from gem.data.shard_plan import ShardPlan
from gem.data.spec import DatasetSpec
from gem.data.suspects import conflicting_rows, early_outcomes, hot_users
from gem.data.timelines import I64, Bools, Ints, grouped_order, rank_in_run, repeated

EVENT_COLUMNS: dict[str, pa.DataType] = {
    "time_ms": pa.int64(),
    "known_ms": pa.int64(),
    "kind": pa.uint8(),
    "flags": pa.uint16(),
    "surface": pa.string(),
    "dwell": pa.uint8(),
    "dup": pa.int64(),
}


@dataclass(frozen=True)
class Chosen:
    """Rows of one kind that stay, in final order: by partition, then user, then time. All arrays [N] but the last two.

    row: position in the shard's pieces. repeat: the store has the row already, it is counted nowhere. conflicts and
    dropped: positions of rows that contradict another, and of rows that the cap took.
    """

    row: I64
    code: npt.NDArray[np.int32]
    part: npt.NDArray[np.int32]
    repeat: Bools
    duplicates: int
    conflicts: I64
    dropped: I64


def collect_shard(spec: DatasetSpec, plan: ShardPlan, places: Places, shard: int) -> dict[str, Any]:
    """Fragments of one shard -> `built/<shard>/{users,described,events,impressions,ads,counts}` in `work`.

    The store holds what came before. Returns JSON: rows, new users, duplicates, conflicts, capped rows, hot users,
    moments.
    """
    name, types, work = shard_name(shard), plan.key_types, places.work
    impressions = load_pieces(work / "impressions" / name, types)
    events = load_events(work, shard, types)
    described = load_pieces(work / "users" / name, {"key": types["user"]})
    known = _known_users(places.store, shard, types["user"])
    new = _new_keys(known, [t[c] for t, c in ((impressions, "user"), (events, "user"), (described, "key")) if t])
    keys = pa.concat_arrays([known, new])
    out = places.built(shard)
    shown = _impressions(spec, plan, places.store, impressions, (keys, shard)) if impressions else None
    known_ms = _not_before_its_impression(spec, events, impressions, shown)
    lines = _events(spec, plan, places.store, events, (keys, shard, known_ms))
    if shown:
        write_piece(out / "impressions", pa.table({"row": shown.row, "code": shown.code, "part": shown.part}))
    at = {"row": lines.row, "code": lines.code, "part": lines.part, "known_ms": known_ms[lines.row]}
    write_piece(out / "events", pa.table(at))
    write_piece(out / "users", pa.table({"key": new}))
    if described is not None:
        write_piece(out / "described", described)
    chunks = [c for t in (impressions, events) if t for c in t["ad"].chunks]
    write_piece(out / "ads", pa.table({"key": pc.unique(pa.chunked_array(chunks, types["ad"]))}))
    counted, moments = count_window(spec, plan, _fresh(impressions, shown), _fresh(events, lines), keys)
    write_piece(out / "counts", counted)
    return {
        "new_users": len(new),
        **(_tally("", shown) if shown else _NO_IMPRESSIONS),
        **_tally("_events", lines),
        "duplicate_users": described.num_rows - len(pc.unique(described["key"])) if described else 0,
        "conflict_records": conflicting_rows(spec, work, shard, (impressions, shown), (events, lines)),
        "repairs": early_outcomes(spec, plan, work, impressions, shown),
        "hot_users": hot_users(events, lines, keys),
        "moments": moments,
    }


_NO_IMPRESSIONS = {"impressions": 0, "duplicates": 0, "conflicts": 0, "capped": 0}
_COUNTED = {"": ("impressions", "duplicates", "conflicts", "capped")}
_COUNTED["_events"] = ("events", "duplicate_events", "conflicting_events", "capped_events")


def _tally(kind: str, chosen: Chosen) -> dict[str, int]:
    again = int(chosen.repeat.sum())
    numbers = (len(chosen.row) - again, chosen.duplicates + again, len(chosen.conflicts), len(chosen.dropped))
    return dict(zip(_COUNTED[kind], numbers, strict=True))


def load_events(work: Path, shard: int, types: Mapping[str, str]) -> pa.Table:
    """All new events of a shard, in the order that `row` of the second pass refers to."""
    found = load_pieces(work / "events" / shard_name(shard), types)
    if found is not None:
        return found
    fields = {"user": pa.type_for_alias(types["user"]), "ad": pa.type_for_alias(types["ad"]), **EVENT_COLUMNS}
    return pa.schema(list(fields.items())).empty_table()


def order_of(events: pa.Table) -> I64:
    """Place of each event among those of its list, 0 where it is of none, [E]."""
    if "order" not in events.column_names:
        return np.zeros(events.num_rows, np.int64)
    out: I64 = pc.fill_null(events["order"], 0).to_numpy()
    return out


def _known_users(store: Path, shard: int, kind: str) -> pa.Array:
    path = store / store_write.index_path(shard)
    if not path.is_file():
        return pa.array([], kind)
    return pq.read_table(path, columns=["key"])["key"].cast(kind).combine_chunks()


def _new_keys(known: pa.Array, columns: Sequence[pa.ChunkedArray]) -> pa.Array:
    """Distinct keys of the columns that the store does not know, sorted."""
    chunks = [chunk for column in columns for chunk in column.chunks]
    distinct = pc.unique(pa.chunked_array(chunks, known.type))
    if len(known):
        distinct = distinct.filter(pc.invert(pc.is_in(distinct, value_set=known)))
    return distinct.take(pc.sort_indices(distinct))


def _codes(table: pa.Table, keys: pa.Array) -> npt.NDArray[np.int32]:
    out: npt.NDArray[np.int32] = pc.index_in(table["user"], value_set=keys).to_numpy().astype(np.int32, copy=False)
    return out


def _np(table: pa.Table, column: str) -> npt.NDArray[Any]:
    out: npt.NDArray[Any] = table[column].to_numpy()
    return out


def _fresh(rows: pa.Table | None, chosen: Chosen | None) -> tuple[pa.Table, Chosen] | None:
    return None if rows is None or chosen is None else (rows, chosen)


def _impressions(
    spec: DatasetSpec, plan: ShardPlan, store: Path, rows: pa.Table, about: tuple[pa.Array, int]
) -> Chosen:
    """Distinct impressions sorted by (day, user, time_ms, impression_id).

    Of rows with one duplicate key the one with the most positive labels stays, wherever it stood.
    """
    keys, shard = about
    code, day, time_ms = _codes(rows, keys), _np(rows, "day"), _np(rows, "time_ms")
    ad, own = stable_hash64(rows["ad"]).view(np.int64), _np(rows, "impression_id")
    ties: list[Ints] = [-_np(rows, n).astype(np.int64) for n in rows.column_names if n.startswith("label:")]
    ties += [time_ms, ad, own, day]
    found = find_duplicates((code, _np(rows, "dup")), ties, (ad, time_ms))
    row = np.flatnonzero(found.keep)
    local = day_numbers(time_ms, spec.impressions.zone)
    row = row[grouped_order((day[row], code[row]), time_ms[row], (own[row], _np(rows, "dup")[row]))]
    row, dropped = _capped(row, code, local, plan.max_rows_per_user_day)
    days = np.unique(day[row]).tolist()
    old = _stored(store, "impressions", days, shard, ["user", "dup"])
    repeat = _repeats(old, store, shard, {"code": code[row], "dup": _np(rows, "dup")[row]})
    return _chosen(row, (code, day), repeat, found, dropped)


def _events(
    spec: DatasetSpec, plan: ShardPlan, store: Path, events: pa.Table, about: tuple[pa.Array, int, I64]
) -> Chosen:
    """Distinct events sorted by (partition, user, known_ms, time_ms).

    Of equal ones the copy with the most flags stays, wherever it stood. Rows of a list keep its order; other ties are
    ordered by content, so that files may come in any order.
    """
    keys, shard, known_ms = about
    code, kind, dup, time_ms = _codes(events, keys), _np(events, "kind"), _np(events, "dup"), _np(events, "time_ms")
    ad = stable_hash64(events["ad"]).view(np.int64)
    ties = (-_np(events, "flags").astype(np.int32), -_np(events, "dwell").astype(np.int32), known_ms, ad)
    found = find_duplicates((code, kind, dup), ties, (ad, time_ms))
    row = np.flatnonzero(found.keep)
    days = day_numbers(known_ms, spec.impressions.zone)
    part = store_write.partition_numbers(days, plan.first_day)
    order = order_of(events)
    content = tuple(c[row] for c in (time_ms, order, kind, dup))
    row = row[grouped_order((part[row], code[row]), known_ms[row], content)]
    row, dropped = _capped(row, code, days, plan.max_rows_per_user_day)
    old = _stored(store, "timelines", _reach(spec, plan, part[row], time_ms[row]), shard, ["user", "kind", "dup"])
    repeat = _repeats(old, store, shard, {"code": code[row], "kind": kind[row], "dup": dup[row]})
    return _chosen(row, (code, part), repeat, found, dropped)


def _chosen(row: I64, whose: tuple[Ints, Ints], repeat: Bools, found: Duplicates, dropped: I64) -> Chosen:
    conflicts = np.flatnonzero(found.conflict)
    code, part = (w[row].astype(np.int32) for w in whose)
    return Chosen(row, code, part, repeat, found.num_dropped - len(conflicts), conflicts, dropped)


def _capped(row: I64, code: Ints, day: Ints, limit: int) -> tuple[I64, I64]:
    """(rows within the first `limit` of their user and day, the others)."""
    fits = rank_in_run(code[row], day[row]) < limit
    return (row, row[:0]) if fits.all() else (row[fits], row[~fits])


def _reach(spec: DatasetSpec, plan: ShardPlan, part: Ints, time_ms: Ints) -> list[int]:
    """Partitions in which a copy of these events may lie: their own; where arrival decides, all since then."""
    own = np.unique(part).tolist()
    if not any(source.ingested for source in spec.events) or not own:
        return [int(n) for n in own]
    first = int(day_numbers(np.array([time_ms.min()]), spec.impressions.zone)[0])
    since = range(max(first, plan.first_day), int(own[-1]) + 1)
    return [int(n) for n in {*own, store_write.BEFORE_NUMBER, *since}]


def _stored(store: Path, kind: str, numbers: Sequence[int], shard: int, columns: list[str]) -> pa.Table | None:
    paths = [store / store_write.partition_path(kind, store_write.partition_name(n), shard) for n in numbers]
    tables = [pq.read_table(p, columns=columns) for p in paths if p.is_file()]
    return pa.concat_tables(tables) if tables else None


def _repeats(old: pa.Table | None, store: Path, shard: int, new: Mapping[str, Ints]) -> Bools:
    """[N] rows whose key (columns of `new`) stands in the store already."""
    size = len(new["code"])
    out = np.zeros(size, np.bool_)
    if old is None or not size:
        return out
    index = pq.read_table(store / store_write.index_path(shard), columns=["user"])["user"].to_numpy()
    code = np.searchsorted(index, _np(old, "user"))
    keys = [np.concatenate([code if n == "code" else _np(old, n), values]) for n, values in new.items()]
    candidates = np.flatnonzero(repeated(keys))
    if not len(candidates):
        return out
    is_new = candidates >= old.num_rows
    found = find_duplicates([k[candidates] for k in keys], (is_new.astype(np.int8),), ())
    out[candidates[is_new & ~found.keep] - old.num_rows] = True
    return out


def _not_before_its_impression(
    spec: DatasetSpec, events: pa.Table, impressions: pa.Table | None, shown: Chosen | None
) -> I64:
    """known_ms [E]: an outcome is never known before the impression it belongs to, whatever its clock says."""
    known: I64 = _np(events, "known_ms")
    if "ref" not in events.column_names or impressions is None or shown is None:
        return known
    known, ref = known.copy(), events["ref"].combine_chunks()
    time_ms = _np(impressions, "time_ms")
    for task in (n for n, label in spec.labels.items() if label.table):
        at = pc.index_in(ref, value_set=impressions[f"key:{task}"].combine_chunks())
        hit = np.asarray(at.is_valid()) & np.asarray(ref.is_valid())
        known[hit] = np.maximum(known[hit], time_ms[pc.fill_null(at, 0).to_numpy()[hit]])
    return known
