"""Raw logs of any size for the data benchmark: Parquet files by day with a heavy tail of events per user.

Not an ads world with truths (that is gem.data.world.generator): here only the shape of the work matters, and speed.
`python -m tests.benchmarks.data_world FOLDER --events 20000000`
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from gem.data.days import DAY_MS, day_number, day_text
from gem.data.spec import DatasetSpec, parse_spec

FIRST_DAY = "2024-01-01"
DUPLICATE_SHARE = 0.005
NULL_SHARE = 0.001
KNOWN_AFTER_MS = 60_000  # an impression and its click
ACTIONS = ("view", "like", "cart", "buy")
SURFACES, DEVICES, SLOTS = ("feed", "stories", "search"), ("ios", "android", "web"), ("top", "middle", "bottom", "side")
COUNTRIES = tuple(f"c{i:02d}" for i in range(40))
BANDS = ("18", "25", "35", "45", "55", "65")
CATEGORIES = tuple(f"cat{i:03d}" for i in range(120))
MB = 2**20

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class World:
    """Size of a log. `longest`: events of the busiest user; `step_ms`: grain of the times (coarse: many ties)."""

    events: int = 20_000_000
    users: int = 500_000
    impressions: int = 5_000_000
    days: int = 30
    ads: int = 100_000
    seed: int = 1
    longest: int = 8_600
    step_ms: int = 1

    def day_names(self) -> list[str]:
        first = day_number(FIRST_DAY)
        return [day_text(first + d) for d in range(self.days)]


def write_world(world: World, folder: Path) -> dict[str, Any]:
    """Write users, ads, events and impressions below `folder`; returns sizes and the tail of events per user."""
    start = time.perf_counter()
    rng = np.random.default_rng(world.seed)
    users, ads = _ids(rng, world.users), _ids(rng, world.ads)
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(_users(rng, users), folder / "users.parquet", compression="zstd")
    pq.write_table(_ads(rng, ads), folder / "ads.parquet", compression="zstd")
    counts = tail_counts(world.events, world.users, world.longest)
    rng.shuffle(counts)
    shown = _share_out(world.impressions, counts**0.7)
    organic, impressions = (_spread(rng, n, world.days) for n in (counts, shown))

    def one_day(day: int) -> int:
        own = np.random.default_rng([world.seed, day])
        name = f"day={world.day_names()[day]}/part-0.parquet"
        return _write(folder / "events" / name, _events(own, world, day, (users, ads), organic[day])) + _write(
            folder / "impressions" / name, _impressions(own, world, day, (users, ads), impressions[day])
        )

    with ThreadPoolExecutor(2) as pool:
        size = sum(pool.map(one_day, range(world.days)))
    return {
        "seconds": round(time.perf_counter() - start, 1),
        "raw_mb": round(size / MB, 1),
        "events_per_user": {"mean": float(counts.mean()), "median": float(np.median(counts)), "max": int(counts.max())},
        "timeline_max": int((counts + shown).max()),
        "mean_history": round(float(shown @ (counts + shown) / 2 / shown.sum()), 1),  # times are uniform in both
    }


def spec() -> DatasetSpec:
    """How the raw files are to be read: organic events and impressions in one timeline, one label."""
    when = {"column": "time_ms", "unit": "ms"}
    shown = {"table": "impressions", "user": "user_id", "ad": "ad_id", "surface": "surface", "time": when}
    return parse_spec(
        {
            "name": "bench",
            "tables": {
                "events": {"files": ["events/day=*/*.parquet"]},
                "impressions": {"files": ["impressions/day=*/*.parquet"]},
                "users": {"files": ["users.parquet"]},
                "ads": {"files": ["ads.parquet"]},
            },
            "impressions": {
                **shown,
                "id": "impression_id",
                "duplicate_key": ["impression_id"],
                "outcomes": ["clicked"],
            },
            "labels": {"click": {"column": "clicked"}},
            "events": [
                {
                    **shown,
                    "kind": "ad_impression",
                    "flags": {"click": "clicked"},
                    "available_after_ms": KNOWN_AFTER_MS,
                },
                {
                    "kind": "organic",
                    "table": "events",
                    "user": "user_id",
                    "ad": "item_id",
                    "time": when,
                    "action": "action",
                    "action_flags": {"like": "like", "cart": "cart", "buy": "buy"},
                    "dwell": {"column": "dwell_ms", "unit": "ms"},
                },
            ],
            "users": {"table": "users", "key": "user_id", "features": _features("country", "age_band", "tenure_days")},
            "ads": {"table": "ads", "key": "ad_id", "features": _features("category", "advertiser", "price")},
            "context": {"features": _features("device", "slot")},
        }
    )


def _features(*names: str) -> list[dict[str, str]]:
    number = {"kind": "numeric", "transform": "log1p"}
    return [{"name": n, **(number if n in ("tenure_days", "price") else {"kind": "categorical"})} for n in names]


def tail_counts(total: int, users: int, longest: int) -> I64:
    """Events per user, ascending, [users], summing to `total`: quantiles of a lognormal whose last is `longest`."""
    normal = NormalDist()
    z = np.array([normal.inv_cdf((i + 0.5) / users) for i in range(users)])
    low, high = 0.0, 4.0
    for _ in range(40):
        sigma = (low + high) / 2
        weights = np.exp(sigma * (z - z[-1]))
        low, high = (low, sigma) if weights[-1] / weights.sum() * total > longest else (sigma, high)
    return np.sort(_share_out(total, np.exp(sigma * (z - z[-1]))))


def _share_out(total: int, weights: npt.NDArray[np.float64]) -> I64:
    edges = np.rint(np.cumsum(weights) / weights.sum() * total).astype(np.int64)
    out: I64 = np.diff(edges, prepend=0)
    return out


def _spread(rng: np.random.Generator, counts: I64, days: int) -> list[npt.NDArray[np.int32]]:
    """User position of every row, dealt to the days at random."""
    rows = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    rng.shuffle(rows)
    return np.array_split(rows, days)


def _ids(rng: np.random.Generator, size: int) -> I64:
    found = np.unique(rng.integers(2**40, 2**62, size + size // 8 + 8))
    rng.shuffle(found)
    out: I64 = found[:size]
    return out


def _words(rng: np.random.Generator, words: Sequence[str], size: int, skew: float = 1.0) -> pa.DictionaryArray:
    codes = (len(words) * rng.random(size) ** skew).astype(np.int32)
    return pa.DictionaryArray.from_arrays(pa.array(codes), pa.array(words))


def _users(rng: np.random.Generator, ids: I64) -> pa.Table:
    return pa.table(
        {
            "user_id": ids,
            "country": _words(rng, COUNTRIES, len(ids), 3.0),
            "age_band": _words(rng, BANDS, len(ids)),
            "tenure_days": rng.integers(0, 3000, len(ids), dtype=np.int32),
        }
    )


def _ads(rng: np.random.Generator, ids: I64) -> pa.Table:
    return pa.table(
        {
            "ad_id": ids,
            "category": _words(rng, CATEGORIES, len(ids), 2.0),
            "advertiser": rng.integers(0, max(len(ids) // 20, 1), len(ids)),
            "price": np.round(rng.lognormal(2.5, 1.0, len(ids)), 2),
        }
    )


def _times(rng: np.random.Generator, world: World, day: int, size: int) -> I64:
    """Sorted times of a day, [size] ms UTC: few at night, most in the evening."""
    hours = np.array([3, 2, 1, 1, 1, 2, 3, 5, 6, 6, 6, 7, 8, 7, 6, 6, 7, 8, 10, 12, 13, 12, 9, 6], np.float64)
    share = np.concatenate([[0.0], np.cumsum(hours / hours.sum())])
    at = np.interp(rng.random(size), share, np.linspace(0, DAY_MS, 25)).astype(np.int64)
    at = np.minimum(at, DAY_MS - 1) // world.step_ms * world.step_ms
    at.sort()
    out: I64 = (day_number(FIRST_DAY) + day) * DAY_MS + at
    return out


def _keys(rng: np.random.Generator, ids: I64, position: npt.NDArray[np.integer[Any]]) -> pa.Array:
    return pa.array(ids[position], mask=rng.random(len(position)) < NULL_SHARE)


def _popular(rng: np.random.Generator, ids: I64, size: int) -> I64:
    out: I64 = ids[(len(ids) * rng.random(size) ** 3).astype(np.int64)]
    return out


def _events(
    rng: np.random.Generator, world: World, day: int, ids: tuple[I64, I64], user: npt.NDArray[np.int32]
) -> pa.Table:
    size = len(user)
    action = np.searchsorted([0.85, 0.93, 0.98], rng.random(size)).astype(np.int32)
    dwell_ms = np.exp(9.0 + 1.3 * rng.standard_normal(size, dtype=np.float32))
    table = pa.table(
        {
            "event_id": np.arange(size, dtype=np.int64) + (day + 1) * 10**10,
            "user_id": _keys(rng, ids[0], user),
            "item_id": _popular(rng, ids[1], size),
            "time_ms": _times(rng, world, day, size),
            "action": pa.DictionaryArray.from_arrays(pa.array(action), pa.array(ACTIONS)),
            "dwell_ms": np.minimum(dwell_ms, 3_600_000).astype(np.int32),
        }
    )
    return _with_duplicates(rng, table)


def _impressions(
    rng: np.random.Generator, world: World, day: int, ids: tuple[I64, I64], user: npt.NDArray[np.int32]
) -> pa.Table:
    size = len(user)
    ad = _popular(rng, ids[1], size)
    clicked = rng.random(size) < 0.02 + 0.06 * (ad % 17 / 16)
    table = pa.table(
        {
            "impression_id": (np.arange(size, dtype=np.int64) + (day + 1) * 10**10) * 7919 + 17,
            "user_id": _keys(rng, ids[0], user),
            "ad_id": ad,
            "time_ms": _times(rng, world, day, size),
            "surface": _words(rng, SURFACES, size, 1.5),
            "device": _words(rng, DEVICES, size),
            "slot": _words(rng, SLOTS, size, 2.0),
            "clicked": clicked.astype(np.int8),
        }
    )
    return _with_duplicates(rng, table)


def _with_duplicates(rng: np.random.Generator, table: pa.Table) -> pa.Table:
    """Some rows twice, the second beside the first: time order stays."""
    again = rng.random(table.num_rows) < DUPLICATE_SHARE
    return table.take(pa.array(np.repeat(np.arange(table.num_rows), 1 + again)))


def _write(path: Path, table: pa.Table) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = [f.with_type(pa.string()) if pa.types.is_dictionary(f.type) else f for f in table.schema]
    pq.write_table(table.cast(pa.schema(text)), path, compression="zstd")
    return path.stat().st_size


def main() -> None:
    """Write a world for a person who wants to look at it or to profile with it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    for f in fields(World):
        parser.add_argument(f"--{f.name.replace('_', '-')}", type=int, default=f.default)
    given = vars(parser.parse_args())
    folder = given.pop("folder")
    print(write_world(World(**given), folder))


if __name__ == "__main__":
    main()
