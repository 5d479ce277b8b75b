"""The feature store of the throughput benchmark: users with long histories and several impressions on one day.

Written once; every measured process maps the reader's arrays of it, as in training. Content is random: only sizes
matter. 16 categorical fields, one task; events and candidates share one vocabulary of ads.

Legend: U users, A ads, E events, N impressions, F fields of a side.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gem.config import ModelConfig
from gem.data.build import store_write
from gem.data.days import BEFORE, DAY_MS, day_number
from gem.data.schema import NUM_RESERVED, Field, Schema, Side, Task
from gem.data.store import FeatureStore, Impressions
from gem.training.data import StoreReader

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
DAY = "2024-01-02"
START_MS = day_number(DAY) * DAY_MS
PAST_STEP_MS = 1_000_000  # between two events before the day: about 86 a day
EVENTS_PER_IMPRESSION = 2  # known between two impressions of a user: the impression itself and one organic event
USER = {"age": 9, "region": 40, "plan": 8, "segment": 200}
AD = {"advertiser": 1000, "category": 120, "format": 8, "objective": 8, "is_post": 5}
CONTEXT = {"hour": 27, "weekday": 10, "device": 6, "slot": 13}
SURFACES = ("", "null", "unknown", "feed", "stories", "search")
LOG_SIZE = "log.json"


@dataclass(frozen=True)
class LogSize:
    """Every user has `longest` to 2 * `longest` events before the day and `shown` impressions on it."""

    users: int = 2048
    ads: int = 20_000
    longest: int = 1000
    shown: int = 16
    seed: int = 1


def make_schema(size: LogSize) -> Schema:
    """User 5, ad 6 and context 5 single-valued fields; no numbers and no vectors, which peers read differently."""

    def side(first: Field, rest: dict[str, int]) -> Side:
        return Side((first, *(Field(n, n, rows) for n, rows in rest.items())))

    return Schema(
        user=side(Field("user_id", "user_id", size.users + 1 + NUM_RESERVED), USER),
        ad=side(Field("ad_id", "ad_id", size.ads + 1 + NUM_RESERVED), AD),
        context=side(Field("surface", "surface", len(SURFACES)), CONTEXT),
        kinds=("ad_impression", "organic"),
        flags=("click", "like"),
        surfaces=SURFACES,
        surface_groups=("all",),
        group_of_surface=(0,) * len(SURFACES),
        tasks=(Task("click"),),
    )


def write_log(folder: Path, size: LogSize) -> None:
    """Write the store and the reader's arrays of it; the same size gives the same content."""
    rng, schema = np.random.default_rng(size.seed), make_schema(size)
    past = rng.integers(size.longest, 2 * size.longest + 1, size.users)
    tables = {
        store_write.USERS: _entities(rng, schema.user, size.users),
        store_write.ADS: _entities(rng, schema.ad, size.ads),
        store_write.partition_path("timelines", BEFORE, 0): _events(rng, size, past, before=True),
        store_write.partition_path("timelines", DAY, 0): _events(
            rng, size, np.full(size.users, EVENTS_PER_IMPRESSION * size.shown), before=False
        ),
        store_write.partition_path("impressions", DAY, 0): _impressions(rng, schema, size, past),
    }
    manifest = {
        "version": store_write.VERSION,
        "days": [DAY],
        "zone": "UTC",
        "files": {name: store_write.write_table(folder, name, table) for name, table in tables.items()},
        "rows": {"users": size.users, "ads": size.ads},
    }
    (folder / LOG_SIZE).write_text(json.dumps({"size": asdict(size), "manifest": manifest}), encoding="utf-8")
    open_store(folder)[0].timelines()


def open_store(folder: Path) -> tuple[FeatureStore, LogSize]:
    """The store (without an encoder: reading needs the schema only) and its size."""
    found = json.loads((folder / LOG_SIZE).read_text(encoding="utf-8"))
    size = LogSize(**found["size"])
    encoder = SimpleNamespace(schema=make_schema(size))
    return FeatureStore(folder, found["manifest"], encoder), size  # type: ignore[arg-type]


