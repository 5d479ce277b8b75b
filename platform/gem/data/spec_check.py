"""Is a dataset spec consistent with itself and with the headers of the files it names? No row is read."""

from __future__ import annotations

import zoneinfo
from collections.abc import Iterable, Iterator
from pathlib import Path

from gem.data.raw import header
from gem.data.spec import DatasetSpec, EntitySpec, EventSource, FeatureSpec, LabelSpec
from gem.errors import SpecError, suggest

MAX_FLAGS = 16  # bits of an event's uint16
MAX_KINDS = 255  # uint8, 0 is padding
RESERVED_NAMES = ("user_id", "ad_id", "surface", "hour", "weekday")  # fields every schema has anyway


def flag_names(spec: DatasetSpec) -> tuple[str, ...]:
    """All timeline flags in bit order: first appearance over the event sources (`flags`, then `always`)."""
    return tuple(dict.fromkeys(name for source in spec.events for name in (*source.flags, *source.always)))


def kind_names(spec: DatasetSpec) -> tuple[str, ...]:
    """Distinct event kinds in order of first appearance; kind code k is kind_names[k - 1]."""
    return tuple(dict.fromkeys(source.kind for source in spec.events))


def check_spec(spec: DatasetSpec, files: dict[str, list[Path]]) -> None:
    """Check the spec against itself and against the header of every file of `resolve_files`.

    Raises SpecError that names the spec's field, the nearest allowed name and what to do.
    """
    _check_tables(spec)
    _check_labels(spec)
    _check_events(spec)
    _check_features(spec)
    _check_outcomes(spec)
    _check_rest(spec)
    _check_columns(spec, files)


def _check_tables(spec: DatasetSpec) -> None:
    uses = [("impressions.table", spec.impressions.table), ("users.table", spec.users.table)]
    uses += [("ads.table", spec.ads.table)]
    uses += [(f"labels.{name}.table", label.table) for name, label in spec.labels.items() if label.table]
    for where, table in uses:
        if table in spec.tables and spec.tables[table].optional:
            raise SpecError(f'{where}: table "{table}" is optional; only tables of event sources may be. Remove it.')
    uses += [(f"events.{i}.table", source.table) for i, source in enumerate(spec.events)]
    for where, table in uses:
        _known(where, "table", table, spec.tables)


def _check_labels(spec: DatasetSpec) -> None:
    if not spec.labels:
        raise SpecError("labels: none given; name at least one outcome to predict.")
    for i, (name, label) in enumerate(spec.labels.items()):
        where = f"labels.{name}"
        if bool(label.column) == bool(label.table):
            raise SpecError(f"{where}: give either `column` (of the impression table) or `table` (a log of its own).")
        if label.table and not (label.key and label.time and label.window_hours and label.window_hours > 0):
            raise SpecError(f"{where}: a label with a `table` needs `key`, `time` and a `window_hours` above 0.")
        if label.given is not None:
            _check_given(where, name, label, i, list(spec.labels))
    for name in spec.impressions.true_probability:
        _known("impressions.true_probability", "label", name, spec.labels)


def _check_given(where: str, name: str, label: LabelSpec, position: int, names: list[str]) -> None:
    if position == 0:
        raise SpecError(f"{where}.given: the first label has no condition, got {label.given!r}. Put that label first.")
    _known(f"{where}.given", "label", str(label.given), [n for n in names if n != name])
    if names.index(str(label.given)) > position:
        raise SpecError(f'{where}.given: label "{label.given}" must stand before "{name}" in `labels`.')


def _check_events(spec: DatasetSpec) -> None:
    for i, source in enumerate(spec.events):
        where = f"events.{i}"
        if not source.kind.strip():
            raise SpecError(f"{where}.kind: empty; name what kind of event this is, such as `impression`.")
        if bool(source.time) == bool(source.list_before):
            raise SpecError(f"{where}: give either `time` or, for lists without times, `list_before`.")
    flags = flag_names(spec)
    if len(flags) > MAX_FLAGS:
        raise SpecError(f"events: {len(flags)} different flags, at most {MAX_FLAGS} allowed: {list(flags)}. Drop some.")
    if len(kind_names(spec)) > MAX_KINDS:
        raise SpecError(f"events: {len(kind_names(spec))} kinds, at most {MAX_KINDS} allowed. Merge some.")


def _features(spec: DatasetSpec) -> Iterator[tuple[str, FeatureSpec]]:
    for side, features in (
        ("users", spec.users.features),
        ("ads", spec.ads.features),
        ("context", spec.context.features),
    ):
        yield from ((side, feature) for feature in features)


def _check_features(spec: DatasetSpec) -> None:
    seen: dict[str, str] = dict.fromkeys(RESERVED_NAMES, "the platform itself (it comes for free)")
    for side, feature in _features(spec):
        where = f"{side}.features.{feature.name}"
        if feature.name in seen:
            raise SpecError(
                f"{where}: the name is already used by {seen[feature.name]}; feature names are unique over users, ads "
                f"and context. Rename it and give `column: {feature.column or feature.name}`."
            )
        seen[feature.name] = side
        if (feature.kind == "embedding") != bool(feature.width and feature.width > 0):
            raise SpecError(f"{where}.width: needed (above 0) for `kind: embedding` and for no other kind.")
        if feature.kind == "embedding" and side == "context":
            raise SpecError(f"{where}: an embedding belongs to a user or an ad. Move it there.")
        if feature.transform != "none" and feature.kind != "numeric":
            raise SpecError(f"{where}.transform: only for `kind: numeric`, got `kind: {feature.kind}`. Remove it.")


