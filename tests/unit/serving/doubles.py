"""A ranker without model or store: p_click rises with the digits of the ad id, everything is countable."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import numpy as np

from gem.data.spec import FeatureSpec
from serving.context import ContextFields
from serving.schema import ModelRef
from serving.scorer import Scores
from serving.store import History


class FakeRanker:
    """Knows users and ads whose id is an integer below 1000. Set `fail` or `block` to break it."""

    tasks = ("click", "conversion")

    def __init__(
        self,
        group: str,
        surfaces: dict[str, str],
        all_surfaces: tuple[str, ...] = (),
        created_utc: str = "2026-01-01T00:00:00+00:00",
    ) -> None:
        self.group, self.surfaces, self.created_utc = group, surfaces, created_utc
        self.all_surfaces = all_surfaces or tuple(surfaces)
        self.model = ModelRef(name=f"fake-{group}", version="3", bundle_hash="b" * 64, store_hash="d" * 64)
        self.context = ContextFields([FeatureSpec(name="device", kind="categorical")])
        self.fail: Exception | None = None
        self.block = threading.Event()
        self.block.set()
        self.shift = 0.0
        self.threads: set[int] = set()
        self.seen: list[tuple[int, int, str, Mapping[str, object]]] = []

    def find_user(self, user_id: int | str) -> int:
        return int(user_id) if str(user_id).isdecimal() and int(user_id) < 1000 else 0

    def history(self, user: int, time_ms: int) -> History:
        return History(None, 5 if user else 0)  # type: ignore[arg-type]

    def score(
        self, user: int, time_ms: int, surface: str, context: Mapping[str, object], ad_ids: list[int | str],
        history: History,
    ) -> Scores:  # fmt: skip
        self.threads.add(threading.get_ident())
        assert self.block.wait(30)
        if self.fail:
            raise self.fail
        self.seen.append((user, time_ms, surface, context))
        ids = np.array([self.find_user(a) for a in ad_ids])
        click = 0.1 + ids / 2000 + self.shift
        return Scores(np.stack([click, click / 10], 1), ids > 0, user > 0, history.cut)

    def golden(self) -> Scores:
        return self.score(0, 0, "golden", {}, [1], History(None, 0))  # type: ignore[arg-type]
