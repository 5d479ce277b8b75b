"""Impressions: what a raw row becomes, which rows are quarantined, which files are refused for their times or ids."""

from __future__ import annotations

import json
import math

import numpy as np
import pyarrow as pa
import pytest

from gem.data.ingest.canonical import (
    read_impressions,
    stable_hash64,
)
from gem.errors import DataError
from tests.unit.data.small_log import BIG, CONTEXT, NOON, log_table, make_spec, reasons, write


def test_an_impression_row(tmp_path):
    spec = make_spec(context={"features": [*CONTEXT["features"], {"name": "tags", "kind": "multi"}]})
    table = log_table(
        u=[7, 8], a=[70, 80], tab=[1, None], y=[1, None], slot=[3.0, None], len=[2.5, None], tags=["b,a", ""]
    )
    got = read_impressions(spec, write(tmp_path, table))
    rows = got.rows.to_pydict()
    assert rows["user"] == [7, 8] and rows["ad"] == [70, 80] and rows["time_ms"] == [NOON, NOON]
    assert rows["surface"] == ["1", None]
    assert rows["ctx:slot"] == ["3", None] and rows["ctx:len"] == [2.5, None] and rows["ctx:tags"] == [["b", "a"], None]
    assert rows["label:click"] == [1, -1] and rows["key:conversion"] == [0, 1]
    assert got.rows.schema.field("label:click").type == pa.int8()
    assert got.raw_rows == 2 and got.quarantined.num_rows == 0


def test_impression_ids_given_or_made(tmp_path):
    table = log_table(u=[1, 1, 2], a=[10, 10, 10], t=[NOON, NOON, NOON], id=[BIG, 4, 5])
    path = write(tmp_path, table)
    made = read_impressions(make_spec(), path).rows["impression_id"].to_pylist()
    assert made[0] == made[1] != made[2] and min(made) >= 0
    named = make_spec(impressions=make_spec().impressions.model_dump() | {"id": "id"})
    assert read_impressions(named, path).rows["impression_id"].to_pylist() == [BIG, 4, 5]


def test_duplicate_key_marks_equal_rows_over_files_and_types(tmp_path):
    spec = make_spec(impressions=make_spec().impressions.model_dump() | {"duplicate_key": ["u", "a", "t"]})
    first = read_impressions(spec, write(tmp_path, log_table(u=[1, 1, 2], y=[0, 1, 0])))
    dup = first.rows["dup"].to_pylist()
    assert dup[0] == dup[1] != dup[2]
    (tmp_path / "log2.csv").write_text(f"u,a,tab,t,y,ref\n2,10,x,{NOON},1,9\n")
    assert read_impressions(spec, tmp_path / "log2.csv").rows["dup"].to_pylist() == [dup[2]]


def test_null_ids_and_times_are_quarantined_with_the_whole_row(tmp_path):
    table = log_table(u=[1, None, 3, 4], a=[10, 10, None, 10], t=[NOON, NOON, NOON, None], note=["p", "q", "r", "s"])
    got = read_impressions(make_spec(), write(tmp_path, table))
    assert reasons(got) == ["null_user", "null_ad", "null_time"]
    assert [json.loads(r)["note"] for r in got.quarantined["row"].to_pylist()] == ["q", "r", "s"]
    assert set(got.quarantined["file"].to_pylist()) == {str(tmp_path / "log.parquet")}
    assert got.rows["user"].to_pylist() == [1] and got.raw_rows == 4


def test_only_nan_and_infinity_of_a_context_number_are_wrong(tmp_path):
    values = pa.array([1.0, math.nan, math.inf, -math.inf, None], pa.float64())
    got = read_impressions(make_spec(context=CONTEXT), write(tmp_path, log_table(len=values, slot=[1] * 5)))
    assert reasons(got) == ["nan_numeric"] * 3
    assert got.rows["ctx:len"].to_pylist() == [1.0, None]


def test_labels_that_are_not_binary(tmp_path):
    got = read_impressions(make_spec(), write(tmp_path, log_table(y=[0, 1, 2, -1, None])))
    assert got.rows["label:click"].to_pylist() == [0, 1, -1]
    assert reasons(got) == ["bad_label", "bad_label"]
    flags = read_impressions(make_spec(), write(tmp_path, log_table(y=[True, False])))
    assert flags.rows["label:click"].to_pylist() == [1, 0]


def test_true_probabilities(tmp_path):
    spec = make_spec(impressions=make_spec().impressions.model_dump() | {"true_probability": {"click": "p"}})
    got = read_impressions(spec, write(tmp_path, log_table(p=[0.25, 1.5])))
    assert got.rows["true:click"].to_pylist() == [0.25] and got.rows["true:click"].type == pa.float32()
    assert reasons(got) == ["bad_label"]


