"""The arithmetic of the quality benchmark: intervals over users and seeds, choices, compute multipliers. No model.

Letters: N rows, U users, S sizes of a family.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gem.metrics import Metric
from gem.metrics.bootstrap import UserSums, multiplicities
from gem.metrics.metric import check_pair, user_codes

Floats = NDArray[np.float64]
Statistic = Callable[[Floats], float]
NUM_BOOTSTRAP = 1000
INTERPOLATED, LOWER_BOUND, EXTRAPOLATED, NOT_REACHED = "interpolated", "lower bound", "extrapolated", "not reached"


def measured(user: ArrayLike, y: ArrayLike, runs: Sequence[ArrayLike]) -> list[UserSums]:
    """The probabilities [N] of every run (seed) of one arm, ready to be measured under any choice of users."""
    codes, num_users = user_codes(user, np.asarray(y).shape[0])
    return [UserSums(codes, num_users, *check_pair(y, p)) for p in runs]


def mean_metric(arm: Sequence[UserSums], metric: str) -> float:
    """Mean over seeds of the metric on all rows."""
    return float(np.mean(per_seed(arm, metric)))


def per_seed(arm: Sequence[UserSums], metric: str) -> list[float]:
    """The metric of every seed on all rows."""
    return [float(run.measure(np.ones(run.num_users), (metric,))[0]) for run in arm]


def interval(
    arms: Sequence[Sequence[UserSums]],
    metric: str,
    statistic: Statistic,
    num_bootstrap: int = NUM_BOOTSTRAP,
    seed: int = 0,
) -> Metric:
    """statistic(metric of every arm), with a 95 % interval that covers the choice of users *and* of the seed.

    The value takes each arm's mean over seeds. Each resample draws users with replacement (the same for all arms:
    paired) and, for every arm on its own, one of its seeds: the interval is that of comparing one run with one run,
    which is wider than that of the means. All arms must be measured on the same rows.
    """
    num_users = arms[0][0].num_users
    if any(run.num_users != num_users for arm in arms for run in arm):
        raise ValueError("interval: the arms were measured on different rows; measure all on the same")
    value = statistic(np.array([mean_metric(arm, metric) for arm in arms]))
    rng = np.random.default_rng([seed, 1])
    draws = []
    for users in multiplicities(num_users, num_bootstrap, seed):
        picked = [arm[int(rng.integers(len(arm)))] for arm in arms]
        draws.append(statistic(np.array([float(run.measure(users, (metric,))[0]) for run in picked])))
    if not np.isfinite(value):
        return Metric(None, reason="undefined on these rows")
    if not draws:
        return Metric(float(value), reason="interval not asked for")
    known = np.array([d for d in draws if not np.isnan(d)])
    if 2 * known.size < num_bootstrap:
        return Metric(float(value), reason="no interval: undefined on most resamples")
    low, high = np.percentile(known, [2.5, 97.5], method="nearest")  # no mean of two: one may be infinite
    finite = bool(np.isfinite([low, high]).all())
    return (
        Metric(float(value), float(low), float(high)) if finite else Metric(float(value), reason="interval unbounded")
    )


def itself(values: Floats) -> float:
    """The metric of the one arm."""
    return float(values[0])


def difference(values: Floats) -> float:
    """First arm minus second."""
    return float(values[0] - values[1])


def relative_gain(values: Floats) -> float:
    """How much lower the first arm's NE is than the second's, as a share of the second's; positive is better."""
    return float((values[1] - values[0]) / values[1])


def relative_excess(values: Floats) -> float:
    """How much higher the first arm's NE is than the second's, as a share of the second's; positive is worse."""
    return -relative_gain(values)


def excess_ratio(values: Floats) -> float:
    """(NE of first - Bayes NE) / (NE of second - Bayes NE); the third arm is the Bayes predictor."""
    ours, theirs, bayes = values
    return float((ours - bayes) / (theirs - bayes)) if theirs > bayes else math.nan


def best_of(validation: Mapping[str, float]) -> str:
    """The name with the lowest validation NE; the first of equals. NaN never wins."""
    known = {name: ne for name, ne in validation.items() if not math.isnan(ne)}
    if not known:
        raise ValueError("best_of: no trial has a validation NE")
    return min(known, key=lambda name: known[name])


@dataclass(frozen=True)
class Curve:
    """NE of the sizes of one family against training compute. flops [S] rising, ne [S]."""

    flops: tuple[float, ...]
    ne: tuple[float, ...]

    @classmethod
    def of(cls, flops: ArrayLike, ne: ArrayLike) -> Curve:
        """Sorted by compute."""
        pairs = sorted(zip(np.asarray(flops, float).tolist(), np.asarray(ne, float).tolist(), strict=True))
        return cls(tuple(f for f, _ in pairs), tuple(n for _, n in pairs))

    def line(self) -> tuple[float, float, float]:
        """(a, b, R²) of the least squares fit NE = a - b log10(FLOPs)."""
        x, y = np.log10(self.flops), np.array(self.ne)
        slope, level = np.polyfit(x, y, 1)
        spread = float(((y - y.mean()) ** 2).sum())
        rest = float(((y - (level + slope * x)) ** 2).sum())
        return float(level), float(-slope), 1.0 - rest / spread if spread > 0 else 1.0

    def reach(self, target: float) -> tuple[float, str]:
        """(log10 of the FLOPs at which this family's NE falls to `target`, how it is known).

        Between the two sizes around it: interpolated on log FLOPs. The smallest size is there already: at most its
        FLOPs. No size is: the fitted line, extrapolated, or infinity if the line does not fall.
        """
        x = np.log10(self.flops)
        if self.ne[0] <= target:
            return float(x[0]), LOWER_BOUND
        for i in range(1, len(self.ne)):
            if self.ne[i] <= target:
                share = (self.ne[i - 1] - target) / (self.ne[i - 1] - self.ne[i])
                return float(x[i - 1] + share * (x[i] - x[i - 1])), INTERPOLATED
        level, fall, _ = self.line()
        if fall <= 0:
            return math.inf, NOT_REACHED
        return max(float((level - target) / fall), float(x[-1])), EXTRAPOLATED


def compute_multiplier(ours: Curve, theirs: Curve, at: int) -> tuple[float, str]:
    """Training compute of their size `at` over what we need for the same NE, and how the latter is known.

    `at` is their best size, chosen on the validation day. 0 if we never reach that NE.
    """
    needed, how = ours.reach(theirs.ne[at])
    return (0.0 if math.isinf(needed) else float(10 ** (math.log10(theirs.flops[at]) - needed))), how


def reverse_multiplier(ours: Curve, theirs: Curve, at: int) -> tuple[float, str]:
    """What they need for the NE of our size `at`, over our compute; infinite if their curve does not lead there.

    A lower bound of theirs (their smallest is better already) makes this an upper bound.
    """
    needed, how = theirs.reach(ours.ne[at])
    how = "upper bound" if how == LOWER_BOUND else how
    return (math.inf if math.isinf(needed) else float(10 ** (needed - math.log10(ours.flops[at])))), how


def noise_floor(values: Sequence[float]) -> float | None:
    """Standard deviation over seeds; None for fewer than two."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else None
