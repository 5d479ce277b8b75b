"""Bytes on disk per impression: the store's timelines and cuts against histories copied into the rows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gem.data.store import FeatureStore
from tests.benchmarks.data_equal import listed
from tests.benchmarks.data_world import World

STORAGE_WORLD = World(events=3_000_000, users=2_350, impressions=1_000_000, ads=100_000, longest=7_000)
SAMPLED_DAYS = 5  # spread evenly over the log, so that their histories are as long as the whole log's
ROW_GROUP = 4096
HISTORY = ("ad", "kind", "flags", "surface", "dwell", "time_ms")
WRITER_ONLY = ("cut", "dup", "order")  # what copied rows have no use for
WRITER_PREFIXES = ("key_", "own_")


@dataclass
class _Events:
    """All timelines, flat: user u owns rows [offsets[u], offsets[u + 1])."""

    offsets: npt.NDArray[np.int64]
    columns: dict[str, npt.NDArray[Any]]


def measure_storage(store_path: Path, folder: Path) -> dict[str, Any]:
    """Bytes per impression of the store and of copied rows, in time order (as logs come) and by user; writes `folder`.

    Copied rows are written for SAMPLED_DAYS whole days and scaled by the mean history of all days over theirs.
    """
    store = FeatureStore.open(store_path, verify=False)
    files = store.manifest["files"]
    kept = {k: sum(files[f]["bytes"] for f in files if f.startswith(f"{k}/")) for k in ("timelines", "impressions")}
    events = _events(store)
    shown = listed(store, "impressions")
    cuts = np.concatenate([pq.read_table(f, columns=["cut"])["cut"].to_numpy() for d in shown.values() for f in d])
    days = sorted(shown)
    sampled = [days[int((i + 0.5) * len(days) / SAMPLED_DAYS)] for i in range(SAMPLED_DAYS)]
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {"time": 0, "user": 0}
    rows = history = 0
    for day in sampled:
        table = pa.concat_tables([pq.read_table(f) for f in shown[day]], promote_options="permissive")
        rows, history = rows + table.num_rows, history + pc.sum(table["cut"]).as_py()
        for order, keys in (("time", ["time_ms"]), ("user", ["user", "time_ms"])):
            path = folder / f"{day}-by-{order}.parquet"
            write_copied(table.sort_by([(k, "ascending") for k in keys]), events, path)
            sizes[order] += path.stat().st_size
            path.unlink()
    scale = float(cuts.mean()) / history  # bytes of the sample -> bytes per impression of the whole log
    ours = sum(kept.values()) / len(cuts)
    return {
        "impressions": len(cuts),
        "mean_history": round(float(cuts.mean()), 1),
        "sampled_days": sampled,
        "sampled_mean_history": round(history / rows, 1),
        "store_bytes_per_impression": round(ours, 2),
        **{f"store_{k}_bytes": size for k, size in kept.items()},
        **{f"copied_by_{k}_bytes_per_impression": round(size * scale, 2) for k, size in sizes.items()},
        **{f"ratio_by_{k}": size * scale / ours for k, size in sizes.items()},
    }


def write_copied(impressions: pa.Table, events: _Events, path: Path) -> None:
    """Write impressions in their order with one list column per event column, each holding the row's whole history."""
    own = [
        n for n in impressions.column_names if n not in WRITER_ONLY and not n.startswith(WRITER_PREFIXES)
    ]  # fmt: skip
    start = events.offsets[impressions["user"].to_numpy()]
    cut = impressions["cut"].to_numpy().astype(np.int64)
    writer = None
    for at in range(0, impressions.num_rows, ROW_GROUP):
        first, size = start[at : at + ROW_GROUP], cut[at : at + ROW_GROUP]
        ends = np.cumsum(size)
        rows = np.arange(int(ends[-1])) + np.repeat(first - (ends - size), size)
        offsets = pa.array(np.concatenate([[0], ends]), pa.int32())
        table = impressions.select(own).slice(at, ROW_GROUP)
        for name in HISTORY:
            values = pa.array(events.columns[name][rows])
            table = table.append_column(f"history_{name}", pa.ListArray.from_arrays(offsets, values))
        writer = writer or pq.ParquetWriter(path, table.schema, compression="zstd")
        writer.write_table(table, row_group_size=ROW_GROUP)
    if writer:
        writer.close()


def _events(store: FeatureStore) -> _Events:
    days = listed(store, "timelines")
    ordered = sorted(days, key=lambda d: (d != "before", d))
    table = pa.concat_tables([pq.read_table(f, columns=["user", *HISTORY]) for d in ordered for f in days[d]])
    user = table["user"].to_numpy()
    order = np.argsort(user, kind="stable")  # files are in day order: the events of a user stay oldest first
    counts = np.bincount(user, minlength=len(store.users))
    offsets = np.concatenate([[0], np.cumsum(counts)])
    return _Events(offsets, {n: table[n].to_numpy()[order] for n in HISTORY})
