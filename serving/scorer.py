"""One champion as a pure function from a request to probabilities. No Ray, no HTTP.

Inputs go through the code of training: `Encoder.encode_context`, `EntityTable.rows`, `collate`; scores
through the code of evaluation. A request is a batch of one user: what depends only on the user and the
timeline is computed once, whatever the number N of candidates.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from gem.data.batch import check_batch
from gem.data.collate import ImpressionRows, collate, take_rows
from gem.data.schema import NUM_RESERVED, UNKNOWN_ENTITY
from gem.data.spec import DatasetSpec, parse_spec
from gem.data.store import FeatureStore
from gem.errors import BundleError
from gem.lineage.bundle import Bundle, schema_differences
from serving.context import ContextFields
from serving.predictor import Predictor
from serving.schema import ModelRef
from serving.spelling import entity_keys
from serving.store import History, HistoryStore

GOLDEN_TIME_MS = 1_767_225_600_000  # 2026-01-01, any fixed time will do


@dataclass(frozen=True)
class Scores:
    """Calibrated entire-space probabilities p [N, K], which ads are known [N], and what was read."""

    p: NDArray[np.float64]
    known: NDArray[np.bool_]
    user_known: bool
    num_events: int  # of the user's history


class Scorer:
    """A bundle and the feature store it was trained on, ready to score.

    Raises BundleError if the store is not the bundle's parent or its schema differs.
    """

    def __init__(self, bundle: Bundle, store: FeatureStore, histories: HistoryStore, version: str = "") -> None:
        _check_parent(bundle, store)
        info = bundle.info
        schema = info.schema
        self.model = ModelRef(name=info.name, version=version, bundle_hash=bundle.hash, store_hash=info.parents.data)
        self.group, self.created_utc = info.group, info.created_utc
        self.tasks = tuple(t.name for t in schema.tasks)
        self.all_surfaces = schema.surfaces[NUM_RESERVED:]
        spec = _spec(bundle)
        self.surfaces: Mapping[str, str] = _objectives(bundle, spec)
        self.context = ContextFields(spec.context.features)
        self._store, self._histories = store, histories
        self._predictor = Predictor(bundle)
        self._rows_of = {f.name: f.rows for side in (schema.user, schema.ad, schema.context) for f in side.fields}

    def find_user(self, user_id: int | str) -> int:
        """Entity index of a user; 0 is the user nobody has seen."""
        users = self._store.users
        return users.index_of(entity_keys(users, [user_id])[0])

    def history(self, user: int, time_ms: int) -> History:
        """Events of the user known strictly before `time_ms`."""
        return self._histories.history(user, time_ms)

    def score(
        self, user: int, time_ms: int, surface: str, context: Mapping[str, object], ad_ids: Sequence[int | str],
        history: History,
    ) -> Scores:  # fmt: skip
        """Probabilities of every task for N candidates, in their order. `context`: feature name -> value."""
        num, encoder, known = len(ad_ids), self._store.encoder, self._store.ads
        times = np.full(num, time_ms, dtype=np.int64)
        one = encoder.encode_context({k: [v] for k, v in context.items()}, times[:1], [surface])
        ads = np.array([known.index_of(a) for a in entity_keys(known, ad_ids)], dtype=np.int64)
        outcome = np.zeros((num, len(self.tasks)), dtype=np.float32)
        surfaces = np.full(num, encoder.surface_code(surface), dtype=np.int64)
        rows = ImpressionRows(
            user=np.full(num, user, dtype=np.int64), ad=ads, time_ms=times,
            cut=np.full(num, history.cut, dtype=np.int64),
            surface=surfaces, past=self._store.past.at(ads, surfaces, times),
            context=take_rows(one, torch.zeros(num, dtype=torch.int64)), labels=outcome, mask=outcome,
            impression_id=np.arange(num, dtype=np.int64),
        )  # fmt: skip
        config = self._predictor.config
        batch = collate(self._store.users, self._store.ads, history.timelines, rows, config.max_history, config.align)
        check_batch(batch, self._rows_of)
        p = self._predictor.predict(batch)
        return Scores(p, ads != UNKNOWN_ENTITY, user != UNKNOWN_ENTITY, history.cut)

    def golden(self) -> Scores:
        """Score a fixed request: the unknown user, the unknown ad and the first known one, on each surface."""
        history = self.history(UNKNOWN_ENTITY, GOLDEN_TIME_MS)
        ads = [self._store.ads.keys[1].as_py()] if len(self._store.ads) > 1 else []
        parts = [
            self.score(UNKNOWN_ENTITY, GOLDEN_TIME_MS, surface, {}, ["", *ads], history) for surface in self.surfaces
        ]
        known = np.concatenate([s.known for s in parts])
        return Scores(np.concatenate([s.p for s in parts]), known, False, 0)


def limit_threads(num_threads: int) -> None:
    """Torch threads of this process. Set on purpose: Ray caps them by a replica's CPU share or not at all."""
    torch.set_num_threads(num_threads)


def _check_parent(bundle: Bundle, store: FeatureStore) -> None:
    name, parents = bundle.info.name, bundle.info.parents
    if store.hash != parents.data:
        raise BundleError(
            f"{name}: was made from the feature store {parents.data[:16]}, the one at {store.path} is "
            f"{store.hash[:16]}; serve it with its own store or train again on this one"
        )
    if store.schema.hash != bundle.info.schema.hash:
        differences = "; ".join(schema_differences(bundle.info.schema, store.schema))
        raise BundleError(f"{name}: its schema differs from the one of {store.path}: {differences}; train again")


def _spec(bundle: Bundle) -> DatasetSpec:
    """The spec that travels in the bundle; its bytes were verified when the bundle was loaded."""
    return parse_spec(json.loads((bundle.path / "spec.json").read_text(encoding="utf-8")))


def _objectives(bundle: Bundle, spec: DatasetSpec) -> dict[str, str]:
    """Surfaces of the bundle's group -> what their bids pay for; a foundation model serves every surface."""
    schema, group = bundle.info.schema, bundle.info.group
    first = schema.tasks[0].name
    return {
        name: spec.surfaces.objective.get(name, first)
        for code, name in enumerate(schema.surfaces)
        if code >= NUM_RESERVED and (not group or schema.surface_groups[schema.group_of_surface[code]] == group)
    }
