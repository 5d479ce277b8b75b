"""The calibration layer: fitted where its task can happen, the same offline and after a round trip to a bundle."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from gem.metrics.recalibration import PlattCalibration
from gem.model.calibration import (
    Outcomes,
    calibrated_probabilities,
    calibration_from_dict,
    calibration_to_dict,
    day_noise,
    fit_calibration,
    surface_names,
)
from tests.unit.model.synthetic import make_schema

SCHEMA = make_schema()
N = 6000


def fit(scored: dict[str, np.ndarray], noise: dict[str, float] | None = None) -> dict[str, PlattCalibration]:
    day = np.zeros(len(scored["surface"]), np.int64)
    outcomes = Outcomes(scored["labels"], scored["mask"], scored["surface"], day)
    return fit_calibration(SCHEMA, scored["logits"], outcomes, noise or {})


@pytest.fixture(scope="module")
def scored() -> dict[str, np.ndarray]:
    """Logits that are too sure of themselves and biased by surface; conversions only after clicks."""
    rng = np.random.default_rng(0)
    surface = rng.integers(3, 5, N)
    truth = rng.normal(-0.5, 1.2, (N, 2))
    click = rng.random(N) < 1 / (1 + np.exp(-truth[:, 0]))
    conversion = click & (rng.random(N) < 1 / (1 + np.exp(-truth[:, 1])))
    labels = np.stack([click, conversion], 1).astype(np.float32)
    mask = np.ones((N, 2), np.float32)
    mask[rng.random(N) < 0.2, 1] = 0
    logits = (1.5 * truth + 0.4 * (surface == 4)[:, None]).astype(np.float32)
    return {"logits": logits, "labels": labels * mask, "mask": mask, "surface": surface.astype(np.int64)}


def test_conversion_is_fitted_on_clicked_rows_with_known_outcome(scored: dict[str, np.ndarray]) -> None:
    got = fit(scored)
    rows = [i for i in range(N) if scored["mask"][i, 1] and scored["labels"][i, 0] == 1]
    names = [SCHEMA.surfaces[scored["surface"][i]] for i in rows]
    by_hand = PlattCalibration.fit(
        [float(scored["logits"][i, 1]) for i in rows], [float(scored["labels"][i, 1]) for i in rows], names
    )
    assert got["conversion"] == by_hand
    assert got["conversion"].rows == len(rows) < N / 2
    assert got["click"].rows == N
    assert got["click"].slope == pytest.approx(1 / 1.5, rel=0.1)


def test_unclicked_or_unknown_rows_cannot_move_the_conversion_layer(scored: dict[str, np.ndarray]) -> None:
    poisoned = {k: v.copy() for k, v in scored.items()}
    unused = (scored["labels"][:, 0] == 0) | (scored["mask"][:, 1] == 0)
    poisoned["logits"][unused, 1] = 1e6
    assert fit(poisoned)["conversion"] == fit(scored)["conversion"]


def test_probabilities_by_hand_and_conversion_below_click(scored: dict[str, np.ndarray]) -> None:
    layers = fit(scored)
    got = calibrated_probabilities(SCHEMA, scored["logits"], scored["surface"], layers)

    def one(task: str, logit: float, surface: int) -> float:
        layer = layers[task]
        z = layer.slope * logit + layer.shift + layer.group_shift[SCHEMA.surfaces[surface]]
        return 1 / (1 + math.exp(-z))

    for i in range(0, N, 500):
        click = one("click", float(scored["logits"][i, 0]), int(scored["surface"][i]))
        conversion = click * one("conversion", float(scored["logits"][i, 1]), int(scored["surface"][i]))
        np.testing.assert_allclose(got[i], [click, conversion], rtol=1e-12)
    assert (got[:, 1] <= got[:, 0]).all()
    assert got[:, 0].mean() == pytest.approx(scored["labels"][:, 0].mean(), rel=1e-3)


def test_served_one_by_one_equals_offline(scored: dict[str, np.ndarray]) -> None:
    """Serving reads the layer from JSON and scores a handful of candidates; offline scores a day at once."""
    layers = fit(scored)
    served = calibration_from_dict(json.loads(json.dumps(calibration_to_dict(layers))))
    offline = calibrated_probabilities(SCHEMA, scored["logits"], scored["surface"], layers)
    for i in range(0, N, 700):
        one = calibrated_probabilities(SCHEMA, scored["logits"][i : i + 3], scored["surface"][i : i + 3], served)
        np.testing.assert_array_equal(one, offline[i : i + 3])


def test_extreme_logits_and_unseen_surfaces_stay_probabilities() -> None:
    layers = {t.name: PlattCalibration(2.0, -1.0, {"feed": 5.0}) for t in SCHEMA.tasks}
    logits = np.array([[300, 300], [-300, -300], [300, -300]], np.float32)
    got = calibrated_probabilities(SCHEMA, logits, np.array([2, 3, 4]), layers)
    assert ((got >= 0) & (got <= 1)).all()
    assert (got[:, 1] <= got[:, 0]).all()
    assert surface_names(SCHEMA, np.array([3, 4, 2])).tolist() == ["feed", "stories", "unknown"]


def test_a_shift_that_may_be_gone_tomorrow_is_not_kept(scored: dict[str, np.ndarray]) -> None:
    """With noise far above the shift seen, the mean logit of the day stays where the model had it; slopes stay."""
    plain, shrunk = fit(scored), fit(scored, {"click": 50.0})
    assert shrunk["conversion"] == plain["conversion"]
    assert shrunk["click"].slope == plain["click"].slope
    assert shrunk["click"].group_shift == plain["click"].group_shift
    x = scored["logits"][:, 0].astype(np.float64)
    assert shrunk["click"].apply(x).mean() == pytest.approx(x.mean(), abs=1e-6)
    seen, noise = plain["click"].apply(x).mean() - x.mean(), 0.1
    se = 1 / (1 / (1 + np.exp(-x)) * (1 - 1 / (1 + np.exp(-x)))).sum()
    some = fit(scored, {"click": noise})["click"].apply(x).mean() - x.mean()
    assert some == pytest.approx(seen * max(0.0, 1 - (noise**2 + se) / seen**2), rel=1e-6, abs=1e-9)


def days_of(spread: float, num_days: int = 300, rows: int = 2000) -> Outcomes:
    """Days whose log odds of a click vary by `spread` (a standard deviation); half of the clicks convert."""
    rng = np.random.default_rng(3)
    day = np.repeat(np.arange(num_days), rows)
    p = 1 / (1 + np.exp(1.0 - spread * rng.normal(size=num_days)))
    click = rng.random(day.size) < p[day]
    labels = np.stack([click, click & (rng.random(day.size) < 0.5)], 1).astype(np.float32)
    return Outcomes(labels, np.ones_like(labels), np.full(day.size, 3), day)


@pytest.mark.parametrize("spread", [0.0, 0.1, 0.3])
def test_day_noise_is_the_spread_beyond_sampling(spread: float) -> None:
    got = day_noise(SCHEMA, days_of(spread))
    assert got["click"] == pytest.approx(spread, rel=0.15, abs=0.02)
    assert got["conversion"] < 0.04


def test_day_noise_of_too_few_days_or_rows_is_nothing() -> None:
    assert day_noise(SCHEMA, days_of(0.3, num_days=2)) == {"click": 0.0, "conversion": 0.0}
    assert day_noise(SCHEMA, days_of(0.3, rows=20)) == {"click": 0.0, "conversion": 0.0}
    nobody = days_of(0.3, num_days=5)
    nobody.labels[:] = 0
    assert day_noise(SCHEMA, nobody) == {"click": 0.0, "conversion": 0.0}
