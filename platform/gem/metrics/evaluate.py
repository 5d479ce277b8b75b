"""All metrics of one task at once, over all rows and by surface (or by any other slice)."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from gem.errors import DataError
from gem.metrics.bootstrap import bootstrap_metrics
from gem.metrics.metric import Metric


def evaluate(
    user: ArrayLike,
    y: ArrayLike,
    p: ArrayLike,
    surface: ArrayLike | None = None,
    *,
    num_bootstrap: int = 200,
    seed: int = 0,
) -> dict[str, Metric]:
    """NE, AUC, gAUC and calibration with 95 % intervals over users.

    Args:
        user, y, p: [N] user, label (0/1) and probability of each row whose outcome is known.
        surface: [N] surface of each row; adds the metrics of every surface on its own.

    Returns:
        Keys `ne`, `auc`, `gauc`, `calibration`, and `<surface>/ne` and so on when surfaces are given.

    Raises:
        DataError: labels other than 0/1, predictions outside [0, 1] or not finite, lengths that differ.
    """
    out = bootstrap_metrics(user, y, p, num_bootstrap, seed)
    if surface is not None:
        for name, metrics in evaluate_by(surface, user, y, p, num_bootstrap=num_bootstrap, seed=seed).items():
            out.update({f"{name}/{key}": metric for key, metric in metrics.items()})
    return out


def evaluate_by(
    group: ArrayLike,
    user: ArrayLike,
    y: ArrayLike,
    p: ArrayLike,
    *,
    num_bootstrap: int = 200,
    seed: int = 0,
) -> dict[str, dict[str, Metric]]:
    """`evaluate` on the rows of each value of `group` [N] (surface, day, ...); the NE base rate is the group's own."""
    groups, users, labels, probs = np.asarray(group), np.asarray(user), np.asarray(y), np.asarray(p)
    if not groups.shape == users.shape == labels.shape == probs.shape:
        shapes = (groups.shape, users.shape, labels.shape, probs.shape)
        raise DataError(f"group, user, y, p: got shapes {shapes}; allowed: four equal [N]")
    names, codes = np.unique(groups, return_inverse=True)
    out = {}
    for k, name in enumerate(names):
        rows = np.flatnonzero(codes == k)
        out[str(name)] = bootstrap_metrics(users[rows], labels[rows], probs[rows], num_bootstrap, seed)
    return out
