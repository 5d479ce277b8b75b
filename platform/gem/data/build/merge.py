"""Third pass of preprocess, per shard of users: a window's rows into the partitions of the store.

Partitions that nothing new reaches stay as they are. Where an event arrives late, the cuts behind it are counted anew;
where an outcome arrives or a window of waiting ends, the labels are. Pure functions of files: no Ray here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gem.data.build import store_write
from gem.data.build.collect import load_events
from gem.data.build.copies import stored_numbers
from gem.data.build.encode_rows import RowEncoder
from gem.data.build.outcomes import Outcomes, relabelled
from gem.data.build.pieces import Places, has_piece, load_pieces, read_piece, shard_name
from gem.data.build.shard_plan import ShardPlan
from gem.data.build.store_write import Entry
from gem.data.build.timelines import Packing, grouped_order, rank_in_run, runs
from gem.data.days import day_numbers
from gem.data.spec import DatasetSpec

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
NEVER = 2**62
STAGED, ENTRIES = ".merged", "entries.json"
CAPPED = "capped"  # in an entry on its way to the manifest
CONTENT = ("time_ms", "order", "kind", "dup")  # orders events that are known at one moment


@dataclass
class Shown:
    """Impressions of one partition on their way: `table` with cut -1 where it is to be counted, `old` as stored.

    capped: rows that the cap took where old and new ones met.
    """

    number: int
    table: pa.Table
    old: pa.Table | None
    wrong: I64  # rows whose cut is to be counted
    capped: int = 0


class ShardMerge:
    """One shard of one window; `run` writes its files and returns their manifest entries."""

    def __init__(self, spec: DatasetSpec, plan: ShardPlan, places: Places, shard: int, first_new: int) -> None:
        self.spec, self.plan, self.places, self.shard = spec, plan, places, shard
        self.store = places.store
        self.index = self._index(first_new)
        self.user = self.index["user"].to_numpy()
        self.encode = RowEncoder(spec, places.store)
        self.gone = {kind: self._gone(kind) for kind in ("impressions", "events")}
        self.entries: dict[str, Entry] = {}

    def run(self) -> dict[str, Entry]:
        """Write what changes in this shard, then put it into the store. Returns the manifest entries."""
        chosen = read_piece(self.places.built(self.shard) / "events")
        known = [chosen["known_ms"], *(g["known_ms"] for g in self.gone["events"].values())]
        first_new = min((pc.min(k).as_py() for k in known if len(k)), default=NEVER)
        shown = self._impressions(first_new)
        counts = self._timelines(chosen, shown)
        self._write_impressions(shown)
        index = self.index.set_column(2, "events", pa.array(counts))
        path = store_write.index_path(self.shard)
        self.entries[path] = store_write.write_table(self.staged, path, index)
        return self._publish()

    @property
    def staged(self) -> Path:
        """Folder of what is to replace files of the store, which stay as they are until all of it is written."""
        return self.store / STAGED / shard_name(self.shard)

    def _publish(self) -> dict[str, Entry]:
        """Move what was written into the store. A task that was cut off in the middle is finished when run again."""
        store_write.write_text(self.staged, ENTRIES, json.dumps(self.entries))
        return publish(self.store, self.shard)

    def _gone(self, kind: str) -> dict[int, pa.Table]:
        """Partition -> rows of the store (`row`: their position) whose place copies in this window take."""
        piece = self.places.built(self.shard) / f"gone-{kind}"
        table = read_piece(piece) if has_piece(piece) else None
        if table is None:
            return {}
        return {n: table.filter(pc.equal(table["part"], n)) for n in pc.unique(table["part"]).to_pylist()}

    def _read(self, kind: str, number: int, columns: list[str] | None = None) -> pa.Table:
        """A stored partition, or some columns of it, without the rows that are gone."""
        lines = kind == "timelines"
        table = store_write.read_table(self.store / self._path(kind, number), columns=columns)
        gone = self.gone["events" if lines else "impressions"].get(number)
        if gone is not None:
            keep = np.ones(table.num_rows, np.bool_)
            keep[gone["row"].to_numpy()] = False
            table = table.filter(pa.array(keep))
        for task in [] if lines else [n for n, la in self.spec.labels.items() if la.table]:
            at, key = table.column_names.index(f"key_{task}"), self.plan.key_types[f"key:{task}"]
            table = table.set_column(at, f"key_{task}", table[f"key_{task}"].cast(key))  # a later file may have text
        return table

    def _index(self, first_new: int) -> pa.Table:
        """key, user, events of the shard's users: those of the store, then the new ones."""
        new = read_piece(self.places.built(self.shard) / "users")["key"]
        users = np.arange(first_new, first_new + len(new), dtype=np.int32)
        fresh = pa.table({"key": new, "user": users, "events": np.zeros(len(new), np.int64)})
        path = self.store / store_write.index_path(self.shard)
        if not path.is_file():
            return fresh.combine_chunks()
        old = store_write.read_table(path)
        return pa.concat_tables([old.set_column(0, "key", old["key"].cast(new.type)), fresh]).combine_chunks()

    def _path(self, kind: str, number: int) -> str:
        return store_write.partition_path(kind, store_write.partition_name(number), self.shard)

    def _write(self, kind: str, number: int, table: pa.Table, capped: int) -> None:
        path = self._path(kind, number)
        self.entries[path] = store_write.write_table(self.staged, path, table) | {CAPPED: capped}

    def _timelines(self, chosen: pa.Table, shown: list[Shown]) -> I64:
        """Write changed partitions and count the cuts of `shown`; returns all events per place in the index, [U]."""
        new = _Slices(self.encode.events(load_events(self.places.work, self.shard, self.plan.key_types)), chosen)
        asked = _Asked(self.spec, self.plan, shown, self.user)
        changed = {*new.bounds, *self.gone["events"]}
        start = min([*changed, *asked.bounds], default=NEVER)
        later = [n for n in stored_numbers(self.store, "timelines", self.shard) if n >= start]
        base: I64 = self.index["events"].to_numpy().astype(np.int64)
        for number in later:
            users = store_write.read_table(self.store / self._path("timelines", number), columns=["user"])[
                "user"
            ].to_numpy()
            base -= np.bincount(np.searchsorted(self.user, users), minlength=len(base))
        for number in sorted({*later, *changed, *asked.bounds}):
            place, known_ms = self._partition(number, number in later, new)
            asked.count(number, base, place, known_ms)
            base += np.bincount(place, minlength=len(base))
        asked.give_back()
        return base

    def _partition(self, number: int, stored: bool, new: _Slices) -> tuple[I64, I64]:
        """(place of the user in the index, known_ms) of a partition's events, in order; new ones are written."""
        changed, capped = number in self.gone["events"], 0
        if number not in new.bounds:
            if not stored:
                return np.zeros(0, np.int64), np.zeros(0, np.int64)
            table = self._read("timelines", number, None if changed else ["user", "known_ms"])
        else:
            table, changed = new.table(number, self.user), True
            if stored:
                table, capped = self._union(self._read("timelines", number), table)
        if changed:
            self._write("timelines", number, table, capped)
        return np.searchsorted(self.user, table["user"].to_numpy()), table["known_ms"].to_numpy()

    def _union(self, old: pa.Table, new: pa.Table) -> tuple[pa.Table, int]:
        """One partition's events, old and new, under the rules of the second pass; and how many the cap took."""
        table = pa.concat_tables([old, new.select(old.column_names).cast(old.schema)]).combine_chunks()
        found = {n: table[n].to_numpy() for n in ("user", "kind", "dup", "known_ms", "time_ms", "order")}
        row = grouped_order((found["user"],), found["known_ms"], tuple(found[n] for n in CONTENT))
        return self._within_cap(table, row, found["user"], found["known_ms"])

    def _within_cap(self, table: pa.Table, row: I64, user: I32, time_ms: I64) -> tuple[pa.Table, int]:
        """(the first rows of every user and day in the order `row`, how many there are more)."""
        days = day_numbers(time_ms[row], self.spec.impressions.zone)
        kept = row[rank_in_run(user[row], days) < self.plan.max_rows_per_user_day]
        return table.take(pa.array(kept)), len(row) - len(kept)

    def _impressions(self, first_new: int) -> list[Shown]:
        """Partitions that are new, or whose cuts or labels may have changed."""
        built = self.places.built(self.shard) / "impressions"
        new = None
        if has_piece(built):
            rows = load_pieces(self.places.work / "impressions", self.plan.key_types, self.shard)
            assert rows is not None
            new = _Slices(self.encode.impressions(rows), read_piece(built))
        self.outcomes = Outcomes(self.spec, self.plan, self.store)
        stored = stored_numbers(self.store, "impressions", self.shard)
        out = []
        for number in sorted({*stored, *(new.bounds if new else {})}):
            fresh = new.table(number, self.user) if new and number in new.bounds else None
            old, changed = None, fresh is not None or number in self.gone["impressions"]
            if number in stored:
                last_ms = self._last_ms(self._path("impressions", number))
                if not changed and last_ms <= first_new and not self.outcomes.reach(last_ms):
                    continue
                old = self._read("impressions", number)
            table, capped = fresh if old is None else old, 0
            if old is not None and fresh is not None:
                table, capped = self._both(old, fresh)
            assert table is not None
            wrong = (table["time_ms"].to_numpy() > first_new) | (table["cut"].to_numpy() < 0)
            out.append(Shown(number, table, None if changed else old, np.flatnonzero(wrong), capped))
        return out

    def _last_ms(self, path: str) -> int:
        """Latest time in a partition, from the footer of its file."""
        found = pq.ParquetFile(self.store / path)
        at = found.schema_arrow.get_field_index("time_ms")
        groups = range(found.metadata.num_row_groups)
        kept = [found.metadata.row_group(g).column(at).statistics for g in groups]
        return max((int(k.max) for k in kept if k is not None and k.has_min_max), default=-NEVER)  # none: no rows

    def _both(self, old: pa.Table, new: pa.Table) -> tuple[pa.Table, int]:
        table = pa.concat_tables([old, new.select(old.column_names).cast(old.schema)]).combine_chunks()
        user, dup, time_ms, own = (table[n].to_numpy() for n in ("user", "dup", "time_ms", "impression_id"))
        row = grouped_order((user,), time_ms, (own, dup))
        return self._within_cap(table, row, user, time_ms)

    def _write_impressions(self, shown: list[Shown]) -> None:
        for part in shown:
            table = relabelled(self.spec, self.plan, part.table, self.outcomes)
            if part.old is None or not table.equals(part.old):
                self._write("impressions", part.number, table, part.capped)


