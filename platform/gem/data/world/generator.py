"""The generated ads world, written as raw tables: what `make pipeline` runs on when no data are given.

Tables (Parquet, times in ms UTC, days from 2026-01-05):

    users                   user_id, age_band, region, device_class, tenure_days, interests
    ads                     ad_id, advertiser, category, format, objective, price, creative, is_post
    impressions-<day>-<n>   impression_id, user_id, ad_id, time_ms, surface, device, slot, clicked, p_click,
                            p_conversion
    conversions-<day>-<n>   impression_id, user_id, ad_id, time_ms        (<day> is that of the impression)
    organic-<day>-<n>       user_id, ad_id, time_ms, liked, shared, watched_ms

`p_click` and `p_conversion` are the true probabilities the outcomes were drawn with; `p_conversion` is that of
click and conversion together. The rows depend on the seed and the sizes only: <n> counts chunks of users, and
another chunk size only spreads the same rows over other files. Memory is that of one chunk and one day.
"""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from gem.config import WorldConfig
from gem.data.world.ads_world import (
    AGE_BANDS,
    CATEGORIES,
    CREATIVE_WIDTH,
    DEVICES,
    FORMATS,
    OBJECTIVES,
    REGIONS,
    SURFACES,
    USER_BLOCK,
    World,
    build_world,
    listed_interests,
    make_users,
)
from gem.data.world.simulate import DAY_MS, FIRST_DAY_MS, ChunkState, Impressions, Organic, simulate_day
from gem.errors import ConfigError, DataError


@dataclass
class WorldReport:
    """What was written. Rows count every row in the files, duplicates included."""

    days: list[str] = field(default_factory=list)
    impressions: int = 0
    clicks: int = 0  # of distinct impressions
    conversions: int = 0
    organic_events: int = 0
    duplicates: int = 0  # impression rows written a second time
    null_users: int = 0  # impressions without user id (their copies not counted)
    files: list[str] = field(default_factory=list)  # relative to the folder


def generate(config: WorldConfig, out: Path, chunk_users: int = 50_000) -> WorldReport:
    """Write the raw tables of the world of `config` into the empty folder `out`.

    Args:
        chunk_users: users simulated together; bounds memory, changes no row.

    Raises:
        ConfigError: sizes or shares out of range.
        DataError: `out` is not an empty folder (it is made if missing).
    """
    if chunk_users < 1:
        raise ConfigError(f"chunk_users: got {chunk_users}; allowed: 1 or more")
    world = build_world(config)
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise DataError(f"generated world: {out} is not empty; give a new folder, it is renamed when complete")
    report = WorldReport(days=[str(day_date(day)) for day in range(config.num_days)])
    _write_users(world, out, report)
    _write(_ads_table(world), out, "ads.parquet", report)
    for chunk, start in enumerate(range(0, config.num_users, chunk_users)):
        index = np.arange(start, min(start + chunk_users, config.num_users))
        state = ChunkState.start(make_users(world, index))
        for day in range(config.num_days):
            impressions, organic = simulate_day(world, state, day)
            _write_day(world, state, impressions, organic, out, report, f"{day_date(day)}-{chunk:05d}.parquet")
    return report


def day_date(day: int) -> datetime.date:
    """Date of day 0, 1, ... of the world."""
    return datetime.datetime.fromtimestamp((FIRST_DAY_MS + day * DAY_MS) / 1000, datetime.UTC).date()


def _write_day(
    world: World,
    state: ChunkState,
    impressions: Impressions,
    organic: Organic,
    out: Path,
    report: WorldReport,
    name: str,
) -> None:
    user_id = state.users.index + 1
    _write(_impression_table(world, user_id, impressions, report), out, f"impressions-{name}", report)
    conversions = _conversion_table(user_id, impressions)
    _write(conversions, out, f"conversions-{name}", report)
    _write(_organic_table(user_id, organic), out, f"organic-{name}", report)
    report.clicks += int(impressions.clicked.sum())
    report.conversions += conversions.num_rows
    report.organic_events += int(organic.row.shape[0])


