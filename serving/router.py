"""Which model answers for a surface: every surface belongs to one vertical model group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from gem.errors import ConfigError, suggest
from serving.context import ContextFields
from serving.schema import ModelRef, Refusal
from serving.scorer import Scores
from serving.store import History


class Ranker(Protocol):
    """What a champion must offer to be served (`serving.scorer.Scorer`, or a double in a test)."""

    model: ModelRef
    group: str
    created_utc: str
    tasks: tuple[str, ...]
    surfaces: Mapping[str, str]  # surfaces of this group -> objective (a task)
    all_surfaces: tuple[str, ...]  # of the data set, also those of other groups
    context: ContextFields

    def find_user(self, user_id: int | str) -> int: ...

    def history(self, user: int, time_ms: int) -> History: ...

    def score(
        self, user: int, time_ms: int, surface: str, context: Mapping[str, object], ad_ids: list[int | str],
        history: History,
    ) -> Scores: ...  # fmt: skip

    def golden(self) -> Scores: ...


@dataclass(frozen=True)
class Route:
    """One surface, the champion that serves it and the task its bids pay for."""

    surface: str
    objective: str
    ranker: Ranker


class Router:
    """Surface name -> Route. Where two champions claim a surface, the younger bundle has it.

    Raises ConfigError without champions or when a surface's objective is no task of its model.
    """

    def __init__(self, rankers: Iterable[Ranker]) -> None:
        self.rankers = sorted(rankers, key=lambda r: (r.created_utc, r.model.name))
        if not self.rankers:
            raise ConfigError('serving: no champion vertical model; run "make pipeline" first')
        self._routes: dict[str, Route] = {}
        for ranker in self.rankers:
            for surface, objective in ranker.surfaces.items():
                if objective not in ranker.tasks:
                    raise ConfigError(
                        f'{ranker.model.name}: surface "{surface}" pays for "{objective}", which the model does not '
                        f"predict. It predicts {list(ranker.tasks)}; correct surfaces.objective in the spec"
                    )
                self._routes[surface] = Route(surface, objective, ranker)
        known = {name for ranker in self.rankers for name in ranker.all_surfaces}
        self.unserved = tuple(sorted(known - set(self._routes)))

    @property
    def surfaces(self) -> tuple[str, ...]:
        """Surfaces that have a champion."""
        return tuple(sorted(self._routes))

    def route(self, surface: str) -> Route:
        """Raises Refusal: 422 for a surface nobody knows, 503 for one without a champion."""
        if surface in self._routes:
            return self._routes[surface]
        if surface in self.unserved:
            message = f'"{surface}" has no champion model (its candidate did not pass the gates); served: '
            raise Refusal(503, "no_champion", [("surface", message + f"{list(self.surfaces)}")])
        near = suggest(surface, self._routes)
        message = f"unknown surface {surface[:60]!r}.{near} Allowed: {list(self.surfaces)}"
        raise Refusal(422, "unknown_surface", [("surface", message)])
