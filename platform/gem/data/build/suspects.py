"""What a person should know of the rows of a shard: contradictions, clocks that run ahead, users that are no people."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gem.data.build.labels import shown_at
from gem.data.build.pieces import load_pieces
from gem.data.build.quarantine import conflict_record
from gem.data.build.shard_plan import ShardPlan
from gem.data.build.timelines import codes_of, rank_in_run
from gem.data.days import HOUR_MS
from gem.data.ingest.spec_check import kind_names
from gem.data.spec import DatasetSpec

if TYPE_CHECKING:
    from gem.data.build.collect import Chosen

TOP = 20


def conflicting_rows(
    spec: DatasetSpec,
    work: Path,
    shard: int,
    shown: tuple[pa.Table | None, Chosen | None],
    lines: tuple[pa.Table, Chosen],
) -> list[dict[str, Any]]:
    """Conflicting duplicates go to the quarantine, as canonical rows; one record per table.

    Rows of the store that gave way to a better copy are among them, with the columns by which they were compared.
    """
    out = []
    impressions, chosen = shown
    if impressions is not None and chosen is not None:
        rows = _contradicting(impressions, chosen)
        if rows:
            out.append(conflict_record(work, spec.impressions.table, "impressions", shard, rows))
    conflicts, kinds = _contradicting(*lines), kind_names(spec)
    for table in dict.fromkeys(s.table for s in spec.events) if conflicts else ():
        codes = pa.array([kinds.index(s.kind) + 1 for s in spec.events if s.table == table], pa.uint8())
        rows = [found for t in conflicts if (found := t.filter(pc.is_in(t["kind"], value_set=codes))).num_rows]
        if rows:
            out.append(conflict_record(work, table, "events", shard, rows))
    return out


def _contradicting(rows: pa.Table, chosen: Chosen) -> list[pa.Table]:
    out = [rows.take(pa.array(chosen.conflicts))]
    if chosen.met.replaced is not None:
        out.append(chosen.met.replaced.drop_columns(["part", "row"]))
    return [table for table in out if table.num_rows]


def hot_users(events: pa.Table, chosen: Chosen, keys: pa.Array) -> list[dict[str, Any]]:
    """The users with most new events: key, events, the most within one second, and how many rows the cap took.

    The times within a list are made up: its events are no burst.
    """
    if not len(chosen.row):
        return []
    counts = np.bincount(chosen.code[~chosen.repeat], minlength=len(keys))
    lost = codes_of(events["user"].take(pa.array(chosen.dropped)), keys)
    capped = np.bincount(lost, minlength=len(keys)) if len(lost) else np.zeros(len(keys), np.int64)
    top = np.argsort(-(counts + capped), kind="stable")[:TOP]
    mask = np.zeros(len(keys), np.bool_)
    mask[top] = True
    mine = mask[chosen.code] & ~chosen.repeat
    if "order" in events.column_names:
        mine &= np.asarray(events["order"].is_null())[chosen.row]
    code, second = chosen.code[mine], _seconds(events, chosen.row[mine])
    order = np.lexsort((second, code))
    peak = np.zeros(len(keys), np.int64)
    np.maximum.at(peak, code[order], rank_in_run(code[order], second[order]) + 1)
    return [
        {
            "user": str(keys[int(c)].as_py()),
            "events": int(counts[c]),
            "peak_per_s": int(peak[c]),
            "capped": int(capped[c]),
        }
        for c in top
        if counts[c]
    ]


def early_outcomes(
    spec: DatasetSpec, plan: ShardPlan, work: Path, impressions: pa.Table | None, shown: Chosen | None
) -> dict[str, int]:
    """Outcomes whose clock stands before their impression: within the bound they count, beyond they are no label."""
    out: dict[str, int] = {}
    for task, label in spec.labels.items():
        log = load_pieces(work / "labels" / task, {"key": plan.key_types[f"key:{task}"]}) if label.table else None
        if log is None or impressions is None or shown is None:
            continue
        rows = (log["key"].combine_chunks(), log["time_ms"].to_numpy())
        shows = (impressions[f"key:{task}"].combine_chunks(), impressions["time_ms"].to_numpy())
        own, found = shown_at(shows, rows, int((label.window_hours or 0) * HOUR_MS), plan.max_skew_ms)
        ahead = (own - rows[1])[found]
        out[f"clamped_outcome:{task}"] = int(((ahead > 0) & (ahead <= plan.max_skew_ms)).sum())
        out[f"outcome_before_impression:{task}"] = int((ahead > plan.max_skew_ms).sum())
    return {k: n for k, n in out.items() if n}


def _seconds(events: pa.Table, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    out: npt.NDArray[np.int64] = events["time_ms"].to_numpy()[rows] // 1000
    return out
