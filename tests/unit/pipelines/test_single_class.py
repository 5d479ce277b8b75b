"""Scenario T22: a test day with one class, constant scores and ties, from the measured rows to the gates' decision."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gem.config import GateConfig
from gem.data.store import Impressions
from gem.lineage.gates import Decision, GateRecord, decide
from pipelines.evaluate import measure
from tests.unit.model.synthetic import make_world

WORLD = make_world(2, num_users=60, num_impressions=900)
LAST = WORLD.impressions.day == len(WORLD.impressions.days) - 1
NUM = len(WORLD.impressions)
GATES = GateConfig()


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelines.evaluate.NUM_BOOTSTRAP", 20)


def with_clicks(click: np.ndarray) -> Impressions:
    """The impressions with these clicks and no conversion, all known."""
    labels = np.stack([click, np.zeros(NUM)], 1).astype(np.float32)
    return replace(WORLD.impressions, labels=labels, mask=np.ones_like(labels))


def measured(imp: Impressions, p: np.ndarray) -> dict[str, Any]:
    """What the evaluate stage writes for click probabilities p [N], as read back from its file."""
    users = SimpleNamespace(index_many=lambda keys: np.zeros(len(keys), np.int64))
    store: Any = SimpleNamespace(schema=WORLD.schema, users=users, manifest={"hot_users": []})
    both = np.stack([p, p / 2], 1).astype(np.float64)
    found: dict[str, Any] = json.loads(json.dumps(measure(store, imp, both, "gem", "f" * 64), allow_nan=False))
    return found


def decision(found: dict[str, Any], gates: GateConfig = GATES) -> Decision:
    """On the click alone: the other task has no positive here and would refuse by itself."""
    record = GateRecord.from_dict(found["gate"])
    return decide(replace(record, tasks={"click": record.tasks["click"]}), None, gates)


def test_t22_all_negatives_have_no_auc_with_the_reason_and_pass_no_gate() -> None:
    click = np.where(LAST, 0, np.arange(NUM) % 3 == 0)
    found = measured(with_clicks(click), np.random.default_rng(0).uniform(0.01, 0.99, NUM))
    task = found["tasks"]["click"]
    for name in ("auc", "gauc", "ne", "calibration"):
        assert task[name]["value"] is None and task[name]["low"] is None
        assert task[name]["reason"] == f"no positive label among {int(LAST.sum())} rows"
    assert task["rows"] == LAST.sum() and task["base_rate"] == 0.0
    refused = decision(found)
    assert not refused.promote
    for name in ("NE", "calibration", "AUC"):
        assert any(r.startswith("refused") and f"{name} is unknown (None)" in r for r in refused.reasons), name
    assert not decide(GateRecord.from_dict(found["gate"]), None, GATES).promote


def test_t22_all_positives_and_no_rows_pass_no_gate_either() -> None:
    p = np.full(NUM, 0.5)
    positives = measured(with_clicks(np.ones(NUM)), p)
    assert positives["tasks"]["click"]["auc"]["reason"] == f"no negative label among {int(LAST.sum())} rows"
    unknown = with_clicks(np.ones(NUM))
    unknown.mask[LAST] = 0
    unknown.labels[LAST] = 0
    nothing = measured(unknown, p)
    assert nothing["tasks"]["click"]["auc"] == {"value": None, "low": None, "high": None, "reason": "no rows"}
    assert nothing["tasks"]["click"]["base_rate"] is None
    for found in (positives, nothing):
        assert not decision(found).promote


@pytest.mark.parametrize("positives", [1, 2, 3, 8, 15, 36, 71, 120])
def test_t22_a_constant_score_has_an_auc_of_one_half_and_passes_no_gate(positives: int) -> None:
    """The base rate itself, so that calibration is perfect; its NE is 1, in floating point at times a hair less."""
    click = np.zeros(NUM)
    click[np.flatnonzero(LAST)[:positives]] = 1
    found = measured(with_clicks(click), np.full(NUM, click[LAST].mean()))
    task = found["tasks"]["click"]
    assert task["auc"]["value"] == 0.5
    assert task["ne"]["value"] == pytest.approx(1.0, abs=1e-12)
    assert task["calibration"]["value"] == pytest.approx(1.0)
    refused = decision(found)
    assert not refused.promote
    assert "refused: click NE 1.0000, must be below 1" in refused.reasons


def test_t22_ties_count_one_half_and_a_model_that_ranks_is_promoted() -> None:
    """Two levels of score against counting pairs; the control shows that these gates can be passed."""
    click = np.arange(NUM) % 2
    high = click ^ np.isin(np.arange(NUM) % 20, (0, 5))  # one of ten of either class is on the wrong side
    p = np.where(high, 0.9, 0.1)
    found = measured(with_clicks(click), p)
    of, against = p[LAST][click[LAST] == 1][:, None], p[LAST][click[LAST] == 0][None, :]
    by_hand = ((of > against) + 0.5 * (of == against)).mean()
    assert found["tasks"]["click"]["auc"]["value"] == pytest.approx(by_hand)
    assert decision(found).promote
