"""How often values occur, per window and summed over windows: what vocabularies are fitted on and grown by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gem.data.encoding import transform
from gem.data.fitting import Moments
from gem.data.shard_plan import ShardPlan
from gem.data.spec import DatasetSpec
from gem.data.timelines import numpy_of
from gem.data.vocabulary import as_text, merge_counts

if TYPE_CHECKING:
    from gem.data.collect import Chosen

TRAINING = -1  # the one "day" of everything up to the last training day
COUNTED = pa.schema([("day", pa.int32()), ("group", pa.string()), ("value", pa.string()), ("count", pa.int64())])


def count_window(
    spec: DatasetSpec,
    plan: ShardPlan,
    shown: tuple[pa.Table, Chosen] | None,
    lines: tuple[pa.Table, Chosen] | None,
    keys: pa.Array,
) -> tuple[pa.Table, dict[str, list[float]]]:
    """Counts of new impressions and events (columns of COUNTED), and moments of numeric context on training days.

    Groups: surface, user, ad_shown, ad_event and ctx:<feature>. Later days stay apart: they are counted when they
    become training days.
    """
    parts = [COUNTED.empty_table()]
    if lines is not None:
        events, chosen = lines
        days, rows = _training_or_day(chosen, plan)
        parts += _counted(events["ad"], rows, days, "ad_event")
    if shown is None:
        return pa.concat_tables(parts), {}
    table, chosen = shown
    days, rows = _training_or_day(chosen, plan)
    parts += _counted(table["ad"], rows, days, "ad_shown")
    parts += _counted(table["surface"], rows, days, "surface")
    for f in spec.context.features:
        if f.kind in ("categorical", "multi"):
            parts += _counted(table[f"ctx:{f.name}"], rows, days, f"ctx:{f.name}")
    users = pa.DictionaryArray.from_arrays(pa.array(chosen.code[~chosen.repeat]), keys)
    parts += _counted(pa.chunked_array([users]), None, days, "user")
    train = table.take(pa.array(rows[days == TRAINING])) if _numeric(spec) else table.slice(0, 0)
    return pa.concat_tables(parts), _moments(spec, train)


def _training_or_day(chosen: Chosen, plan: ShardPlan) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """(TRAINING or the day, position) of every row that is counted."""
    part = chosen.part[~chosen.repeat]
    return np.where(part <= plan.last_train_day, np.int32(TRAINING), part), chosen.row[~chosen.repeat]


def _counted(
    column: pa.ChunkedArray, rows: npt.NDArray[np.int64] | None, days: npt.NDArray[np.int32], group: str
) -> list[pa.Table]:
    """Counts by day of the values at `rows` (all if None); nulls are left out, lists count each item."""
    array = column.combine_chunks()
    if pa.types.is_list(array.type):
        array = array if rows is None else array.take(pa.array(rows))
        rows, days = None, days[pc.list_parent_indices(array).to_numpy()]
        array = array.flatten()
    coded = array if pa.types.is_dictionary(array.type) else array.dictionary_encode()
    codes = pc.fill_null(coded.indices, len(coded.dictionary)).to_numpy(zero_copy_only=False)
    codes = codes if rows is None else codes[rows]
    out = []
    for day in np.unique(days).tolist():
        sums = np.bincount(codes[days == day], minlength=len(coded.dictionary) + 1)[:-1]
        met = np.flatnonzero(sums)
        values = as_text(coded.dictionary.take(pa.array(met)))
        labels = {"day": np.full(len(met), day, np.int32), "group": pa.array([group] * len(met), pa.string())}
        out.append(pa.table({**labels, "value": values, "count": sums[met]}).cast(COUNTED))
    return out


def add_counts(
    total: pa.Table | None, held: pa.Table | None, new: Sequence[pa.Table], last_train_day: int
) -> tuple[pa.Table, pa.Table]:
    """(total, held) of the store before and the new windows' counts -> (total, held) up to `last_train_day`."""
    tables = [t for t in (total, held, *new) if t is not None]
    table = pa.concat_tables([COUNTED.empty_table(), *tables])
    day = table["day"].to_numpy()
    train = pa.array(day <= last_train_day)
    return _summed(table.filter(train), TRAINING), _summed(table.filter(pc.invert(train)), None)


def groups_of(table: pa.Table) -> dict[str, pa.Table]:
    """Group -> table value, count."""
    names = pc.unique(table["group"]).to_pylist()
    return {g: merge_counts([table.filter(pc.equal(table["group"], g))]) for g in names}


def merged_moments(records: Sequence[Mapping[str, Any]]) -> dict[str, Moments]:
    """Moments of numeric context features over all shards."""
    out: dict[str, Moments] = {}
    for record in records:
        for name, (count, mean, m2) in record["moments"].items():
            out[name] = out.get(name, Moments()).merge(Moments(count, mean, m2))
    return out


def _summed(table: pa.Table, day: int | None) -> pa.Table:
    keys = ["group", "value"] if day is not None else ["day", "group", "value"]
    summed = table.group_by(keys).aggregate([("count", "sum")]).rename_columns([*keys, "count"])
    if day is not None:
        summed = summed.append_column("day", pa.array(np.full(summed.num_rows, day, np.int32)))
    return summed.select(COUNTED.names).sort_by([(n, "ascending") for n in COUNTED.names[:3]]).cast(COUNTED)


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
