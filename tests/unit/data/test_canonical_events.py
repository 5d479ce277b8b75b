"""Timeline events and label logs from raw files."""

from __future__ import annotations

import math

import pyarrow as pa
import pytest

from gem.data.ingest.canonical import (
    flag_names,
    kind_names,
    read_events,
    read_impressions,
    read_label_log,
)
from tests.unit.data.small_log import BIG, NOON, log_table, make_spec, reasons, write


def events_spec():
    log = {"kind": "seen", "table": "log", "user": "u", "ad": "a", "time": {"column": "t"}, "surface": "tab"}
    log |= {"flags": {"click": "y"}, "available_after_ms": 500}
    post = {"kind": "post", "table": "posts", "user": "u", "ad": "a", "time": {"column": "t"}, "always": ["own"]}
    post |= {"flags": {"like": "l", "click": "y"}, "dwell": {"column": "w", "unit": "ms"}}
    before = {"kind": "before", "table": "posts", "user": "u", "ad": "seq", "list_before": {"column": "last"}}
    return make_spec(events=[log, post, before | {"always": ["like"]}])


def test_events_of_the_impression_log(tmp_path):
    spec = events_spec()
    assert kind_names(spec) == ("seen", "post", "before") and flag_names(spec) == ("click", "like", "own")
    path = write(tmp_path, log_table(u=[1, 1, 2], y=[1, 1, 0], tab=["x", "x", None]))
    got = read_events(spec, 0, path)
    rows = got.rows.to_pydict()
    assert rows["kind"] == [1, 1, 1] and rows["flags"] == [1, 1, 0] and rows["surface"] == ["x", "x", None]
    assert rows["known_ms"] == [NOON + 500] * 3 and rows["time_ms"] == [NOON] * 3 and rows["order"] == [0, 1, 2]
    assert rows["dup"] == read_impressions(spec, path).rows["dup"].to_pylist()
    types = {f.name: f.type for f in got.rows.schema}
    assert (types["kind"], types["flags"], types["dwell"]) == (pa.uint8(), pa.uint16(), pa.uint8())


def test_events_of_another_log(tmp_path):
    dwell = [None, -1, 0, 999, 1000, 1999, 2000, 4000, 2**20 * 1000, math.nan]
    size = len(dwell)
    table = pa.table(
        {"u": [1] * size, "a": [3] * size, "t": [NOON] * size, "l": [0, 1] * 5, "y": [1, 0] * 5, "w": dwell}
    )
    got = read_events(events_spec(), 1, write(tmp_path, table, "posts.parquet"))
    assert got.rows["flags"].to_pylist() == [0b101, 0b110] * 5
    assert got.rows["dwell"].to_pylist() == [0, 0, 1, 1, 2, 2, 3, 4, 15, 0]
    assert got.rows["kind"].to_pylist() == [2] * size and set(got.rows["surface"].to_pylist()) == {None}
    assert got.counts == {"unknown_dwell": 2}


def test_repeated_events_of_a_log_share_dup(tmp_path):
    row = {"u": [1, 1, 1, 2], "a": [3] * 4, "t": [NOON] * 4, "l": [0, 0, 1, 0], "y": [0] * 4, "w": [5] * 4}
    dup = read_events(events_spec(), 1, write(tmp_path, pa.table(row), "posts.parquet")).rows["dup"].to_pylist()
    assert dup[0] == dup[1] and len(set(dup)) == 3


def test_wrong_events_are_quarantined(tmp_path):
    row = {"u": [None, 1, 1, 1, 1], "a": [3, None, 3, 3, 3], "t": [NOON, NOON, None, NOON, NOON]}
    row |= {"l": [0, 0, 0, 3, None], "y": [0] * 5, "w": [5] * 5}
    got = read_events(events_spec(), 1, write(tmp_path, pa.table(row), "posts.parquet"))
    assert reasons(got) == ["null_user", "null_ad", "null_time", "bad_flag"] and got.rows.num_rows == 1


@pytest.mark.parametrize("as_text", [False, True])
def test_lists_become_events_oldest_first(tmp_path, as_text):
    lists = [[5, BIG, 5], [], None, [6], [7, None, 8]]
    texts = [None if x is None else ",".join("" if i is None else str(i) for i in x) for x in lists]
    table = {"u": [1, 2, 3, None, 4], "seq": texts if as_text else pa.array(lists, pa.list_(pa.int64()))}
    path = write(tmp_path, pa.table(table | {"last": [NOON + i for i in range(5)]}), "posts.parquet")
    got = read_events(events_spec(), 2, path)
    by_hand = [(u, ad, t + i - len(items) + 1, i) for u, items, t in
               [(1, [5, BIG, 5], NOON), (4, [7, 8], NOON + 4)] for i, ad in enumerate(items)]  # fmt: skip
    assert list(zip(*(got.rows[c].to_pylist() for c in ("user", "ad", "time_ms", "order")), strict=True)) == by_hand
    assert got.rows["known_ms"].to_pylist() == got.rows["time_ms"].to_pylist()
    assert set(got.rows["flags"].to_pylist()) == {0b10} and set(got.rows["kind"].to_pylist()) == {3}
    assert len(set(got.rows["dup"].to_pylist())) == 5
    assert reasons(got) == ["null_user"] and got.raw_rows == 5 and got.counts == {"null_list_items": 1}


def test_label_log(tmp_path):
    table = pa.table({"ref": [4, None, 6], "t": [NOON // 1000, NOON // 1000, None]})
    got = read_label_log(make_spec(), "conversion", write(tmp_path, table, "sales.parquet"))
    assert got.rows.to_pydict() == {"key": [4], "time_ms": [NOON]}
    assert reasons(got) == ["null_key", "null_time"]
