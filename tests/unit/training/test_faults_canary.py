"""Scenario D10: the label stands in the user's own events, and no model can read it. A control shows it could."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gem.data.store import FeatureStore
from gem.metrics.auc import auc
from gem.training.data import StoreReader
from tests.unit.data.fault_log import DAY_MS, SPEC, START_MS, build, fault_spec, put
from tests.unit.model.synthetic import MODEL
from tests.unit.training.one_rank import make_learner

pytestmark = pytest.mark.usefixtures("one_rank")
NUM_USERS, PER_DAY, NUM_DAYS = 80, 10, 4
STEPS = 16
PLANTED = {"kind": "post", "table": "posts", "user": "u", "ad": "a", "time": {"column": "t"}, "flags": {"click": "y"}}
SHOWN = SPEC["events"][0]


def log() -> list[dict[str, Any]]:
    """Impressions whose labels are drawn by a coin: nothing but the label itself tells them."""
    rng = np.random.default_rng(0)
    size = NUM_USERS * PER_DAY * NUM_DAYS
    day, step = np.arange(size) // (NUM_USERS * PER_DAY), np.arange(size) // NUM_USERS % PER_DAY
    user = np.arange(size) % NUM_USERS
    time_ms = START_MS + day * DAY_MS + (step * 120 + rng.integers(0, 60, size)) * 60_000 + user
    columns = {
        "show": np.arange(size),
        "u": user,
        "a": rng.integers(10, 20, size),
        "t": time_ms,
        "y": rng.integers(0, 2, size),
    }
    rows = zip(*(c.tolist() for c in columns.values()), strict=True)
    return [dict(zip(columns, row, strict=True)) | {"tab": "feed"} for row in rows]


def measured_auc(store: FeatureStore) -> float:
    """AUC on the last two days of a tiny GEM that was trained on the first two."""
    imp = store.impressions()
    reader = StoreReader(store, store.timelines(), imp, MODEL.max_history)
    learner = make_learner(store, total_steps=STEPS)  # type: ignore[arg-type]
    train, last = np.flatnonzero(imp.day < 2), np.flatnonzero(imp.day >= 2)
    order = np.random.default_rng(1).permutation(np.tile(train, 2))
    for at in np.array_split(order, STEPS):
        learner.step(reader.batch(at), len(at))
    batch = reader.batch(last)
    with torch.no_grad():
        logits = learner.model(batch, learner.tables.lookup(batch.lookups())).logits[:, 0]
    return float(auc(batch.labels[:, 0].numpy(), logits.sigmoid().numpy()).value or 0)


def store_with(folder: Path, *offsets: int) -> FeatureStore:
    """The log, and an event with the label of each impression so many ms after it."""
    shows = log()
    posts = [{"u": r["u"], "a": r["a"], "t": r["t"] + ms, "y": r["y"]} for ms in offsets for r in shows]
    labels = {"click": SPEC["labels"]["click"]}
    spec = fault_spec(events=[SHOWN, PLANTED], labels=labels)
    return build(put(folder / "raw", shows=shows, posts=posts), folder / "store", spec)[1]


def test_d10_label_in_history(tmp_path: Path) -> None:
    """The label is a flag of the impression's own event, of one at the same ms and of one a second later."""
    store = store_with(tmp_path, 0, 1000)
    size = NUM_USERS * PER_DAY * NUM_DAYS
    assert len(store.impressions()) == size
    assert int((store.timelines().flags & 1).sum()) == 3 * sum(r["y"] for r in log())
    assert measured_auc(store) == pytest.approx(0.5, abs=0.06)


def test_d10_the_canary_sings_when_the_label_is_known_a_millisecond_early(tmp_path: Path) -> None:
    assert measured_auc(store_with(tmp_path, -1)) > 0.95
