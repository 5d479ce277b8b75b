"""A small world in memory for tests of model and training: no files, and every awkward shape on purpose.

Users 0.. have between no event and many; ads carry an empty list of tags, missing numbers and a field called
"type"; user and ad share the table "place". Cuts are counted here in plain Python.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import torch

from gem.config import ModelConfig
from gem.data.batch import Batch, EntityRows
from gem.data.collate import ImpressionRows, collate
from gem.data.past import AdValues, PastCounts, count_past, day_starts
from gem.data.rows import SideRows
from gem.data.schema import Field, Schema, Side, Task
from gem.data.store import Impressions, Timelines
from gem.model.ranker import Ranker

MINUTE_MS = 60_000
START_MS = 1_700_000_000_000
MODEL = ModelConfig(
    dim=8,
    num_layers=2,
    num_heads=2,
    max_history=6,
    num_levels=1,
    num_fmb=3,
    num_lcb=3,
    rank=3,
    mlp_hidden=16,
    representation_dim=8,
)


def make_schema(num_users: int = 12, num_ads: int = 20) -> Schema:
    """Rows of the id tables are as many as there are users and ads, plus the reserved ones."""
    return Schema(
        user=Side((Field("user_id", "user_id", num_users + 3), Field("town", "place", 8)), ("age",)),
        ad=Side(
            (
                Field("ad_id", "ad_id", num_ads + 3),
                Field("type", "type", 5),
                Field("brand", "brand.name", 6),
                Field("tags", "tags", 9, multi=True),
                Field("origin", "place", 8),
            ),
            ("price", "weight"),
            (("look", 3),),
        ),
        context=Side(
            (Field("surface", "surface", 5), Field("hour", "hour", 27), Field("device", "device", 5)), ("slot",)
        ),
        kinds=("show", "view"),
        flags=("click", "like"),
        surfaces=("", "null", "unknown", "feed", "stories"),
        surface_groups=("feed", "stories"),
        group_of_surface=(0, 0, 0, 0, 1),
        tasks=(Task("click"), Task("conversion", given="click")),
    )


@dataclass
class Entities:
    """The part of `EntityTable` that batches need."""

    side_rows: SideRows

    def rows(self, idx: np.ndarray) -> EntityRows:
        return self.side_rows.take(idx)


@dataclass
class World:
    """Stands in for a `FeatureStore` where only schema, users and ads are read."""

    schema: Schema
    users: Entities
    ads: Entities
    timelines: Timelines
    impressions: Impressions
    past: PastCounts

    def batch(self, at: list[int] | np.ndarray, max_history: int = MODEL.max_history, align: int = 1) -> Batch:
        """Collate the impressions at these positions."""
        at, imp = np.asarray(at, np.int64), self.impressions
        rows = ImpressionRows(
            user=imp.user[at].astype(np.int64),
            ad=imp.ad[at].astype(np.int64),
            time_ms=imp.time_ms[at],
            cut=imp.cut[at].astype(np.int64),
            surface=imp.surface[at].astype(np.int64),
            context=imp.context_rows(at),
            labels=imp.labels[at],
            mask=imp.mask[at],
            impression_id=imp.impression_id[at],
            past=self.past.at(imp.ad[at], imp.surface[at], imp.time_ms[at]),
        )
        return collate(self.users, self.ads, self.timelines, rows, max_history, align)

    def rows_of(self) -> dict[str, int]:
        """Field name -> rows of its table, as `check_batch` takes it."""
        sides = (self.schema.user, self.schema.ad, self.schema.context)
        return {f.name: f.rows for side in sides for f in side.fields}


def make_world(
    seed: int = 0, num_users: int = 12, num_ads: int = 20, num_impressions: int = 60, num_days: int = 3,
    events_per_user: int = 14,
) -> World:  # fmt: skip
    """User 0 has no event, user 1 has one; the others up to `events_per_user`. `events_per_user=0`: nobody has any."""
    rng = np.random.default_rng(seed)
    schema = make_schema(num_users, num_ads)
    lengths = rng.integers(0, events_per_user + 1, num_users)
    lengths[0], lengths[1:2] = 0, min(1, events_per_user)
    timelines = make_timelines(rng, lengths, num_ads, num_days)
    day = np.sort(rng.integers(0, num_days, num_impressions)).astype(np.int16)
    user = rng.integers(0, num_users, num_impressions).astype(np.int32)
    time = START_MS + (day.astype(np.int64) * 1440 + rng.integers(0, 1440, num_impressions)) * MINUTE_MS
    cut = [
        sum(int(t) < int(when) for t in timelines.known_ms[timelines.offsets[u] : timelines.offsets[u + 1]])
        for u, when in zip(user, time, strict=True)
    ]
    click = (rng.random(num_impressions) < 0.3).astype(np.float32)
    conversion = click * (rng.random(num_impressions) < 0.4)
    mask = np.ones((num_impressions, 2), np.float32)
    mask[rng.random(num_impressions) < 0.1, 1] = 0
    labels = np.stack([click, conversion], 1).astype(np.float32) * mask
    impressions = Impressions(
        impression_id=rng.permutation(num_impressions).astype(np.int64) + 1000,
        user=user,
        ad=rng.integers(0, num_ads, num_impressions).astype(np.int32),
        time_ms=time,
        cut=np.array(cut, np.int32),
        surface=rng.integers(2, 5, num_impressions).astype(np.int16),
        labels=labels,
        mask=mask,
        context=side_rows(rng, schema.context, num_impressions),
        true={},
        day=day,
        days=tuple(f"2023-11-{15 + d}" for d in range(num_days)),
        rows=np.arange(num_impressions),
    )
    users, ads = side_rows(rng, schema.user, num_users), side_rows(rng, schema.ad, num_ads)
    past = make_past(schema, ads, timelines, impressions.days)
    return World(schema, Entities(users), Entities(ads), timelines, impressions, past)


def make_past(schema: Schema, ads: SideRows, timelines: Timelines, days: tuple[str, ...]) -> PastCounts:
    """Counts of all events of the timelines, as a store would hold them."""
    values, starts = AdValues.of(schema, ads.first, len(ads)), day_starts(days, "UTC")
    return PastCounts(dict(count_past(schema, vars(timelines), values, starts)), values, starts)


def make_timelines(rng: np.random.Generator, lengths: np.ndarray, num_ads: int, num_days: int) -> Timelines:
    """Random events, sorted by time within a user; known at their time."""
    total = int(lengths.sum())
    times = [np.sort(rng.integers(-1440, num_days * 1440, n)) for n in lengths]
    time_ms = START_MS + np.concatenate([*times, np.zeros(0, np.int64)]).astype(np.int64) * MINUTE_MS
    return Timelines(
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        ad=rng.integers(0, num_ads, total).astype(np.int32),
        kind=rng.integers(1, 3, total).astype(np.uint8),
        flags=rng.integers(0, 4, total).astype(np.uint16),
        surface=rng.integers(2, 5, total).astype(np.int16),
        dwell=rng.integers(0, 16, total).astype(np.uint8),
        time_ms=time_ms,
        known_ms=time_ms,
    )


def side_rows(rng: np.random.Generator, side: Side, num_rows: int) -> SideRows:
    """Random encoded columns; the first field is the entity's own id."""
    columns: dict[str, pa.Array] = {}
    for number, field in enumerate(side.fields):
        if field.multi:
            lists = [rng.integers(2, field.rows, rng.integers(0, 4)).tolist() for _ in range(num_rows)]
            columns[field.name] = pa.array([[], *lists[1:]], pa.list_(pa.int32()))
        elif number == 0 and field.rows == num_rows + 3:
            columns[field.name] = pa.array(np.arange(num_rows, dtype=np.int32) + 3)
        else:
            columns[field.name] = pa.array(rng.integers(2, field.rows, num_rows).astype(np.int32))
    for name in side.numeric:
        values = rng.normal(size=num_rows).astype(np.float32)
        columns[name] = pa.array(np.where(rng.random(num_rows) < 0.2, np.float32("nan"), values))
    for name, width in side.vectors:
        flat = pa.array(rng.normal(size=num_rows * width).astype(np.float32))
        columns[name] = pa.FixedSizeListArray.from_arrays(flat, width)
    return SideRows(side, columns, num_rows)


def loud_ranker(schema: Schema, config: ModelConfig = MODEL, seed: int = 0) -> Ranker:
    """A ranker whose every weight matters: none is zero and none is small."""
    model = Ranker(schema, config, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.mul_(20) if name.startswith("tables.") else p.add_(0.15 * torch.randn(p.shape, generator=generator))
    return model.eval()


def changed_after(world: World, user: int, count: int, seed: int = 5) -> World:
    """The same world, but all of that user's events from number `count` on are other ones, and some more follow."""
    rng, t = np.random.default_rng(seed), world.timelines
    start, end = int(t.offsets[user]) + count, int(t.offsets[user + 1])
    fresh = make_timelines(rng, np.array([end - start + 5]), len(world.ads.side_rows), 3)

    def joined(name: str) -> np.ndarray:
        own = getattr(t, name)
        return np.concatenate([own[:start], getattr(fresh, name), own[end:]])

    offsets = t.offsets.copy()
    offsets[user + 1 :] += 5
    parts = {n: joined(n) for n in ("ad", "kind", "flags", "surface", "dwell", "time_ms", "known_ms")}
    return replace(world, timelines=Timelines(offsets=offsets, **parts))
