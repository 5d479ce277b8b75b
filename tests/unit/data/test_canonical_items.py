"""Events without an ad of their own, named actions, times of arrival, and flags over ratings."""

from __future__ import annotations

import json

import pyarrow as pa

from gem.data.build.entities import _described_by_key
from gem.data.ingest.canonical import flag_names, read_events, read_impressions
from gem.data.ingest.canonical_events import item_features
from gem.data.spec import EntitySpec, FeatureSpec
from tests.unit.data.small_log import NOON, log_table, make_spec, reasons, write

ADS = {
    "table": "ads",
    "key": "a",
    "features": [
        {"name": "cate", "kind": "categorical"},
        {"name": "price", "kind": "numeric"},
        {"name": "tags", "kind": "multi", "separator": "|"},
    ],
}
VISIT = {
    "kind": "visit",
    "table": "posts",
    "user": "u",
    "item": {"price": "p", "cate": "c", "tags": "g"},
    "time": {"column": "t"},
    "action": "act",
    "action_flags": {"buy": "bought", "fav": "liked", "9": "bought"},
}


def visits(**columns):
    size = len(next(iter(columns.values())))
    base = {"u": [1] * size, "c": ["x"] * size, "p": [1.5] * size, "g": ["a|b"] * size, "act": ["buy"] * size}
    return pa.table(base | {"t": [NOON] * size} | columns)


def read_visits(folder, table, **changes):
    spec = make_spec(ads=ADS, events=[VISIT | changes])
    return read_events(spec, 0, write(folder, table, "posts.parquet"))


def test_an_item_is_named_by_the_json_of_its_features(tmp_path):
    table = visits(
        c=["é", "2.0", None, None, "é"],
        p=[1.5, None, float("nan"), None, 1.5],
        g=["b|a", "", "q", None, "b|a"],
    )
    got = read_visits(tmp_path, table)
    expected = [
        {"cate": "é", "price": 1.5, "tags": ["b", "a"]},
        {"cate": "2"},
        {"tags": ["q"]},
        {"cate": "é", "price": 1.5, "tags": ["b", "a"]},
    ]
    ads = got.rows["ad"].to_pylist()
    assert ads == ["~" + json.dumps(e, sort_keys=True, ensure_ascii=False, separators=(",", ":")) for e in expected]
    assert [item_features(ad) for ad in ads] == expected and item_features("12") is item_features("~x") is None
    assert reasons(got) == ["null_ad"] and got.counts == {"nan:price": 1}
    assert got.rows["dup"][0] == got.rows["dup"][3] != got.rows["dup"][1]


def test_many_items_keep_their_own_features(tmp_path):
    """Every pair of values, in an order that mixes them."""
    pairs = [(i * 7 % 40, i * 11 % 30) for i in range(1200)]
    table = visits(c=[f"c{c}" for c, _ in pairs], p=[float(p) for _, p in pairs], g=[None] * 1200)
    ads = read_visits(tmp_path, table).rows["ad"].to_pylist()
    assert [item_features(ad) for ad in ads] == [{"cate": f"c{c}", "price": float(p)} for c, p in pairs]


def test_an_item_of_too_many_bytes_is_quarantined(tmp_path):
    got = read_visits(tmp_path, visits(c=["x" * 300, "y"]))
    assert reasons(got) == ["id_too_long"] and got.rows.num_rows == 1
    assert read_visits(tmp_path, visits(c=["y"]).slice(0, 0)).rows.num_rows == 0


def test_actions_become_flags(tmp_path):
    spec = make_spec(ads=ADS, events=[VISIT])
    assert flag_names(spec) == ("bought", "liked")
    got = read_visits(tmp_path, visits(act=["buy", "fav", "view", None, "9"]))
    assert got.rows["flags"].to_pylist() == [1, 2, 0, 0, 1]
    got = read_visits(tmp_path, visits(act=[9, 8]))
    assert got.rows["flags"].to_pylist() == [1, 0]


def test_d9_late_backfilled_feature(tmp_path):
    """A row is known at the later of its time with the delay and its arrival."""
    table = visits(u=[1, 2, 3, 4], at=[NOON // 1000 - 5, NOON // 1000 + 60, None, 7])
    got = read_visits(tmp_path, table, available_after_ms=1000, ingested={"column": "at", "unit": "s"})
    assert got.rows["time_ms"].to_pylist() == [NOON] * 3
    assert got.rows["known_ms"].to_pylist() == [NOON + 1000, NOON + 60_000, NOON + 1000]
    assert reasons(got) == ["time_out_of_range"] and got.counts == {"null_arrival": 1}


def test_a_flag_over_a_rating_means_what_the_label_means(tmp_path):
    event = {"kind": "rated", "table": "log", "user": "u", "ad": "a", "time": {"column": "t"}, "flags": {"like": "y"}}
    labels = {"like": {"column": "y", "at_least": 4}, "love": {"column": "y", "at_least": 5}}
    spec = make_spec(labels=labels, events=[event | {"flags": {"love": "y", "like": "y"}}])
    path = write(tmp_path, log_table(y=[3, 4, 5]))
    assert read_events(spec, 0, path).rows["flags"].to_pylist() == [0, 0b10, 0b11]
    rows = read_impressions(spec, path).rows
    assert rows["label:like"].to_pylist() == [0, 1, 1] and rows["label:love"].to_pylist() == [0, 0, 1]


def test_users_without_a_table(tmp_path):
    spec = make_spec(users={}, ads={})
    assert read_impressions(spec, write(tmp_path, log_table(u=[1, 2]))).rows["user"].to_pylist() == [1, 2]


def test_an_ad_of_its_own_may_begin_like_an_item() -> None:
    """Its key is no description: only what `item_features` reads is one."""
    assert item_features("~promo") is None and item_features("~{promo") is None
    entity = EntitySpec(features=[FeatureSpec(name="brand", kind="categorical")])
    keys = pa.array(["~promo", '~{"brand":"b1"}', "plain", "~{promo"], pa.string())
    (table,) = _described_by_key(entity, keys, False)
    assert table.to_pylist() == [{"key": '~{"brand":"b1"}', "brand": "b1"}]
    assert _described_by_key(entity, keys.filter(pa.array([True, False, True, True])), False) == []
