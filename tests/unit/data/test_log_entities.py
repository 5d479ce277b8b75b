"""Users and ads described by the rows of a log: the earliest row counts, in one build and window by window."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from gem.data.build import store_write
from gem.data.spec import parse_spec
from tests.unit.data.fault_log import DAY_MS, SPEC, START_MS, Rows, build, good_shows, put

_TOWN = [{"name": "town", "kind": "categorical"}]
IN_LOG = parse_spec(SPEC | {"users": {"table": "shows", "key": "u", "min_count": 1, "features": _TOWN}})
OWN = parse_spec(
    SPEC
    | {
        "tables": SPEC["tables"] | {"people": {"files": ["people*.parquet"]}},
        "users": {"table": "people", "key": "u", "min_count": 1, "features": _TOWN},
    }
)


def towns(store: Path) -> dict[Any, Any]:
    raw = pq.read_table(store / store_write.RAW_USERS)
    return dict(zip(raw["key"].to_pylist(), raw["town"].to_pylist(), strict=True))


def moving(days: range) -> Rows:
    """Every user moves each day; the profile of user 3 is not known on the first."""
    out = []
    for row in good_shows():
        day = (row["t"] - START_MS) // DAY_MS
        if day in days:
            out.append(row | {"town": None if row["u"] == 3 and day == 0 else f"town-{day}"})
    return out


def test_the_earliest_row_of_a_log_describes_whatever_the_files_are_called(tmp_path: Path) -> None:
    raw = put(tmp_path / "raw", shows_test=moving(range(3, 4)), shows_train=moving(range(3))[::-1])
    build(raw, tmp_path / "store", IN_LOG)
    assert towns(tmp_path / "store") == {1: "town-0", 2: "town-0", 3: None, 4: "town-0"}


def test_later_windows_do_not_describe_known_users_anew(tmp_path: Path) -> None:
    raw, last = put(tmp_path / "raw", shows_b=moving(range(3))), moving(range(3, 4))
    seen = [{"id": 1, "u": 9, "a": 10, "t": START_MS}]  # a user of whom the log of impressions knows nothing yet
    put(raw, posts=seen)
    build(raw, tmp_path / "first", IN_LOG)
    before = towns(tmp_path / "first")
    assert before == {1: "town-0", 2: "town-0", 3: None, 4: "town-0", 9: None}
    put(raw, shows_a=[*last, last[0] | {"show": 900, "u": 9}, last[0] | {"show": 901, "u": 8}])
    build(raw, tmp_path / "grown", IN_LOG, tmp_path / "first")
    build(raw, tmp_path / "whole", IN_LOG)
    assert towns(tmp_path / "grown") == before | {8: "town-3", 9: "town-3"} == towns(tmp_path / "whole")
    encoded = [pq.read_table(tmp_path / s / store_write.USERS).sort_by("key") for s in ("grown", "whole")]
    assert encoded[0]["key"].equals(encoded[1]["key"])


def test_a_new_delivery_of_an_entity_table_replaces_the_old_one(tmp_path: Path) -> None:
    people = [{"u": 1, "town": "a"}, {"u": 1, "town": "b"}, {"u": 2, "town": "c"}]
    raw = put(tmp_path / "raw", shows_a=good_shows(num_days=3), people=people)
    build(raw, tmp_path / "first", OWN)
    assert towns(tmp_path / "first") == {1: "b", 2: "c", 3: None, 4: None}
    put(raw, shows_b=good_shows()[24:], people=[{"u": 1, "town": "d"}])
    build(raw, tmp_path / "grown", OWN, tmp_path / "first")
    assert towns(tmp_path / "grown") == {1: "d", 2: "c", 3: None, 4: None}
