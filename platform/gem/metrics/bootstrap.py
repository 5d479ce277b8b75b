"""95 % intervals by resampling whole users (cluster bootstrap): rows of one user are not independent.

One resample draws U users out of U with replacement, so user u counts m_u times (a multinomial draw).
Nothing is copied: NE and calibration need per-user sums only, AUC one running sum over scores sorted once,
gAUC the per-user AUCs. The NE base rate is that of the resample.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import ArrayLike

from gem.errors import DataError, suggest
from gem.metrics.auc import SortedScores, user_aucs
from gem.metrics.metric import Floats, Ints, Metric, check_pair, single_class_reason, user_codes
from gem.metrics.ne import log_loss

METRICS = ("ne", "auc", "gauc", "calibration")
_TAIL = 2.5  # per cent on each side


class UserSums:
    """Everything needed to measure the same predictions under any user multiplicities.

    Args:
        codes: [N] user of each row, 0..num_users-1.
        y, p: [N] checked labels and probabilities.
    """

    def __init__(self, codes: Ints, num_users: int, y: Floats, p: Floats) -> None:
        def per_user(weights: Floats | None) -> Floats:
            return np.bincount(codes, weights=weights, minlength=num_users).astype(np.float64)

        self.num_users = num_users
        self._sums = np.stack([per_user(None), per_user(y), per_user(p), per_user(log_loss(y, p))])  # [4, U]
        self._aucs, self._auc_weights = user_aucs(codes, num_users, y, p)
        self._scores = SortedScores.of(y, p)
        self._user_sorted = codes[self._scores.order]

    def measure(self, multiplicity: Floats, names: tuple[str, ...] = METRICS) -> Floats:
        """[len(names)] metric values when user u counts `multiplicity[u]` times; NaN where undefined."""
        return np.array([self._one(name, multiplicity) for name in names])

    def _one(self, name: str, multiplicity: Floats) -> float:
        if name == "auc":
            return self._scores.auc(multiplicity[self._user_sorted])
        if name == "gauc":
            weights = multiplicity * self._auc_weights
            total = float(weights.sum())
            return float(weights @ self._aucs) / total if total > 0 else float("nan")
        rows, positives, predicted, loss = self._sums @ multiplicity
        if name == "calibration":
            return float(predicted / positives) if positives > 0 else float("nan")
        if not 0 < positives < rows:
            return float("nan")
        rate = positives / rows
        return float(loss / -(positives * np.log(rate) + (rows - positives) * np.log1p(-rate)))


def multiplicities(num_users: int, num_bootstrap: int, seed: int) -> Iterator[Floats]:
    """`num_bootstrap` draws [U] of how often each user counts; the same for the same arguments."""
    rng = np.random.default_rng(seed)
    for _ in range(num_bootstrap):
        picked = rng.integers(0, num_users, size=num_users)
        yield np.bincount(picked, minlength=num_users).astype(np.float64)


def bootstrap_metrics(
    user: ArrayLike, y: ArrayLike, p: ArrayLike, num_bootstrap: int = 200, seed: int = 0
) -> dict[str, Metric]:
    """NE, AUC, gAUC and calibration of p [N] for y [N], each with its 95 % percentile interval.

    `num_bootstrap=0` gives the values alone. An undefined value is None with the reason; an interval is
    left out (with the reason) for a single user or where most resamples have one class only.
    """
    labels, probs = check_pair(y, p)
    codes, num_users = user_codes(user, labels.shape[0])
    if num_users == 0:
        return {name: Metric(None, reason="no rows") for name in METRICS}
    sums = UserSums(codes, num_users, labels, probs)
    whole = sums.measure(np.ones(num_users))
    draws = np.array([sums.measure(m) for m in multiplicities(num_users, num_bootstrap, seed)])
    draws = draws.reshape(num_bootstrap, len(METRICS))
    why = single_class_reason(labels.shape[0], float(labels.sum()))
    out = {}
    for k, name in enumerate(METRICS):
        reason = why or f"none of {num_users} users has both labels"
        out[name] = _interval(float(whole[k]), draws[:, k], num_users, reason)
    return out


def paired_difference(
    user: ArrayLike,
    y: ArrayLike,
    p_a: ArrayLike,
    p_b: ArrayLike,
    metric: str = "ne",
    *,
    num_bootstrap: int = 200,
    seed: int = 0,
) -> Metric:
    """metric(p_a) - metric(p_b) on the same rows, both measured on the same resamples of users.

    For NE a negative value says that a is better. The interval holds 0 when the gap is not resolved.
    """
    if metric not in METRICS:
        raise DataError(f'metric: got "{metric}".{suggest(metric, METRICS)} Allowed: {", ".join(METRICS)}')
    labels, probs_a = check_pair(y, p_a)
    _, probs_b = check_pair(y, p_b)
    codes, num_users = user_codes(user, labels.shape[0])
    if num_users == 0:
        return Metric(None, reason="no rows")
    a, b = UserSums(codes, num_users, labels, probs_a), UserSums(codes, num_users, labels, probs_b)

    def gap(multiplicity: Floats) -> float:
        return float((a.measure(multiplicity, (metric,)) - b.measure(multiplicity, (metric,)))[0])

    draws = np.array([gap(m) for m in multiplicities(num_users, num_bootstrap, seed)])
    reason = single_class_reason(labels.shape[0], float(labels.sum()))
    return _interval(gap(np.ones(num_users)), draws, num_users, reason or "no user has both labels")


def _interval(value: float, draws: Floats, num_users: int, undefined: str) -> Metric:
    if not np.isfinite(value):
        return Metric(None, reason=undefined)
    if draws.shape[0] == 0:
        return Metric(value, reason="interval not asked for")
    if num_users < 2:
        return Metric(value, reason="no interval: one user")
    known = draws[np.isfinite(draws)]
    if 2 * known.shape[0] < draws.shape[0]:
        return Metric(value, reason="no interval: most resamples of users have one label only")
    low, high = np.percentile(known, [_TAIL, 100.0 - _TAIL])
    return Metric(value, float(low), float(high))
