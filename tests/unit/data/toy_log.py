"""A small made-up log with dirt in it, and a naive reading of it in plain Python (the oracle of the store tests)."""

from __future__ import annotations

import datetime as dt
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from gem.data.spec import DatasetSpec, parse_spec

DAYS = 5
START_MS = int(dt.datetime(2024, 3, 4, tzinfo=dt.UTC).timestamp() * 1000)
HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
DELAY_MS = 30_000
WINDOW_HOURS = 24

SPEC: dict[str, Any] = {
    "name": "toy",
    "tables": {
        "shows": {"files": ["shows-*.parquet"]},
        "buys": {"files": ["buys-*.parquet"]},
        "views": {"files": ["views-*.parquet"]},
        "people": {"files": ["people.csv"]},
        "items": {"files": ["items.parquet"]},
    },
    "impressions": {
        "table": "shows",
        "user": "person",
        "ad": "item",
        "surface": "place",
        "time": {"column": "at", "unit": "ms"},
        "id": "show_id",
        "duplicate_key": ["show_id"],
        "outcomes": ["clicked"],
    },
    "labels": {
        "click": {"column": "clicked"},
        "conversion": {
            "table": "buys",
            "key": "show_id",
            "time": {"column": "at", "unit": "ms"},
            "window_hours": WINDOW_HOURS,
            "given": "click",
        },
    },
    "events": [
        {
            "kind": "show",
            "table": "shows",
            "user": "person",
            "ad": "item",
            "time": {"column": "at", "unit": "ms"},
            "surface": "place",
            "flags": {"click": "clicked"},
            "available_after_ms": DELAY_MS,
        },
        {"kind": "view", "table": "views", "user": "person", "ad": "item", "time": {"column": "at", "unit": "s"}},
    ],
    "users": {
        "table": "people",
        "key": "person",
        "min_count": 1,
        "features": [{"name": "town", "kind": "categorical"}, {"name": "age", "kind": "numeric"}],
    },
    "ads": {
        "table": "items",
        "key": "item",
        "features": [
            {"name": "tags", "kind": "multi"},
            {"name": "price", "kind": "numeric", "transform": "log1p"},
            {"name": "look", "kind": "embedding", "width": 2},
        ],
    },
    "context": {"features": [{"name": "device", "kind": "categorical"}, {"name": "slot", "kind": "numeric"}]},
    "surfaces": {"min_rows": 60, "rest": "other", "names": {"1": "feed", "2": "stories"}},
}


def toy_spec() -> DatasetSpec:
    return parse_spec(SPEC)


def toy_rows(seed: int = 0, num_shows: int = 600) -> dict[str, list[dict[str, Any]]]:
    """Raw rows by table: 3 % duplicates, 2 % null users, times on a coarse grid so that ties are common."""
    rng = random.Random(seed)
    shows, buys = [], []
    for i in range(num_shows):
        at = START_MS + rng.randrange(DAYS * DAY_MS // 15_000) * 15_000
        clicked = int(rng.random() < 0.4)
        row = {
            "show_id": i,
            "person": None if rng.random() < 0.02 else rng.randrange(30),
            "item": 1000 + rng.randrange(25),
            "at": at,
            "place": rng.choice(["1", "1", "1", "2", "2", "9"]),
            "device": rng.choice(["ios", "android", None]),
            "slot": rng.random() * 10,
            "clicked": clicked,
        }
        shows += [row, dict(row)] if rng.random() < 0.03 else [row]
        if clicked and rng.random() < 0.5:
            delay = rng.choice([0, 1, 5, 23, 24, 30]) * HOUR_MS
            buys.append({"show_id": i, "at": at + delay})
    views = [
        {
            "person": rng.randrange(32),
            "item": 1000 + rng.randrange(30),
            "at": START_MS // 1000 - 86_400 + rng.randrange((DAYS + 1) * 5760) * 15,
        }
        for _ in range(900)
    ]
    people = [{"person": p, "town": rng.choice("abc"), "age": rng.choice(["20", "35", "", "61"])} for p in range(28)]
    items = [
        {
            "item": 1000 + i,
            "tags": rng.choice([["x"], ["x", "y"], [], None]),
            "price": rng.choice([1.0, 9.5, -2.0, None]),
            "look": [rng.random(), rng.random()],
        }
        for i in range(22)
    ]
    return {"shows": shows, "buys": buys, "views": views, "people": people, "items": items}


def write_toy(folder: Path, rows: dict[str, list[dict[str, Any]]], seed: int | None = None, parts: int = 2) -> Path:
    """Write the raw tables; with a seed, rows are shuffled within and across files."""
    folder.mkdir(parents=True, exist_ok=True)
    for table in ("shows", "buys", "views"):
        mine = list(rows[table])
        if seed is not None:
            random.Random(seed).shuffle(mine)
        for part in range(parts):
            pq.write_table(pa.Table.from_pylist(mine[part::parts]), folder / f"{table}-{part}.parquet")
    lines = ["person,town,age"] + [f"{r['person']},{r['town']},{r['age']}" for r in rows["people"]]
    (folder / "people.csv").write_text("\n".join(lines) + "\n")
    look = pa.field("look", pa.list_(pa.float32()))
    schema = pa.schema([("item", pa.int64()), ("tags", pa.list_(pa.string())), ("price", pa.float64()), look])
    pq.write_table(pa.Table.from_pylist(rows["items"], schema), folder / "items.parquet")
    return folder


def naive(rows: dict[str, list[dict[str, Any]]]) -> dict[int, dict[str, Any]]:
    """show_id -> expected day, cut and labels, by scanning every row for every impression."""
    shows = {r["show_id"]: r for r in rows["shows"] if r["person"] is not None}
    events = [(r["person"], r["at"] + DELAY_MS) for r in shows.values()]
    events += list({(r["person"], r["at"] * 1000, r["item"]) for r in rows["views"]})
    end = max([r["at"] for r in shows.values()] + [b["at"] for b in rows["buys"]])
    out = {}
    for show_id, r in shows.items():
        bought = any(b["show_id"] == show_id and 0 <= b["at"] - r["at"] <= WINDOW_HOURS * HOUR_MS for b in rows["buys"])
        young = r["at"] + WINDOW_HOURS * HOUR_MS > end
        out[show_id] = {
            "day": dt.datetime.fromtimestamp(r["at"] / 1000, dt.UTC).date().isoformat(),
            "cut": sum(1 for e in events if e[0] == r["person"] and e[1] < r["at"]),
            "click": r["clicked"],
            "conversion": -1 if young else int(bool(r["clicked"]) and bought),
            "row": r,
        }
    return out
