"""Vocabularies, the encoder and its fit. Expected rows and numbers by hand."""

from __future__ import annotations

import math
import pickle
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from gem.data.encoding import Encoder
from gem.data.fitting import EntityCounts, Moments, TrainCounts, fit_encoder, group_surfaces
from gem.data.schema import NULL, OOV
from gem.data.spec import DatasetSpec, SurfaceSpec, parse_spec
from gem.data.vocabulary import Vocabulary, as_text, count_values, fit_vocabulary, merge_counts
from gem.errors import DataError, SpecError, StoreError
from tests.unit.data.toy_log import SPEC


def counts(**pairs: int) -> pa.Table:
    return pa.table({"value": pa.array(list(pairs), pa.string()), "count": pa.array(list(pairs.values()), pa.int64())})


def make(spec: DatasetSpec | None = None, **changes: Any) -> Encoder:
    """An encoder of the toy spec: persons 1..3, of whom 3 was never shown anything."""
    users = pa.table({"key": [1, 2, 3], "town": ["a", "b", "c"], "age": [10.0, 30.0, 999.0]})
    look = pa.array([[1.0, 2.0], None], pa.list_(pa.float32()))
    ads = pa.table({"key": [8, 9], "tags": [["x", "y"], ["x"]], "price": [math.e - 1, -5.0], "look": look})
    plain: dict[str, Any] = {
        "user": EntityCounts(users, np.array([1, 3, 0]), np.array([1, 3, 0])),
        "ad": EntityCounts(ads, np.array([5, 2]), np.array([4, 0])),
        "surfaces": counts(**{"2": 70, "1": 100, "7": 3}),
        "context": {"device": counts(ios=9, tv=1)},
        "moments": {"slot": Moments(4.0, 2.0, 16.0)},
    }
    return fit_encoder(spec or parse_spec(SPEC), TrainCounts(**(plain | changes)))


def test_vocabulary_is_by_frequency_then_value_and_capped() -> None:
    table = counts(rare=1, b=5, a=5, c=9, never=0)
    assert fit_vocabulary(table).to_list() == ["c", "a", "b", "rare"]
    assert fit_vocabulary(table, min_count=2).to_list() == ["c", "a", "b"]
    capped = fit_vocabulary(table, max_rows=5)
    assert (capped.to_list(), capped.rows) == (["c", "a"], 5)
    assert fit_vocabulary(table, max_rows=1).rows == 3


@pytest.mark.parametrize("repeat", [1, 3000])
def test_small_and_large_lookups_agree(repeat: int) -> None:
    vocabulary = Vocabulary(["c", "a"])
    rows = vocabulary.lookup(pa.array(["a", None, "c", "zz", ""] * repeat))
    assert rows.tolist() == [4, NULL, 3, OOV, OOV] * repeat
    assert [vocabulary.row(v) for v in ("a", None, "c", "zz")] == [4, NULL, 3, OOV]


def test_counts_are_weighted_flattened_and_merged() -> None:
    lists = count_values(pa.array([["x", "y"], None, [], ["x", None]]), np.array([2, 9, 9, 5]))
    merged = merge_counts([lists, count_values(pa.array([1, None, 1]))])
    assert dict(zip(*merged.to_pydict().values(), strict=True)) == {"x": 7, "y": 2, "1": 2}


def test_one_text_for_numbers_and_their_decimal_form() -> None:
    assert (
        as_text([5, None]).to_pylist() == as_text(["5", None]).to_pylist() == as_text(pa.array([5, None])).to_pylist()
    )
    assert as_text([5, "x", None, True, math.nan]).to_pylist() == ["5", "x", None, "true", None]
    assert as_text([0.5, math.nan]).to_pylist() == ["0.5", None]
    assert as_text([2**53 + 1]).to_pylist() == ["9007199254740993"]


