"""What the rules judge and the page draws: label rates, drift, AUC of single columns, history lengths."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gem.data.days import day_text
from gem.data.profile.samples import KeySample
from gem.data.profile.stats import (
    category_codes,
    column_auc,
    drift_codes,
    is_number,
    numbers_if_so,
    psi,
    psi_noise,
    quantiles,
    wilson,
)
from pipelines.check.gather import EXTRA, Facts

MIN_DRIFT_ROWS = 300  # on both sides
MAX_SURFACES = 6  # with figures by day and feature
MAX_RATED = 50  # with a label rate
AUC_ROWS = 50_000
MIN_CLASS = 50  # rows of either class for an AUC


@dataclass(frozen=True)
class Rate:
    """Label rate of a group with Wilson's 95 % interval; surface or day "" = all."""

    label: str
    surface: str
    day: str
    rows: int
    positives: int
    low: float
    high: float

    @property
    def rate(self) -> float:
        return self.positives / self.rows if self.rows else float("nan")


@dataclass(frozen=True)
class Drift:
    """PSI of a feature between the days before and the last one; `noise` is what equal distributions would show."""

    feature: str
    surface: str
    psi: float
    noise: float
    rows: int


@dataclass(frozen=True)
class SingleAuc:
    """How well one column alone orders a label. `use`: feature, unused, outcome (declared as one) or free (surface)."""

    label: str
    column: str
    auc: float
    use: str


@dataclass
class Measures:
    """All measures; lists are empty where there was nothing to measure."""

    days: list[str] = field(default_factory=list)
    surfaces: list[str] = field(default_factory=list)  # most rows first
    rates: list[Rate] = field(default_factory=list)
    drift: list[Drift] = field(default_factory=list)
    unseen: dict[str, float] = field(default_factory=dict)  # feature -> share of the last day's rows with a new value
    aucs: list[SingleAuc] = field(default_factory=list)
    medians: dict[tuple[str, str], float] = field(default_factory=dict)  # (role, column) -> median
    histories: dict[str, float] = field(default_factory=dict)
    history_counts: list[tuple[int, int, int]] = field(default_factory=list)  # (from, to, users)


def measure(facts: Facts) -> Measures:
    """Compute everything from the merged samples."""
    out = Measures()
    _histories(facts, out)
    _medians(facts, out)
    sample = facts.sample
    if sample is None or not sample.num_rows:
        return out
    day = sample["day"].to_numpy()
    out.days = [day_text(d) for d in np.unique(day).tolist()]
    surface = np.asarray([names(facts, s) for s in sample["surface"].to_pylist()], dtype=object)
    found, counts = np.unique(surface.astype(str), return_counts=True)
    out.surfaces = [str(found[i]) for i in np.argsort(-counts, kind="stable")]
    _rates(facts, sample, surface.astype(str), day, out)
    _drift(facts, sample, surface.astype(str), day, out)
    _aucs(facts, sample, out)
    return out


def names(facts: Facts, surface: str | None) -> str:
    """Readable name of a raw surface."""
    return "(none)" if surface is None else facts.spec.surfaces.names.get(surface, surface)


def _rates(facts: Facts, sample: pa.Table, surface: Any, day: npt.NDArray[np.int32], out: Measures) -> None:
    for name, label in facts.spec.labels.items():
        y = sample[f"label:{name}"].to_numpy()
        known = y >= 0
        if label.given:
            known &= sample[f"label:{label.given}"].to_numpy() == 1
        groups = [("", "", known)]
        groups += [(s, "", known & (surface == s)) for s in out.surfaces[:MAX_RATED]]
        days = [(d, known & (day == n)) for d, n in zip(out.days, np.unique(day).tolist(), strict=True)]
        groups += [("", d, mask) for d, mask in days]
        groups += [(s, d, mask & (surface == s)) for s in out.surfaces[:MAX_SURFACES] for d, mask in days]
        for where, when, mask in groups:
            rows, positives = int(mask.sum()), int((y[mask] == 1).sum())
            out.rates.append(Rate(name, where, when, rows, positives, *wilson(positives, rows)))


