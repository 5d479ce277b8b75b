"""Exact area under the ROC curve, over all rows and averaged within users. Ties count one half."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from gem.metrics.metric import Floats, Ints, Metric, check_pair, single_class_reason, user_codes


def auc(y: ArrayLike, p: ArrayLike) -> Metric:
    """Exact AUC of scores p [N] for labels y [N]: the chance that a positive is above a negative, ties one half.

    A constant predictor has 0.5. One class only: None with the reason. Raises DataError for bad input.
    """
    labels, probs = check_pair(y, p)
    reason = single_class_reason(labels.shape[0], float(labels.sum()))
    if reason:
        return Metric(None, reason=reason)
    return Metric(SortedScores.of(labels, probs).auc(np.ones(labels.shape[0])))


def gauc(user: ArrayLike, y: ArrayLike, p: ArrayLike) -> Metric:
    """AUC within each user, averaged with the user's number of rows as weight.

    Users whose rows have one class only have no AUC and are left out (Zhu et al. 2017, OCPC, eq. 3;
    weight = impressions). None if there is no other user.
    """
    labels, probs = check_pair(y, p)
    codes, num_users = user_codes(user, labels.shape[0])
    values, weights = user_aucs(codes, num_users, labels, probs)
    if not weights.any():
        return Metric(None, reason=f"none of {num_users} users has both labels")
    return Metric(float(values @ weights / weights.sum()))


def user_aucs(codes: Ints, num_users: int, y: Floats, p: Floats) -> tuple[Floats, Floats]:
    """Per user [U] its AUC and its weight (rows; 0 where the user has one class only, AUC then 0).

    Mid-ranks within (user, p) runs after one sort: AUC_u = (R_u - n1 (n1 + 1) / 2) / (n1 n0), with R_u
    the rank sum of the positives.
    """
    if y.shape[0] == 0:
        return np.zeros(num_users), np.zeros(num_users)
    order = np.lexsort((p, codes))
    user_s, y_s, p_s = codes[order], y[order], p[order]
    first_of_user = np.searchsorted(user_s, np.arange(num_users))
    new_run = np.ones(y.shape[0], dtype=bool)
    new_run[1:] = (user_s[1:] != user_s[:-1]) | (p_s[1:] != p_s[:-1])
    run_start = np.flatnonzero(new_run)
    run_end = np.append(run_start[1:], y.shape[0])
    run = np.cumsum(new_run) - 1
    mid_rank = 0.5 * (run_start + run_end - 1)[run] + 1.0 - first_of_user[user_s]
    count = np.bincount(user_s, minlength=num_users).astype(np.float64)
    pos = np.bincount(user_s, weights=y_s, minlength=num_users)
    rank_sum = np.bincount(user_s, weights=y_s * mid_rank, minlength=num_users)
    pairs = pos * (count - pos)
    values = np.divide(rank_sum - pos * (pos + 1.0) / 2.0, pairs, out=np.zeros(num_users), where=pairs > 0)
    return values, np.where(pairs > 0, count, 0.0)


@dataclass(frozen=True)
class SortedScores:
    """Rows sorted by score once, so that the AUC under any row weights is two sums and a running sum."""

    order: Ints  # [N] rows, lowest score first
    y: Floats  # [N] labels in that order
    run_start: Ints  # [G] where each run of equal scores starts

    @classmethod
    def of(cls, y: Floats, p: Floats) -> SortedScores:
        order = np.argsort(p, kind="stable")
        ranked = p[order]
        new_run = np.ones(p.shape[0], dtype=bool)
        new_run[1:] = ranked[1:] != ranked[:-1]
        return cls(order, y[order], np.flatnonzero(new_run))

    def auc(self, weights_sorted: Floats) -> float:
        """AUC where row `order[i]` counts `weights_sorted[i]` times; NaN if a class has no weight."""
        pos_w = weights_sorted * self.y
        neg_w = weights_sorted - pos_w
        if self.run_start.shape[0] < self.order.shape[0]:
            pos_w = np.add.reduceat(pos_w, self.run_start)
            neg_w = np.add.reduceat(neg_w, self.run_start)
        below = np.cumsum(neg_w)
        pairs = float(pos_w.sum()) * float(below[-1])
        return float(pos_w @ (below - 0.5 * neg_w)) / pairs if pairs > 0 else float("nan")
