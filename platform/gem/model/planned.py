"""Schemas of data sets that are not there: the generated world's before it is made, and a large one to plan for."""

from __future__ import annotations

from gem.config import WorldConfig
from gem.data.schema import NUM_RESERVED, Field, Schema, Side, Task
from gem.model.cost import Workload

BILLION, MILLION = 10**9, 10**6
# A batch there: long timelines, many impressions of a user; every fourth ad in them is met for the first time.
LARGE_WORKLOAD = Workload(history=4096, impressions_per_user=16, first_seen=0.25)


def generated_schema(world: WorldConfig) -> Schema:
    """What `pipelines/datasets/generated.yaml` becomes; ids that never occur in training are counted too."""
    return Schema(
        user=Side(
            (_ids("user_id", world.num_users), _ids("age_band", 6), _ids("region", 5), _ids("device_class", 3),
             _ids("interests", 16, multi=True)),
            ("tenure_days",),
        ),
        ad=Side(
            (_ids("ad_id", 2 * world.num_ads), _ids("advertiser", max(16, world.num_ads // 12)), _ids("category", 16),
             _ids("format", 4), _ids("objective", 3), _ids("is_post", 2)),
            ("price",),
            (("creative", 16),),
        ),
        context=Side((_ids("surface", 3), _ids("hour", 24), _ids("weekday", 7), _ids("device", 3), _ids("slot", 10))),
        kinds=("ad_impression", "organic", "conversion"),
        flags=("click", "like", "share", "conversion"),
        surfaces=("<pad>", "<null>", "<unknown>", "feed", "stories", "messaging"),
        surface_groups=("feed", "stories", "messaging"),
        group_of_surface=(0, 0, 0, 0, 1, 2),
        tasks=(Task("click"), Task("conversion", given="click")),
    )  # fmt: skip


def large_schema() -> Schema:
    """A large ads platform, to plan for: 2.1 billion table rows, 8 surfaces, 6 event kinds, 4 tasks. Invented.

    One billion users and 200 million ads have rows of their own; the crossed features of both sides are open
    vocabularies of two rows a value; creatives bring 768 numbers (an image and a text of 384).
    """
    user = [_ids("user_id", BILLION), _ids("user_cluster", 50 * MILLION), _ids("user_region", 100_000)]
    user += [_ids(f"user_segment_{i}", 1000) for i in range(16)]
    user += [_ids(f"user_interest_{i}", 5 * MILLION, multi=True) for i in range(4)]
    user += [_ids(f"user_cross_{i}", 100 * MILLION, hashes=2) for i in range(4)]
    ad = [_ids("ad_id", 200 * MILLION), _ids("campaign", 60 * MILLION), _ids("advertiser", 20 * MILLION)]
    ad += [_ids(f"ad_attribute_{i}", 1000) for i in range(12)]
    ad += [_ids("ad_topic", MILLION, multi=True), _ids("landing_page", 50 * MILLION)]
    ad += [_ids(f"ad_cross_{i}", 100 * MILLION, hashes=2) for i in range(3)]
    context = [_ids("surface", 8), _ids("hour", 24), _ids("weekday", 7), _ids("device", 10_000), _ids("slot", 100)]
    context += [_ids(f"context_{i}", 1000) for i in range(5)]
    surfaces = tuple(f"surface_{i}" for i in range(8))
    return Schema(
        user=Side(tuple(user), tuple(f"user_number_{i}" for i in range(32))),
        ad=Side(tuple(ad), tuple(f"ad_number_{i}" for i in range(32)), (("image", 384), ("text", 384))),
        context=Side(tuple(context), tuple(f"context_number_{i}" for i in range(8))),
        kinds=("ad_impression", "ad_view", "organic_view", "organic_reaction", "visit", "conversion"),
        flags=("click", "like", "share", "hide", "purchase"),
        surfaces=("<pad>", "<null>", "<unknown>", *surfaces),
        surface_groups=surfaces,
        group_of_surface=(0, 0, 0, *range(8)),
        tasks=(Task("click"), Task("conversion", given="click"), Task("reaction"), Task("hide")),
    )


def _ids(name: str, values: int, multi: bool = False, hashes: int = 0) -> Field:
    return Field(name, name, NUM_RESERVED + values, multi or hashes > 0, hashes)
