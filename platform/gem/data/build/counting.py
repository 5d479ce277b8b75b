"""How often values occur, per window and summed over windows: what vocabularies are fitted on and grown by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gem.data.build.shard_plan import ShardPlan
from gem.data.build.timelines import codes_of, numpy_of, runs
from gem.data.encoding import transform
from gem.data.fitting import Moments
from gem.data.spec import DatasetSpec
from gem.data.vocabulary import as_text, merge_counts

if TYPE_CHECKING:
    from gem.data.build.collect import Chosen

TRAINING = -1  # the one "day" of everything up to the last training day
VALUES = pa.schema([("day", pa.int32()), ("group", pa.string()), ("value", pa.string()), ("count", pa.int64())])
ENTITIES = pa.schema([("day", pa.int32()), ("group", pa.int8()), ("index", pa.int32()), ("count", pa.int64())])
USER, AD_SHOWN, AD_EVENT = 0, 1, 2  # groups of ENTITIES: impressions of a user, of an ad, events with an ad


@dataclass(frozen=True)
class Counted:
    """values: columns of VALUES (groups surface and ctx:<feature>). entities: columns of ENTITIES, by the shard's own
    codes of users and ads. moments: of numeric context features on training days."""

    values: pa.Table
    entities: pa.Table
    moments: dict[str, list[float]]


def count_window(
    spec: DatasetSpec,
    plan: ShardPlan,
    shown: tuple[pa.Table, Chosen] | None,
    lines: tuple[pa.Table, Chosen],
    ads: pa.Array,
) -> Counted:
    """Counts of new impressions and events of one shard; `ads` are its distinct ads.

    Days after the last training day stay apart: they are counted when they become training days.
    """
    values, entities = [VALUES.empty_table()], [ENTITIES.empty_table()]
    events, chosen = lines
    days, rows = _training_or_day(chosen, plan)
    entities += _by_day(codes_of(events["ad"], ads)[rows], days, AD_EVENT)
    if shown is None:
        return Counted(pa.concat_tables(values), pa.concat_tables(entities), {})
    table, chosen = shown
    days, rows = _training_or_day(chosen, plan)
    entities += _by_day(codes_of(table["ad"], ads)[rows], days, AD_SHOWN)
    entities += _by_day(chosen.code[~chosen.repeat], days, USER)
    values += _counted(table["surface"], rows, days, "surface")
    for f in spec.context.features:
        if f.kind in ("categorical", "multi"):
            values += _counted(table[f"ctx:{f.name}"], rows, days, f"ctx:{f.name}")
    train = table.take(pa.array(rows[days == TRAINING])) if _numeric(spec) else table.slice(0, 0)
    return Counted(pa.concat_tables(values), pa.concat_tables(entities), _moments(spec, train))


def add_values(old: pa.Table | None, new: Sequence[pa.Table], last_train_day: int) -> pa.Table:
    """Counts of the store before and of a window's shards, summed; days up to `last_train_day` become TRAINING."""
    table = pa.concat_tables([VALUES.empty_table(), *([old] if old is not None else []), *new])
    days = table["day"].to_numpy()
    days = pa.array(np.where(days <= last_train_day, np.int32(TRAINING), days))
    keys = ["day", "group", "value"]
    summed = table.set_column(0, "day", days).group_by(keys).aggregate([("count", "sum")])
    return summed.rename_columns([*keys, "count"]).sort_by([(n, "ascending") for n in keys]).cast(VALUES)


def add_entities(old: pa.Table | None, new: Sequence[pa.Table], last_train_day: int) -> pa.Table:
    """The same for counts of entities, which all go by entity index here."""
    table = pa.concat_tables([ENTITIES.empty_table(), *([old] if old is not None else []), *new])
    day, group, index, count = (table[n].to_numpy() for n in ENTITIES.names)
    day = np.where(day <= last_train_day, np.int32(TRAINING), day)
    out = [ENTITIES.empty_table()]
    for number in np.unique(day).tolist():
        for kind in (USER, AD_SHOWN, AD_EVENT):
            mine = (day == number) & (group == kind)
            out += _entity_counts(index[mine], count[mine], number, kind)
    return pa.concat_tables(out).combine_chunks()


