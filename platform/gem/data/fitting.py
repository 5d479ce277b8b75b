"""Fit an `Encoder` on training days: vocabularies, numeric moments, surfaces and their groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gem.data.canonical import flag_names, kind_names
from gem.data.encoding import HOUR, ID_FIELD, SURFACE, WEEKDAY, Encoder, Feature, transform
from gem.data.schema import NUM_RESERVED, Field, Schema, Side, Task
from gem.data.spec import DatasetSpec, FeatureSpec, SurfaceSpec
from gem.data.vocabulary import COUNTS, Vocabulary, count_values, fit_vocabulary, merge_counts
from gem.errors import SpecError

I64 = npt.NDArray[np.int64]
_NO_LIMIT = 2**40
_MAX_SURFACES = 10_000  # codes are int16
# One or two Thursdays teach a model what those Thursdays were like, not what Thursdays are like: on KuaiRand (10 days)
# the weekday moved the raw calibration of the next day from 0.97 to 0.94.
MIN_WEEKDAY_DAYS = 21
RESERVED_SURFACES = ("<pad>", "<null>", "<unknown>")


@dataclass(frozen=True)
class Moments:
    """Mergeable count, mean and sum of squared deviations (Chan, Golub and LeVeque 1979)."""

    count: float = 0.0
    mean: float = 0.0
    m2: float = 0.0

    @classmethod
    def of(cls, values: npt.NDArray[np.float64], weights: I64 | None = None) -> Moments:
        """Moments of the finite values, each weighted."""
        weight = np.ones(len(values)) if weights is None else weights.astype(np.float64)
        ok = np.isfinite(values) & (weight > 0)
        x, w = values[ok], weight[ok]
        if not len(x):
            return cls()
        total = float(w.sum())
        mean = float((w * x).sum() / total)
        return cls(total, mean, float((w * (x - mean) ** 2).sum()))

    def merge(self, other: Moments) -> Moments:
        """Moments of both samples together."""
        total = self.count + other.count
        if not total:
            return self
        delta = other.mean - self.mean
        mean = self.mean + delta * other.count / total
        return Moments(total, mean, self.m2 + other.m2 + delta**2 * self.count * other.count / total)

    @property
    def std(self) -> float:
        """Population standard deviation; 1 where nothing varies."""
        variance = self.m2 / self.count if self.count else 0.0
        return float(variance**0.5) if variance > 1e-12 * max(1.0, self.mean**2) else 1.0


@dataclass(frozen=True)
class EntityCounts:
    """Raw entities of one side and how often training met each row.

    table:   key and raw feature columns, [B]
    seen:    [B] training impressions, on the ad side plus training-period events: vocabularies
    shown:   [B] training impressions: numeric moments
    """

    table: pa.Table
    seen: I64
    shown: I64


@dataclass(frozen=True)
class TrainCounts:
    """All that fitting reads; every number comes from training days."""

    user: EntityCounts
    ad: EntityCounts
    surfaces: pa.Table  # value, count
    context: Mapping[str, pa.Table] = field(default_factory=dict)  # categorical or multi feature -> value, count
    moments: Mapping[str, Moments] = field(default_factory=dict)  # numeric context feature
    num_days: int = MIN_WEEKDAY_DAYS


def fit_encoder(spec: DatasetSpec, counts: TrainCounts) -> Encoder:
    """Fit vocabularies, moments and surfaces, and derive the schema. Raises SpecError on names used twice."""
    sides = (("user", spec.users, counts.user), ("ad", spec.ads, counts.ad))
    value_counts: dict[str, list[pa.Table]] = {}
    limits: dict[str, list[tuple[int, int]]] = {}
    features: dict[str, tuple[Feature, ...]] = {}
    for name, entity, seen in sides:
        ids = count_values(seen.table["key"], seen.seen)
        _add(value_counts, limits, ID_FIELD[name], ids, (entity.min_count, _NO_LIMIT))
        for f in entity.features:
            if f.kind in ("categorical", "multi"):
                _add(value_counts, limits, _table(f), count_values(seen.table[f.name], seen.seen), _limit(f))
        features[name] = tuple(_fit_feature(f, _entity_moments(f, seen)) for f in entity.features)
    for f in spec.context.features:
        if f.kind in ("categorical", "multi"):
            _add(value_counts, limits, _table(f), counts.context.get(f.name, COUNTS.empty_table()), _limit(f))
    features["context"] = tuple(_fit_feature(f, counts.moments.get(f.name, Moments())) for f in spec.context.features)
    vocabularies = {
        table: fit_vocabulary(merge_counts(parts), *_widest(limits[table])) for table, parts in value_counts.items()
    }
    surfaces = fit_vocabulary(counts.surfaces, 1, _MAX_SURFACES).to_list()
    schema = _schema(spec, features, vocabularies, counts.surfaces, surfaces)
    weekday = counts.num_days >= MIN_WEEKDAY_DAYS
    return Encoder(schema, spec.impressions.zone, features, vocabularies, tuple(surfaces), weekday)


def group_surfaces(
    spec: SurfaceSpec, values: Sequence[str], rows: Mapping[str, int]
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[int, ...]]:
    """Readable names by code, group names, and the group of every code.

    A surface with at least `min_rows` training impressions is a group; the others together are `rest`. Reserved codes
    go to `rest`, or to the largest group where there is no rest.
    """
    names = [spec.names.get(v, v) for v in values]
    total: dict[str, int] = {}
    for value, name in zip(values, names, strict=True):
        total[name] = total.get(name, 0) + rows[value]
    by_size = sorted(total, key=lambda n: (-total[n], n))
    groups = [n for n in by_size if total[n] >= spec.min_rows]
    if len(groups) < len(by_size) or not groups:
        groups = groups if spec.rest in groups else [*groups, spec.rest]
    fallback = groups.index(spec.rest) if spec.rest in groups else 0
    of_name = {n: i for i, n in enumerate(groups)}
    group_of = [fallback] * NUM_RESERVED + [of_name.get(n, fallback) for n in names]
    return (*RESERVED_SURFACES, *names), tuple(groups), tuple(group_of)


def _schema(
    spec: DatasetSpec,
    features: Mapping[str, tuple[Feature, ...]],
    vocabularies: Mapping[str, Vocabulary],
    surface_counts: pa.Table,
    surfaces: Sequence[str],
) -> Schema:
    rows = dict(zip(surface_counts["value"].to_pylist(), surface_counts["count"].to_pylist(), strict=True))
    names, groups, group_of = group_surfaces(spec.surfaces, surfaces, rows)
    fixed = (
        Field(SURFACE, SURFACE, NUM_RESERVED + len(surfaces)),
        Field(HOUR, HOUR, NUM_RESERVED + 24),
        Field(WEEKDAY, WEEKDAY, NUM_RESERVED + 7),
    )
    sides = {
        name: _side(features[name], vocabularies, (Field(i, i, vocabularies[i].rows),)) for name, i in ID_FIELD.items()
    }
    sides["context"] = _side(features["context"], vocabularies, fixed)
    _check_unique(sides, set(vocabularies))
    return Schema(
        user=sides["user"],
        ad=sides["ad"],
        context=sides["context"],
        kinds=kind_names(spec),
        flags=flag_names(spec),
        surfaces=names,
        surface_groups=groups,
        group_of_surface=group_of,
        tasks=tuple(Task(name, label.given) for name, label in spec.labels.items()),
    )


def _side(features: Sequence[Feature], vocabularies: Mapping[str, Vocabulary], fixed: tuple[Field, ...]) -> Side:
    fields = tuple(
        Field(f.name, f.table, vocabularies[f.table].rows, f.kind == "multi")
        for f in features
        if f.kind in ("categorical", "multi")
    )
    return Side(
        fields=fixed + fields,
        numeric=tuple(f.name for f in features if f.kind == "numeric"),
        vectors=tuple((f.name, f.width) for f in features if f.kind == "embedding"),
    )


def _check_unique(sides: Mapping[str, Side], tables: set[str]) -> None:
    owner: dict[str, str] = {}
    for name, side in sides.items():
        for column in [f.name for f in side.fields] + list(side.numeric) + [n for n, _ in side.vectors]:
            if column in owner:
                raise SpecError(f'feature "{column}" is on the {owner[column]} and the {name} side; rename one of them')
            owner[column] = name
    taken = tables & {SURFACE, HOUR, WEEKDAY}
    if taken:
        raise SpecError(f"embedding tables {sorted(taken)} are made by the platform; give the feature another table")


def _fit_feature(f: FeatureSpec, moments: Moments) -> Feature:
    if f.kind == "numeric":
        return Feature(f.name, f.kind, transform=f.transform, mean=moments.mean, std=moments.std)
    if f.kind == "embedding":
        return Feature(f.name, f.kind, width=f.width or 0)
    return Feature(f.name, f.kind, table=_table(f))


def _entity_moments(f: FeatureSpec, seen: EntityCounts) -> Moments:
    if f.kind != "numeric":
        return Moments()
    values = pc.fill_null(seen.table[f.name].combine_chunks().cast(pa.float64()), float("nan"))
    return Moments.of(transform(f.transform, values.to_numpy(zero_copy_only=False)), seen.shown)


def _add(
    counts: dict[str, list[pa.Table]],
    limits: dict[str, list[tuple[int, int]]],
    table: str,
    part: pa.Table,
    limit: tuple[int, int],
) -> None:
    counts.setdefault(table, []).append(part)
    limits.setdefault(table, []).append(limit)


def _widest(limits: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """A shared table keeps what any of its fields would keep."""
    return min(low for low, _ in limits), max(high for _, high in limits)


def _table(f: FeatureSpec) -> str:
    return f.table or f.name


def _limit(f: FeatureSpec) -> tuple[int, int]:
    return f.min_count, f.max_rows
