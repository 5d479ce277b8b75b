"""Faults of whole files: another unit or type, nothing in them, missing, damaged (D6, D11, D12, D18)."""

from __future__ import annotations

import hashlib
import random
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gem.data.store import FeatureStore
from gem.errors import DataError, StoreError
from tests.unit.data.fault_log import DAY_MS, START_MS, build, data_files, good_shows, put, reads

SHOWS = good_shows()


def day_folder(raw, day, rows):
    """One day's partition; `rows` is a list or a table."""
    folder = raw / f"day=2024-03-{4 + day:02d}"
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(rows), folder / "shows.parquet")
    return folder / "shows.parquet"


def of_day(day, rows=SHOWS):
    return [r for r in rows if (r["t"] - START_MS) // DAY_MS == day]


def partitioned(raw, days=range(4)):
    put(raw)
    for day in days:
        day_folder(raw, day, of_day(day))
    return raw


@pytest.fixture
def before(tmp_path):
    """Raw days 0 to 2 and the store that was built of them."""
    raw = partitioned(tmp_path / "raw", range(3))
    build(raw, tmp_path / "before")
    return raw


def refused(tmp_path, raw, match):
    """The window is refused with that message, leaves no store, and the store before is as it was, byte for byte."""
    old = FeatureStore.open(tmp_path / "before").hash
    with pytest.raises(DataError, match=match):
        build(raw, tmp_path / "refused", parent=tmp_path / "before")
    assert not (tmp_path / "refused" / "manifest.json").exists()
    assert FeatureStore.open(tmp_path / "before").hash == old


@pytest.mark.parametrize(("factor", "fits"), [((1, 1000), "seconds"), ((1000, 1), "microseconds")])
def test_d6_ms_vs_s(before, tmp_path, factor, fits):
    day_folder(before, 3, [r | {"t": r["t"] * factor[0] // factor[1]} for r in of_day(3)])
    refused(tmp_path, before, rf"day=2024-03-07/shows.parquet.*`ms`.*fit {fits}.*no row was read")


def test_d6_a_day_of_another_day(before, tmp_path):
    day_folder(before, 3, [r | {"t": r["t"] + 90 * DAY_MS} for r in of_day(3)])
    refused(tmp_path, before, r"8 of 8 times are not near the partition's day 2024-03-07")


def test_d11_empty_partition(before, tmp_path):
    """A day without rows is one; a file of 0 bytes and a day that is not there are errors."""
    empty = pa.Table.from_pylist(SHOWS).slice(0, 0)
    path = day_folder(before, 3, empty)
    day_folder(before, 4, [r | {"t": r["t"] + DAY_MS, "show": 100 + r["show"]} for r in of_day(3)])
    store = build(before, tmp_path / "next", parent=tmp_path / "before")[1]
    assert "2024-03-07" not in store.days and store.days[-1] == "2024-03-08"
    assert store.manifest["missing_days"] == ["2024-03-07"]
    path.write_bytes(b"")
    refused(tmp_path, before, r"day=2024-03-07/shows.parquet: the file is empty \(0 bytes\)")
    shutil.rmtree(path.parent)
    refused(tmp_path, before, r"no partition for 2024-03-07, between .*allow_missing_days=true")
    allowed = build(before, tmp_path / "gap", parent=tmp_path / "before", allow_missing_days=True)[1]
    assert reads(allowed) == reads(store)


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("a", lambda v: str(v)),
        ("a", lambda v: float(v)),
        ("y", lambda v: float(v)),
        ("tab", lambda v: None),
        ("u", None),
    ],
)
def test_d12_schema_change(before, tmp_path, column, values):
    """A day with another type, no type, or without the column is refused; a day with one more column is not."""
    rows = [{c: v for c, v in r.items() if c != column or values} for r in of_day(3)]
    changed = [r | {column: values(r[column])} for r in rows] if values else rows
    day_folder(before, 3, changed)
    refused(tmp_path, before, rf'day=2024-03-07/shows.parquet: column "{column}".*had: ')
    day_folder(before, 3, [r | {"new": 1} for r in of_day(3)])
    more = build(before, tmp_path / "more", parent=tmp_path / "before")[1]
    day_folder(before, 3, of_day(3))
    assert data_files(more) == data_files(build(before, tmp_path / "same", parent=tmp_path / "before")[1])


def test_d18_corrupt_parquet(before, tmp_path):
    """64 flipped bytes among the values: the list of hashes finds them and names the file. So does a cut file."""
    big = [r | {"show": 1000 * i + r["show"], "t": r["t"] + i} for i in range(1, 200) for r in of_day(3)]
    path = day_folder(before, 3, big)
    pq.write_table(pq.read_table(path), path, compression="none", use_dictionary=False)
    names = [p for p in sorted(before.rglob("*.parquet"))]
    lines = [f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.relative_to(before)}" for p in names]
    (before / "SHA256SUMS").write_text("\n".join(lines) + "\n")
    good = path.read_bytes()
    build(before, tmp_path / "fine", parent=tmp_path / "before")
    damaged = bytearray(good)
    for at in random.Random(3).sample(range(100, len(good) // 2), 64):
        damaged[at] ^= 0x55
    path.write_bytes(bytes(damaged))
    assert pq.read_table(path, columns=["show"])["show"].to_pylist() != [r["show"] for r in big]  # read without a word
    refused(tmp_path, before, r"day=2024-03-07/shows.parquet: the file is not the one in SHA256SUMS")
    path.write_bytes(good[: len(good) // 2])
    refused(tmp_path, before, r"day=2024-03-07/shows.parquet: truncated or no Parquet file")


def test_d18_a_damaged_store_is_not_built_upon(before, tmp_path):
    victim = next((tmp_path / "before" / "timelines").rglob("*.parquet"))
    damaged = bytearray(victim.read_bytes())
    for at in range(64):
        damaged[4 + at] ^= 0x55
    victim.write_bytes(bytes(damaged))
    with pytest.raises(StoreError, match=rf"{victim.relative_to(tmp_path / 'before')} is corrupted"):
        FeatureStore.open(tmp_path / "before")


def test_files_of_one_row_of_no_row_and_a_header_only(tmp_path):
    """How rows are cut into files changes nothing, nor do files without rows."""
    whole = build(put(tmp_path / "whole", shows=SHOWS), tmp_path / "one")[1]
    raw = put(tmp_path / "raw", **{f"shows__{i}": [r] for i, r in enumerate(SHOWS)})
    put(
        raw,
        shows__none=pa.Table.from_pylist(SHOWS).slice(0, 0),
        posts=pa.table({c: [1] for c in ["u", "a", "t", "id"]})[:0],
    )
    (raw / "shows-header.csv").write_text(",".join(SHOWS[0]) + "\n")
    cut = build(raw, tmp_path / "many")[1]
    assert data_files(cut) == data_files(whole)


def test_a_log_without_any_row_says_so(tmp_path):
    raw = put(tmp_path / "raw", shows=pa.Table.from_pylist(SHOWS).slice(0, 0))
    with pytest.raises(DataError, match="no impressions are left"):
        build(raw, tmp_path / "store")