def entity_totals(entities: pa.Table, group: int, size: int) -> npt.NDArray[np.int64]:
    """Training counts of entities 1 … size of one group, [size]."""
    mine = (entities["day"].to_numpy() == TRAINING) & (entities["group"].to_numpy() == group)
    index, count = entities["index"].to_numpy()[mine], entities["count"].to_numpy()[mine]
    return np.bincount(index, weights=count, minlength=size + 1)[1:].astype(np.int64)


def value_groups(values: pa.Table) -> dict[str, pa.Table]:
    """Group -> table value, count, over training days."""
    train = values.filter(pc.equal(values["day"], TRAINING))
    names = pc.unique(train["group"]).to_pylist()
    return {g: merge_counts([train.filter(pc.equal(train["group"], g))]) for g in names}


def merged_moments(records: Sequence[Mapping[str, Any]]) -> dict[str, Moments]:
    """Moments of numeric context features over all shards."""
    out: dict[str, Moments] = {}
    for record in records:
        for name, (count, mean, m2) in record["moments"].items():
            out[name] = out.get(name, Moments()).merge(Moments(count, mean, m2))
    return out


def _runs(days: npt.NDArray[np.int32]) -> list[tuple[int, int, int]]:
    """(day, start, end) of runs of equal days."""
    starts, lengths = runs(days)
    return [(int(days[s]), s, s + n) for s, n in zip(starts.tolist(), lengths.tolist(), strict=True)]


def _by_day(codes: npt.NDArray[np.int32], days: npt.NDArray[np.int32], group: int) -> list[pa.Table]:
    out = []
    for day, start, end in _runs(days):
        out += _entity_counts(codes[start:end], None, day, group)
    return out


def _entity_counts(
    index: npt.NDArray[np.int32], count: npt.NDArray[np.int64] | None, day: int, group: int
) -> list[pa.Table]:
    if not len(index):
        return []
    sums = np.bincount(index, weights=count).astype(np.int64)
    met = np.flatnonzero(sums)
    size = len(met)
    columns = (np.full(size, day, np.int32), np.full(size, group, np.int8), met.astype(np.int32), sums[met])
    return [pa.table(dict(zip(ENTITIES.names, columns, strict=True)), schema=ENTITIES)]


def _training_or_day(chosen: Chosen, plan: ShardPlan) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """(TRAINING or the day, position) of every row that is counted."""
    part = chosen.part[~chosen.repeat]
    return np.where(part <= plan.last_train_day, np.int32(TRAINING), part), chosen.row[~chosen.repeat]


def _counted(
    column: pa.ChunkedArray, rows: npt.NDArray[np.int64] | None, days: npt.NDArray[np.int32], group: str
) -> list[pa.Table]:
    """Counts by day of the values at `rows`, in runs of equal days; nulls are left out, lists count each item."""
    array = column.combine_chunks()
    if pa.types.is_list(array.type):
        array = array.take(pa.array(rows))
        rows, days = None, days[pc.list_parent_indices(array).to_numpy()]
        array = array.flatten()
    coded = array if pa.types.is_dictionary(array.type) else array.dictionary_encode()
    codes = pc.fill_null(coded.indices, len(coded.dictionary)).to_numpy(zero_copy_only=False)
    codes = codes if rows is None else codes[rows]
    out = []
    for day, start, end in _runs(days):
        sums = np.bincount(codes[start:end], minlength=len(coded.dictionary) + 1)[:-1]
        met = np.flatnonzero(sums)
        values = as_text(coded.dictionary.take(pa.array(met)))
        labels = {"day": np.full(len(met), day, np.int32), "group": pa.array([group] * len(met), pa.string())}
        out.append(pa.table({**labels, "value": values, "count": sums[met]}).cast(VALUES))
    return out


def _numeric(spec: DatasetSpec) -> bool:
    return any(f.kind == "numeric" for f in spec.context.features)


def _moments(spec: DatasetSpec, train: pa.Table) -> dict[str, list[float]]:
    out: dict[str, list[float]] = {}
    for f in spec.context.features:
        if f.kind == "numeric":
            column = pc.fill_null(train[f"ctx:{f.name}"].cast(pa.float64()), float("nan"))
            m = Moments.of(transform(f.transform, numpy_of(column).astype(np.float64)))
            out[f.name] = [m.count, m.mean, m.m2]
    return out
