"""Whether the Polars program and the feature store hold the same timelines and cuts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa

from gem.data.store import FeatureStore
from tests.benchmarks.data_polars import SURFACES

EVENT = ("user", "known_ms", "time_ms", "ad", "kind", "flags", "surface", "dwell")
SHOWN = ("impression_id", "user", "ad", "time_ms", "cut", "surface", "label_click")


def differences(by_hand: Path, store_path: Path) -> list[str]:
    """What differs, day by day; [] if nothing does.

    Equal are: the days; per day the multiset of timeline rows (user and ad by their raw keys, both times, kind, flags,
    surface, dwell); the order of each user's rows by (known_ms, time_ms) in both; every impression with its cut.
    """
    store = FeatureStore.open(store_path, verify=False)
    users = {"hand": pl.read_parquet(by_hand / "users.parquet")["key"], "store": _keys(store.users.keys)}
    ads = {"hand": None, "store": _keys(store.ads.keys)}
    surfaces = np.asarray(store.encoder.surface_codes(pa.array([None, *SURFACES])), np.int16)
    out: list[str] = []
    for kind, columns in (("timelines", EVENT), ("impressions", SHOWN)):
        files = {"hand": _files(by_hand, kind), "store": listed(store, kind)}
        if sorted(files["hand"]) != sorted(files["store"]):
            out.append(f"{kind}: days {sorted(files['hand'])} by hand, {sorted(files['store'])} in the store")
            continue
        for day in sorted(files["hand"]):
            found = {}
            for side, mine in files.items():
                frame = pl.concat([pl.read_parquet(f, columns=list(columns)) for f in mine[day]]).select(columns)
                found[side] = _raw(frame, users[side], ads[side], surfaces if side == "hand" else None)
                if kind == "timelines" and not _in_order(found[side]):
                    out.append(f"timelines {day}: not in the order of known_ms and time_ms ({side})")
            if not found["hand"].sort(columns).equals(found["store"].sort(columns)):
                out.append(f"{kind} {day}: {_first_difference(found, columns)}")
    return out


def _keys(keys: pa.Array) -> pl.Series:
    found = pl.from_arrow(keys)
    assert isinstance(found, pl.Series)
    return found


def _files(root: Path, kind: str) -> dict[str, list[Path]]:
    return {p.name.removeprefix("day="): sorted(p.glob("*.parquet")) for p in sorted((root / kind).iterdir())}


def listed(store: FeatureStore, kind: str) -> dict[str, list[Path]]:
    """Day -> files with rows of a kind (timelines or impressions), by the manifest."""
    out: dict[str, list[Path]] = {}
    for relative in sorted(store.manifest["files"]):
        parts = relative.split("/")
        if parts[0] == kind and store.manifest["files"][relative]["rows"]:
            out.setdefault(parts[1].removeprefix("day="), []).append(store.path / relative)
    return out


def _raw(frame: pl.DataFrame, users: pl.Series, ads: pl.Series | None, surfaces: np.ndarray | None) -> pl.DataFrame:
    """Keys for indices, the store's surface codes, and one type for all numbers."""
    frame = frame.with_columns(user=users.gather(frame["user"]))
    if ads is not None:
        frame = frame.with_columns(ad=ads.gather(frame["ad"]))
    if surfaces is not None:
        frame = frame.with_columns(surface=pl.Series(surfaces[frame["surface"].to_numpy()]))
    return frame.cast(pl.Int64)


def _in_order(frame: pl.DataFrame) -> bool:
    """Whether the rows of every user of one day stand in (known_ms, time_ms) order."""
    frame = frame.with_row_index("row").sort("user", "row")
    same = frame["user"] == frame["user"].shift(1)
    step, inner = frame["known_ms"].diff(), frame["time_ms"].diff()
    return not (same & ((step < 0) | ((step == 0) & (inner < 0)))).any()


def _first_difference(found: Mapping[str, pl.DataFrame], columns: tuple[str, ...]) -> str:
    hand, store = found["hand"], found["store"]
    only = [a.join(b, on=columns, how="anti", nulls_equal=True) for a, b in ((hand, store), (store, hand))]
    first = [o.row(0, named=True) if o.height else None for o in only]
    return (
        f"{hand.height} rows by hand, {store.height} in the store; {only[0].height} only by hand (first {first[0]}), "
        f"{only[1].height} only in the store (first {first[1]})"
    )
