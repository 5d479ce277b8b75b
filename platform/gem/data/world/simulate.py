"""One day of some users in the generated world: sessions, organic events, impressions, clicks, conversions.

Nothing is drawn from a running generator, so a day of a user is the same in every chunk. What a model can
only learn from history: taste (hidden and drifting), a user's inclination to click, bursts of intent (hours
to a day in which one category is wanted), fatigue (repeated ads of a category) and momentum (the last ad of
that category was clicked).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gem.data.world.ads_world import (
    CATEGORIES,
    DEVICES,
    DRIFTING,
    Floats,
    Ints,
    Items,
    Users,
    World,
    ad_activity,
    affinity,
    drifted,
)

DAY_MS = 86_400_000
HOUR_MS = 3_600_000
FIRST_DAY_MS = 1_767_571_200_000  # 2026-01-05 00:00 UTC, a Monday
MAX_PER_DAY = 65_535  # events of one user and kind; the sequence number takes 16 bits of the id
CONVERSION_LIMIT_MS = 48 * HOUR_MS

# click logits by surface: feed, stories, messaging
BASE = np.array([-3.1, -3.5, -2.65])
TASTE = np.array([0.7, 0.6, 0.5])
INTENT = np.array([1.3, 1.1, 1.7])
FATIGUE = np.array([0.3, 0.4, 0.2])
SLOT = np.array([0.06, 0.02, 0.0])
MOMENTUM = 0.7
CONVERSION_BASE = np.array([-2.3, -2.6, -1.5])
CONVERSION_OBJECTIVE = np.array([-0.5, 0.1, 0.5])  # traffic, leads, sales
SURFACE_SHARE = np.array([0.58, 0.86])  # cumulative: 58 % feed, 28 % stories, 14 % messaging

BURST_CHANCE = 0.65  # per user and day
BURST_HOURS = (4.0, 30.0)
BURST_ORGANIC, BURST_ADS = 0.6, 0.2  # share of events that follow the burst's category
FATIGUE_KEPT = 0.5  # overnight
SESSION_MINUTES = 14.0
_HOUR_WEIGHT = np.array([3, 2, 1, 1, 1, 1, 2, 4, 5, 5, 5, 5, 7, 6, 5, 5, 5, 6, 8, 10, 12, 12, 9, 6], dtype=np.float64)
HOUR_CDF = np.cumsum(_HOUR_WEIGHT) / _HOUR_WEIGHT.sum()


@dataclass
class ChunkState:
    """What a chunk of n users carries from day to day."""

    users: Users
    drift: Floats | None  # [n, D]
    exposures: Floats  # [n, C] decayed number of ads seen
    last_click: Floats  # [n, C] 1 if the last ad seen was clicked

    @classmethod
    def start(cls, users: Users) -> ChunkState:
        shape = (len(users), len(CATEGORIES))
        return cls(users, None, np.zeros(shape), np.zeros(shape))


@dataclass(frozen=True)
class Impressions:
    """N impressions in time order. `static_logit` is the part of the click logit that needs no history."""

    id: Ints
    row: Ints  # user, row of the chunk
    item: Ints
    time_ms: Ints
    surface: Ints
    device: Ints
    slot: Ints
    clicked: NDArray[np.int8]
    p_click: Floats
    p_conversion: Floats  # on the entire space: p(click) p(conversion | click)
    conversion_ms: Ints  # -1 where there is none
    static_logit: Floats


@dataclass(frozen=True)
class Organic:
    """M organic events in time order."""

    row: Ints
    item: Ints
    time_ms: Ints
    liked: NDArray[np.int8]
    shared: NDArray[np.int8]
    watched_ms: Ints


@dataclass(frozen=True)
class _Events:
    row: Ints
    user: Ints
    k: Ints  # number of the event within its user and day
    time_ms: Ints
    category: Ints
    in_burst: NDArray[np.bool_]  # the event's category is the one wanted at that moment


def simulate_day(world: World, state: ChunkState, day: int) -> tuple[Impressions, Organic]:
    """Advance the chunk by one day; days must come in order from 0."""
    users = state.users
    state.drift = drifted(world, users, state.drift, day)
    taste = users.interest + DRIFTING * state.drift
    by_category = affinity(taste[:, None, :], world.centroids[None, :, :])
    organic = _organic(world, users, taste, by_category, day)
    return _impressions(world, state, taste, by_category, day), organic


def _events(world: World, users: Users, kind: str, by_category: Floats, day: int) -> _Events:
    ads = kind == "ad"
    rate = _daily_rate(world, users, ads, day)
    noise = np.exp(0.4 * world.random.normal("busy day", users.index, day) - 0.08)
    draw = world.random.uniform(kind + " count", users.index, day)
    count = np.minimum(np.floor(rate * noise + draw), MAX_PER_DAY).astype(np.int64)
    row = np.repeat(np.arange(len(users)), count)
    k = np.arange(row.shape[0]) - np.repeat(np.cumsum(count) - count, count)
    user = users.index[row]
    time_ms = _times(world, kind, user, k, day)
    preference = np.log(world.category_weight) + (0.5 if ads else 1.6) * by_category
    category = _pick(preference, row, world.random.uniform(kind + " category", user, day, k))
    wanted = _wanted(world, user, time_ms, day)
    follow = world.random.uniform(kind + " follows", user, day, k) < (BURST_ADS if ads else BURST_ORGANIC)
    category = np.where(follow & (wanted >= 0), wanted, category)
    order = np.lexsort((k, user, time_ms))
    parts = (row, user, k, time_ms, category, category == wanted)
    return _Events(*(np.asarray(part[order]) for part in parts))


def _daily_rate(world: World, users: Users, ads: bool, day: int) -> Floats:
    """[n] expected events of the day; weekends are busier, the whole log sums to the configured total."""
    days = np.where(np.arange(world.config.num_days) % 7 >= 5, 1.25, 1.0)
    share = days[day] / days.sum()
    total = world.config.num_impressions if ads else world.config.num_organic_events
    activity = ad_activity(users.activity) if ads else users.activity
    everyone = world.total_ad_activity if ads else world.total_activity
    return np.asarray(total * share * activity / everyone, dtype=np.float64)


def _session_start(world: World, user: Ints, day: int, session: Ints | int) -> Ints:
    draw = world.random.uniform("session hour", user, day, session)
    hour = np.searchsorted(HOUR_CDF, draw)
    within = world.random.below(HOUR_MS, "session minute", user, day, session)
    return FIRST_DAY_MS + day * DAY_MS + hour * HOUR_MS + within


def _times(world: World, kind: str, user: Ints, k: Ints, day: int) -> Ints:
    """Event times: an exponential while after the start of one of the user's one to four sessions of the day."""
    sessions = 1 + world.random.below(4, "sessions", user, day)
    start = _session_start(world, user, day, world.random.below(sessions, kind + " session", user, day, k))
    after = -SESSION_MINUTES * 60_000.0 * np.log(world.random.uniform(kind + " after", user, day, k))
    begin = FIRST_DAY_MS + day * DAY_MS
    return np.asarray(begin + (start - begin + after.astype(np.int64)) % DAY_MS, dtype=np.int64)