def _impression_table(world: World, user_id: NDArray[np.int64], e: Impressions, report: WorldReport) -> pa.Table:
    """The impressions in time order, with some user ids nulled and some rows repeated at the end."""
    nulled = world.random.uniform("null user", e.id) < world.config.null_user_share
    table = pa.table(
        {
            "impression_id": e.id,
            "user_id": pa.array(user_id[e.row], mask=nulled, type=pa.int64()),
            "ad_id": e.item + 1,
            "time_ms": e.time_ms,
            "surface": _names(SURFACES, e.surface),
            "device": _names(DEVICES, e.device),
            "slot": e.slot,
            "clicked": e.clicked,
            "p_click": e.p_click.astype(np.float32),
            "p_conversion": e.p_conversion.astype(np.float32),
        }
    )
    twice = np.flatnonzero(world.random.uniform("written twice", e.id) < world.config.duplicate_share)
    report.impressions += table.num_rows + twice.shape[0]
    report.duplicates += int(twice.shape[0])
    report.null_users += int(nulled.sum())
    return pa.concat_tables([table, table.take(pa.array(twice))]).combine_chunks()


def _conversion_table(user_id: NDArray[np.int64], e: Impressions) -> pa.Table:
    rows = np.flatnonzero(e.conversion_ms >= 0)
    rows = rows[np.lexsort((e.id[rows], e.conversion_ms[rows]))]
    return pa.table(
        {
            "impression_id": e.id[rows],
            "user_id": user_id[e.row[rows]],
            "ad_id": e.item[rows] + 1,
            "time_ms": e.conversion_ms[rows],
        }
    )


def _organic_table(user_id: NDArray[np.int64], e: Organic) -> pa.Table:
    return pa.table(
        {
            "user_id": user_id[e.row],
            "ad_id": e.item + 1,
            "time_ms": e.time_ms,
            "liked": e.liked,
            "shared": e.shared,
            "watched_ms": e.watched_ms,
        }
    )


def _ads_table(world: World) -> pa.Table:
    """Ads and posts. A post has no objective and no price."""
    items = world.items
    index = np.arange(items.category.shape[0])
    post = index >= world.config.num_ads
    digits = len(str(int(items.advertiser.max())))
    objective = pa.array(np.array(OBJECTIVES)[items.objective].astype(object), mask=post, type=pa.string())
    creative = pa.FixedSizeListArray.from_arrays(pa.array(items.creative.reshape(-1)), CREATIVE_WIDTH)
    return pa.table(
        {
            "ad_id": index + 1,
            "advertiser": pa.array([f"advertiser-{a:0{digits}d}" for a in items.advertiser]),
            "category": _names(CATEGORIES, items.category),
            "format": _names(FORMATS, items.format),
            "objective": objective,
            "price": pa.array(np.exp(items.log_price).astype(np.float32), mask=post),
            "creative": creative,
            "is_post": post.astype(np.int8),
        }
    )


def _write_users(world: World, out: Path, report: WorldReport) -> None:
    """Users in blocks; a few have no age band (3 %) or tenure (2 %), as in any real table."""
    writer: pq.ParquetWriter | None = None
    for start in range(0, world.config.num_users, USER_BLOCK):
        users = make_users(world, np.arange(start, min(start + USER_BLOCK, world.config.num_users)))
        no_age = world.random.uniform("age not told", users.index) < 0.03
        no_tenure = world.random.uniform("tenure lost", users.index) < 0.02
        age = pa.array(np.array(AGE_BANDS)[users.age].astype(object), mask=no_age, type=pa.string())
        table = pa.table(
            {
                "user_id": users.index + 1,
                "age_band": age,
                "region": _names(REGIONS, users.region),
                "device_class": _names(DEVICES, users.device),
                "tenure_days": pa.array(users.tenure_days, mask=no_tenure, type=pa.int64()),
                "interests": pa.array(listed_interests(world, users), type=pa.list_(pa.string())),
            }
        )
        writer = writer or pq.ParquetWriter(out / "users.parquet", table.schema)
        writer.write_table(table)
    if writer is not None:
        writer.close()
        report.files.append("users.parquet")


def _names(values: tuple[str, ...], codes: NDArray[np.int64]) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array(codes.astype(np.int32)), pa.array(values)).cast(pa.string())


def _write(table: pa.Table, out: Path, name: str, report: WorldReport) -> None:
    pq.write_table(table, os.fspath(out / name))
    report.files.append(name)
