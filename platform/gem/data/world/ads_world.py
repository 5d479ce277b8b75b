"""Who lives in the generated world: categories, advertisers, ads, posts and users, all from the seed.

Letters: U users, A items (ads first, then as many posts), C categories, D latent dimensions, E creative width.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gem.config import WorldConfig
from gem.data.world.counter_random import CounterRandom
from gem.errors import ConfigError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

LATENT = 8
CREATIVE_WIDTH = 16
CATEGORIES = (
    "apparel", "automotive", "beauty", "books", "electronics", "finance", "fitness", "food", "games", "garden",
    "home", "movies", "music", "pets", "software", "travel",
)  # fmt: skip
FORMATS = ("image", "video", "carousel", "text")
OBJECTIVES = ("traffic", "leads", "sales")
SURFACES = ("feed", "stories", "messaging")
AGE_BANDS = ("13-17", "18-24", "25-34", "35-44", "45-54", "55+")
REGIONS = ("africa", "americas", "asia", "europe", "oceania")
DEVICES = ("desktop", "phone_high", "phone_low")
USER_BLOCK = 65_536  # users made at once where all are needed; no result depends on it

ACTIVITY_SPREAD = 1.1  # sd of log activity: the busiest of 3000 users has some 20 times the mean
DEMOGRAPHIC, HIDDEN, DRIFTING = 0.5, 0.55, 0.67  # shares of an interest vector; squares add up to 1
DRIFT_KEPT = 0.9  # of the drifting part from one day to the next
CLICKINESS = 0.45  # sd of a user's own inclination to click, logit


@dataclass(frozen=True)
class Items:
    """Ads (rows 0..num_ads-1) and posts (the rest). Row i has ad_id i + 1."""

    category: Ints  # [A]
    advertiser: Ints  # [A]
    format: Ints  # [A]
    objective: Ints  # [A]
    log_price: Floats  # [A]
    latent: Floats  # [A, D] unit length
    creative: NDArray[np.float32]  # [A, E] noisy view of `latent`
    quality: Floats  # [A] click logit
    popularity: Floats  # [A] how often shown, relative
    first_day: Ints  # [A]
    last_day: Ints  # [A]


@dataclass(frozen=True)
class Users:
    """Users `index` of the world. `interest` is the lasting part of their taste."""

    index: Ints  # [n]
    age: Ints
    region: Ints
    device: Ints
    tenure_days: Ints
    activity: Floats  # [n] relative, mean about 1
    clickiness: Floats  # [n] logit
    budget: Floats  # [n] log price they are at ease with
    interest: Floats  # [n, D]

    def __len__(self) -> int:
        return int(self.index.shape[0])


@dataclass(frozen=True)
class World:
    """Everything that does not change over the days."""

    config: WorldConfig
    random: CounterRandom
    items: Items
    centroids: Floats  # [C, D] unit length
    category_weight: Floats  # [C] sums to 1
    category_quality: Floats  # [C] click logit
    format_surface: Floats  # [F, S] click logit
    age_surface: Floats  # [ages, S] click logit
    total_activity: float  # sum over all users
    total_ad_activity: float  # the same of `ad_activity`


def ad_activity(activity: Floats) -> Floats:
    """Impressions grow slower than organic use: hot users see relatively fewer ads."""
    return np.asarray(activity**0.8, dtype=np.float64)


def build_world(config: WorldConfig) -> World:
    """The world of `config`. Raises ConfigError for sizes that make no world."""
    _check(config)
    random = CounterRandom(config.seed)
    num_categories = len(CATEGORIES)
    cat, dim = np.arange(num_categories), np.arange(LATENT)
    centroids = _unit_rows(random.normal("centroid", cat[:, None], dim[None, :]))
    weight = 1.0 / (3.0 + random.uniform("category weight", cat) * 9.0)
    quality = 0.45 * random.normal("category quality", cat)
    items = _items(config, random, centroids, quality)
    form, surface, age = np.arange(len(FORMATS)), np.arange(len(SURFACES)), np.arange(len(AGE_BANDS))
    total = total_ads = 0.0
    for start in range(0, config.num_users, USER_BLOCK):
        activity = _activity(random, np.arange(start, min(start + USER_BLOCK, config.num_users)))
        total += float(activity.sum())
        total_ads += float(ad_activity(activity).sum())
    return World(
        config=config,
        random=random,
        items=items,
        centroids=centroids,
        category_weight=weight / weight.sum(),
        category_quality=quality,
        format_surface=0.32 * random.normal("format x surface", form[:, None], surface[None, :]),
        age_surface=0.27 * random.normal("age x surface", age[:, None], surface[None, :]),
        total_activity=total,
        total_ad_activity=total_ads,
    )


def make_users(world: World, index: Ints) -> Users:
    """The users numbered `index` [n], the same whichever others are made with them."""
    r, dim = world.random, np.arange(LATENT)
    age = np.searchsorted(np.array([0.08, 0.3, 0.56, 0.76, 0.9]), r.uniform("age", index))
    region = r.below(len(REGIONS), "region", index)
    demographic = r.normal("taste of age", age[:, None], dim) + r.normal("taste of region", region[:, None], dim)
    hidden = r.normal("hidden taste", index[:, None], dim)
    return Users(
        index=index,
        age=age.astype(np.int64),
        region=region,
        device=np.searchsorted(np.array([0.2, 0.6]), r.uniform("device", index)).astype(np.int64),
        tenure_days=np.floor(2000.0 * r.uniform("tenure", index) ** 2).astype(np.int64),
        activity=_activity(r, index),
        clickiness=CLICKINESS * r.normal("clickiness", index),
        budget=3.2 + 0.15 * age + 0.6 * r.normal("budget", index),
        interest=DEMOGRAPHIC * np.sqrt(0.5) * demographic + HIDDEN * hidden,
    )


def drifted(world: World, users: Users, drift: Floats | None, day: int) -> Floats:
    """[n, D] next value of the drifting part of taste: a stationary random walk (AR(1)) per day."""
    step = world.random.normal("drift", users.index[:, None], np.int64(day), np.arange(LATENT))
    return step if drift is None else DRIFT_KEPT * drift + np.sqrt(1.0 - DRIFT_KEPT**2) * step


def affinity(taste: Floats, latent: Floats) -> Floats:
    """Row-wise dot products of [n, D] with [n, D], or all pairs of [n, D] with [C, D] given as [1, C, D].

    A plain sum over D in a fixed order: a matrix product may round otherwise for other row counts.
    """
    out = taste[..., 0] * latent[..., 0]
    for d in range(1, LATENT):
        out = out + taste[..., d] * latent[..., d]
    return np.asarray(out, dtype=np.float64)


def listed_interests(world: World, users: Users) -> list[list[str]]:
    """What users say they like: of the three best categories each with 70 %, sometimes one at random."""
    r = world.random
    score = affinity(users.interest[:, None, :], world.centroids[None, :, :])
    best = np.argsort(-score, axis=1, kind="stable")[:, :3]
    told = r.uniform("told", users.index[:, None], np.arange(3)) < 0.7
    other = r.below(len(CATEGORIES), "other interest", users.index)
    wrong = r.uniform("wrong interest", users.index) < 0.2
    out = []
    for row in range(len(users)):
        names = [CATEGORIES[c] for c, yes in zip(best[row], told[row], strict=True) if yes]
        out.append(sorted({*names, CATEGORIES[other[row]]} if wrong[row] else names))
    return out


def _activity(random: CounterRandom, index: Ints) -> Floats:
    return np.asarray(np.exp(ACTIVITY_SPREAD * random.normal("activity", index) - ACTIVITY_SPREAD**2 / 2))


def _unit_rows(x: Floats) -> Floats:
    return np.asarray(x / np.sqrt((x * x).sum(axis=1, keepdims=True)), dtype=np.float64)


def _items(config: WorldConfig, random: CounterRandom, centroids: Floats, category_quality: Floats) -> Items:
    num_items, num_categories = 2 * config.num_ads, len(CATEGORIES)
    num_advertisers = max(num_categories, config.num_ads // 12)
    item, dim = np.arange(num_items), np.arange(LATENT)
    is_post = item >= config.num_ads
    number = item % config.num_ads
    late = number >= num_advertisers  # the first ads and posts give every advertiser one, always there
    advertiser = np.where(late, random.below(num_advertisers, "advertiser", item), number)
    category = advertiser % num_categories
    style = random.normal("advertiser style", advertiser[:, None], dim)
    own = random.normal("ad style", item[:, None], dim)
    latent = _unit_rows(centroids[category] + 0.16 * style + 0.14 * own)
    view = random.normal("creative projection", dim[:, None], np.arange(CREATIVE_WIDTH)) / np.sqrt(CREATIVE_WIDTH)
    noise = 0.1 * random.normal("creative noise", item[:, None], np.arange(CREATIVE_WIDTH))
    pull = _unit_rows(random.normal("pull", np.zeros((1, 1), dtype=np.int64), dim))
    quality = (
        category_quality[category]
        + 0.36 * random.normal("advertiser quality", advertiser)
        + 0.5 * affinity(latent, pull)
        + 0.12 * random.normal("ad quality", item)
    )
    start = np.floor(random.uniform("first day", item) * config.num_days * 1.5 - config.num_days * 0.5)
    length = 3.0 + np.floor(random.uniform("lifetime", item) * 2.0 * config.num_days)
    lasting = ~late | is_post | (start < 0)
    return Items(
        category=category,
        advertiser=advertiser,
        format=random.below(len(FORMATS), "format", item),
        objective=random.below(len(OBJECTIVES), "objective", item),
        log_price=2.5 + 0.9 * random.normal("category price", category) + 0.4 * random.normal("price", item),
        latent=latent,
        creative=(affinity(latent[:, None, :], view.T[None, :, :]) + noise).astype(np.float32),
        quality=quality,
        popularity=1.0 / (1.0 + 12.0 * random.uniform("popularity", item)),
        first_day=np.where(lasting, 0, start).astype(np.int64),
        last_day=np.where(~late | is_post, config.num_days, np.maximum(start, 0) + length).astype(np.int64),
    )


def _check(config: WorldConfig) -> None:
    limits = {
        "num_users": (config.num_users, 1, 2**31 - 1),
        "num_ads": (config.num_ads, len(CATEGORIES), 2**30),
        "num_days": (config.num_days, 1, 3650),
        "num_impressions": (config.num_impressions, 1, 2**40),
        "num_organic_events": (config.num_organic_events, 0, 2**40),
    }
    for name, (got, low, high) in limits.items():
        if not low <= got <= high:
            raise ConfigError(f"world.{name}: got {got}; allowed: {low} to {high}; set data.world.{name}")
    for name, share in (("duplicate_share", config.duplicate_share), ("null_user_share", config.null_user_share)):
        if not 0.0 <= share <= 0.5:
            raise ConfigError(f"world.{name}: got {share}; allowed: 0 to 0.5; set data.world.{name}")
