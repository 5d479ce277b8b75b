"""Counting quarantined rows, writing them to one file per table, and stopping the run when there are too many."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gem.data.build import store_write
from gem.data.build.pieces import read_piece, write_piece
from gem.data.ingest.raw import QUARANTINE_SCHEMA
from gem.errors import DataError

CONFLICT = "conflicting_duplicate"


def by_table(records: Sequence[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Table -> reason -> rows. A table read in several roles counts a reason in the role that found most of it."""
    owner = _owners(records)
    out: dict[str, dict[str, int]] = {}
    for (table, reason), (_, count) in sorted(owner.items()):
        out.setdefault(table, {})[reason] = count
    return out


def write(store: Path, work: Path, window: int, records: Sequence[dict[str, Any]]) -> dict[str, store_write.Entry]:
    """Write `quarantine/<table>-<window>.parquet` (row, reason, file) and return the manifest entries."""
    tables = collect(work, records)
    paths = {table: f"quarantine/{table}-{window:05d}.parquet" for table in tables}
    return {path: store_write.write_table(store, path, tables[table]) for table, path in paths.items()}


def collect(work: Path, records: Sequence[dict[str, Any]]) -> dict[str, pa.Table]:
    """Quarantined rows by table, each row once per reason."""
    owner = _owners(records)
    parts: dict[str, list[pa.Table]] = {}
    for record in records:
        table, role = record["job"]["table"], role_of(record)
        mine = [r for r in record["quarantined"] if owner[table, r][0] == role]
        if mine:
            rows = read_piece(work / "quarantine" / record["piece"])
            parts.setdefault(table, []).append(rows.filter(pc.is_in(rows["reason"], value_set=pa.array(mine))))
    return {table: pa.concat_tables(found) for table, found in sorted(parts.items())}


def conflict_record(work: Path, table: str, role: str, shard: int, tables: Sequence[pa.Table]) -> dict[str, Any]:
    """Set rows aside that have the key of another row and say something else; a record as the first pass makes it."""
    piece = f"conflict-{role}-{table}-{shard:03d}"
    texts = [json.dumps(row, ensure_ascii=False, default=str) for rows in tables for row in rows.to_pylist()]
    reasons = [CONFLICT] * len(texts)
    write_piece(work / "quarantine" / piece, pa.table([texts, reasons, [""] * len(texts)], schema=QUARANTINE_SCHEMA))
    job = {"table": table, "role": role, "source": -1, "label": ""}
    return {"job": job, "piece": piece, "raw_rows": 0, "quarantined": {CONFLICT: len(texts)}}


def check(records: Sequence[dict[str, Any]], limit: float, work: Path, beside: Path) -> None:
    """Raise DataError if the quarantined share of a table's rows is above `limit`.

    The rows are then written to `beside`/quarantine-<table>.parquet, where a person can look at them.
    """
    totals: dict[tuple[str, str], list[int]] = {}
    for record in records:
        total = totals.setdefault((record["job"]["table"], role_of(record)), [0, 0])
        total[0] += record["raw_rows"]
        total[1] += sum(record["quarantined"].values())
    worst = max(totals, key=lambda k: totals[k][1] / max(1, totals[k][0]), default=None)
    if worst is None or totals[worst][1] <= limit * totals[worst][0]:
        return
    table, (rows, bad) = worst[0], totals[worst]
    reasons = sorted(by_table(records)[table].items(), key=lambda item: (-item[1], item[0]))
    path = beside / f"quarantine-{table}.parquet"
    beside.mkdir(parents=True, exist_ok=True)
    pq.write_table(collect(work, records)[table], path)
    top = ", ".join(f"{reason} {count}" for reason, count in reasons[:5])
    raise DataError(
        f'table "{table}": {bad} of {rows} rows were quarantined ({bad / rows:.1%}), allowed are {limit:.1%} '
        f"(data.max_quarantine_share). Reasons: {top}. The rows are in {path}. Repair the table, or raise the limit "
        "with --set data.max_quarantine_share=…"
    )


def _owners(records: Sequence[dict[str, Any]]) -> dict[tuple[str, str], tuple[str, int]]:
    """(table, reason) -> (role that found most rows with it, how many)."""
    found: dict[tuple[str, str, str], int] = {}
    for record in records:
        for reason, count in record["quarantined"].items():
            key = (record["job"]["table"], reason, role_of(record))
            found[key] = found.get(key, 0) + count
    out: dict[tuple[str, str], tuple[str, int]] = {}
    for (table, reason, role), count in sorted(found.items()):
        if count > out.get((table, reason), ("", 0))[1]:
            out[table, reason] = (role, count)
    return out


def role_of(record: dict[str, Any]) -> str:
    """In what role a table was read: as impressions, as which event source, as which label's log, as entities."""
    job = record["job"]
    return f"{job['role']}{job['source']}{job['label']}"
