"""Logs of outcomes in the store, and the labels that follow from them and from what is settled by now."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gem.data.build import store_write
from gem.data.build.labels import entire_space, immature, join_log, shown_at
from gem.data.build.shard_plan import ShardPlan
from gem.data.days import HOUR_MS
from gem.data.schema import Task
from gem.data.spec import DatasetSpec

FOREVER = 2**62


class Outcomes:
    """Rows of the label logs (columns key, time_ms), this window's and earlier ones.

    They lie in `outcomes/<label>/<window>.parquet` of the store.
    """

    def __init__(self, spec: DatasetSpec, plan: ShardPlan, store: Path) -> None:
        self.spec, self.plan = spec, plan
        self._rows: dict[str, pa.Table] = {}
        self._new_from: dict[str, int] = {}
        for task, label in spec.labels.items():
            if not label.table:
                continue
            kind = plan.key_types[f"key:{task}"]
            parts = [store_write.read_table(p) for p in sorted((store / "outcomes" / task).glob("*.parquet"))]
            tables = [p.set_column(0, "key", p["key"].cast(kind)) for p in parts]
            empty = pa.schema([("key", pa.type_for_alias(kind)), ("time_ms", pa.int64())]).empty_table()
            self._rows[task] = pa.concat_tables([empty, *tables]).combine_chunks()
            new = store / outcome_path(task, plan.window)
            times = store_write.read_table(new, columns=["time_ms"])["time_ms"] if new.is_file() else None
            self._new_from[task] = pc.min(times).as_py() if times is not None and len(times) else FOREVER

    def reach(self, last_ms: int) -> bool:
        """Can labels of impressions up to this time differ from what the window before left?"""
        for task, new_from in self._new_from.items():
            label = self.spec.labels[task]
            wait = FOREVER if label.window_hours is None else int(label.window_hours * HOUR_MS)
            if last_ms + wait >= new_from:
                return True
            settled = self.plan.settled_ms.get(task, -1)
            if not label.complete and label.window_hours is not None and last_ms + wait > settled:
                return True
        return False

    def of(self, task: str) -> pa.Table:
        """All rows of one label's log."""
        return self._rows[task]


def outran(spec: DatasetSpec, plan: ShardPlan, store: Path, shard: int, shown: pa.Table) -> int:
    """Outcomes in the store whose impression comes only now and is later by its clock.

    As events they were taken to be known before it, and would stand in its history. `shown`: new impressions.
    """
    count = 0
    for task, label in spec.labels.items():
        delays = [s.available_after_ms for s in spec.events if s.table == label.table and s.time]
        files = sorted((store / "outcomes" / task).glob("*.parquet")) if delays else []
        if not files or not shown.num_rows:
            continue
        kind, window_ms = plan.key_types[f"key:{task}"], int((label.window_hours or 0) * HOUR_MS)
        keys, time_ms = shown[f"key:{task}"].combine_chunks(), shown["time_ms"].to_numpy()
        log = pa.concat_tables([_with_key(store_write.read_table(f), "key", kind) for f in files])
        log = log.filter(pc.and_(pc.is_in(log["key"], value_set=keys), pc.less(log["time_ms"], int(time_ms.max()))))
        rows = (log["key"].combine_chunks(), log["time_ms"].to_numpy())
        own, found = shown_at((keys, time_ms), rows, window_ms, plan.max_skew_ms)
        early = np.flatnonzero(found & (own > rows[1] + min(delays)))
        if len(early):
            rows = (rows[0].take(pa.array(early)), rows[1][early])
            count += len(early) - int(shown_at(_stored(store, shard, task, kind), rows, window_ms, 0)[1].sum())
    return count


def _stored(store: Path, shard: int, task: str, kind: str) -> tuple[pa.Array, npt.NDArray[np.int64]]:
    """Keys and times of a shard's impressions so far."""
    name, empty = f"key_{task}", pa.schema([("key", pa.type_for_alias(kind)), ("time_ms", pa.int64())]).empty_table()
    paths = sorted((store / "impressions").glob(f"day=*/shard-{shard:03d}.parquet"))
    tables = [_with_key(store_write.read_table(p, [name, "time_ms"]), name, kind) for p in paths]
    table = pa.concat_tables([empty, *tables]).combine_chunks()
    return table["key"].combine_chunks(), table["time_ms"].to_numpy()


def _with_key(table: pa.Table, name: str, kind: str) -> pa.Table:
    return pa.table({"key": table[name].cast(kind), "time_ms": table["time_ms"]})


def outcome_path(task: str, window: int) -> str:
    """Relative path of one window's rows of a label log."""
    return f"outcomes/{task}/{window:05d}.parquet"


def relabelled(spec: DatasetSpec, plan: ShardPlan, table: pa.Table, outcomes: Outcomes) -> pa.Table:
    """Impressions with own_<task> joined anew from the logs and label_<task> on the entire space."""
    time_ms = table["time_ms"].to_numpy()
    own = {}
    for task, label in spec.labels.items():
        if label.table:
            key = table[f"key_{task}"].combine_chunks()
            log = outcomes.of(task)
            log = log.filter(pc.is_in(log["key"], value_set=key))
            rows = (log["key"].combine_chunks(), log["time_ms"].to_numpy())
            own[task] = join_log(key, time_ms, rows, label.window_hours, plan.max_skew_ms)
        else:
            own[task] = table[f"own_{task}"].to_numpy()
    labels = entire_space(own, tuple(Task(n, la.given) for n, la in spec.labels.items()))
    for task, label in spec.labels.items():
        if label.table and not label.complete:
            young = immature(time_ms, label.window_hours, plan.log_end_ms[task])
            labels[task] = np.where(young, np.int8(-1), labels[task])
    for prefix, values in (("own", own), ("label", labels)):
        for task, value in values.items():
            name = f"{prefix}_{task}"
            table = table.set_column(table.column_names.index(name), name, pa.array(value))
    return table