def _outcomes(spec: DatasetSpec) -> dict[str, str]:
    """Columns of the impression table that are known only afterwards -> what makes them so."""
    imp = spec.impressions
    out = dict.fromkeys(imp.outcomes, "listed in impressions.outcomes")
    out |= {c: f"the true probability of label {name}" for name, c in imp.true_probability.items()}
    for source in spec.events:
        if source.table == imp.table:
            out |= {c: f"the flag {name} of event {source.kind}" for name, c in source.flags.items()}
            out |= {source.dwell.column: f"the dwell time of event {source.kind}"} if source.dwell else {}
    return out | {lab.column: f"the label {name}" for name, lab in spec.labels.items() if lab.column}


def _check_outcomes(spec: DatasetSpec) -> None:
    outcomes = _outcomes(spec)
    sides: list[tuple[str, str, Iterable[FeatureSpec]]] = [
        ("users", spec.users.table, spec.users.features),
        ("ads", spec.ads.table, spec.ads.features),
        ("context", spec.impressions.table, spec.context.features),
    ]
    logs = {label.table: name for name, label in spec.labels.items() if label.table}
    for side, table, features in sides:
        for feature in features:
            column = feature.column or feature.name
            why = outcomes.get(column) if table == spec.impressions.table else None
            if table in logs:
                why = f"in the log of label {logs[table]}"
            if why:
                raise SpecError(
                    f'{side}.features.{feature.name}: column "{column}" is an outcome ({why}), known only after the '
                    "impression; a model that reads it sees the answer. Remove the feature; past outcomes may be read "
                    "as flags of an event source."
                )


def _check_rest(spec: DatasetSpec) -> None:
    zone = spec.impressions.zone
    zones = zoneinfo.available_timezones()
    if zone not in zones:
        raise SpecError(f'impressions.zone: unknown time zone "{zone}".{suggest(zone, zones)} Use an IANA name.')
    for surface, label in spec.surfaces.objective.items():
        _known(f"surfaces.objective.{surface}", "label", label, spec.labels)


def _check_columns(spec: DatasetSpec, files: dict[str, list[Path]]) -> None:
    used: dict[str, list[tuple[str, str]]] = {}
    for where, table, column in _column_uses(spec):
        used.setdefault(table, []).append((where, column))
    for table, uses in used.items():
        for path in files.get(table, []):
            names = header(spec.tables[table], path)
            twice = sorted({n for n in names if names.count(n) > 1} & {c for _, c in uses})
            if twice:
                raise SpecError(f"{path}: the header names {twice} more than once. Rename the columns.")
            for where, column in uses:
                if column not in names:
                    raise SpecError(
                        f'{where}: table "{table}" has no column "{column}".{suggest(column, names)} '
                        f"{path} has: {', '.join(names)}. Correct the spec."
                    )


def _column_uses(spec: DatasetSpec) -> Iterator[tuple[str, str, str]]:
    """(field of the spec, table, column) of every column the spec names."""
    imp = spec.impressions
    named = [("user", imp.user), ("ad", imp.ad), ("surface", imp.surface), ("time.column", imp.time.column)]
    named += [(where, column) for where, column in (("id", imp.id), ("day", imp.day)) if column]
    named += [("duplicate_key", c) for c in imp.duplicate_key] + [("outcomes", c) for c in imp.outcomes]
    named += [(f"true_probability.{n}", c) for n, c in imp.true_probability.items()]
    yield from ((f"impressions.{where}", imp.table, column) for where, column in named)
    for name, label in spec.labels.items():
        if label.column:
            yield f"labels.{name}.column", imp.table, label.column
        if label.table and label.key and label.time:
            yield f"labels.{name}.key", imp.table, label.key
            yield f"labels.{name}.key", label.table, label.key
            yield f"labels.{name}.time.column", label.table, label.time.column
    for i, source in enumerate(spec.events):
        yield from ((f"events.{i}.{where}", source.table, column) for where, column in _event_uses(source))
    yield from _entity_uses("users", spec.users)
    yield from _entity_uses("ads", spec.ads)
    for f in spec.context.features:
        yield f"context.features.{f.name}", imp.table, f.column or f.name


def _event_uses(source: EventSource) -> Iterator[tuple[str, str]]:
    yield from (("user", source.user), ("ad", source.ad))
    times = (("time", source.time), ("list_before", source.list_before), ("dwell", source.dwell))
    yield from ((f"{where}.column", when.column) for where, when in times if when)
    if source.surface:
        yield "surface", source.surface
    yield from ((f"flags.{name}", column) for name, column in source.flags.items())


def _entity_uses(side: str, entity: EntitySpec) -> Iterator[tuple[str, str, str]]:
    yield f"{side}.key", entity.table, entity.key
    yield from ((f"{side}.features.{f.name}", entity.table, f.column or f.name) for f in entity.features)


def _known(where: str, what: str, name: str, allowed: Iterable[str]) -> None:
    names = list(allowed)
    if name not in names:
        raise SpecError(f'{where}: no {what} "{name}".{suggest(name, names)} Allowed: {", ".join(names)}.')
