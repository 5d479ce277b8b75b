"""Is a dataset spec consistent with itself and with the headers of the files it names? No row is read."""

from __future__ import annotations

import codecs
import datetime as dt
import re
import zoneinfo
from collections.abc import Iterable, Iterator, Mapping, Sequence

from gem.data.ingest.contract import check_columns
from gem.data.ingest.globs import check_patterns
from gem.data.ingest.raw import RawFile
from gem.data.spec import DatasetSpec, EntitySpec, EventSource, FeatureSpec, LabelSpec, TableSpec, TimeSpec
from gem.errors import SpecError, suggest

MAX_FLAGS = 16  # bits of an event's uint16
MAX_KINDS = 255  # uint8, 0 is padding
_ENCODINGS = ("utf-8", "latin-1", "cp1252", "gb18030", "shift_jis")
RESERVED_NAMES = ("user_id", "ad_id", "surface", "hour", "weekday")  # fields every schema has anyway


def flag_names(spec: DatasetSpec) -> tuple[str, ...]:
    """All timeline flags in bit order: first appearance over the event sources (`flags`, `always`, `action_flags`)."""
    return tuple(
        dict.fromkeys(
            name for source in spec.events for name in (*source.flags, *source.always, *source.action_flags.values())
        )
    )


def kind_names(spec: DatasetSpec) -> tuple[str, ...]:
    """Distinct event kinds in order of first appearance; kind code k is kind_names[k - 1]."""
    return tuple(dict.fromkeys(source.kind for source in spec.events))


def check_spec(spec: DatasetSpec, files: Mapping[str, Sequence[RawFile]]) -> None:
    """Check the spec against itself and against the header of every file of `resolve_files`.

    Raises SpecError that names the spec's field, the nearest allowed name and what to do; DataError for a file that
    differs from the other files of its table.
    """
    _check_tables(spec)
    _check_labels(spec)
    _check_events(spec)
    _check_features(spec)
    _check_outcomes(spec)
    _check_rest(spec)
    check_columns(spec, files)


def _check_tables(spec: DatasetSpec) -> None:
    uses = [("impressions.table", spec.impressions.table)]
    uses += [(f"{side}.table", entity.table) for side, entity in _entities(spec) if entity.table]
    uses += [(f"labels.{name}.table", label.table) for name, label in spec.labels.items() if label.table]
    for where, table in uses:
        if table in spec.tables and spec.tables[table].optional:
            raise SpecError(f'{where}: table "{table}" is optional; only tables of event sources may be. Remove it.')
    uses += [(f"events.{i}.table", source.table) for i, source in enumerate(spec.events)]
    for where, table in uses:
        _known(where, "table", table, spec.tables)
    for name, described in spec.tables.items():
        _check_files(f"tables.{name}", described)
        _check_made(f"tables.{name}", described)
    for side, entity in _entities(spec):
        if bool(entity.table) != bool(entity.key):
            raise SpecError(f"{side}: give both `table` and `key`, or neither (then they are those of the log).")
        if entity.features and not entity.table:
            raise SpecError(f"{side}.features: features need a `table` and its `key` to be read from. Add both.")


def _check_files(where: str, table: TableSpec) -> None:
    check_patterns(where, table.files)
    defaults = TableSpec(files=table.files)
    for name in ("separator", "columns", "encoding"):
        if table.format == "parquet" and getattr(table, name) != getattr(defaults, name):
            raise SpecError(f"{where}.{name}: only for CSV, and `format: parquet` was given. Remove one of them.")
    if any(c in table.separator for c in '\r\n"') or (len(table.separator) == 1 and not table.separator.isascii()):
        raise SpecError(
            f"{where}.separator: {table.separator!r} cannot separate columns; allowed is one ASCII character such as "
            "',' or '\\t', or several characters such as '::', without quotes and line ends."
        )
    twice = sorted({c for c in table.columns if table.columns.count(c) > 1})
    if twice:
        raise SpecError(f"{where}.columns: {twice} named more than once. Rename them.")
    try:
        codecs.lookup(table.encoding)
    except LookupError:
        raise SpecError(
            f'{where}.encoding: nobody knows "{table.encoding}".{suggest(table.encoding, _ENCODINGS)} Common ones are '
            f"{', '.join(_ENCODINGS)}."
        ) from None


