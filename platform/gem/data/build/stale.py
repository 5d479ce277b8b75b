"""Values that were unknown when the days before were encoded, and are known now."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc

from gem.data.build.shard_plan import RebuildNeeded
from gem.data.encoding import SURFACE, Encoder
from gem.data.spec import DatasetSpec
from gem.data.vocabulary import Vocabulary

MAX_STALE_SHARE = 0.01  # of the impressions before


def check_stale(spec: DatasetSpec, encoders: tuple[Encoder, Encoder], before: pa.Table) -> None:
    """Raise RebuildNeeded if too many impressions of the store hold "unknown" where the grown encoder knows the value.

    encoders: of the store, and grown. before: counts of values in the store (`counting.VALUES`). Partitions keep what
    they were encoded with; below the limit that is borne, as it is for values that are too rare.
    """
    total = _count(before, SURFACE, None)
    for group, values in _new_values(spec, *encoders):
        affected = _count(before, group, values)
        if affected > MAX_STALE_SHARE * max(1, total):
            name = group.removeprefix("ctx:")
            raise RebuildNeeded(
                f'"{name}" has values that were unknown in the days before and are known now: {affected} of {total} '
                "impressions there would keep the unknown one"
            )


def _new_values(spec: DatasetSpec, old: Encoder, new: Encoder) -> Iterator[tuple[str, pa.Array]]:
    known = len(old.surface_values)
    yield SURFACE, pa.array(new.surface_values[known:], pa.string())
    for feature in spec.context.features:
        table = feature.table or feature.name
        before, after = old.vocabularies.get(table), new.vocabularies.get(table)
        if isinstance(before, Vocabulary) and isinstance(after, Vocabulary):
            yield f"ctx:{feature.name}", after.values[len(before.values) :]


def _count(table: pa.Table, group: str, values: pa.Array | None) -> int:
    rows = table.filter(pc.equal(table["group"], group))
    if values is not None:
        rows = rows.filter(pc.is_in(rows["value"], value_set=values.cast(pa.string())))
    return int(pc.sum(rows["count"]).as_py() or 0)
