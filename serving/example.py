"""A request that works: real ids from the feature store, for the ready line and the README."""

from __future__ import annotations

from typing import Any

import numpy as np

from gem.data.store import FeatureStore
from serving.router import Router


def example_request(router: Router, store: FeatureStore, num_candidates: int = 5) -> dict[str, Any]:
    """A user with a median history and some ads, on the first served surface, right after the last known event."""
    timelines = store.timelines()
    lengths = np.diff(timelines.offsets)
    users = np.flatnonzero(lengths > 0)
    users = users[users > 0]
    if users.size:
        user = int(users[np.argsort(lengths[users], kind="stable")[users.size // 2]])
        time_ms: int | None = int(timelines.known_ms[timelines.offsets[user + 1] - 1]) + 1
    else:
        user, time_ms = min(1, len(store.users) - 1), None
    ads = [store.ads.keys[i].as_py() for i in range(1, min(num_candidates + 1, len(store.ads)))]
    candidates = [{"ad_id": ad, "bid": 1.0 + 0.25 * i} for i, ad in enumerate(ads)] or [{"ad_id": "new", "bid": 1.0}]
    user_id = store.users.keys[user].as_py() if user else "new"
    return {"surface": router.surfaces[0], "user_id": user_id, "time_ms": time_ms, "candidates": candidates}
