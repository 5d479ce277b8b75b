"""Promotion gates: pure functions from records to a decision with reasons (contract 6).

Everything unknown refuses: a metric that is missing, NaN or infinite, another evaluation set, an empty
record. MLflow stores infinity as 1.797e308, so absurdly large values count as infinite too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from gem.config import GateConfig

_ABSURD = 1e300
_ROUNDING = 1e-9  # the base rate itself has an NE of 1 give or take the last bits, and must not pass by these
_WIDEN = 2.576 / 1.960  # normal quantiles, on the log scale of a ratio


@dataclass(frozen=True)
class TaskScore:
    """Metrics of one task on the evaluation rows. None = could not be computed.

    calibration_low, calibration_high: its 95 % interval, where there is one.
    """

    ne: float | None
    calibration: float | None
    auc: float | None
    rows: int = 0
    calibration_low: float | None = None
    calibration_high: float | None = None


@dataclass(frozen=True)
class GateRecord:
    """What a gate needs to know about one model.

    rows_hash: hash of the exact evaluation rows (impression ids and labels). A champion is evaluated
    again on the challenger's rows; two records with different hashes are never compared.
    """

    name: str
    bundle_hash: str
    rows_hash: str
    tasks: Mapping[str, TaskScore] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> GateRecord:
        tasks = {str(k): TaskScore(**v) for k, v in raw["tasks"].items()}
        return cls(str(raw["name"]), str(raw["bundle_hash"]), str(raw["rows_hash"]), tasks)


@dataclass(frozen=True)
class Decision:
    """promote, and why. `reasons` lists every check; those that refuse begin with "refused: "."""

    promote: bool
    reasons: tuple[str, ...]


def decide(challenger: GateRecord, champion: GateRecord | None, config: GateConfig) -> Decision:
    """Decide whether the challenger becomes champion; fails closed. Never raises for bad numbers."""
    passed: list[str] = []
    refused: list[str] = [*_check_config(config), *_check_identity(challenger, champion)]
    for task, score in challenger.tasks.items():
        good, bad = _check_task(task, score, config)
        passed += good
        refused += bad
    if champion is None:
        passed.append("no champion yet")
    elif champion.rows_hash == challenger.rows_hash:
        good, bad = _compare(challenger, champion, config)
        passed += good
        refused += bad
    return Decision(not refused, (*(f"refused: {r}" for r in refused), *passed))


def _known(value: float | None) -> float | None:
    """The value as a usable number, or None."""
    if value is None or isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) and abs(value) < _ABSURD else None


def _check_config(config: GateConfig) -> list[str]:
    limits = (config.min_calibration, config.max_calibration, config.max_ne, config.max_ne_increase_vs_champion)
    known = all(_known(x) is not None for x in (*limits, config.outer_calibration))
    if not known or config.min_calibration > config.max_calibration or config.outer_calibration < 1.0:
        return [f"the gate limits make no sense: {config}"]
    return []


def _check_identity(challenger: GateRecord, champion: GateRecord | None) -> list[str]:
    out: list[str] = []
    if not challenger.bundle_hash:
        out.append("the challenger has no bundle hash")
    if not challenger.rows_hash:
        out.append("the challenger does not say on which rows it was evaluated")
    if not challenger.tasks:
        out.append("the challenger has no metrics")
    if champion is None:
        return out
    if champion.name != challenger.name:
        out.append(f'the champion is of model "{champion.name}", the challenger of "{challenger.name}"')
    if champion.bundle_hash == challenger.bundle_hash:
        out.append("the challenger is the champion already")
    if champion.rows_hash != challenger.rows_hash:
        out.append(
            f"evaluated on other rows than the champion ({challenger.rows_hash[:12]} against "
            f"{champion.rows_hash[:12]}); evaluate the champion on the same rows"
        )
    missing = sorted(set(champion.tasks) - set(challenger.tasks))
    if missing:
        out.append(f"no metrics for {', '.join(missing)}, which the champion has")
    return out


def _check_task(task: str, score: TaskScore, config: GateConfig) -> tuple[list[str], list[str]]:
    good: list[str] = []
    bad: list[str] = []
    ne, calibration, auc = _known(score.ne), _known(score.calibration), _known(score.auc)
    if ne is None or ne < 0:
        bad.append(f"{task} NE is unknown ({score.ne})")
    else:
        (good if ne < config.max_ne - _ROUNDING else bad).append(f"{task} NE {ne:.4f}, must be below {config.max_ne:g}")
    good_calibration, text = _check_calibration(calibration, score, config)
    (good if good_calibration else bad).append(f"{task} {text}")
    if auc is None or not 0.0 <= auc <= 1.0:
        bad.append(f"{task} AUC is unknown ({score.auc})")
    return good, bad


def _check_calibration(value: float | None, score: TaskScore, config: GateConfig) -> tuple[bool, str]:
    """Within the bounds; or outside, but not distinguishable from 1 on so few outcomes.

    With 250 positives the true model itself is off by 10 % one time in ten, so a bare bound would refuse it. A
    loop makes many such checks: the interval is widened from 95 % to 99 %, so that few of them err together. Far off
    is refused however few the outcomes.
    """
    if value is None:
        return False, f"calibration is unknown ({score.calibration})"
    low, high = config.min_calibration, config.max_calibration
    text = f"calibration {value:.3f}, must be within {low:g} to {high:g}"
    if low <= value <= high:
        return True, text
    if not 1.0 / config.outer_calibration <= value <= config.outer_calibration:
        return False, text
    from_, to = _known(score.calibration_low), _known(score.calibration_high)
    if value > 0 and from_ is not None and to is not None and 0 < from_ <= value <= to:
        from_, to = (value * (edge / value) ** _WIDEN for edge in (from_, to))
        if from_ <= 1.0 <= to:
            return (
                True,
                f"{text}: outside, but its 99 % interval [{from_:.3f}, {to:.3f}] holds 1: too few outcomes to tell",
            )
    return False, text


def _compare(challenger: GateRecord, champion: GateRecord, config: GateConfig) -> tuple[list[str], list[str]]:
    good: list[str] = []
    bad: list[str] = []
    for task in sorted(set(champion.tasks) & set(challenger.tasks)):
        ours, theirs = _known(challenger.tasks[task].ne), _known(champion.tasks[task].ne)
        if ours is None:
            continue  # refused above
        if theirs is None or theirs <= 0:
            bad.append(f"{task} NE of the champion is unknown ({champion.tasks[task].ne}): cannot compare")
            continue
        rise = ours / theirs - 1.0
        text = f"{task} NE {rise:+.2%} against the champion, allowed {config.max_ne_increase_vs_champion:+.2%}"
        (good if rise <= config.max_ne_increase_vs_champion else bad).append(text)
    return good, bad
