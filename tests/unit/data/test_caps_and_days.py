"""Rows the cap takes are counted alike in one build and by window; days that are not those of their times."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from gem.data.spec import parse_spec
from gem.errors import DataError
from tests.unit.data.fault_log import HOUR_MS, SPEC, START_MS, Rows, build, good_shows, put

LOGGED = parse_spec(
    SPEC | {"impressions": SPEC["impressions"] | {"day": "date"}},
)


def test_capped_rows_are_counted_alike_by_window(tmp_path: Path) -> None:
    shows = good_shows()
    many = [shows[0] | {"show": 500 + i, "t": START_MS + HOUR_MS + i * 1000} for i in range(9)]
    posts = [{"id": i, "u": 1, "a": 10, "t": START_MS + i * 60_000} for i in range(12)]
    raw = put(tmp_path / "raw", shows_a=[*shows, *many[::2]], posts_a=posts[::2])
    first = build(raw, tmp_path / "first", max_rows_per_user_day=4)[1].manifest["rows"]
    put(raw, shows_b=many[1::2], posts_b=[*posts[1::2], posts[0]])
    grown = build(raw, tmp_path / "grown", parent=tmp_path / "first", max_rows_per_user_day=4)[1].manifest
    whole = build(raw, tmp_path / "whole", max_rows_per_user_day=4)[1].manifest
    names = ("impressions", "events", "capped", "capped_events", "duplicate_events")
    assert {n: grown["rows"][n] for n in names} == {n: whole["rows"][n] for n in names}
    assert grown["rows"]["capped"] > first["capped"] > 0 and grown["rows"]["capped_events"] > first["capped_events"] > 0
    for n in names:
        assert sum(w["rows"][n] for w in grown["windows"]) == whole["rows"][n], n
    assert all("capped" not in entry for entry in grown["files"].values())


def logged() -> Rows:
    days = [(r["t"] - START_MS) // (24 * HOUR_MS) for r in good_shows()]
    return [r | {"date": 20240304 + d} for r, d in zip(good_shows(), days, strict=True)]


def test_a_day_far_from_its_time_goes_to_the_quarantine(tmp_path: Path) -> None:
    rows = logged()
    rows[0]["date"], rows[1]["date"], rows[9]["date"] = 20991231, None, rows[9]["date"] + 1  # the last: a day's edge
    record, store = build(put(tmp_path / "raw", shows=rows), tmp_path / "store", LOGGED)
    assert record["quarantine_reasons"] == {"shows": {"day_not_of_time": 1}}
    assert record["split"]["test_day"] == "2024-03-07" and record["rows"]["impressions"] == len(rows) - 1
    (path,) = (f for f in store.manifest["files"] if f.startswith("quarantine/"))
    (row,) = pq.read_table(tmp_path / "store" / path).to_pylist()
    assert json.loads(row["row"]) == rows[0] and row["reason"] == "day_not_of_time"


def test_a_file_whose_days_are_not_those_of_its_times_is_refused(tmp_path: Path) -> None:
    rows = [r | {"date": r["date"] + 10_000} for r in logged()]
    with pytest.raises(DataError, match=r'column "date": 32 of 32 rows .* in UTC.*2025-03-04 for 2024-03-04 06:00:00'):
        build(put(tmp_path / "raw", shows=rows), tmp_path / "store", LOGGED)