def _wanted(world: World, user: Ints, time_ms: Ints, day: int) -> Ints:
    """Category of the burst of intent the user is in, -1 for none. A burst may last into the next day."""
    out = np.full(user.shape[0], -1, dtype=np.int64)
    for born in (day - 1, day):
        if born < 0:
            continue
        start = _session_start(world, user, born, 0)
        hours = BURST_HOURS[0] + (BURST_HOURS[1] - BURST_HOURS[0]) * world.random.uniform("burst length", user, born)
        inside = (time_ms >= start) & (time_ms < start + (hours * HOUR_MS).astype(np.int64))
        inside &= world.random.uniform("burst", user, born) < BURST_CHANCE
        draw = world.random.uniform("burst category", user, born)
        category = np.searchsorted(np.cumsum(world.category_weight), draw).clip(max=len(CATEGORIES) - 1)
        out = np.where(inside, category, out)
    return out


def _pick(logits: Floats, row: Ints, draw: Floats) -> Ints:
    """One column per event, with chances softmax(logits[row])."""
    weight = np.cumsum(np.exp(logits), axis=1)
    target = draw * weight[row, -1]
    return np.asarray((weight[row] <= target[:, None]).sum(axis=1).clip(max=logits.shape[1] - 1), dtype=np.int64)


def _choose_items(items: Items, allowed: NDArray[np.bool_], category: Ints, draw: Floats) -> Ints:
    """An allowed item of each event's category, by popularity."""
    pool = np.flatnonzero(allowed)
    pool = pool[np.argsort(items.category[pool], kind="stable")]
    edge = np.concatenate([[0.0], np.cumsum(items.popularity[pool])])
    first = np.searchsorted(items.category[pool], np.arange(len(CATEGORIES) + 1))
    low, high = edge[first[category]], edge[first[category + 1]]
    at = np.searchsorted(edge, low + draw * (high - low), side="right") - 1
    return np.asarray(pool[np.clip(at, first[category], first[category + 1] - 1)], dtype=np.int64)