def test_moments_merge_like_one_sample() -> None:
    x, w = np.array([1.0, np.nan, 4.0, 1e9, 1e9 + 2]), np.array([1, 5, 2, 1, 0])
    whole = Moments.of(x, w)
    merged = Moments.of(x[:2], w[:2]).merge(Moments.of(x[2:], w[2:])).merge(Moments())
    sample = np.array([1.0, 4.0, 4.0, 1e9])
    for m in (whole, merged):
        assert m.count == 4 and m.mean == pytest.approx(sample.mean()) and m.std == pytest.approx(sample.std())
    assert Moments.of(np.array([3.0, 3.0])).std == 1.0 and Moments().std == 1.0


def test_schema_lists_every_field_with_its_rows() -> None:
    schema = make().schema
    assert [(f.name, f.rows, f.multi) for f in schema.user.fields] == [("user_id", 5, False), ("town", 5, False)]
    assert [(f.name, f.rows, f.multi) for f in schema.ad.fields] == [("ad_id", 5, False), ("tags", 5, True)]
    assert [(f.name, f.rows) for f in schema.context.fields] == [
        ("surface", 6),
        ("hour", 27),
        ("weekday", 10),
        ("device", 5),
    ]
    assert (schema.user.numeric, schema.ad.numeric, schema.context.numeric) == (("age",), ("price",), ("slot",))
    assert schema.ad.vectors == (("look", 2),)
    assert schema.surfaces[3:] == ("feed", "stories", "7")
    assert (schema.surface_groups, schema.group_of_surface) == (("feed", "stories", "other"), (2, 2, 2, 0, 1, 2))
    assert [(t.name, t.given) for t in schema.tasks] == [("click", None), ("conversion", "click")]


def test_entities_are_encoded_with_training_statistics_only() -> None:
    """age: mean (10 + 3 * 30) / 4 = 25, variance (15² + 3 * 5²) / 4 = 75; person 3 (never shown) has no say."""
    raw = pa.table({"key": pa.array([None, 2, 3], pa.int64()), "town": [None, "a", "c"], "age": [None, 30.0, 9999.0]})
    out = make().encode_entities("user", raw)
    assert out["user_id"].to_pylist() == [OOV, 3, OOV]
    assert out["town"].to_pylist() == [NULL, 4, OOV]
    age = out["age"].to_pylist()
    assert math.isnan(age[0]) and age[1] == pytest.approx(5 / 75**0.5) and age[2] == 5.0


def test_multi_numeric_and_vector_of_ads() -> None:
    """price: log1p(e - 1) = 1 is the only training value, so std is 1; log1p(-5) is missing, not a number."""
    raw = pa.table(
        {
            "key": [8, 9, 77],
            "tags": pa.array([["y", "new", "x"], [], None]),
            "price": [math.e**3 - 1, -5.0, math.inf],
            "look": pa.array([[1.0, 2.0], [math.nan, 1.0], None], pa.list_(pa.float32())),
        }
    )
    out = make().encode_entities("ad", raw)
    assert out["ad_id"].to_pylist() == [3, 4, OOV]
    assert out["tags"].to_pylist() == [[4, OOV, 3], [], [NULL]]
    price = out["price"].to_pylist()
    assert price[0] == pytest.approx(2.0) and math.isnan(price[1]) and math.isnan(price[2])
    assert out["look"].to_pylist() == [[1.0, 2.0], [0.0, 1.0], [0.0, 0.0]]


def test_a_vector_of_another_width_is_refused() -> None:
    raw = pa.table({"key": [8], "look": pa.array([[1.0, 2.0, 3.0]], pa.list_(pa.float32()))})
    with pytest.raises(DataError, match='"look": a vector has 3 numbers, the spec says width 2'):
        make().encode_entities("ad", raw)