def _events(rng: np.random.Generator, size: LogSize, counts: I64, before: bool) -> pa.Table:
    """Events of every user in order: before the day one every PAST_STEP_MS, on it evenly over the day."""
    num, user = int(counts.sum()), np.repeat(np.arange(size.users) + 1, counts)
    place = np.arange(num) - np.repeat(np.cumsum(counts) - counts, counts)
    if before:
        time_ms = START_MS - (np.repeat(counts, counts) - place) * PAST_STEP_MS
    else:
        time_ms = START_MS + (2 * place + 1) * DAY_MS // (2 * np.repeat(counts, counts))
    return pa.table(
        {
            "user": pa.array(user.astype(np.int32)),
            "known_ms": time_ms,
            "time_ms": time_ms,
            "ad": pa.array(_popular(rng, size.ads, num)),
            "kind": pa.array(rng.integers(1, 3, num).astype(np.uint8)),
            "flags": pa.array(rng.integers(0, 4, num).astype(np.uint16)),
            "surface": pa.array(rng.integers(NUM_RESERVED, len(SURFACES), num).astype(np.int16)),
            "dwell": pa.array(rng.integers(0, 16, num).astype(np.uint8)),
        }
    )


def _impressions(rng: np.random.Generator, schema: Schema, size: LogSize, past: I64) -> pa.Table:
    user, turn = np.repeat(np.arange(size.users), size.shown), np.tile(np.arange(size.shown), size.users)
    own = Side(schema.context.fields[1:])
    return pa.table(
        {
            "impression_id": np.arange(user.size, dtype=np.int64),
            "user": pa.array((user + 1).astype(np.int32)),
            "ad": pa.array(_popular(rng, size.ads, user.size)),
            "time_ms": START_MS + turn * DAY_MS // size.shown,
            "cut": pa.array((past[user] + EVENTS_PER_IMPRESSION * turn).astype(np.int32)),
            "surface": pa.array(rng.integers(NUM_RESERVED, len(SURFACES), user.size).astype(np.int16)),
            "label_click": pa.array((rng.random(user.size) < 0.3).astype(np.int8)),
            **{f"{store_write.CONTEXT_PREFIX}{n}": c for n, c in _columns(rng, own, user.size).items()},
        }
    )


def _popular(rng: np.random.Generator, ads: int, size: int) -> I32:
    """Entity indices from 1: a few ads are met often, most of them rarely."""
    return (1 + ads * rng.random(size) ** 3).astype(np.int32)


def _entities(rng: np.random.Generator, side: Side, num: int) -> pa.Table:
    """Row 0 is the unknown entity; the first field is the entity's own id."""
    columns = _columns(rng, side, num + 1)
    columns[side.fields[0].name] = pa.array(np.arange(num + 1, dtype=np.int32) + NUM_RESERVED)
    return pa.table({"key": pa.array([None, *range(num)], pa.int64()), **columns})


def _columns(rng: np.random.Generator, side: Side, num: int) -> dict[str, pa.Array]:
    return {f.name: pa.array(rng.integers(NUM_RESERVED, f.rows, num).astype(np.int32)) for f in side.fields}


@dataclass(frozen=True)
class Log:
    """An opened log. Only the first `per_user` impressions of every user are trained on."""

    store: FeatureStore
    impressions: Impressions

    @classmethod
    def open(cls, folder: Path, per_user: int) -> Log:
        """Raises FileNotFoundError for a folder without a log, ValueError for more impressions than it holds."""
        store, size = open_store(folder)
        if not 1 <= per_user <= size.shown:
            raise ValueError(f"per_user: got {per_user}, this log allows 1 to {size.shown}; write a longer one")
        every = store.impressions()
        first = np.flatnonzero(np.arange(len(every)) % size.shown < per_user)
        return cls(store, every if per_user == size.shown else every.take(first))

    def reader(self, model: ModelConfig) -> StoreReader:
        """The training reader."""
        return StoreReader(self.store, self.store.timelines(), self.impressions, model.max_history, align=model.align)