def _impressions(world: World, state: ChunkState, taste: Floats, by_category: Floats, day: int) -> Impressions:
    users, items, r = state.users, world.items, world.random
    e = _events(world, users, "ad", by_category, day)
    index = np.arange(items.category.shape[0])
    running = (index < world.config.num_ads) & (items.first_day <= day) & (day <= items.last_day)
    item = _choose_items(items, running, e.category, r.uniform("which ad", e.user, day, e.k))
    surface = np.searchsorted(SURFACE_SHARE, r.uniform("surface", e.user, day, e.k)).astype(np.int64)
    slot = np.minimum(-4.0 * np.log(r.uniform("slot", e.user, day, e.k)), 9.0).astype(np.int64)
    other = r.uniform("other device", e.user, day, e.k) < 0.15
    device = np.where(other, r.below(len(DEVICES), "which device", e.user, day, e.k), users.device[e.row])
    static = _static_logit(world, users, e, item, surface) - SLOT[surface] * slot
    like = affinity(taste[e.row], items.latent[item])
    logit = static + users.clickiness[e.row] + TASTE[surface] * like + INTENT[surface] * e.in_burst
    p_click, clicked = _clicks(state, e, logit, FATIGUE[surface], r.uniform("click", e.user, day, e.k))
    p_given = _sigmoid(
        CONVERSION_BASE[surface]
        + CONVERSION_OBJECTIVE[items.objective[item]]
        + 0.6 * like
        + 0.6 * e.in_burst
        - 0.4 * np.abs(items.log_price[item] - users.budget[e.row])
        + 0.3 * np.log1p(users.tenure_days[e.row] / 365.0)
    )
    converted = (clicked == 1) & (r.uniform("conversion", e.user, day, e.k) < p_given)
    mean_ms = (2.0 + 10.0 * r.uniform("delay of category", items.category[item])) * HOUR_MS
    cut = -np.expm1(-CONVERSION_LIMIT_MS / mean_ms)  # exponential, conditioned on at most 48 hours
    delay = (-mean_ms * np.log1p(-cut * r.uniform("delay", e.user, day, e.k))).astype(np.int64)
    return Impressions(
        id=((day * world.config.num_users + e.user) << 16) + e.k,
        row=e.row,
        item=item,
        time_ms=e.time_ms,
        surface=surface,
        device=device,
        slot=slot,
        clicked=clicked,
        p_click=p_click,
        p_conversion=p_click * p_given,
        conversion_ms=np.where(converted, e.time_ms + 1000 + delay.clip(max=CONVERSION_LIMIT_MS - 1000), -1),
        static_logit=static,
    )


def _static_logit(world: World, users: Users, e: _Events, item: Ints, surface: Ints) -> Floats:
    """The part of the click logit that ad, surface, age and time decide."""
    hour = (e.time_ms // HOUR_MS) % 24
    weekend = ((e.time_ms - FIRST_DAY_MS) // DAY_MS) % 7 >= 5
    return np.asarray(
        BASE[surface]
        + world.items.quality[item]
        + world.format_surface[world.items.format[item], surface]
        + world.age_surface[users.age[e.row], surface]
        + 0.2 * np.cos(2.0 * np.pi * (hour - 20) / 24.0)
        + 0.15 * weekend,
        dtype=np.float64,
    )


def _clicks(
    state: ChunkState, e: _Events, logit: Floats, fatigue: Floats, draw: Floats
) -> tuple[Floats, NDArray[np.int8]]:
    """p_click and clicks with fatigue and momentum, which depend on the user's earlier ads of that category.

    Ads of one user and category are a chain; the n-th links of all chains are decided together. Updates the state.
    """
    num_categories = len(CATEGORIES)
    chain = e.row * num_categories + e.category
    order = np.argsort(chain, kind="stable")  # events are in time order already
    ranked = chain[order]
    first = np.searchsorted(ranked, ranked)
    link = np.arange(chain.shape[0]) - first
    exposures, last = state.exposures.reshape(-1), state.last_click.reshape(-1)
    logit = logit - fatigue * np.log1p(exposures[chain] + _unsorted(order, link))
    p_click = np.zeros(chain.shape[0])
    clicked = np.zeros(chain.shape[0], dtype=np.int8)
    by_link = order[np.argsort(link, kind="stable")]
    for now in np.split(by_link, np.cumsum(np.bincount(link))[:-1]):
        p_click[now] = _sigmoid(logit[now] + MOMENTUM * last[chain[now]])
        clicked[now] = draw[now] < p_click[now]
        last[chain[now]] = clicked[now]
    seen = np.bincount(chain, minlength=exposures.shape[0])
    state.exposures = (FATIGUE_KEPT * (exposures + seen)).reshape(-1, num_categories)
    state.last_click = last.reshape(-1, num_categories)
    return p_click, clicked


def _organic(world: World, users: Users, taste: Floats, by_category: Floats, day: int) -> Organic:
    r, items = world.random, world.items
    e = _events(world, users, "post", by_category, day)
    posts = np.arange(items.category.shape[0]) >= world.config.num_ads
    item = _choose_items(items, posts, e.category, r.uniform("which post", e.user, day, e.k))
    like = affinity(taste[e.row], items.latent[item])
    mood = 0.8 * like + 1.2 * users.clickiness[e.row] + 0.5 * e.in_burst
    seconds = np.exp(1.8 + 0.5 * like + 0.9 * r.normal("watch", e.user, day, e.k))
    return Organic(
        row=e.row,
        item=item,
        time_ms=e.time_ms,
        liked=(r.uniform("like", e.user, day, e.k) < _sigmoid(mood - 2.2)).astype(np.int8),
        shared=(r.uniform("share", e.user, day, e.k) < _sigmoid(mood - 4.0)).astype(np.int8),
        watched_ms=(1000.0 * np.minimum(seconds, 900.0)).astype(np.int64),
    )


def _unsorted(order: Ints, values: Ints) -> Ints:
    out = np.empty_like(values)
    out[order] = values
    return out


def _sigmoid(x: Floats) -> Floats:
    return np.asarray(1.0 / (1.0 + np.exp(-x)), dtype=np.float64)