def _drift(facts: Facts, sample: pa.Table, surface: Any, day: npt.NDArray[np.int32], out: Measures) -> None:
    last = day == day.max()
    entity = {"users": sample["user"].to_numpy(), "ads": sample["ad"].to_numpy()}
    rows = np.arange(len(day))
    for column in feature_columns(sample):
        values = _array(sample, column)
        if pa.types.is_nested(values.type) and not pa.types.is_list(values.type):
            continue
        codes = drift_codes(values, ~last)
        if not is_number(values.type) and min(last.sum(), (~last).sum()) >= MIN_DRIFT_ROWS:
            known, _ = category_codes(values)
            out.unseen[pretty(column)] = float((~np.isin(known[last], np.unique(known[~last]))).mean())
        whose = entity.get(column.partition(":")[0], rows)
        for where in ["", *out.surfaces[:MAX_SURFACES]]:
            inside = np.ones(len(day), np.bool_) if not where else surface == where
            after, before = inside & last, inside & ~last
            if min(after.sum(), before.sum()) < MIN_DRIFT_ROWS or (column == "surface" and where):
                continue
            size = int(codes.max(initial=0)) + 1
            a, b = (np.bincount(codes[mask], minlength=size).astype(np.float64) for mask in (before, after))
            noise = psi_noise(a * _spread(whose[before]), b * _spread(whose[after]))
            out.drift.append(Drift(pretty(column), where, psi(a, b), noise, int(after.sum())))


def _spread(whose: npt.NDArray[Any]) -> float:
    """Rows that are as good as independent, as a share: rows of one user share that user's features (Kish)."""
    counts = np.unique(whose, return_counts=True)[1].astype(np.float64)
    return float(counts.sum() / (counts**2).sum())


def _aucs(facts: Facts, sample: pa.Table, out: Measures) -> None:
    chosen = np.argsort(sample["rank"].to_numpy(), kind="stable")[:AUC_ROWS]
    sample = sample.take(pa.array(chosen))
    fold = (sample["user"].to_numpy() >> np.uint64(17)).astype(np.int64) & 1
    outcomes = {f"ctx:{EXTRA}{c}" for c in facts.spec.impressions.outcomes}
    extras = [n for n in sample.column_names if n.startswith(f"ctx:{EXTRA}")]
    columns = [(c, "feature") for c in feature_columns(sample) if c != "surface"]
    columns += [("surface", "free")] + [(c, "outcome" if c in outcomes else "unused") for c in extras]
    for name, label in facts.spec.labels.items():
        y = sample[f"label:{name}"].to_numpy()
        known = y >= 0
        if label.given:
            known &= sample[f"label:{label.given}"].to_numpy() == 1
        positives = int((y[known] == 1).sum())
        if min(positives, int(known.sum()) - positives) < MIN_CLASS:
            continue
        truth = y[known].astype(np.float64)
        for column, use in columns:
            values = numbers_if_so(_array(sample, column).filter(pa.array(known)))
            found = column_auc(values, truth, fold[known])
            out.aucs.append(SingleAuc(name, pretty(column), found, use))


def feature_columns(sample: pa.Table) -> list[str]:
    """Columns of the joined sample that a model would read (and the surface)."""
    own = [n for n in sample.column_names if n.startswith(("ctx:", "users:", "ads:"))]
    return ["surface", *(n for n in own if not n.startswith(f"ctx:{EXTRA}"))]


def pretty(column: str) -> str:
    """Name of a sample's column as a person knows it."""
    if column.startswith(f"ctx:{EXTRA}"):
        return column.removeprefix(f"ctx:{EXTRA}")
    return column.replace("ctx:", "context.").replace("users:", "users.").replace("ads:", "ads.")


def _array(table: pa.Table, name: str) -> pa.Array:
    column = table[name].combine_chunks()
    return column if isinstance(column, pa.Array) else pa.concat_arrays(column.chunks)


def _medians(facts: Facts, out: Measures) -> None:
    for key, role in facts.roles.items():
        if role.sample is None:
            continue
        rows = role.sample
        if "random" in rows.column_names:
            rows = rows.filter(rows["random"])
        for name in rows.column_names:
            kind = rows.schema.field(name).type
            if is_number(kind) and name not in ("rank", "key", "user", "ad") and not name.startswith("key:"):
                values = rows[name].drop_null().to_numpy().astype(np.float64)
                found = quantiles(values, (0.5,))
                if found:
                    out.medians[key, name] = found[0]


def _histories(facts: Facts, out: Measures) -> None:
    samples = [role.keys["user"] for key, role in facts.roles.items() if key.startswith("events") and role.keys]
    if not samples:
        return
    merged = KeySample.merge(samples)
    if not len(merged.rows):
        return
    at = (0.5, 0.9, 0.99, 1.0)
    found = quantiles(merged.rows.astype(np.float64), at)
    out.histories = {"events": merged.num_rows, "users": merged.num_keys}
    out.histories |= dict(zip(("median", "p90", "p99", "longest"), found, strict=True))
    edges = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 2**62]
    counts, _ = np.histogram(merged.rows, bins=np.asarray(edges, np.float64))
    scale = merged.num_keys / len(merged.rows)
    cells = [(a, b, round(int(n) * scale)) for a, b, n in zip(edges, edges[1:], counts, strict=False)]
    while len(cells) > 1 and not cells[-1][2]:
        cells.pop()
    out.history_counts = cells
