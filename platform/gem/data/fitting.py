"""Fit an `Encoder` on training days, or let a fitted one grow: vocabularies, numeric moments, surfaces, groups.

A value has one row for ever: growth puts new values behind the old ones, so that a model trained on an earlier window
reads the rows it knows and needs new ones only at the end of its tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gem.data.encoding import HOUR, ID_FIELD, SURFACE, WEEKDAY, AnyVocabulary, Encoder, Feature, transform
from gem.data.hashed_vocabulary import HashedVocabulary, collision_rate
from gem.data.ingest.canonical import flag_names, kind_names
from gem.data.schema import NUM_RESERVED, Field, Schema, Side, Task
from gem.data.spec import DatasetSpec, FeatureSpec
from gem.data.surfaces import group_surfaces
from gem.data.vocabulary import COUNTS, Vocabulary, count_values, fit_vocabulary, merge_counts
from gem.errors import SpecError, StoreError

I64 = npt.NDArray[np.int64]
_NO_LIMIT = 2**40
_MAX_SURFACES = 10_000  # codes are int16
# One or two Thursdays teach a model what those Thursdays were like, not what Thursdays are like: on KuaiRand (10 days)
# the weekday moved the raw calibration of the next day from 0.97 to 0.94.
MIN_WEEKDAY_DAYS = 21


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
    unknown: [B] whose id has no row of the vocabulary yet; None: nobody's is known to have one
    """

    table: pa.Table
    seen: I64
    shown: I64
    unknown: npt.NDArray[np.bool_] | None = None


@dataclass(frozen=True)
class TrainCounts:
    """All that fitting reads; every number comes from training days."""

    user: EntityCounts
    ad: EntityCounts
    surfaces: pa.Table  # value, count
    context: Mapping[str, pa.Table] = field(default_factory=dict)  # categorical or multi feature -> value, count
    moments: Mapping[str, Moments] = field(default_factory=dict)  # numeric context feature
    num_days: int = MIN_WEEKDAY_DAYS


@dataclass(frozen=True)
class _Use:
    """One field that reads an embedding table, and what the spec says of its values."""

    side: str
    field: str
    table: str
    min_count: int
    max_rows: int
    hash_rows: int | None
    hashes: int

    @property
    def limits(self) -> str:
        return f"hash_rows: {self.hash_rows}, hashes: {self.hashes}" if self.hash_rows else "no hash_rows"


def fit_encoder(spec: DatasetSpec, counts: TrainCounts) -> Encoder:
    """Fit vocabularies, moments and surfaces, and derive the schema.

    Raises SpecError on names used twice and on fields that share a table but do not agree on `hash_rows` and `hashes`.
    """
    features = _fit_features(spec, counts)
    vocabularies: dict[str, AnyVocabulary] = {}
    for table, uses in _uses(spec).items():
        vocabularies[table] = _open_vocabulary(table, uses) or _grown(None, uses, counts)
    surfaces = fit_vocabulary(counts.surfaces, 1, _MAX_SURFACES).to_list()
    schema = _schema(spec, features, vocabularies, _groups(spec, counts, surfaces))
    weekday = counts.num_days >= MIN_WEEKDAY_DAYS
    return Encoder(schema, spec.impressions.zone, features, vocabularies, tuple(surfaces), weekday)


