"""Feature stores of any size with random content, written partition by partition: no log, no preprocess.

For tests of reading and its benchmark. Users are dealt over shards at random, so that a shard's users are not
neighbours; every awkward shape is there (no event, no impression, an empty list, a missing number).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa

from gem.data.build import store_write
from gem.data.schema import Field, Schema, Side, Task
from gem.data.store import FeatureStore

START_MS = 1_700_006_400_000  # midnight
DAY_MS = 86_400_000
Rng = np.random.Generator


@dataclass(frozen=True)
class Shape:
    """`past`: mean events of a user before the first day; `daily`, `shown`: mean events and impressions a day."""

    num_users: int = 40
    num_ads: int = 60
    num_days: int = 3
    num_shards: int = 3
    past: int = 5
    daily: int = 3
    shown: int = 2
    step_ms: int = 3_600_000  # grain of the times: coarse ones give ties
    seed: int = 0

    @property
    def days(self) -> list[str]:
        return [f"2023-11-{15 + d}" for d in range(self.num_days)]


def make_schema(shape: Shape) -> Schema:
    """User 4 ids and 2 numbers; ad 4 ids (one multi-valued), a number and a vector; context 4 ids, so too."""
    return Schema(
        user=Side(
            (Field("user_id", "user_id", shape.num_users + 3), *(Field(n, n, 50) for n in ("town", "age", "plan"))),
            ("tenure", "spend"),
        ),
        ad=Side(
            (
                Field("ad_id", "ad_id", shape.num_ads + 3),
                Field("brand", "brand", 500),
                Field("type", "type", 9),
                Field("tags", "tags", 300, multi=True),
            ),
            ("price",),
            (("look", 8),),
        ),
        context=Side(
            (
                Field("surface", "surface", 5),
                Field("hour", "hour", 27),
                Field("device", "device", 6),
                Field("words", "words", 90, multi=True),
            ),
            ("slot",),
            (("page", 2),),
        ),
        kinds=("show", "view"),
        flags=("click", "like"),
        surfaces=("", "null", "unknown", "feed", "stories"),
        surface_groups=("feed", "stories"),
        group_of_surface=(0, 0, 0, 0, 1),
        tasks=(Task("click"), Task("conversion", given="click")),
    )


def write_store(folder: Path, shape: Shape = Shape()) -> FeatureStore:
    """Write partitions, entity tables and the manifest; returns the store, opened."""
    rng, schema = np.random.default_rng(shape.seed), make_schema(shape)
    files: dict[str, Any] = {
        store_write.USERS: _entities(folder, store_write.USERS, rng, schema.user, shape.num_users),
        store_write.ADS: _entities(folder, store_write.ADS, rng, schema.ad, shape.num_ads),
    }
    shard = rng.integers(0, shape.num_shards, shape.num_users)
    events, day = _events(rng, shape)
    names = ["before", *shape.days]
    for at, relative in _partitions("timelines", names, day + 1, shard[events["user"]], shape.num_shards):
        files[relative] = store_write.write_table(folder, relative, events.take(pa.array(at)))
    rows, day = _impressions(rng, shape, schema, events)
    for at, relative in _partitions("impressions", shape.days, day, shard[rows["user"]], shape.num_shards):
        files[relative] = store_write.write_table(folder, relative, rows.take(pa.array(at)))
    counts = {"users": shape.num_users - 1, "ads": shape.num_ads - 1, "events": events.num_rows}
    manifest = {"version": store_write.VERSION, "days": shape.days, "zone": "UTC", "files": files, "rows": counts}
    return reopened(folder, manifest, schema)


def reopened(folder: Path, manifest: dict[str, Any], schema: Schema) -> FeatureStore:
    """A store without an encoder: reading needs the schema only."""
    return FeatureStore(folder, manifest, SimpleNamespace(schema=schema))  # type: ignore[arg-type]


def _partitions(
    kind: str, days: list[str], day: np.ndarray, shard: np.ndarray, num_shards: int
) -> list[tuple[np.ndarray, str]]:
    if not day.size:
        return []
    code = day * num_shards + shard
    order = np.argsort(code, kind="stable")
    codes, starts = np.unique(code[order], return_index=True)
    parts = np.split(order, starts[1:])
    paths = [store_write.partition_path(kind, days[c // num_shards], c % num_shards) for c in codes.tolist()]
    return list(zip(parts, paths, strict=True))


def _events(rng: Rng, shape: Shape) -> tuple[pa.Table, np.ndarray]:
    """Events sorted by (user, known_ms), and their day (-1 before the first). User 0 (unknown) has none."""
    user, day = [], []
    for d in range(-1, shape.num_days):
        counts = rng.integers(0, 2 * (shape.past if d < 0 else shape.daily) + 1, shape.num_users)
        counts[0] = 0
        user.append(np.repeat(np.arange(shape.num_users), counts))
        day.append(np.full(int(counts.sum()), d))
    users, days = np.concatenate(user), np.concatenate(day)
    steps = DAY_MS // shape.step_ms
    known = START_MS + days * DAY_MS + rng.integers(0, steps, users.size) * shape.step_ms
    order = np.lexsort((known, users))
    users, days, known, total = users[order], days[order], known[order], users.size
    return pa.table(
        {
            "user": pa.array(users.astype(np.int32)),
            "known_ms": known,
            "time_ms": known - rng.integers(0, 3, total) * 1000,
            "ad": pa.array(_popular(rng, shape.num_ads, total)),
            "kind": pa.array(rng.integers(1, 3, total).astype(np.uint8)),
            "flags": pa.array(rng.integers(0, 4, total).astype(np.uint16)),
            "surface": pa.array(rng.integers(2, 5, total).astype(np.int16)),
            "dwell": pa.array(rng.integers(0, 16, total).astype(np.uint8)),
            "order": pa.array(np.zeros(total, np.int64)),  # only the writer reads it
        }
    ), days


def _impressions(rng: Rng, shape: Shape, schema: Schema, events: pa.Table) -> tuple[pa.Table, np.ndarray]:
    """Impressions sorted by (user, time) with their cuts, and their day."""
    counts = rng.integers(0, 2 * shape.shown + 1, (shape.num_days, shape.num_users))
    user = np.repeat(np.tile(np.arange(shape.num_users), shape.num_days), counts.reshape(-1))
    day = np.repeat(np.repeat(np.arange(shape.num_days), shape.num_users), counts.reshape(-1))
    time = START_MS + day * DAY_MS + rng.integers(0, DAY_MS // shape.step_ms, user.size) * shape.step_ms
    order = np.lexsort((time, user))
    user, day, time, total = user[order], day[order], time[order], user.size
    span = (shape.num_days + 2) * DAY_MS
    codes = events["user"].to_numpy().astype(np.int64) * span + events["known_ms"].to_numpy() - START_MS + DAY_MS
    before = np.searchsorted(codes, user * span + time - START_MS + DAY_MS, side="left")
    start = np.searchsorted(codes, user * span, side="left")
    click = rng.random(total) < 0.3
    conversion = np.where(rng.random(total) < 0.2, -1, click & (rng.random(total) < 0.4))
    columns = {
        "impression_id": rng.permutation(total).astype(np.int64) + 10**12,
        "user": pa.array(user.astype(np.int32)),
        "ad": pa.array(_popular(rng, shape.num_ads, total)),
        "time_ms": time,
        "cut": pa.array((before - start).astype(np.int32)),
        "surface": pa.array(rng.integers(2, 5, total).astype(np.int16)),
        "label_click": pa.array(click.astype(np.int8)),
        "label_conversion": pa.array(conversion.astype(np.int8)),
        "true_click": pa.array(rng.random(total).astype(np.float32)),
        "dup": pa.array(np.zeros(total, np.int64)),  # only the writer reads it
    }
    side = Side(schema.context.fields[1:], schema.context.numeric, schema.context.vectors)
    columns |= {f"ctx_{n}": c for n, c in _columns(rng, side, total).items()}
    return pa.table(columns), day


def _popular(rng: Rng, num_ads: int, total: int) -> np.ndarray:
    """A few ads are met often, most of them rarely."""
    return (num_ads * rng.random(total) ** 3).astype(np.int32)


def _entities(folder: Path, relative: str, rng: Rng, side: Side, num_rows: int) -> Any:
    keys = pa.array([None, *range(100, 99 + num_rows)], pa.int64())
    return store_write.write_table(folder, relative, pa.table({"key": keys, **_columns(rng, side, num_rows)}))


def _columns(rng: Rng, side: Side, num_rows: int) -> dict[str, pa.Array]:
    """Random encoded columns; a field with a row per entity is its id."""
    out: dict[str, pa.Array] = {}
    for field in side.fields:
        if field.multi:
            offsets = np.concatenate([[0], np.cumsum(rng.integers(0, 4, num_rows))])
            values = rng.integers(2, field.rows, offsets[-1]).astype(np.int32)
            out[field.name] = pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(values))
        elif field.rows == num_rows + 3:
            out[field.name] = pa.array(np.arange(num_rows, dtype=np.int32) + 3)
        else:
            out[field.name] = pa.array(rng.integers(2, field.rows, num_rows).astype(np.int32))
    for name in side.numeric:
        values = rng.normal(size=num_rows).astype(np.float32)
        out[name] = pa.array(np.where(rng.random(num_rows) < 0.1, np.float32("nan"), values))
    for name, width in side.vectors:
        flat = pa.array(rng.normal(size=num_rows * width).astype(np.float32))
        out[name] = pa.FixedSizeListArray.from_arrays(flat, width)
    return out
