"""A small clean log for the tests of `check`: people who sleep at night, stable rates, every key known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

START_MS = 1_709_510_400_000  # 2024-03-04T00:00:00Z
HOUR_MS, DAY_MS = 3_600_000, 86_400_000
DAYS, PER_DAY, USERS, ADS = 6, 400, 80, 40
Tables = dict[str, dict[str, np.ndarray[Any, Any]]]


def spec() -> dict[str, Any]:
    """The spec as YAML would give it."""
    return {
        "name": "small",
        "tables": {
            "log": {"files": ["log-*.parquet"]},
            "sales": {"files": ["sales.parquet"]},
            "views": {"files": ["views.parquet"]},
            "people": {"files": ["people.parquet"]},
            "items": {"files": ["items.parquet"]},
        },
        "impressions": {
            "table": "log", "user": "person", "ad": "item", "surface": "place", "time": {"column": "at"}, "id": "row",
            "day": "date", "outcomes": ["clicked"],
        },
        "labels": {
            "click": {"column": "clicked"},
            "sale": {"table": "sales", "key": "row", "time": {"column": "at"}, "window_hours": 24, "complete": True,
                     "given": "click"},
        },
        "events": [
            {"kind": "view", "table": "views", "user": "person", "ad": "item", "time": {"column": "at", "unit": "s"},
             "dwell": {"column": "spent"}},
        ],
        "users": {"table": "people", "key": "person", "features": [{"name": "town", "kind": "categorical"}]},
        "ads": {"table": "items", "key": "item",
                "features": [{"name": "price", "kind": "numeric", "transform": "log1p"}]},
        "context": {"features": [{"name": "device", "kind": "categorical"}, {"name": "slot", "kind": "numeric"}]},
    }  # fmt: skip


def awake(rng: np.random.Generator, size: int) -> np.ndarray[Any, Any]:
    """Milliseconds of the day, seldom between 1 and 7."""
    weight = np.array([6, *[1] * 6, *[8] * 10, *[12] * 7], np.float64)
    hour = rng.choice(24, size, p=weight / weight.sum())
    return hour * HOUR_MS + rng.integers(0, 3600, size) * 1000


def tables(seed: int = 0) -> Tables:
    """Columns by table; impressions sorted by day."""
    rng = np.random.default_rng(seed)
    size = DAYS * PER_DAY
    at = START_MS + np.repeat(np.arange(DAYS), PER_DAY) * DAY_MS + awake(rng, size)
    device = rng.choice(np.array(["ios", "android", "web"]), size)
    clicked = (rng.random(size) < np.where(device == "ios", 0.4, 0.3)).astype(np.int8)
    sold = np.flatnonzero((clicked == 1) & (rng.random(size) < 0.5))
    log = {
        "row": np.arange(size), "person": rng.integers(0, USERS, size), "item": rng.integers(0, ADS, size), "at": at,
        "date": days(at), "place": rng.choice(np.array(["a", "b"]), size), "device": device,
        "slot": rng.random(size), "clicked": clicked,
    }  # fmt: skip
    views = {
        "person": rng.integers(0, USERS, 1200), "item": rng.integers(0, ADS, 1200),
        "at": (START_MS + rng.integers(0, DAYS, 1200) * DAY_MS + awake(rng, 1200)) // 1000,
        "spent": rng.integers(500, 60_000, 1200),
    }  # fmt: skip
    return {
        "log": log,
        "sales": {"row": sold, "at": at[sold] + rng.integers(1, 12, len(sold)) * HOUR_MS},
        "views": views,
        "people": {"person": np.arange(USERS), "town": rng.choice(np.array(["x", "y", "z"]), USERS)},
        "items": {"item": np.arange(ADS), "price": rng.integers(1, 90, ADS) / 2},
    }  # fmt: skip


def days(at: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The UTC day of each time, yyyy-mm-dd."""
    return at.astype("datetime64[ms]").astype("datetime64[D]").astype(str)


def write(folder: Path, data: Tables, files: int = 2) -> Path:
    """Write the tables; impressions in `files` files, one after the other in time."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, columns in data.items():
        table = pa.table({c: pa.array(v.tolist() if v.dtype == object else v) for c, v in columns.items()})
        if name != "log":
            pq.write_table(table, folder / f"{name}.parquet")
            continue
        step = -(-table.num_rows // files)
        for part in range(files):
            pq.write_table(table.slice(part * step, step), folder / f"log-{part}.parquet")
    return folder
