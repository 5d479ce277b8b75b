"""User and ad features from raw files: one spelling per category, missing numbers, lists, embeddings."""

from __future__ import annotations

import math

import pyarrow as pa
import pytest

from gem.data.ingest.canonical import (
    read_entities,
)
from gem.errors import DataError
from tests.unit.data.small_log import make_spec, reasons, write


def entity_spec(*features):
    return make_spec(ads={"table": "ads", "key": "a", "features": list(features)})


def test_categories_have_one_spelling(tmp_path):
    table = pa.table({"a": [1, 2, 3, 4, 5], "c": [29.0, math.nan, None, 0.5, -3.0]})
    spec = entity_spec({"name": "c", "kind": "categorical"})
    got = read_entities(spec, "ad", write(tmp_path, table, "ads.parquet"))
    assert got.rows["c"].to_pylist() == ["29", None, None, "0.5", "-3"]
    words = pa.table({"a": [1, 2, 3, 4, 5], "c": pa.array([" e\u0301 ", "29.0", "NaN", "", "NA"]).dictionary_encode()})
    got = read_entities(spec, "ad", write(tmp_path, words, "ads.parquet"))
    assert got.rows["c"].to_pylist() == ["\u00e9", "29", None, None, "NA"]


def test_wrong_numbers_of_an_entity_are_missing_and_counted(tmp_path):
    table = pa.table({"a": [1, 2, 3, 4, 5], "price": [1.5, math.nan, math.inf, -math.inf, None]})
    got = read_entities(entity_spec({"name": "price", "kind": "numeric"}), "ad", write(tmp_path, table, "ads.parquet"))
    assert got.rows["price"].to_pylist() == [1.5, None, None, None, None]
    assert got.counts == {"nan:price": 1, "infinite:price": 2} and got.quarantined.num_rows == 0


def test_text_declared_numeric_is_refused(tmp_path):
    (tmp_path / "ads.csv").write_text('a,price\n1,"(0,10]"\n2,"(10,50]"\n3,5\n')
    with pytest.raises(DataError, match=r'column "price": 2 of 3 values cannot be read.*Declare `kind: categorical`'):
        read_entities(entity_spec({"name": "price", "kind": "numeric"}), "ad", tmp_path / "ads.csv")


def test_multi_values(tmp_path):
    spec = entity_spec({"name": "tags", "kind": "multi", "separator": "|"})
    table = pa.table({"a": [1, 2, 3, 4], "tags": [[" x", None, "y"], [], None, [""]]})
    got = read_entities(spec, "ad", write(tmp_path, table, "ads.parquet")).rows["tags"].to_pylist()
    assert got == [["x", "y"], [], None, []]
    (tmp_path / "ads.csv").write_text("a,tags\n1,x| y\n2,7.0\n3,\n")
    assert read_entities(spec, "ad", tmp_path / "ads.csv").rows["tags"].to_pylist() == [["x", "y"], ["7"], None]


@pytest.mark.parametrize("kind", [pa.list_(pa.float64()), pa.large_list(pa.float32()), pa.list_(pa.float32(), 2)])
def test_embeddings(tmp_path, kind):
    missing = [0.0, 0.0] if pa.types.is_fixed_size_list(kind) else None  # see the next test
    table = pa.table({"a": [1, 2, 3], "e": pa.array([[0.5, 1.0], missing, [2.0, -3.0]], kind)})
    got = read_entities(
        entity_spec({"name": "e", "kind": "embedding", "width": 2}), "ad", write(tmp_path, table, "ads.parquet")
    )
    assert got.rows["e"].to_pylist() == [[0.5, 1.0], missing, [2.0, -3.0]]
    assert got.rows["e"].type == pa.list_(pa.float32(), 2)


def test_nulls_that_pyarrow_cannot_read_are_explained(tmp_path):
    table = pa.table({"a": [1, 2], "e": pa.array([[0.5, 1.0], None], pa.list_(pa.float32(), 2))})
    spec = entity_spec({"name": "e", "kind": "embedding", "width": 2})
    with pytest.raises(DataError, match=r"ads\.parquet.*write that column as a plain list<float32>"):
        read_entities(spec, "ad", write(tmp_path, table, "ads.parquet"))


def test_wrong_embeddings_are_quarantined(tmp_path):
    spec = entity_spec({"name": "e", "kind": "embedding", "width": 2})
    lists = [[1.0], [1.0, 2.0], [1.0, 2.0, 3.0], [1.0, math.nan], [math.inf, 1.0], [4.0, 5.0]]
    got = read_entities(spec, "ad", write(tmp_path, pa.table({"a": list(range(6)), "e": lists}), "ads.parquet"))
    assert got.rows["key"].to_pylist() == [1, 5]
    assert got.rows["e"].to_pylist() == [[1.0, 2.0], [4.0, 5.0]]
    assert reasons(got) == ["bad_embedding"] * 4
    (tmp_path / "ads.csv").write_text('a,e\n1,"0.5, 1"\n2,"1,2,3"\n3,\n')
    got = read_entities(spec, "ad", tmp_path / "ads.csv")
    assert got.rows["e"].to_pylist() == [[0.5, 1.0], None] and reasons(got) == ["bad_embedding"]


def test_entities_without_a_key(tmp_path):
    got = read_entities(make_spec(), "user", write(tmp_path, pa.table({"u": ["a", None]}), "users.parquet"))
    assert got.rows["key"].to_pylist() == ["a"] and reasons(got) == ["null_key"]