def grow_encoder(spec: DatasetSpec, old: Encoder, counts: TrainCounts) -> Encoder:
    """The encoder of a later window: what `old` knows keeps its rows, values that reached `min_count` get new ones.

    `counts` are totals over all training days so far (moments are not read: `old`'s stay, as does the weekday flag).
    Tables never exceed `max_rows`; surfaces get codes behind the old ones and are grouped anew, with the old
    groups first (see `group_surfaces`). Returns `old` itself if nothing changes. Raises StoreError if `old` was fitted
    with other features, tables or open vocabularies than the spec's.
    """
    _check_same(spec, old)
    vocabularies = dict(old.vocabularies)
    for table, uses in _uses(spec).items():
        known = old.vocabularies[table]
        if isinstance(known, Vocabulary):
            vocabularies[table] = _grown(known, uses, counts)
    known_surfaces = Vocabulary(old.surface_values)
    surfaces = fit_vocabulary(counts.surfaces, 1, _MAX_SURFACES, known_surfaces)
    groups = _groups(spec, counts, surfaces.to_list(), old.schema.surface_groups)
    schema = _schema(spec, old.features, vocabularies, groups)
    added = surfaces is not known_surfaces or any(v is not old.vocabularies[t] for t, v in vocabularies.items())
    if not added and schema == old.schema:
        return old
    return replace(
        old,
        schema=schema,
        vocabularies=vocabularies,
        surface_values=tuple(surfaces.to_list()),
        vocabulary_version=old.vocabulary_version + int(added),
    )


def table_figures(spec: DatasetSpec, encoder: Encoder, counts: TrainCounts) -> dict[str, dict[str, float]]:
    """Per embedding table: `rows`, `values` (with a row of their own, or hashed), `collision_rate`.

    The collision rate is the share of distinct training values of an open vocabulary whose rows another value has too;
    0 for a vocabulary. Values of different fields of one table are different values.
    """
    uses = _uses(spec)
    out: dict[str, dict[str, float]] = {}
    for table, rows in sorted(encoder.schema.tables().items()):
        out[table] = {"rows": rows, "values": rows - NUM_RESERVED, "collision_rate": 0.0}
        vocabulary = encoder.vocabularies.get(table)
        if isinstance(vocabulary, HashedVocabulary):
            met = [(u.field, _field_counts(u, counts)) for u in uses[table]]
            parts = [vocabulary.lookup(_met(c).combine_chunks(), name) for name, c in met]
            taken = np.concatenate(parts)
            out[table] |= {"values": len(taken), "collision_rate": round(collision_rate(taken), 6)}
    return out


def _met(counts: pa.Table) -> pa.ChunkedArray:
    return counts.filter(pc.greater(counts["count"], 0))["value"]


def _uses(spec: DatasetSpec) -> dict[str, list[_Use]]:
    """Embedding table -> the fields that read it: ids first, then features in the order of the spec."""
    out: dict[str, list[_Use]] = {}
    for use in _all_uses(spec):
        out.setdefault(use.table, []).append(use)
    return out


def _all_uses(spec: DatasetSpec) -> Iterator[_Use]:
    for side, entity in (("user", spec.users), ("ad", spec.ads)):
        name = ID_FIELD[side]
        yield _Use(side, name, name, entity.min_count, _NO_LIMIT, entity.hash_rows, entity.hashes)
    for side, features in (
        ("user", spec.users.features),
        ("ad", spec.ads.features),
        ("context", spec.context.features),
    ):
        for f in features:
            if f.kind in ("categorical", "multi"):
                yield _Use(side, f.name, _table(f), f.min_count, f.max_rows, f.hash_rows, f.hashes)


def _open_vocabulary(table: str, uses: Sequence[_Use]) -> HashedVocabulary | None:
    first = uses[0]
    for other in uses[1:]:
        if other.limits != first.limits:
            raise SpecError(
                f'embedding table "{table}": {first.field} has {first.limits}, {other.field} has {other.limits}; '
                "fields that share a table must agree. Give one of them a `table` of its own."
            )
    return HashedVocabulary(first.hash_rows, first.hashes) if first.hash_rows else None


def _grown(old: Vocabulary | None, uses: Sequence[_Use], counts: TrainCounts) -> Vocabulary:
    """A shared table keeps what any of its fields would keep."""
    parts = [_field_counts(u, counts) for u in uses]
    total = parts[0] if len(parts) == 1 else merge_counts(parts)
    return fit_vocabulary(total, min(u.min_count for u in uses), max(u.max_rows for u in uses), old)


