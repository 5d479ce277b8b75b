"""Copies of a window's rows that the store holds already, in whatever partition, and which one of them stays.

Pure functions of files: the store holds what came before the window. N rows of the window.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa

from gem.data.build import store_write
from gem.data.build.duplicates import find_duplicates
from gem.data.build.timelines import I64, Bools, Ints, is_in
from gem.data.days import day_numbers
from gem.data.hashing import stable_hash64
from gem.data.ingest.spec_check import kind_names
from gem.data.spec import DatasetSpec


def _none() -> I64:
    return np.zeros(0, np.int64)


@dataclass(frozen=True)
class Met:
    """What meeting the store does to new rows, as positions of theirs.

    lost: the store has a better copy or the same. repeat: better than the store's copy, whose place they take.
    conflict: lost, and they say something else. dup: keys of all copies in the store. gone: the store's rows that are
    replaced (part, row and what was asked for). replaced: those of them that say something else, with the keys of user
    and ad.
    """

    lost: I64 = field(default_factory=_none)
    repeat: I64 = field(default_factory=_none)
    conflict: I64 = field(default_factory=_none)
    dup: I64 = field(default_factory=_none)
    gone: pa.Table | None = None
    replaced: pa.Table | None = None


def stored_numbers(store: Path, kind: str, shard: int) -> list[int]:
    """Partitions that the store has for a shard, in order; `kind` is "timelines" or "impressions"."""
    paths = (store / kind).glob(f"day=*/shard-{shard:03d}.parquet")
    return sorted(store_write.partition_number(f"{kind}/{p.parent.name}/{p.name}") for p in paths)


def impression_places(spec: DatasetSpec, store: Path, shard: int, day: Ints, dup: I64) -> dict[int, I64]:
    """Partition -> keys whose copies may lie there: that of the row where time is part of the key, else all."""
    imp = spec.impressions
    timed = imp.time.column in imp.duplicate_key if imp.duplicate_key else not imp.id
    numbers = stored_numbers(store, "impressions", shard)
    if timed and not imp.day:
        numbers = sorted({*numbers} & {*np.unique(day).tolist()})
    return dict.fromkeys(numbers, dup)


def event_places(
    spec: DatasetSpec, store: Path, shard: int, new: Mapping[str, Ints], shown: Met | None
) -> dict[int, I64]:
    """Partition -> keys whose copies may lie there.

    Most keys hold the time and so say where a copy lies; an id says nothing, and where arrival decides it may lie
    anywhere later. Of impressions, `shown` tells which have a copy. new: kind, dup, part, time_ms.
    """
    numbers = stored_numbers(store, "timelines", shard)
    if not numbers:
        return {}
    kind, dup = new["kind"], new["dup"].astype(np.int64)
    names = kind_names(spec)

    def of(kinds: list[str]) -> Bools:
        return np.isin(kind, [names.index(k) + 1 for k in kinds])

    imp = spec.impressions.table
    far = dup[of([s.kind for s in spec.events if s.id])]
    if shown is not None and len(shown.dup):
        again = dup[of([s.kind for s in spec.events if s.table == imp and not s.list_before])]
        far = np.concatenate([far, again[np.isin(again, shown.dup)]])
    late = of([s.kind for s in spec.events if s.ingested])
    own = np.unique(new["part"]).tolist()
    since = 2**31
    if late.any():
        since = int(day_numbers(new["time_ms"][late].min(keepdims=True), spec.impressions.zone)[0])
    out = {}
    for number in numbers:
        keys = [dup] if number in own else [far]
        if number >= since or number == store_write.BEFORE_NUMBER:
            keys.append(dup[late])
        found = np.concatenate(keys)
        if len(found):
            out[number] = found
    return out


def stored_copies(
    store: Path, kind: str, shard: int, places: Mapping[int, I64], columns: Sequence[str]
) -> pa.Table | None:
    """Stored rows with one of the keys that `places` names: user, ad, time_ms, dup, the columns, and part and row,
    where they lie. None if there is none."""
    paths = {n: store / store_write.partition_path(kind, store_write.partition_name(n), shard) for n in places}
    there = {n: store_write.read_table(path, columns=["dup"])["dup"] for n, path in paths.items()}
    found = []
    for number, at in _hits(places, there):
        table = store_write.read_table(paths[number], columns=["user", "ad", "time_ms", "dup", *columns])
        part = pa.array(np.full(len(at), number, np.int32))
        found.append(table.take(pa.array(at)).append_column("part", part).append_column("row", pa.array(at)))
    return pa.concat_tables(found) if found else None


def _hits(places: Mapping[int, I64], there: Mapping[int, pa.ChunkedArray]) -> Iterator[tuple[int, I64]]:
    """(partition, rows) with one of the keys it was asked for; partitions of one set of keys are searched together."""
    asked: dict[int, list[int]] = {}
    for number, dup in places.items():
        asked.setdefault(id(dup), []).append(number)
    for numbers in asked.values():
        rows = pa.chunked_array([c for n in numbers for c in there[n].chunks], pa.int64())
        hit = np.flatnonzero(is_in(rows, pa.array(places[numbers[0]])))
        ends = np.cumsum([len(there[n]) for n in numbers])
        for number, end, start in zip(numbers, ends, ends - [len(there[n]) for n in numbers], strict=True):
            at = hit[np.searchsorted(hit, start) : np.searchsorted(hit, end)] - start
            if len(at):
                yield number, at


def meet(
    store: Path,
    old: pa.Table | None,
    about: tuple[pa.Array, int],
    rows: tuple[pa.Table, I64, Mapping[str, Ints]],
    better: Sequence[str],
) -> Met:
    """New rows against the copies that `stored_copies` found.

    about: keys of the users by code, and the shard. rows: the new rows, positions of those that are out already, and
    code, dup, time_ms and more of them, [N]. Rows of one user with equal dup (and kind, if there is one) are one row:
    that with the smallest of the columns `better` stays ("-flags": the largest), of equal ones the store's.
    """
    if old is None:
        return Met()
    keys, shard = about
    table, out, new = rows
    at = np.setdiff1d(np.flatnonzero(is_in(pa.array(new["dup"]), old["dup"].combine_chunks())), out)
    index = store_write.read_table(store / store_write.index_path(shard), columns=["user"])["user"].to_numpy()
    ads = store_write.read_table(store / store_write.ADS, columns=["key"])["key"].take(old["ad"])
    found = {n: old[n].to_numpy() for n in old.column_names if n in new}
    found |= {"code": np.searchsorted(index, old["user"].to_numpy()), "ad": stable_hash64(ads).view(np.int64)}
    mine = {n: v[at] for n, v in new.items()} | {"ad": stable_hash64(table["ad"].take(pa.array(at))).view(np.int64)}
    both = {n: np.concatenate([found[n].astype(np.int64), v.astype(np.int64)]) for n, v in mine.items()}
    identity = [both[n] for n in ("code", "kind", "dup") if n in both]
    size, values = old.num_rows, (both["ad"], both["time_ms"])
    is_new = (np.arange(size + len(at)) >= size).astype(np.int8)
    ties = [-both[n[1:]] if n.startswith("-") else both[n] for n in better]
    best = find_duplicates(identity, (*ties, is_new), values)
    known = ~find_duplicates(identity, (is_new,), ()).keep[size:]
    keep = best.keep[size:]
    named = old.set_column(old.column_names.index("user"), "user", keys.take(pa.array(found["code"])))
    named = named.set_column(named.column_names.index("ad"), "ad", ads)
    return Met(
        lost=at[known & ~keep],
        repeat=at[known & keep],
        conflict=at[best.conflict[size:]],
        dup=both["dup"][:size],
        gone=old.filter(pa.array(~best.keep[:size])),
        replaced=named.filter(pa.array(best.conflict[:size])),
    )


__all__ = ["Met", "event_places", "impression_places", "meet", "stored_copies", "stored_numbers"]
