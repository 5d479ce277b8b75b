"""Histories at serving time, behind one small interface (an online store can take its place)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from gem.data.collate import TimelineSource
from gem.data.store import Timelines


@dataclass(frozen=True)
class History:
    """Events of a user known at request time: the first `cut` of its events in `timelines`.

    The timelines must begin with the user's first event ever: a model's summaries lie at fixed places counted from
    there (`gem.model.levels`), and a store that forgets old events would move them away from where training had them.
    """

    timelines: TimelineSource
    cut: int


class HistoryStore(Protocol):
    """Gives the history of a user (entity index) as it was known strictly before `time_ms`."""

    def history(self, user: int, time_ms: int) -> History: ...


class MemoryHistories:
    """All timelines of a feature store in memory; shared by the models of that store.

    The cut is the offline one: the number of the user's events with known_ms < time_ms.
    """

    def __init__(self, timelines: Timelines) -> None:
        self._timelines = timelines

    def history(self, user: int, time_ms: int) -> History:
        low, high = int(self._timelines.offsets[user]), int(self._timelines.offsets[user + 1])
        known = self._timelines.known_ms[low:high]  # sorted within a user
        return History(self._timelines, int(np.searchsorted(known, time_ms, side="left")))