def test_a_few_times_out_of_range_cost_their_rows_only(tmp_path):
    got = read_impressions(
        make_spec(), write(tmp_path, log_table(t=[NOON, NOON // 1000, 0, -5, NOON, NOON, NOON, NOON]))
    )
    assert reasons(got) == ["time_out_of_range"] * 3 and got.rows.num_rows == 5


@pytest.mark.parametrize(
    ("declared", "factor", "message"),
    [
        ("ms", 1_000, r"`ms` \(milliseconds\) was declared.* year 1970.*fit seconds \(year 2022\): set `unit: s`"),
        ("s", 1_000_000, r"`s` \(seconds\) was declared.* year 54300.*fit milliseconds \(year 2022\): set `unit: ms`"),
        ("us", 1_000_000, r"`us`.* year 1970.*fit milliseconds"),
        ("ms", 1, r"`ms`.*fit microseconds.*set `unit: us`"),
        ("us", 0, r"`us`.*fit nanoseconds.*divide the column by 1000"),
    ],
    ids=["s as ms", "ms as s", "ms as us", "us as ms", "ns as us"],
)
def test_wrong_time_unit_refuses_the_file_and_says_the_year(tmp_path, declared, factor, message):
    raw = NOON * 1_000_000 if factor == 0 else {1_000: NOON // 1000, 1_000_000: NOON, 1: NOON * 1000}[factor]
    imp = make_spec().impressions.model_dump() | {"time": {"column": "t", "unit": declared}}
    with pytest.raises(DataError, match=message):
        read_impressions(make_spec(impressions=imp), write(tmp_path, log_table(t=[raw, raw + 1])))


@pytest.mark.parametrize(("unit", "raw"), [("s", NOON // 1000), ("ms", NOON), ("us", NOON * 1000 + 999)])
def test_units_become_milliseconds(tmp_path, unit, raw):
    imp = make_spec().impressions.model_dump() | {"time": {"column": "t", "unit": unit}}
    got = read_impressions(make_spec(impressions=imp), write(tmp_path, log_table(t=[raw])))
    assert got.rows["time_ms"].to_pylist() == [NOON]


@pytest.mark.parametrize(
    "times",
    [
        pa.array(["2022-05-01 12:00:00"] * 2),
        pa.array([NOON, NOON], pa.timestamp("ms")),
        pa.array([NOON + 0.5, NOON + 0.25], pa.float64()),
    ],
    ids=["text", "timestamp", "fraction"],
)
def test_times_that_are_no_integers_are_refused(tmp_path, times):
    with pytest.raises(DataError, match=r'column "t".*whole numbers expected.*integer, UTC epoch'):
        read_impressions(make_spec(), write(tmp_path, log_table(t=times)))


def test_ids_beyond_2_53_stay_exact_beside_nulls(tmp_path):
    table = log_table(u=pa.array([BIG, None, 2**63 - 1], pa.int64()), a=pa.array([-1, 5, 2**62 + 3], pa.int64()))
    got = read_impressions(make_spec(), write(tmp_path, table))
    assert got.rows["user"].to_pylist() == [BIG, 2**63 - 1] and got.rows["ad"].to_pylist() == [-1, 2**62 + 3]
    (tmp_path / "log.csv").write_text(f"u,a,tab,t,y,ref\n{BIG},1,x,{NOON},0,1\n,1,x,{NOON},0,2\n")
    assert read_impressions(make_spec(), tmp_path / "log.csv").rows["user"].to_pylist() == [BIG]


def test_float_ids_only_if_exact(tmp_path):
    whole = read_impressions(make_spec(), write(tmp_path, log_table(u=[7.0, math.nan, 2.0**52])))
    assert whole.rows["user"].to_pylist() == [7, 2**52] and reasons(whole) == ["null_user"]
    for wrong in (2.5, 2.0**53):
        with pytest.raises(DataError, match=r'column "u": 1 ids are floats .* below 2\^53'):
            read_impressions(make_spec(), write(tmp_path, log_table(u=[1.0, wrong])))
    (tmp_path / "log.csv").write_text(f"u,a,tab,t,y,ref\n7.0,1,x,{NOON},0,1\n9,1,x,{NOON},0,2\n")
    assert read_impressions(make_spec(), tmp_path / "log.csv").rows["user"].to_pylist() == [7, 9]


def test_text_ids_are_normalised_and_kept(tmp_path):
    decomposed, composed = "e\u0301ric", "\u00e9ric"
    got = read_impressions(make_spec(), write(tmp_path, log_table(u=[decomposed, composed, " 広告 ", "", "007"])))
    assert got.rows["user"].to_pylist() == [composed, composed, "広告", "007"]
    assert reasons(got) == ["null_user"]
    ids = got.rows["impression_id"].to_pylist()
    assert ids[0] == ids[1] != ids[2]


def test_d15_unicode_ids(tmp_path):
    """One spelling per id, a length cap in bytes, no NUL; the hash of a kept id is a fixed number."""
    longest, too_long = "é" * 128, "é" * 128 + "x"
    users = ["e\u0301", "\u00e9", "🙂", longest, too_long, "x" * 10_000, "nu\x00l", "-1"]
    path = write(tmp_path, log_table(u=users, a=["a"] * 7 + ["b" * 300]))
    got = read_impressions(make_spec(), path)
    assert got.rows["user"].to_pylist() == ["\u00e9", "\u00e9", "🙂", longest]
    assert reasons(got) == ["id_too_long", "id_too_long", "bad_id", "id_too_long"]
    assert stable_hash64(pa.array(["é"]), "user")[0] == stable_hash64(got.rows["user"].slice(0, 1), "user")[0]
    lines = "".join(f"{u},a,x,{NOON},0,1\n" for u in users)
    (tmp_path / "log.csv").write_text("u,a,tab,t,y,ref\n" + lines, encoding="utf-8")
    assert reasons(read_impressions(make_spec(), tmp_path / "log.csv")) == ["id_too_long", "id_too_long", "bad_id"]


def test_keys_of_labels_obey_the_same_rules(tmp_path):
    got = read_impressions(make_spec(), write(tmp_path, log_table(ref=["k", None, "k" * 257])))
    assert got.rows["key:conversion"].to_pylist() == ["k", None] and reasons(got) == ["id_too_long"]


def test_bytes_that_are_no_text_in_parquet(tmp_path):
    broken = pa.array([b"ok", b"\xff\xfe"]).view(pa.string())
    with pytest.raises(DataError, match=r'column "u": .*Write the column again as UTF-8 text'):
        read_impressions(make_spec(), write(tmp_path, log_table(u=broken)))


def test_a_rating_becomes_a_label(tmp_path):
    spec = make_spec(labels={"like": {"column": "y", "at_least": 4.0}})
    got = read_impressions(spec, write(tmp_path, log_table(y=[3.5, 4.0, 5.0, None, -1.0, math.nan])))
    assert got.rows["label:like"].to_pylist() == [0, 1, 1, -1, 0, -1]
    (tmp_path / "log.csv").write_text(f"u,a,tab,t,y,ref\n1,2,x,{NOON},4,1\n1,2,x,{NOON},3,1\n1,2,x,{NOON},good,1\n")
    got = read_impressions(spec, tmp_path / "log.csv")
    assert got.rows["label:like"].to_pylist() == [1, 0] and reasons(got) == ["bad_label"]


def test_numbers_of_a_csv_read_alike_with_and_without_a_value_to_clean(tmp_path):
    """The short way of clean columns and the long way give the same numbers."""
    lines = [f"{u},10,x,{NOON + 1},1,3,{v}" for u, v in ((7, "1.5"), (-8, "-2e3"), (9, ""), (BIG, "inf"))]
    spec = make_spec(context={"features": [CONTEXT["features"][1]]})
    (tmp_path / "log.csv").write_text("u,a,tab,t,y,ref,len\n" + "\n".join(lines) + "\n")
    plain = read_impressions(spec, tmp_path / "log.csv").rows.to_pylist()
    (tmp_path / "log.csv").write_text("u,a,tab,t,y,ref,len\n" + "\n".join(lines) + f"\n 11,10,x,+{NOON} ,true,3, 1 \n")
    cleaned = read_impressions(spec, tmp_path / "log.csv").rows.to_pylist()
    assert cleaned[:-1] == plain and len(plain) == 3
    assert cleaned[-1]["user"] == 11 and cleaned[-1]["time_ms"] == NOON and cleaned[-1]["ctx:len"] == 1.0


def test_text_that_is_all_numbers_becomes_numbers(tmp_path):
    got = read_impressions(make_spec(), write(tmp_path, log_table(u=["5", str(BIG)])))
    assert got.rows["user"].type == pa.int64() and got.rows["user"].to_pylist() == [5, BIG]
    huge = read_impressions(make_spec(), write(tmp_path, log_table(u=["5", str(2**63)])))
    assert huge.rows["user"].to_pylist() == ["5", str(2**63)]


def test_ids_of_an_impossible_type(tmp_path):
    with pytest.raises(DataError, match=r'column "u": an id must be an integer or text, got list'):
        read_impressions(make_spec(), write(tmp_path, log_table(u=[[1], [2]])))


def test_reading_is_not_row_by_row(tmp_path):
    """200 k rows in well under a second: a Python loop over rows takes several."""
    import time

    size = 200_000
    rng = np.random.default_rng(0)
    table = log_table(u=rng.integers(0, 1000, size), t=NOON + np.arange(size), y=rng.integers(0, 2, size))
    path = write(tmp_path, table)
    start = time.process_time()
    assert read_impressions(make_spec(), path).rows.num_rows == size
    assert time.process_time() - start < 2.0
