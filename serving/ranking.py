"""From probabilities and bids to an order. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.schema import Candidate


def rank(
    candidates: Sequence[Candidate],
    p: Mapping[str, NDArray[np.float64]],
    known: NDArray[np.bool_],
    objective: str,
) -> list[dict[str, Any]]:
    """Order N candidates by expected value = bid x p[objective], highest first; ties keep request order.

    p: task -> [N]. A score that is not finite becomes null and goes last: it must neither win nor fail
    the whole request. Returns one dict per candidate (see `schema.RankedAd`).
    """
    bids = np.array([c.bid for c in candidates], dtype=np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        value = bids * p[objective]
    order = np.argsort(np.where(np.isfinite(value), -value, np.inf), kind="stable")
    columns = {f"p_{task}": [_finite(v) for v in scores] for task, scores in p.items()}
    out: list[dict[str, Any]] = []
    for place, i in enumerate(order.tolist(), start=1):
        row: dict[str, Any] = {"ad_id": candidates[i].ad_id, "p_click": None, "p_conversion": None}
        row |= {name: column[i] for name, column in columns.items()}
        row |= {"expected_value": _finite(value[i]), "rank": place, "known": bool(known[i]), "index": i}
        out.append(row)
    return out


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