class _Slices:
    """New rows of one kind by partition: `rows` in the order of the pieces, `chosen` says which and in which order."""

    def __init__(self, rows: pa.Table, chosen: pa.Table) -> None:
        self.rows = rows
        self.row, self.code = chosen["row"].to_numpy(), chosen["code"].to_numpy()
        self.known_ms = chosen["known_ms"].to_numpy() if "known_ms" in chosen.column_names else None
        part = chosen["part"].to_numpy()
        starts, lengths = runs(part)
        self.bounds = {int(part[s]): (s, s + n) for s, n in zip(starts.tolist(), lengths.tolist(), strict=True)}

    def table(self, number: int, user: I32) -> pa.Table:
        """Rows of one partition; `user` maps codes to entity indices."""
        start, end = self.bounds[number]
        table = self.rows.take(pa.array(self.row[start:end]))
        if self.known_ms is not None:
            at = table.column_names.index("known_ms")
            table = table.set_column(at, "known_ms", pa.array(self.known_ms[start:end]))
        users = pa.array(user[self.code[start:end]])
        return table.set_column(table.column_names.index("user"), "user", users).combine_chunks()


class _Asked:
    """Cuts that are to be counted, of all partitions of impressions, by the partition their time lies in."""

    def __init__(self, spec: DatasetSpec, plan: ShardPlan, shown: list[Shown], user: I32) -> None:
        self.shown = [s for s in shown if len(s.wrong)]
        empty = np.zeros(0, np.int64)
        time_ms = np.concatenate([empty, *(s.table["time_ms"].to_numpy()[s.wrong] for s in self.shown)])
        users = np.concatenate([empty, *(s.table["user"].to_numpy()[s.wrong] for s in self.shown)])
        part = store_write.partition_numbers(day_numbers(time_ms, spec.impressions.zone), plan.first_day)
        self.order = np.argsort(part, kind="stable")
        self.time_ms, self.place = time_ms[self.order], np.searchsorted(user, users)[self.order]
        part = part[self.order]
        starts, lengths = runs(part)
        self.bounds = {int(part[s]): (s, s + n) for s, n in zip(starts.tolist(), lengths.tolist(), strict=True)}
        self.cut = np.full(len(part), -1, np.int32)

    def count(self, number: int, base: I64, place: I64, known_ms: I64) -> None:
        """Cuts of times in one partition: `base` [U] events before it, and its own ones known strictly before."""
        if number not in self.bounds:
            return
        start, end = self.bounds[number]
        mine, time_ms = self.place[start:end], self.time_ms[start:end]
        packing = Packing(known_ms, len(base) + 1)
        found = np.searchsorted(packing.pack(place, known_ms), packing.pack(mine, time_ms), side="left")
        self.cut[start:end] = base[mine] + found - np.searchsorted(place, mine, side="left")

    def give_back(self) -> None:
        """The counted cuts into the tables they are asked for."""
        cut = np.empty_like(self.cut)
        cut[self.order] = self.cut
        for shown, mine in zip(self.shown, self._split(cut), strict=True):
            values = shown.table["cut"].to_numpy().copy()
            values[shown.wrong] = mine
            at = shown.table.column_names.index("cut")
            shown.table = shown.table.set_column(at, "cut", pa.array(values))

    def _split(self, cut: I32) -> Iterator[I32]:
        at = 0
        for shown in self.shown:
            yield cut[at : at + len(shown.wrong)]
            at += len(shown.wrong)


def merge_shard(spec: DatasetSpec, plan: ShardPlan, places: Places, shard: int, first_new: int) -> dict[str, Any]:
    """Built shard -> partitions of the store. Returns manifest entries of what changed, those of partitions with the
    rows that the cap took where old and new ones met (`CAPPED`).

    `first_new` is the entity index of the shard's first new user.
    """
    if (places.store / STAGED / shard_name(shard) / ENTRIES).is_file():
        return publish(places.store, shard)
    return ShardMerge(spec, plan, places, shard, first_new).run()


def publish(store: Path, shard: int) -> dict[str, Entry]:
    """Move the staged files of a shard to their places. Returns their manifest entries."""
    staged = store / STAGED / shard_name(shard)
    entries: dict[str, Entry] = json.loads((staged / ENTRIES).read_text(encoding="utf-8"))
    for relative in entries:
        target = store / relative
        target.parent.mkdir(parents=True, exist_ok=True)
        if (staged / relative).is_file():
            (staged / relative).replace(target)
    return entries


__all__ = ["CAPPED", "STAGED", "ShardMerge", "merge_shard"]
