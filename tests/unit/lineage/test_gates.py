"""Gates fail closed: only a known, finite, better-than-base-rate model on the same rows is promoted."""

from __future__ import annotations

import dataclasses
import math

import pytest

from gem.config import GateConfig
from gem.lineage.gates import GateRecord, TaskScore, decide

GOOD = TaskScore(ne=0.90, calibration=1.01, auc=0.72, rows=1000)
CONFIG = GateConfig(min_calibration=0.9, max_calibration=1.1, max_ne=1.0, max_ne_increase_vs_champion=0.002)


def record(score: TaskScore = GOOD, *, bundle: str = "new", rows: str = "rows1", name: str = "gem") -> GateRecord:
    return GateRecord(name, bundle, rows, {"click": score})


def refusals(challenger: GateRecord, champion: GateRecord | None = None, config: GateConfig = CONFIG) -> list[str]:
    decision = decide(challenger, champion, config)
    out = [r for r in decision.reasons if r.startswith("refused: ")]
    assert decision.promote == (not out), "a refusal always has a reason, a promotion none against it"
    return out


def test_first_good_model_is_promoted_with_its_reasons() -> None:
    decision = decide(record(), None, CONFIG)
    assert decision.promote
    assert decision.reasons == (
        "click NE 0.9000, must be below 1",
        "click calibration 1.010, must be within 0.9 to 1.1",
        "no champion yet",
    )


@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf, 1.797e308])
@pytest.mark.parametrize("metric", ["ne", "calibration", "auc"])
def test_unknown_metric_is_refused(metric: str, value: float | None) -> None:
    assert any("unknown" in r for r in refusals(record(dataclasses.replace(GOOD, **{metric: value}))))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ne": 1.0}, "click NE 1.0000, must be below 1"),
        ({"ne": -0.1}, "NE is unknown"),
        ({"calibration": 0.8999}, "calibration 0.900, must be within"),
        ({"calibration": 1.1001}, "calibration 1.100, must be within"),
        ({"auc": 1.2}, "AUC is unknown"),
    ],
)
def test_limits(change: dict[str, float], words: str) -> None:
    assert any(words in r for r in refusals(record(dataclasses.replace(GOOD, **change))))


def test_limits_of_calibration_are_inclusive() -> None:
    for edge in (0.9, 1.1):
        assert not refusals(record(dataclasses.replace(GOOD, calibration=edge)))


def test_nothing_known_is_refused() -> None:
    assert refusals(GateRecord("gem", "new", "rows1", {}))
    assert refusals(record(rows=""))
    assert refusals(record(bundle=""))


def test_comparison_with_the_champion_allows_exactly_the_configured_rise() -> None:
    champion = record(dataclasses.replace(GOOD, ne=0.5), bundle="old")
    assert not refusals(record(dataclasses.replace(GOOD, ne=0.5 * 1.0019)), champion)
    worse = refusals(record(dataclasses.replace(GOOD, ne=0.5 * 1.0021)), champion)
    assert worse == ["refused: click NE +0.21% against the champion, allowed +0.20%"]


@pytest.mark.parametrize("value", [None, math.nan, math.inf, 0.0])
def test_champion_without_a_known_metric_cannot_be_beaten(value: float | None) -> None:
    champion = record(dataclasses.replace(GOOD, ne=value), bundle="old")
    assert any("cannot compare" in r for r in refusals(record(), champion))


def test_other_rows_other_model_same_bundle_lost_task() -> None:
    assert any("other rows" in r for r in refusals(record(), record(bundle="old", rows="rows2")))
    assert any("of model" in r for r in refusals(record(), record(bundle="old", name="gem-feed")))
    assert any("champion already" in r for r in refusals(record(), record()))
    two = GateRecord("gem", "old", "rows1", {"click": GOOD, "conversion": GOOD})
    assert any("no metrics for conversion" in r for r in refusals(record(), two))


def test_senseless_limits_refuse_everything() -> None:
    for change in ({"max_ne": math.nan}, {"min_calibration": 1.2}, {"max_ne_increase_vs_champion": math.inf}):
        assert any("make no sense" in r for r in refusals(record(), None, dataclasses.replace(CONFIG, **change)))


def test_record_survives_json() -> None:
    assert GateRecord.from_dict(record().to_dict()) == record()


def test_calibration_outside_the_limits_needs_an_interval_without_one() -> None:
    def off(low: float | None, high: float | None) -> GateRecord:
        return record(dataclasses.replace(GOOD, calibration=1.14, calibration_low=low, calibration_high=high))

    assert any("calibration" in r for r in refusals(off(1.05, 1.23)))
    assert any("calibration" in r for r in refusals(off(1.04, 1.25)))  # 99 %: from 1.010
    assert not refusals(off(1.02, 1.27))  # 99 %: from 0.985
    assert any("calibration" in r for r in refusals(off(None, None)))
    assert any("calibration" in r for r in refusals(off(0.9, math.inf)))
    assert not refusals(off(0.98, 1.3))
    assert any("too few outcomes to tell" in r for r in decide(off(0.98, 1.3), None, CONFIG).reasons)


def test_a_calibration_far_off_is_refused_however_few_the_outcomes() -> None:
    for value in (1.6, 0.6):
        wide = dataclasses.replace(GOOD, calibration=value, calibration_low=0.1, calibration_high=9.0)
        assert any("calibration" in r for r in refusals(record(wide)))
