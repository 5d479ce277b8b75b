"""The same timelines and cuts by hand: one process, Polars, for the one log of data_world. It imports nothing of ours.

`python -m tests.benchmarks.data_polars RAW OUT` prints its seconds as JSON.

All columns are read once and dealt to days by the time an event is known. Within a day, rows are sorted by one int64
of (user, ms of the day), in which cuts are searched; events of earlier days are a running count per user. Nothing here
depends on the order of rows or files. An event before the first impression day would get a day folder of its own.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import polars as pl

DAY_MS = 86_400_000
KNOWN_AFTER_MS = 60_000
SURFACES = ("feed", "stories", "search")  # codes 1, 2, 3; 0 is none
MS_BITS = 28  # a day's ms need 27; of a query, which may stand at the next midnight, 28
MAX_DWELL = 15
TIMELINE = ("user", "known_ms", "time_ms", "ad", "kind", "flags", "surface", "dwell")
SHOWN = ("impression_id", "user", "ad", "time_ms", "cut", "surface", "device", "slot", "label_click")


def build(raw: Path, out: Path) -> dict[str, int]:
    """Write `users.parquet` (key by code), `timelines/day=…` and `impressions/day=…` below `out`; returns rows."""
    shown = _impressions(raw)
    events = _events(raw)
    keys = pl.read_parquet(raw / "users.parquet", columns=["user_id"])["user_id"]
    users = pl.DataFrame({"key": pl.concat([keys, events["key"], shown["key"]]).unique().sort()})
    out.mkdir(parents=True, exist_ok=True)
    users.write_parquet(out / "users.parquet", compression="zstd")
    users = users.with_row_index("user")
    organic, by_day = _by_day(events), _by_day(shown)
    del events
    own = _by_day(_as_events(shown))
    days = sorted({*organic, *own, *by_day})
    known = np.zeros(users.height, np.int64)
    rows = {"events": 0, "impressions": 0}

    def timeline(day: int) -> pl.DataFrame:
        return _timeline([d[day] for d in (own, organic) if day in d], users, day)

    with ThreadPoolExecutor(2) as pool:
        writes: list[Future[None]] = []
        for day, found in zip(days, pool.map(timeline, days), strict=True):
            if day in by_day:
                cut = _cut(by_day[day].join(users, on="key", how="left"), found, known, day)
                writes.append(pool.submit(_write, out / "impressions", day, cut.select(SHOWN)))
                rows["impressions"] += cut.height
            known += np.bincount(found["user"].to_numpy(), minlength=len(known))
            writes.append(pool.submit(_write, out / "timelines", day, found.select(TIMELINE)))
            rows["events"] += found.height
        for write in writes:
            write.result()
    return rows


def _events(raw: Path) -> pl.DataFrame:
    flags = pl.lit(0, pl.UInt16)
    for bit, action in ((2, "like"), (4, "cart"), (8, "buy")):
        flags = pl.when(pl.col("action") == action).then(pl.lit(bit, pl.UInt16)).otherwise(flags)
    dwell = pl.lit(1, pl.UInt8)  # 1 below a second, then one more per doubling
    for exponent in range(MAX_DWELL - 1):
        dwell = dwell + (pl.col("dwell_ms") >= 1000 * 2**exponent).cast(pl.UInt8)
    frame = pl.scan_parquet(raw / "events" / "**" / "*.parquet", hive_partitioning=False).select(
        key="user_id",
        known_ms="time_ms",
        time_ms="time_ms",
        ad="item_id",
        kind=pl.lit(2, pl.UInt8),
        flags=flags,
        surface=pl.lit(0, pl.Int16),
        dwell=dwell,
        day=_day("time_ms"),
    )
    return frame.filter(pl.col("key").is_not_null()).collect()


def _impressions(raw: Path) -> pl.DataFrame:
    """Distinct impressions: of those with one id, the one with a click, then the earliest."""
    codes = {name: i + 1 for i, name in enumerate(SURFACES)}
    frame = (
        pl.scan_parquet(raw / "impressions" / "**" / "*.parquet", hive_partitioning=False)
        .filter(pl.col("user_id").is_not_null())
        .select(
            "impression_id",
            "time_ms",
            "device",
            "slot",
            key="user_id",
            ad="ad_id",
            surface=pl.col("surface").replace_strict(codes, return_dtype=pl.Int16),
            label_click="clicked",
            day=_day("time_ms"),
        )
        .collect()
    )
    repeated = frame["impression_id"].is_duplicated()
    some = frame.filter(repeated).sort("label_click", "time_ms", descending=[True, False])
    some = some.unique("impression_id", keep="first", maintain_order=True)
    return pl.concat([frame.filter(~repeated), some])


def _as_events(shown: pl.DataFrame) -> pl.DataFrame:
    known_ms = pl.col("time_ms") + KNOWN_AFTER_MS
    return shown.select(
        "key",
        "time_ms",
        "ad",
        "surface",
        known_ms=known_ms,
        kind=pl.lit(1, pl.UInt8),
        flags=pl.col("label_click").cast(pl.UInt16),
        dwell=pl.lit(0, pl.UInt8),
        day=(known_ms // DAY_MS).cast(pl.Int32),
    )


def _day(column: str) -> pl.Expr:
    return (pl.col(column) // DAY_MS).cast(pl.Int32)


def _by_day(frame: pl.DataFrame) -> dict[int, pl.DataFrame]:
    parts = frame.partition_by("day", as_dict=True, include_key=False, maintain_order=True)
    return {int(str(name[0])): part for name, part in parts.items()}


def _timeline(parts: list[pl.DataFrame], users: pl.DataFrame, day: int) -> pl.DataFrame:
    """Distinct events of a day in (user, known_ms) order. Impressions come first: of one known time they are older."""
    frame = pl.concat([p.select(parts[0].columns) for p in parts]).join(
        users, on="key", how="left", maintain_order="left"
    )
    packed = (frame["user"].cast(pl.Int64) * 2**MS_BITS + (frame["known_ms"] - day * DAY_MS)).alias("packed")
    frame = frame.drop("key").with_columns(packed).sort("packed", maintain_order=True)
    same = (frame["packed"] == frame["packed"].shift(1)).fill_null(False)
    close = same | same.shift(-1, fill_value=False)
    ties = frame.with_row_index("row").filter(close)  # only rows of one user and one ms can be duplicates
    first = ties.unique([c for c in ties.columns if c != "row"], keep="first")
    again = ties.join(first.select("row"), on="row", how="anti")["row"].to_numpy()
    keep = np.ones(frame.height, np.bool_)
    keep[again] = False
    return frame.filter(pl.Series(keep))


def _cut(shown: pl.DataFrame, events: pl.DataFrame, known: npt.NDArray[np.int64], day: int) -> pl.DataFrame:
    """Impressions with their cut: events of earlier days plus those of the day before them, the instant itself not."""
    start = shown["user"].cast(pl.Int64) * 2**MS_BITS
    before = events["packed"].search_sorted(start + (shown["time_ms"] - day * DAY_MS), side="left").to_numpy()
    first = events["packed"].search_sorted(start, side="left").to_numpy()
    cut = known[shown["user"].to_numpy()] + before.astype(np.int64) - first
    return shown.with_columns(cut=pl.Series(cut.astype(np.int32)))


def _write(folder: Path, day: int, frame: pl.DataFrame) -> None:
    name = str(np.datetime64(day, "D"))
    path = folder / f"day={name}" / "part-0.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    frame.write_parquet(path, compression="zstd", compression_level=1)


def main() -> None:
    """RAW OUT from the command line."""
    start = time.perf_counter()
    rows = build(Path(sys.argv[1]), Path(sys.argv[2]))
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = {"seconds": time.perf_counter() - start, "cpu_s": used.ru_utime + used.ru_stime}
    print(json.dumps({**seconds, "peak_gb": used.ru_maxrss / 2**20, **rows}))


if __name__ == "__main__":
    main()
