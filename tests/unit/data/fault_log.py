"""A small log into which the tests of faults put one fault each, and what an impression may read, by its keys."""

from __future__ import annotations

import datetime as dt
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gem.config import DataConfig, RunConfig
from gem.data.spec import DatasetSpec, parse_spec
from gem.data.store import FeatureStore
from pipelines.distribute import in_process
from pipelines.preprocess import Base, build_store

START_MS = int(dt.datetime(2024, 3, 4, tzinfo=dt.UTC).timestamp() * 1000)
HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
NUM_DAYS = 4
Rows = list[dict[str, Any]]

SPEC: dict[str, Any] = {
    "name": "faults",
    "tables": {
        "shows": {"files": ["shows*.parquet", "shows*.csv", "day=*/shows*.parquet"]},
        "posts": {"files": ["posts*.parquet"], "optional": True},
        "buys": {"files": ["buys*.parquet"]},
    },
    "impressions": {"table": "shows", "user": "u", "ad": "a", "surface": "tab", "time": {"column": "t"}, "id": "show"},
    "labels": {
        "click": {"column": "y"},
        "conversion": {
            "table": "buys",
            "key": "show",
            "time": {"column": "t"},
            "window_hours": 24,
            "complete": True,
            "given": "click",
        },
    },
    "events": [
        {"kind": "show", "table": "shows", "user": "u", "ad": "a", "time": {"column": "t"}, "flags": {"click": "y"}},
        {"kind": "post", "table": "posts", "user": "u", "ad": "a", "time": {"column": "t"}, "id": "id"},
        {"kind": "buy", "table": "buys", "user": "u", "ad": "a", "time": {"column": "t"}},
    ],
    "users": {"min_count": 1},
    "ads": {"min_count": 1},
}


def fault_spec(**changes: Any) -> DatasetSpec:
    """The spec with top-level parts replaced."""
    return parse_spec(SPEC | changes)


def good_shows(users: tuple[Any, ...] = (1, 2, 3, 4), num_days: int = NUM_DAYS) -> Rows:
    """Two impressions a day of every user at distinct times, clicked in turn; ads 10 to 14."""
    cells = [(d, i, u) for d in range(num_days) for i in range(2) for u in range(len(users))]
    return [
        {
            "show": n,
            "u": users[u],
            "a": 10 + (d + i + u) % 5,
            "tab": "feed",
            "t": START_MS + d * DAY_MS + (6 + 8 * i) * HOUR_MS + u * 60_000,
            "y": n % 2,
        }
        for n, (d, i, u) in enumerate(cells)
    ]


NO_BUYS = pa.schema([("show", pa.int64()), ("u", pa.int64()), ("a", pa.int64()), ("t", pa.int64())]).empty_table()


def put(folder: Path, **tables: pa.Table | Rows) -> Path:
    """Write `<name>.parquet` files (buys.parquet too where none is given) into the folder; two underscores are `-`."""
    folder.mkdir(parents=True, exist_ok=True)
    if not list(folder.glob("buys*")) and not any(n.startswith("buys") for n in tables):
        tables = tables | {"buys": NO_BUYS}
    for name, rows in tables.items():
        table = rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(rows)
        pq.write_table(table, folder / f"{name.replace('__', '-')}.parquet")
    return folder


def build(raw: Path, out: Path, spec: DatasetSpec | None = None, parent: Path | None = None, **data: Any) -> Any:
    """(stage record, opened store) of the log in `raw`."""
    settings = {"num_shards": 2, "max_quarantine_share": 0.5, **data}
    config = replace(RunConfig(), data=replace(DataConfig(), **settings))
    record = build_store(config, spec or fault_spec(), (raw, out), lambda _: None, in_process, Base(parent=parent))
    return record, FeatureStore.open(out)


def reads(store: FeatureStore) -> dict[int, list[tuple[Any, ...]]]:
    """impression id -> what it may read, oldest first: (ad, time - START_MS, kind, flags)."""
    lines, shown = store.timelines(), store.impressions()
    ads = store.ads.keys.to_pylist()
    out = {}
    for i, show in enumerate(shown.impression_id.tolist()):
        first = int(lines.offsets[shown.user[i]])
        own = slice(first, first + int(shown.cut[i]))
        columns = ([ads[a] for a in lines.ad[own]], lines.time_ms[own] - START_MS, lines.kind[own], lines.flags[own])
        out[show] = [(a, int(t), int(k), int(f)) for a, t, k, f in zip(*columns, strict=True)]
    return out


def timelines(store: FeatureStore) -> dict[Any, list[tuple[Any, ...]]]:
    """user key -> all its events as (ad, time - START_MS, kind, flags)."""
    lines, ads = store.timelines(), store.ads.keys.to_pylist()
    out = {}
    for u, user in enumerate(store.users.keys.to_pylist()):
        own = slice(int(lines.offsets[u]), int(lines.offsets[u + 1]))
        columns = ([ads[a] for a in lines.ad[own]], lines.time_ms[own] - START_MS, lines.kind[own], lines.flags[own])
        out[user] = [(a, int(t), int(k), int(f)) for a, t, k, f in zip(*columns, strict=True)]
    return out


def labels_of(store: FeatureStore) -> dict[int, tuple[Any, ...]]:
    """impression id -> label of every task, None where it is not known."""
    shown = store.impressions()
    values = np.where(shown.mask > 0, shown.labels, np.nan).tolist()
    known = [tuple(None if v != v else int(v) for v in row) for row in values]
    return dict(zip(shown.impression_id.tolist(), known, strict=True))


def data_files(store: FeatureStore) -> dict[str, str]:
    """sha256 of every file of the store that does not name the raw files."""
    files = store.manifest["files"]
    return {f: e["sha256"] for f, e in files.items() if not f.startswith(("quarantine/", "windows/"))}