def _field_counts(use: _Use, counts: TrainCounts) -> pa.Table:
    """How often training met each value of a field: columns value, count."""
    if use.side == "context":
        return counts.context.get(use.field, COUNTS.empty_table())
    seen = counts.user if use.side == "user" else counts.ad
    if use.field not in ID_FIELD.values():
        return count_values(seen.table[use.field], seen.seen)
    if seen.unknown is None:
        return count_values(seen.table["key"], seen.seen)
    mask = seen.unknown & (seen.seen > 0)
    return count_values(seen.table["key"].filter(pa.array(mask)), seen.seen[mask])


def _fit_features(spec: DatasetSpec, counts: TrainCounts) -> dict[str, tuple[Feature, ...]]:
    users = tuple(_fit_feature(f, _entity_moments(f, counts.user)) for f in spec.users.features)
    ads = tuple(_fit_feature(f, _entity_moments(f, counts.ad)) for f in spec.ads.features)
    context = tuple(_fit_feature(f, counts.moments.get(f.name, Moments())) for f in spec.context.features)
    return {"user": users, "ad": ads, "context": context}


def _check_same(spec: DatasetSpec, old: Encoder) -> None:
    """Growth keeps features, tables and open vocabularies; another spec needs another fit."""
    sides = {"user": spec.users.features, "ad": spec.ads.features, "context": spec.context.features}
    for side, features in sides.items():
        want = [_shape(_fit_feature(f, Moments())) for f in features]
        have = [_shape(f) for f in old.features[side]]
        if want != have:
            differ = sorted({n for n, *_ in set(want) ^ set(have)}) or "their order"
            raise StoreError(f"{side} features differ from the store's ({differ}); preprocess the whole log again")
    for table, uses in _uses(spec).items():
        known, want_open = old.vocabularies.get(table), _open_vocabulary(table, uses)
        if known is None or isinstance(known, HashedVocabulary) != bool(want_open) or (want_open not in (None, known)):
            raise StoreError(f'embedding table "{table}" is another than the store\'s; preprocess the whole log again')


def _shape(f: Feature) -> tuple[str, str, str, str, int]:
    return f.name, f.kind, f.table, f.transform, f.width


def _groups(
    spec: DatasetSpec, counts: TrainCounts, surfaces: Sequence[str], old: Sequence[str] = ()
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[int, ...]]:
    rows = dict(zip(counts.surfaces["value"].to_pylist(), counts.surfaces["count"].to_pylist(), strict=True))
    return group_surfaces(spec.surfaces, surfaces, rows, old)


def _schema(
    spec: DatasetSpec,
    features: Mapping[str, tuple[Feature, ...]],
    vocabularies: Mapping[str, AnyVocabulary],
    surfaces: tuple[tuple[str, ...], tuple[str, ...], tuple[int, ...]],
) -> Schema:
    names, groups, group_of = surfaces
    fixed = (
        Field(SURFACE, SURFACE, len(names)),
        Field(HOUR, HOUR, NUM_RESERVED + 24),
        Field(WEEKDAY, WEEKDAY, NUM_RESERVED + 7),
    )
    sides = {name: _side(features[name], vocabularies, (_field(i, i, vocabularies),)) for name, i in ID_FIELD.items()}
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


def _field(name: str, table: str, vocabularies: Mapping[str, AnyVocabulary], multi: bool = False) -> Field:
    vocabulary = vocabularies[table]
    if isinstance(vocabulary, HashedVocabulary):
        return Field(name, table, vocabulary.rows, True, 0 if multi else vocabulary.hashes)
    return Field(name, table, vocabulary.rows, multi)


def _side(features: Sequence[Feature], vocabularies: Mapping[str, AnyVocabulary], fixed: tuple[Field, ...]) -> Side:
    fields = tuple(
        _field(f.name, f.table, vocabularies, f.kind == "multi") for f in features if f.kind in ("categorical", "multi")
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


def _table(f: FeatureSpec) -> str:
    return f.table or f.name
