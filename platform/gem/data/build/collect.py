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

from gem.data.build import store_write
from gem.data.build.copies import Met, event_places, impression_places, meet, stored_copies, stored_numbers
from gem.data.build.counting import count_window
from gem.data.build.duplicates import find_duplicates
from gem.data.build.labels import shown_at
from gem.data.build.outcomes import outran
from gem.data.build.pieces import Places, load_pieces, write_piece
from gem.data.build.shard_plan import ShardPlan
from gem.data.build.suspects import conflicting_rows, early_outcomes, hot_users
from gem.data.build.timelines import (
    I64,
    Bools,
    Ints,
    codes_of,
    in_order_of,
    order_and_ties,
    rank_in_run,
    repeated,
    runs,
)
from gem.data.days import HOUR_MS, day_numbers
from gem.data.hashing import stable_hash64
from gem.data.ingest.spec_check import kind_names
from gem.data.spec import DatasetSpec

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

    row: position in the shard's pieces. repeat: the store has a copy, whose place it takes; it is counted nowhere.
    conflicts and dropped: positions of rows that contradict another, and of rows that the cap took. met: what of the
    store was a copy.
    """

    row: I64
    code: npt.NDArray[np.int32]
    part: npt.NDArray[np.int32]
    repeat: Bools
    duplicates: int
    conflicts: I64
    dropped: I64
    met: Met


def collect_shard(spec: DatasetSpec, plan: ShardPlan, places: Places, shard: int) -> dict[str, Any]:
    """Fragments of one shard -> `built/<shard>/{users,described,events,impressions,ads,values,entities}` in `work`.

    The store holds what came before. Returns JSON: rows, new users, duplicates, conflicts, capped rows, hot users,
    moments.
    """
    types, work = plan.key_types, places.work
    impressions = load_pieces(work / "impressions", types, shard)
    events = load_events(work, shard, types)
    described = load_pieces(work / "users", {"key": types["user"]}, shard)
    known = _known_users(places.store, shard, types["user"])
    new = _new_keys(known, [t[c] for t, c in ((impressions, "user"), (events, "user"), (described, "key")) if t])
    keys = pa.concat_arrays([known, new])
    out = places.built(shard)
    shown = _impressions(spec, plan, places.store, impressions, (keys, shard)) if impressions else None
    known_ms = _not_before_its_impression(spec, plan, places.store, events, (impressions, shard))
    lines = _events(spec, plan, places.store, events, (keys, shard, known_ms, shown.met if shown else None))
    for kind, found in (("impressions", shown), ("events", lines)):
        if found is not None and found.met.gone is not None:
            write_piece(out / f"gone-{kind}", found.met.gone)
    if shown:
        write_piece(out / "impressions", pa.table({"row": shown.row, "code": shown.code, "part": shown.part}))
    at = {"row": lines.row, "code": lines.code, "part": lines.part, "known_ms": known_ms[lines.row]}
    write_piece(out / "events", pa.table(at))
    write_piece(out / "users", pa.table({"key": new}))
    if described is not None:
        write_piece(out / "described", described)
    chunks = [c for t in (impressions, events) if t for c in t["ad"].chunks]
    ads = pc.unique(pa.chunked_array(chunks, types["ad"]))
    write_piece(out / "ads", pa.table({"key": ads}))
    counted = count_window(spec, plan, (impressions, shown) if impressions and shown else None, (events, lines), ads)
    write_piece(out / "values", counted.values)
    write_piece(out / "entities", counted.entities)
    return {
        "new_users": len(new),
        **(_tally("", shown) if shown else _NO_IMPRESSIONS),
        **_tally("_events", lines),
        "duplicate_users": described.num_rows - len(pc.unique(described["key"])) if described else 0,
        "conflict_records": conflicting_rows(spec, work, shard, (impressions, shown), (events, lines)),
        "repairs": early_outcomes(spec, plan, work, impressions, shown),
        "hot_users": hot_users(events, lines, keys),
        "outran": outran(spec, plan, places.store, shard, _new_rows(impressions, shown))
        if impressions and shown
        else 0,
        "moments": counted.moments,
    }


_NOTHING = pa.schema([("key", pa.int64()), ("time_ms", pa.int64())]).empty_table()
_NO_IMPRESSIONS = {"impressions": 0, "duplicates": 0, "conflicts": 0, "capped": 0}
_COUNTED = {"": ("impressions", "duplicates", "conflicts", "capped")}
_COUNTED["_events"] = ("events", "duplicate_events", "conflicting_events", "capped_events")


def _tally(kind: str, chosen: Chosen) -> dict[str, int]:
    again, other = len(chosen.met.repeat), chosen.met.replaced.num_rows if chosen.met.replaced else 0
    repeats, conflicts = chosen.duplicates + again - other, len(chosen.conflicts) + other
    numbers = (len(chosen.row) - again, repeats, conflicts, len(chosen.dropped))
    return dict(zip(_COUNTED[kind], numbers, strict=True))


def _new_rows(rows: pa.Table, chosen: Chosen) -> pa.Table:
    wanted = [n for n in rows.column_names if n == "time_ms" or n.startswith("key:")]
    return rows.select(wanted).take(pa.array(chosen.row[~chosen.repeat]))


def load_events(work: Path, shard: int, types: Mapping[str, str]) -> pa.Table:
    """All new events of a shard, in the order that `row` of the second pass refers to."""
    found = load_pieces(work / "events", types, shard)
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
    return store_write.read_table(path, columns=["key"])["key"].cast(kind).combine_chunks()


def _new_keys(known: pa.Array, columns: Sequence[pa.ChunkedArray]) -> pa.Array:
    """Distinct keys of the columns that the store does not know, sorted."""
    chunks = [chunk for column in columns for chunk in column.chunks]
    distinct = pc.unique(pa.chunked_array(chunks, known.type))
    if len(known):
        distinct = distinct.filter(pc.invert(pc.is_in(distinct, value_set=known)))
    return distinct.take(pc.sort_indices(distinct))


def _np(table: pa.Table, column: str) -> npt.NDArray[Any]:
    out: npt.NDArray[Any] = table[column].to_numpy()
    return out


def _impressions(
    spec: DatasetSpec, plan: ShardPlan, store: Path, rows: pa.Table, about: tuple[pa.Array, int]
) -> Chosen:
    """Distinct impressions sorted by (day, user, time_ms, impression_id).

    Of rows with one duplicate key one stays, wherever it stood: a positive first label wins, then the next label.
    """
    keys, shard = about
    code, day, time_ms = codes_of(rows["user"], keys), _np(rows, "day"), _np(rows, "time_ms")
    dup, own = _np(rows, "dup"), _np(rows, "impression_id")
    some = np.flatnonzero(repeated((code, dup)))
    ad = stable_hash64(rows["ad"].take(pa.array(some))).view(np.int64)
    ties: list[Ints] = [-_np(rows, n)[some].astype(np.int64) for n in rows.column_names if n.startswith("label:")]
    ties += [time_ms[some], ad, own[some], day[some]]
    found = find_duplicates((code[some], dup[some]), ties, (ad, time_ms[some]))
    new = {"code": code, "dup": dup, "time_ms": time_ms, "impression_id": own, "part": day}
    new |= {f"own_{n[6:]}": _np(rows, n) for n in rows.column_names if n.startswith("label:")}
    labels = [n for n in new if n.startswith("own_")]
    old = stored_copies(store, "impressions", shard, impression_places(spec, store, shard, day, dup),
                        ["impression_id", *labels])  # fmt: skip
    better = [*(f"-{n}" for n in labels), "time_ms", "ad", "impression_id", "part"]
    met = meet(store, old, about, (rows, some[~found.keep], new), better)
    order, tied = order_and_ties((day, code), time_ms)
    row = _without(in_order_of((own, dup), order, tied), np.append(some[~found.keep], met.lost))
    row, dropped = _capped(row, code, day_numbers(time_ms, spec.impressions.zone), plan.max_rows_per_user_day)
    return _chosen(row, (code, day), met, some[found.conflict], (found.num_dropped, dropped))


def _events(
    spec: DatasetSpec, plan: ShardPlan, store: Path, events: pa.Table, about: tuple[pa.Array, int, I64, Met | None]
) -> Chosen:
    """Distinct events sorted by (partition, user, known_ms, time_ms).

    Of equal ones the copy with the most flags stays, wherever it stood. Rows of a list keep its order; other ties are
    ordered by content, so that files may come in any order.
    """
    keys, shard, known_ms, shown = about
    code, kind, dup, time_ms = (
        codes_of(events["user"], keys),
        _np(events, "kind"),
        _np(events, "dup"),
        _np(events, "time_ms"),
    )
    days = day_numbers(known_ms, spec.impressions.zone)
    part = store_write.partition_numbers(days, plan.first_day)
    order, tied = order_and_ties((part, code), known_ms)
    some = _suspects(spec, kind, order[tied.place])
    ad = stable_hash64(events["ad"].take(pa.array(some))).view(np.int64)
    ties: list[Ints] = [-_np(events, n)[some].astype(np.int32) for n in ("flags", "dwell")]
    found = find_duplicates(
        (code[some], kind[some], dup[some]), (*ties, known_ms[some], ad), (ad, time_ms[some])
    )  # fmt: skip
    new = {"code": code, "kind": kind, "dup": dup, "time_ms": time_ms, "known_ms": known_ms, "part": part}
    new |= {n: _np(events, n) for n in ("flags", "dwell")}
    at = event_places(spec, store, shard, new, shown)
    old = stored_copies(store, "timelines", shard, at, ["kind", "known_ms", "flags", "dwell"])
    met = meet(store, old, (keys, shard), (events, some[~found.keep], new), ("-flags", "-dwell", "known_ms", "ad"))
    row = in_order_of((time_ms, order_of(events), kind, dup), order, tied)
    row = _without(row, np.append(some[~found.keep], met.lost))
    row, dropped = _capped(row, code, days, plan.max_rows_per_user_day)
    return _chosen(row, (code, part), met, some[found.conflict], (found.num_dropped, dropped))


def _suspects(spec: DatasetSpec, kind: Ints, tied: I64) -> I64:
    """Rows that may be copies of another: those of one user and one moment; those whose key tells no time."""
    kinds = kind_names(spec)
    loose = [
        kinds.index(s.kind) + 1
        for s in spec.events
        if s.id or s.ingested or (s.table == spec.impressions.table and not s.list_before)
    ]
    mask = np.isin(kind, np.array(loose, kind.dtype)) if loose else np.zeros(len(kind), np.bool_)
    mask[tied] = True
    return np.flatnonzero(mask)


def _without(order: I64, rows: I64) -> I64:
    if not len(rows):
        return order
    keep = np.ones(len(order), np.bool_)
    keep[rows] = False
    return order[keep[order]]


def _chosen(row: I64, whose: tuple[Ints, Ints], met: Met, conflicts: I64, lost: tuple[int, I64]) -> Chosen:
    code, part = (w[row].astype(np.int32, copy=False) for w in whose)
    repeat = np.isin(row, met.repeat) if len(met.repeat) else np.zeros(len(row), np.bool_)
    conflicts = np.append(conflicts, met.conflict)
    return Chosen(row, code, part, repeat, lost[0] + len(met.lost) - len(conflicts), conflicts, lost[1], met)


def _capped(row: I64, code: Ints, day: Ints, limit: int) -> tuple[I64, I64]:
    """(rows within the first `limit` of their user and day, the others)."""
    users, days = code[row], day[row]
    if not len(row) or int(runs(users, days)[1].max()) <= limit:
        return row, row[:0]
    fits = rank_in_run(users, days) < limit
    return row[fits], row[~fits]


def _stored(store: Path, kind: str, numbers: Sequence[int], shard: int, columns: list[str]) -> pa.Table | None:
    paths = [store / store_write.partition_path(kind, store_write.partition_name(n), shard) for n in numbers]
    tables = [store_write.read_table(p, columns=columns) for p in paths if p.is_file()]
    return pa.concat_tables(tables) if tables else None


def _not_before_its_impression(
    spec: DatasetSpec, plan: ShardPlan, store: Path, events: pa.Table, shown: tuple[pa.Table | None, int]
) -> I64:
    """known_ms [E]: an outcome is never known before the impression it belongs to, whatever its clock says."""
    impressions, shard = shown
    known: I64 = _np(events, "known_ms")
    keys = [n for n in events.column_names if n.startswith("key:")]
    if not keys:
        return known
    known, time_ms = known.copy(), _np(events, "time_ms")
    for name in keys:
        rows = np.flatnonzero(np.asarray(events[name].is_valid()))
        if not len(rows):
            continue
        log = (events[name].combine_chunks().take(pa.array(rows)), time_ms[rows])
        window_ms = int((spec.labels[name[4:]].window_hours or 0) * HOUR_MS)
        first = int(day_numbers(np.array([log[1].min() - window_ms]), spec.impressions.zone)[0])
        days = [n for n in stored_numbers(store, "impressions", shard) if n >= first - 1]
        stored = _stored(store, "impressions", days, shard, [f"key_{name[4:]}", "time_ms"])
        tables = [t.select([c, "time_ms"]).rename_columns(["key", "time_ms"])
                  for t, c in ((impressions, name), (stored, f"key_{name[4:]}")) if t]  # fmt: skip
        found = pa.concat_tables([t.set_column(0, "key", t["key"].cast(log[0].type)) for t in tables] or [_NOTHING])
        shows = (found["key"].combine_chunks(), _np(found, "time_ms"))
        own, has_one = shown_at(shows, log, window_ms, plan.max_skew_ms)
        known[rows[has_one]] = np.maximum(known[rows[has_one]], own[has_one])
    return known
