"""The log of the throughput benchmark: users with long histories and several impressions on one day, as plain arrays.

Written once as .npy files and mapped by every measured process, so that the log itself costs no side memory or time.
Content is random: only sizes matter. 16 categorical fields, one task; event and candidate ads share one vocabulary.

Legend: U users, A ads, E events, N impressions, F fields of a side, L events an impression reads.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from gem.config import ModelConfig
from gem.data.rows import SideRows
from gem.data.schema import NUM_RESERVED, Field, Schema, Side, Task
from gem.data.store import Impressions, Timelines
from gem.training.data import StoreReader

I32 = npt.NDArray[np.int32]
DAY_MS = 86_400_000
START_MS = 1_700_006_400_000  # midnight before the impressions
EVENTS_PER_IMPRESSION = 2  # known between two impressions of a user: the impression itself and one organic event
USER = {"age": 9, "region": 40, "plan": 8, "segment": 200}
AD = {"advertiser": 1000, "category": 120, "format": 8, "objective": 8, "is_post": 5}
CONTEXT = {"hour": 27, "weekday": 10, "device": 6, "slot": 13}
SURFACES = ("", "null", "unknown", "feed", "stories", "search")


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
        user=side(Field("user_id", "user_id", size.users + NUM_RESERVED), USER),
        ad=side(Field("ad_id", "ad_id", size.ads + NUM_RESERVED), AD),
        context=side(Field("surface", "surface", len(SURFACES)), CONTEXT),
        kinds=("ad_impression", "organic"),
        flags=("click", "like"),
        surfaces=SURFACES,
        surface_groups=("all",),
        group_of_surface=(0,) * len(SURFACES),
        tasks=(Task("click"),),
    )


def write_log(folder: Path, size: LogSize) -> None:
    """Write the arrays of a log; the same size gives the same bytes."""
    rng = np.random.default_rng(size.seed)
    schema = make_schema(size)
    past = rng.integers(size.longest, 2 * size.longest + 1, size.users)
    today = EVENTS_PER_IMPRESSION * size.shown
    offsets = np.concatenate([[0], np.cumsum(past + today)])
    num = int(offsets[-1])
    place = np.arange(num) - np.repeat(offsets[:-1], past + today)  # of an event in its user's timeline
    before = np.repeat(past, past + today) - place  # above 0: so many events before the day
    hours = np.where(before > 0, -before * 0.3, (0.5 - before) * 24 / today)
    user = np.repeat(np.arange(size.users), size.shown)
    turn = np.tile(np.arange(size.shown), size.users)
    arrays: dict[str, npt.NDArray[Any]] = {
        "offsets": offsets,
        "event_ad": _popular(rng, size.ads, num),
        "event_kind": rng.integers(1, 3, num).astype(np.uint8),
        "event_flags": rng.integers(0, 4, num).astype(np.uint16),
        "event_surface": rng.integers(NUM_RESERVED, len(SURFACES), num).astype(np.int16),
        "event_dwell": rng.integers(0, 16, num).astype(np.uint8),
        "event_time_ms": START_MS + (hours * 3_600_000).astype(np.int64),
        "user": user.astype(np.int32),
        "ad": _popular(rng, size.ads, user.size),
        "time_ms": START_MS + (turn * DAY_MS // size.shown).astype(np.int64),
        "cut": (past[user] + EVENTS_PER_IMPRESSION * turn).astype(np.int32),
        "click": (rng.random(user.size) < 0.3).astype(np.float32),
        "user_ids": _ids(rng, schema.user, size.users),
        "ad_ids": _ids(rng, schema.ad, size.ads),
        "context_ids": _ids(rng, schema.context, user.size),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, values in {**arrays, "size": np.array(list(asdict(size).values()))}.items():
        np.save(folder / f"{name}.npy", values)


def _popular(rng: np.random.Generator, ads: int, size: int) -> I32:
    return (ads * rng.random(size) ** 3).astype(np.int32)


def _ids(rng: np.random.Generator, side: Side, rows: int) -> I32:
    """Table rows, [rows, F]. The first field of users and ads is their own id; a context's is its surface."""
    columns = [rng.integers(NUM_RESERVED, f.rows, rows) for f in side.fields]
    if side.fields[0].rows == rows + NUM_RESERVED:
        columns[0] = np.arange(rows) + NUM_RESERVED
    return np.stack(columns, 1).astype(np.int32)


@dataclass(frozen=True)
class Log:
    """A written log, mapped. `per_user`: the first impressions of every user that are trained on."""

    schema: Schema
    timelines: Timelines
    impressions: Impressions
    users: SideRows
    ads: SideRows

    @classmethod
    def open(cls, folder: Path, per_user: int) -> Log:
        """Raises FileNotFoundError for a folder without a log, ValueError for more impressions than it holds."""

        def load(name: str) -> npt.NDArray[Any]:
            return np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r"))

        size = LogSize(*np.load(folder / "size.npy").tolist())
        if not 1 <= per_user <= size.shown:
            raise ValueError(f"per_user: got {per_user}, this log allows 1 to {size.shown}; write a longer one")
        schema, events = make_schema(size), ("ad", "kind", "flags", "surface", "dwell", "time_ms")
        columns = [load(f"event_{n}") for n in events]
        timelines = Timelines(load("offsets"), *columns, known_ms=columns[-1])
        at = np.flatnonzero(np.arange(size.users * size.shown) % size.shown < per_user)
        context, click = load("context_ids").take(at, axis=0), load("click")[at]
        impressions = Impressions(
            impression_id=at, user=load("user")[at], ad=load("ad")[at], time_ms=load("time_ms")[at],
            cut=load("cut")[at], surface=context[:, 0].astype(np.int16), labels=click[:, None],
            mask=np.ones((at.size, 1), np.float32), context=_side_rows(schema.context, context), true={},
            day=np.zeros(at.size, np.int16), days=("day",),
        )  # fmt: skip
        return cls(schema, timelines, impressions, *(_side_rows(s, load(f"{n}_ids"))
                   for n, s in (("user", schema.user), ("ad", schema.ad))))  # fmt: skip

    def reader(self, model: ModelConfig) -> StoreReader:
        """The training reader over this log, as over a feature store."""
        store = SimpleNamespace(schema=self.schema, users=_Source(self.users), ads=_Source(self.ads))
        lines, imp = self.timelines, self.impressions
        return StoreReader(store, lines, imp, model.max_history, align=model.align)  # type: ignore[arg-type]


class _Source:
    """Entities by index, as `gem.data.collate` asks for them."""

    def __init__(self, side_rows: SideRows) -> None:
        self.rows = side_rows.take
        self.num = len(side_rows)

    def __len__(self) -> int:
        return self.num


def _side_rows(side: Side, ids: I32) -> SideRows:
    nothing = np.zeros((len(ids), 0), np.float32)
    return SideRows.of_arrays(side, ids, {}, (nothing, nothing))
