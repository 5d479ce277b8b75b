"""Statistics of a check: intervals of rates, population stability, how well one column alone orders a label."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

Z95 = 1.959963984540054
PSI_FLOOR = 1e-4  # share given to a bin without rows
MAX_VALUES = 20  # categories with a bin of their own; the others share one
NUM_BINS = 10
MAX_CODES = 4096  # categories with a rate of their own in `column_auc`
PRIOR_ROWS = 5.0
NULL_TEXT = "(none)"


def wilson(positives: float, rows: float, z: float = Z95) -> tuple[float, float]:
    """Wilson's interval of a rate; (0, 1) without rows."""
    if rows <= 0:
        return 0.0, 1.0
    p, z2 = positives / rows, z * z
    middle = (p + z2 / (2 * rows)) / (1 + z2 / rows)
    half = z / (1 + z2 / rows) * float(np.sqrt(p * (1 - p) / rows + z2 / (4 * rows * rows)))
    return max(0.0, middle - half), min(1.0, middle + half)


def psi(before: npt.ArrayLike, after: npt.ArrayLike) -> float:
    """Population stability index of two histograms over the same bins; 0 if either is empty."""
    a, b = np.asarray(before, np.float64), np.asarray(after, np.float64)
    if not a.sum() or not b.sum():
        return 0.0
    p, q = np.maximum(a / a.sum(), PSI_FLOOR), np.maximum(b / b.sum(), PSI_FLOOR)
    both = (a > 0) | (b > 0)
    return float(((q - p) * np.log(q / p))[both].sum())


def psi_noise(before: npt.ArrayLike, after: npt.ArrayLike) -> float:
    """PSI that two samples of one distribution show on average: (bins - 1)(1/n + 1/m)."""
    a, b = np.asarray(before), np.asarray(after)
    if not a.sum() or not b.sum():
        return 0.0
    bins = int(((a > 0) | (b > 0)).sum())
    return float((bins - 1) * (1.0 / a.sum() + 1.0 / b.sum()))


def drift_codes(values: pa.Array, before: npt.NDArray[np.bool_]) -> I64:
    """Bins [N] for `psi`: tenths of the earlier rows (`before` [N]) for numbers, frequent values else; null is one."""
    if is_number(values.type):
        numbers = as_numbers(values)
        known = numbers[before & np.isfinite(numbers)]
        edges = np.unique(np.quantile(known, np.linspace(0, 1, NUM_BINS + 1)[1:-1])) if known.size else np.zeros(0)
        codes = np.searchsorted(edges, numbers, side="right")
        return np.where(np.isfinite(numbers), codes, len(edges) + 1).astype(np.int64)
    codes, _ = category_codes(values)
    counts = np.bincount(codes[before], minlength=int(codes.max(initial=0)) + 1)
    kept = np.argsort(-counts, kind="stable")[:MAX_VALUES]
    table = np.full(len(counts), MAX_VALUES, np.int64)
    table[kept] = np.arange(len(kept))
    out: I64 = table[codes]
    return out


def auc(y: npt.ArrayLike, score: npt.ArrayLike) -> float:
    """Chance that a positive stands above a negative, ties one half; NaN with one class only."""
    labels, scores = np.asarray(y, np.float64), np.asarray(score, np.float64)
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    rank = (ends - (counts - 1) / 2.0)[inverse.reshape(-1)]
    positives = float(labels.sum())
    negatives = len(labels) - positives
    if not positives or not negatives:
        return float("nan")
    return float((rank @ labels - positives * (positives + 1) / 2) / (positives * negatives))


def column_auc(values: pa.Array, y: F64, fold: I64) -> float:
    """AUC of one column alone, at least about 0.5; rows [N], labels y [N], fold [N] in {0, 1} (by user).

    Numbers: in their own order, whichever way round, or by bins. Bins and categories are scored with the rate that
    the other fold shows, so that rare values do not pass for signal.
    """
    found = [0.5]
    if is_number(values.type):
        numbers = as_numbers(values)
        known = np.isfinite(numbers)
        if known.mean() > 0.5:
            plain = auc(y[known], numbers[known])
            found.append(max(plain, 1 - plain))
        codes = drift_codes(values, np.ones(len(values), np.bool_))
    else:
        codes, _ = category_codes(values)
        codes = np.minimum(codes, MAX_CODES)
    found.append(_rate_auc(codes, y, fold))
    return float(np.nanmax(found))


def _rate_auc(codes: I64, y: F64, fold: I64) -> float:
    size = int(codes.max(initial=0)) + 1
    out = []
    for side in (0, 1):
        learn, score = fold != side, fold == side
        if not learn.any() or not score.any():
            return float("nan")
        rows = np.bincount(codes[learn], minlength=size)
        positives = np.bincount(codes[learn], weights=y[learn], minlength=size)
        rate = (positives + PRIOR_ROWS * y[learn].mean()) / (rows + PRIOR_ROWS)
        out.append(auc(y[score], rate[codes[score]]))
    return float(np.mean(out))


def category_codes(values: pa.Array) -> tuple[I64, list[str]]:
    """Codes [N], most frequent value first, and the texts of the codes; null is a value."""
    words = pc.fill_null(as_words(values), NULL_TEXT)
    coded = words.dictionary_encode()
    indices = coded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    order = np.argsort(-np.bincount(indices, minlength=len(coded.dictionary)), kind="stable")
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    return place[indices], coded.dictionary.take(pa.array(order)).to_pylist()


def as_words(values: pa.Array) -> pa.Array:
    """A column as text; the items of a list in their order, joined."""
    if pa.types.is_list(values.type):
        return pc.binary_join(values.cast(pa.list_(pa.string())), "|")
    return values.cast(pa.string())


def as_numbers(values: pa.Array) -> F64:
    """A column of numbers as float64 [N], NaN where null."""
    out: F64 = values.cast(pa.float64()).to_numpy(zero_copy_only=False)
    return out


def is_number(kind: pa.DataType) -> bool:
    """Whether a column is ordered by its value."""
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def numbers_if_so(values: pa.Array) -> pa.Array:
    """A text column as float64 if all its values read as numbers and there are more than a few of them."""
    if not pa.types.is_string(values.type):
        return values
    distinct = pc.unique(pc.drop_null(values))
    if len(distinct) <= MAX_VALUES:
        return values
    try:
        return values.cast(pa.float64())
    except pa.ArrowInvalid:
        return values


def quantiles(values: npt.NDArray[Any], at: tuple[float, ...]) -> list[float]:
    """Quantiles of finite values; empty list if there is none."""
    known = values[np.isfinite(values)]
    return [float(q) for q in np.quantile(known, at)] if known.size else []
