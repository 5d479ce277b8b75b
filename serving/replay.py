"""Score logged requests again, offline: many requests in one batch, cuts taken as preprocess takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from gem.data.build.timelines import cuts
from gem.data.collate import ImpressionRows, collate
from gem.data.store import EntityTable, FeatureStore
from gem.errors import BundleError
from gem.lineage.bundle import Bundle
from serving.predictor import Predictor
from serving.spelling import entity_keys

Record = Mapping[str, Any]


def offline_scores(records: Sequence[Record], bundle: Bundle, store: FeatureStore) -> list[NDArray[np.float64]]:
    """Scores [N, K] of every logged request (see `request_log`), N its candidates in request order.

    Raises BundleError if a request was answered by another bundle.
    """
    other = {r["model"]["bundle_hash"] for r in records} - {bundle.hash}
    if other:
        raise BundleError(
            f"replay: requests were answered by {sorted(other)[0][:16]}, the bundle is {bundle.hash[:16]}"
        )
    sizes = [len(r["candidates"]) for r in records]
    if not sizes:
        return []
    predictor = Predictor(bundle)
    rows = _rows(records, np.array(sizes), store)
    config = predictor.config
    batch = collate(store.users, store.ads, store.timelines(), rows, config.max_history, config.align)
    scores = np.empty((int(np.sum(sizes)), len(bundle.info.schema.tasks)))
    scores[batch.impression_id.numpy()] = predictor.predict(batch)
    return np.split(scores, np.cumsum(sizes)[:-1])


def largest_difference(records: Sequence[Record], bundle: Bundle, store: FeatureStore) -> float:
    """The largest absolute difference between a served and an offline probability; 0 without records."""
    offline = offline_scores(records, bundle, store)
    served = [np.array(r["p"], dtype=np.float64) for r in records]
    return max((float(np.abs(a - b).max()) for a, b in zip(served, offline, strict=True)), default=0.0)


def _rows(records: Sequence[Record], sizes: NDArray[np.int64], store: FeatureStore) -> ImpressionRows:
    user = np.repeat(_indices(store.users, [r["user_id"] for r in records]), sizes).astype(np.int64)
    time_ms = np.repeat(np.array([r["time_ms"] for r in records], dtype=np.int64), sizes)
    surface = [r["surface"] for r, n in zip(records, sizes, strict=True) for _ in range(n)]
    names = sorted({name for r in records for name in r["context"]})
    context = {
        name: [r["context"].get(name) for r, n in zip(records, sizes, strict=True) for _ in range(n)] for name in names
    }
    timelines = store.timelines()
    event_user = np.repeat(np.arange(len(store.users)), timelines.lengths())
    ads = _indices(store.ads, [ad for r in records for ad, _ in r["candidates"]]).astype(np.int64)
    unknown = np.zeros((ads.size, len(store.schema.tasks)), dtype=np.float32)
    surfaces = store.encoder.surface_codes(surface).astype(np.int64)
    return ImpressionRows(
        user=user, ad=ads, time_ms=time_ms,
        cut=cuts(event_user, timelines.known_ms, user, time_ms).astype(np.int64),
        surface=surfaces, past=store.past.at(ads, surfaces, time_ms),
        context=store.encoder.encode_context(context, time_ms, surface),
        labels=unknown, mask=unknown, impression_id=np.arange(ads.size, dtype=np.int64),
    )  # fmt: skip


def _indices(table: EntityTable, ids: Sequence[int | str]) -> NDArray[np.int32]:
    keys = [None if k is None else str(k) for k in entity_keys(table, ids)]
    return table.index_many(pa.array(keys, pa.string()))
