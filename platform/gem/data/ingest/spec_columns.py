"""Which columns of which table a dataset spec names, and where."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gem.data.spec import DatasetSpec, EntitySpec, EventSource, FeatureSpec


@dataclass(frozen=True)
class ColumnUse:
    """`where`: the field of the spec. `since`: files of earlier days may lack the column."""

    where: str
    table: str
    column: str
    since: str | None = None


def column_uses(spec: DatasetSpec) -> Iterator[ColumnUse]:
    """Every column the spec names."""
    imp = spec.impressions
    named = [("user", imp.user), ("ad", imp.ad), ("surface", imp.surface), ("time.column", imp.time.column)]
    named += [(where, column) for where, column in (("id", imp.id), ("day", imp.day)) if column]
    named += [("duplicate_key", c) for c in imp.duplicate_key] + [("outcomes", c) for c in imp.outcomes]
    named += [(f"true_probability.{n}", c) for n, c in imp.true_probability.items()]
    yield from (ColumnUse(f"impressions.{where}", imp.table, column) for where, column in named)
    for name, label in spec.labels.items():
        if label.column:
            yield ColumnUse(f"labels.{name}.column", imp.table, label.column)
        if label.table and label.key and label.time:
            yield ColumnUse(f"labels.{name}.key", imp.table, label.key)
            yield ColumnUse(f"labels.{name}.key", label.table, label.key)
            yield ColumnUse(f"labels.{name}.time.column", label.table, label.time.column)
    for i, source in enumerate(spec.events):
        yield from (ColumnUse(f"events.{i}.{where}", source.table, c) for where, c in _event_uses(source))
    yield from _entity_uses("users", spec.users)
    yield from _entity_uses("ads", spec.ads)
    yield from (_feature_use("context", imp.table, f) for f in spec.context.features)
    for name, table in spec.tables.items():
        if table.row_time and table.row_time.day:
            yield ColumnUse(f"tables.{name}.row_time.day", name, table.row_time.day)


def _event_uses(source: EventSource) -> Iterator[tuple[str, str]]:
    yield "user", source.user
    yield from ((f"item.{name}", column) for name, column in source.item.items())
    yield from ((where, c) for where, c in (("ad", source.ad), ("id", source.id), ("action", source.action)) if c)
    times = (
        ("time", source.time),
        ("list_before", source.list_before),
        ("dwell", source.dwell),
        ("ingested", source.ingested),
    )
    yield from ((f"{where}.column", when.column) for where, when in times if when)
    if source.surface:
        yield "surface", source.surface
    yield from ((f"flags.{name}", column) for name, column in source.flags.items())


def _entity_uses(side: str, entity: EntitySpec) -> Iterator[ColumnUse]:
    if entity.table and entity.key:
        yield ColumnUse(f"{side}.key", entity.table, entity.key)
        yield from (_feature_use(side, entity.table, f) for f in entity.features)


def _feature_use(side: str, table: str, feature: FeatureSpec) -> ColumnUse:
    return ColumnUse(f"{side}.features.{feature.name}", table, feature.column or feature.name, feature.since)