def test_context_of_a_request_and_of_a_log_column_are_the_same() -> None:
    encoder = make()
    time_ms = np.array([1_709_542_800_000, 1_709_542_800_000 + 86_400_000], np.int64)  # Monday 2024-03-04 09:00 UTC
    served = encoder.encode_context({"device": ["ios", "fridge"], "slot": [4, None]}, time_ms, ["feed", 9])
    logged = encoder.encode_context(
        {"device": pa.array(["ios", "fridge"]), "slot": pa.array([4.0, None])}, time_ms, pa.array(["1", "9"])
    )
    expected = {"surface": [3, OOV], "hour": [12, 12], "weekday": [3, 4], "device": [3, OOV]}
    for rows in (served, logged):
        assert {n: v.tolist() for n, v in rows.ids.items()} == expected
        assert rows.numeric.tolist() == [[1.0, 0.0], [0.0, 1.0]]  # (4 - 2) / 2, then missing
    assert len(served) == 2


def test_absent_context_columns_are_null_and_missing() -> None:
    rows = make().encode_context({}, np.array([0], np.int64), [None])
    assert rows.ids["device"].tolist() == [NULL] and rows.ids["surface"].tolist() == [NULL]
    assert rows.numeric.tolist() == [[0.0, 1.0]]
    with pytest.raises(DataError, match='"device": 2 values for 1 rows'):
        make().encode_context({"device": ["a", "b"]}, np.array([0], np.int64), [None])


def test_surface_codes_by_raw_value_number_and_name() -> None:
    encoder = make()
    assert [encoder.surface_code(v) for v in ("1", 1, "feed", "2", "7", None, "no", "<pad>")] == [
        3,
        3,
        3,
        4,
        5,
        1,
        2,
        2,
    ]


def test_json_restores_an_encoder_that_encodes_alike() -> None:
    encoder = make()
    other = Encoder.from_json(encoder.to_json())
    assert other.schema == encoder.schema and other.to_json() == encoder.to_json()
    assert other.surface_code("stories") == 4
    assert pickle.loads(pickle.dumps(encoder)).to_json() == encoder.to_json()
    with pytest.raises(StoreError, match=r"not a text written by Encoder\.to_json"):
        Encoder.from_json("{}")
    with pytest.raises(StoreError, match="version 99"):
        Encoder.from_json(encoder.to_json().replace('"version": 2', '"version": 99'))


def test_a_shared_table_holds_the_values_of_both_fields() -> None:
    raw = SPEC | {
        "context": {"features": [{"name": "last_town", "kind": "categorical", "table": "town", "min_count": 4}]}
    }
    encoder = make(parse_spec(raw), context={"last_town": counts(a=1, d=4)}, moments={})
    assert encoder.vocabularies["town"].to_list() == ["d", "b", "a"]  # 4, 3, 1 + 1
    assert encoder.schema.table_of()["last_town"] == "town" and encoder.schema.tables()["town"] == 6


def test_names_used_twice_are_refused() -> None:
    twice = SPEC | {"context": {"features": [{"name": "town", "kind": "categorical"}]}}
    with pytest.raises(SpecError, match='"town" is on the user and the context side'):
        make(parse_spec(twice))
    taken = SPEC | {"context": {"features": [{"name": "x", "kind": "categorical", "table": "hour"}]}}
    with pytest.raises(SpecError, match=r"\['hour'\] are made by the platform"):
        make(parse_spec(taken))


def test_groups_without_rest_and_with_shared_names() -> None:
    spec = SurfaceSpec(min_rows=10, names={"1": "feed", "2": "feed", "3": "side"})
    names, groups, of = group_surfaces(spec, ["1", "2", "3"], {"1": 6, "2": 5, "3": 30})
    assert (names[3:], groups, of) == (("feed", "feed", "side"), ("side", "feed"), (0, 0, 0, 1, 1, 0))
    assert group_surfaces(spec, ["3"], {"3": 2})[1:] == (("other",), (0, 0, 0, 0))


def test_the_weekday_is_null_until_training_met_each_three_times() -> None:
    time_ms = np.array([0, 86_400_000], np.int64)
    few, enough = make(num_days=20), make(num_days=21)
    assert few.encode_context({}, time_ms, ["1", "1"]).ids["weekday"].tolist() == [NULL, NULL]
    assert len(set(enough.encode_context({}, time_ms, ["1", "1"]).ids["weekday"].tolist())) == 2
    assert Encoder.from_json(few.to_json()).weekday is False
