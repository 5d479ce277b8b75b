"""A request that works: real ids from the feature store, for the ready line and the README."""

from __future__ import annotations

from typing import Any

from serving.router import Router


def example_request(router: Router, num_candidates: int = 5) -> dict[str, Any]:
    """A user with history and some ads, on the first served surface, at the last known moment."""
    route = router.route(router.surfaces[0])
    user, ads, time_ms = route.ranker.sample(num_candidates)
    bids = [round(1.0 + 0.25 * i, 2) for i in range(len(ads))]
    candidates = [{"ad_id": ad, "bid": bid} for ad, bid in zip(ads, bids, strict=True)]
    return {"surface": route.surface, "user_id": user, "time_ms": time_ms, "candidates": candidates}