def _check_made(where: str, table: TableSpec) -> None:
    """Columns that the table makes: each name once, and row_time without contradictions."""
    made = [(f"constants.{name}", name) for name in table.constants]
    if table.path_columns is not None:
        try:
            groups = list(re.compile(table.path_columns).groupindex)
        except re.error as e:
            raise SpecError(f"{where}.path_columns: {table.path_columns!r} is no regular expression: {e}.") from None
        if not groups:
            raise SpecError(f"{where}.path_columns: no named group; write (?P<column>…) around what becomes a column.")
        made += [("path_columns", name) for name in groups]
    made += [("row_number", table.row_number)] if table.row_number else []
    made += [("row_time.column", table.row_time.column)] if table.row_time else []
    seen = dict.fromkeys(table.columns, "columns")
    for field, name in made:
        if name in seen:
            raise SpecError(
                f'{where}.{field}: the column "{name}" is already made by {seen[name]}. Rename one of them.'
            )
        seen[name] = field
    time = table.row_time
    if time is None:
        return
    _check_day(f"{where}.row_time.start", time.start)
    if time.days and not time.day:
        raise SpecError(f"{where}.row_time.days: needs `day`, the column whose values it names.")
    if time.day and time.day in (time.column, table.row_number):
        raise SpecError(f'{where}.row_time.day: "{time.day}" is made by this table from the row. Name another column.')


def _entities(spec: DatasetSpec) -> tuple[tuple[str, EntitySpec], ...]:
    return (("users", spec.users), ("ads", spec.ads))


def _check_day(where: str, day: str) -> None:
    try:
        good = dt.date.fromisoformat(day).isoformat() == day
    except ValueError:
        good = False
    if not good:
        raise SpecError(f'{where}: "{day}" is not a day; write it as YYYY-MM-DD, in quotes.')


def _check_labels(spec: DatasetSpec) -> None:
    if not spec.labels:
        raise SpecError("labels: none given; name at least one outcome to predict.")
    for i, (name, label) in enumerate(spec.labels.items()):
        where = f"labels.{name}"
        if bool(label.column) == bool(label.table):
            raise SpecError(f"{where}: give either `column` (of the impression table) or `table` (a log of its own).")
        if label.table and not (label.key and label.time and label.window_hours and label.window_hours > 0):
            raise SpecError(f"{where}: a label with a `table` needs `key`, `time` and a `window_hours` above 0.")
        if label.at_least is not None and not label.column:
            raise SpecError(f"{where}.at_least: only for a label with a `column` of numbers. Remove it.")
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
        _check_event(where, spec, source)
    flags = flag_names(spec)
    if len(flags) > MAX_FLAGS:
        raise SpecError(f"events: {len(flags)} different flags, at most {MAX_FLAGS} allowed: {list(flags)}. Drop some.")
    if len(kind_names(spec)) > MAX_KINDS:
        raise SpecError(f"events: {len(kind_names(spec))} kinds, at most {MAX_KINDS} allowed. Merge some.")


def _check_event(where: str, spec: DatasetSpec, source: EventSource) -> None:
    if bool(source.ad) == bool(source.item):
        raise SpecError(f"{where}: give either `ad` or, for events without an ad of their own, `item`.")
    for field in ("item", "ingested", "id") if source.list_before else ():
        if getattr(source, field):
            raise SpecError(f"{where}.{field}: not for lists without times (`list_before`). Remove it.")
    if source.id and source.table == spec.impressions.table:
        raise SpecError(
            f"{where}.id: events over the impression table are one per impression; `impressions.id` and "
            "`impressions.duplicate_key` say which rows are one. Remove it."
        )
    features = {f.name: f for f in spec.ads.features}
    for name in source.item:
        _known(f"{where}.item", "ad feature", name, features)
        if features[name].kind == "embedding":
            raise SpecError(f"{where}.item.{name}: an embedding cannot describe an item; allowed are the other kinds.")
    if bool(source.action) != bool(source.action_flags):
        raise SpecError(f"{where}: give both `action` (a column) and `action_flags` (action: flag), or neither.")
    for flag in source.flags:
        own = {w.at_least for n, w in spec.labels.items() if w.column == source.flags[flag]}
        if source.table == spec.impressions.table and len(own) > 1 and flag not in spec.labels:
            raise SpecError(
                f"{where}.flags.{flag}: labels read this column with different `at_least`; give the flag the name of "
                "the label that it means."
            )


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
        if feature.since is not None:
            _check_day(f"{where}.since", feature.since)
        _check_hashed(where, feature)
    _check_shared(spec)


