"""Scenario T21: conversions whose window is not over teach nothing, from the raw log to the weights after a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gem.data.store import FeatureStore
from gem.training.data import StoreReader
from gem.training.objective import task_losses
from tests.unit.data.fault_log import DAY_MS, HOUR_MS, NUM_DAYS, SPEC, START_MS, build, fault_spec, good_shows, put
from tests.unit.model.synthetic import MODEL
from tests.unit.training.one_rank import everything, make_learner

pytestmark = pytest.mark.usefixtures("one_rank")
# The log of conversions ends seven hours after the last day: of that day, what was shown from 7 o'clock on is open.
LOG_END_MS = START_MS + NUM_DAYS * DAY_MS + 7 * HOUR_MS
SHOWS = good_shows()
CLICKED = [s for s in SHOWS if s["y"]]


def is_open(show: dict[str, Any]) -> bool:
    return bool(show["t"] + DAY_MS > LOG_END_MS)


def store_with(folder: Path, early: bool, complete: bool) -> FeatureStore:
    """Every second click converts after an hour; of the open ones those that `early` says are in the log by now."""
    sold = [s for s in CLICKED[::2] if early or not is_open(s)]
    buys = [{"show": s["show"], "u": s["u"], "a": s["a"], "t": s["t"] + HOUR_MS} for s in sold]
    buys.append({"show": -1, "u": 1, "a": 10, "t": LOG_END_MS})
    labels = SPEC["labels"] | {"conversion": SPEC["labels"]["conversion"] | {"complete": complete}}
    spec = fault_spec(labels=labels, events=SPEC["events"][:1])
    return build(put(folder / "raw", shows=SHOWS, buys=buys), folder / "store", spec)[1]


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[bool, bool], FeatureStore]:
    """(open ones are in the log by now, log taken for complete) -> store."""
    kinds = [(early, complete) for early in (False, True) for complete in (False, True)]
    return {k: store_with(tmp_path_factory.mktemp("store"), *k) for k in kinds}


def batch_of(store: FeatureStore) -> Any:
    imp = store.impressions()
    return StoreReader(store, store.timelines(), imp, MODEL.max_history).batch(np.arange(len(imp)))


@pytest.mark.parametrize("early", [False, True])
def test_t21_an_open_conversion_is_unknown_and_the_click_still_trains(stores: Any, early: bool) -> None:
    store = stores[early, False]
    batch = batch_of(store)
    open_ids = {s["show"] for s in SHOWS if is_open(s)}
    is_young = torch.tensor([int(i) in open_ids for i in batch.impression_id])
    assert 0 < int(is_young.sum()) < len(batch)
    assert batch.labels[is_young, 0].any() and not batch.labels[is_young, 1].any()
    assert batch.mask.tolist() == [[1.0, 0.0 if young else 1.0] for young in is_young.tolist()]
    logits = torch.randn(len(batch), 2, generator=torch.Generator().manual_seed(0)).requires_grad_()
    task_losses(logits, batch.labels, batch.mask, store.schema).sum().backward()
    assert logits.grad is not None
    assert not logits.grad[is_young, 1].any()
    assert logits.grad[is_young, 0].abs().min() > 0
    assert logits.grad[~is_young, 1].abs().min() > 0


def after_a_step(store: FeatureStore) -> dict[str, torch.Tensor]:
    learner = make_learner(store)  # type: ignore[arg-type]
    batch = batch_of(store)
    assert not learner.step(batch, len(batch)).skipped
    return everything(learner)


def test_t21_weights_do_not_depend_on_outcomes_that_are_not_settled(stores: Any) -> None:
    """Whether the open conversions have come in or not. The control takes the log for complete, and they differ."""
    late, early = (after_a_step(stores[e, False]) for e in (False, True))
    assert late.keys() == early.keys() and all(torch.equal(v, early[k]) for k, v in late.items())
    plain, other = (after_a_step(stores[e, True]) for e in (False, True))
    assert any(not torch.equal(v, other[k]) for k, v in plain.items() if k.startswith("dense."))