def _check_hashed(where: str, feature: FeatureSpec) -> None:
    if feature.hash_rows is None:
        return
    if feature.kind not in ("categorical", "multi"):
        raise SpecError(
            f"{where}.hash_rows: only for `kind: categorical` and `multi`, got `{feature.kind}`. Remove it."
        )
    if feature.min_count > 1:
        raise SpecError(
            f"{where}: `hash_rows` and `min_count` contradict each other: hashed values have no vocabulary, rare ones "
            "get rows like all others. Remove one of them."
        )


def _check_shared(spec: DatasetSpec) -> None:
    """Features of one embedding table are either all in its vocabulary or all hashed to the same rows."""
    first: dict[str, tuple[str, FeatureSpec]] = {}
    for side, feature in _features(spec):
        if feature.kind not in ("categorical", "multi"):
            continue
        where = f"{side}.features.{feature.name}"
        other, shared = first.setdefault(feature.table or feature.name, (where, feature))
        for name in ("hash_rows", "hashes") if feature.hash_rows or shared.hash_rows else ():
            if getattr(feature, name) != getattr(shared, name):
                raise SpecError(
                    f"{where}.{name}: {getattr(feature, name)}, but {other} reads the same table "
                    f'"{feature.table or feature.name}" with {getattr(shared, name)}. Give both the same, or separate '
                    "tables."
                )


def _outcomes(spec: DatasetSpec) -> dict[str, str]:
    """Columns of the impression table that are known only afterwards -> what makes them so."""
    imp = spec.impressions
    out = dict.fromkeys(imp.outcomes, "listed in impressions.outcomes")
    out |= {c: f"the true probability of label {name}" for name, c in imp.true_probability.items()}
    for source in spec.events:
        if source.table == imp.table:
            out |= {c: f"the flag {name} of event {source.kind}" for name, c in source.flags.items()}
            out |= {source.dwell.column: f"the dwell time of event {source.kind}"} if source.dwell else {}
            out |= {source.action: f"the action of event {source.kind}"} if source.action else {}
            out |= {source.ingested.column: f"the arrival of event {source.kind}"} if source.ingested else {}
    return out | {lab.column: f"the label {name}" for name, lab in spec.labels.items() if lab.column}


def _check_outcomes(spec: DatasetSpec) -> None:
    outcomes = _outcomes(spec)
    sides: list[tuple[str, str | None, Iterable[FeatureSpec]]] = [
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
    made = {n: t.row_time.column for n, t in spec.tables.items() if t.row_time}
    for where, table, when in _times(spec):
        if made.get(table) == when.column and when.unit != "ms":
            raise SpecError(
                f"{where}.unit: the times that row_time makes are in ms, got `{when.unit}`. Set `unit: ms`."
            )


def _times(spec: DatasetSpec) -> Iterator[tuple[str, str, TimeSpec]]:
    yield "impressions.time", spec.impressions.table, spec.impressions.time
    for name, label in spec.labels.items():
        if label.table and label.time:
            yield f"labels.{name}.time", label.table, label.time
    for i, source in enumerate(spec.events):
        for field in ("time", "list_before", "ingested"):
            when = getattr(source, field)
            if when is not None:
                yield f"events.{i}.{field}", source.table, when


def _known(where: str, what: str, name: str, allowed: Iterable[str]) -> None:
    names = list(allowed)
    if name not in names:
        raise SpecError(f'{where}: no {what} "{name}".{suggest(name, names)} Allowed: {", ".join(names)}.')
