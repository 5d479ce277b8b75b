"""A request spells values as the training log does: the reader of raw tables is the oracle."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gem.data.ingest import columns
from gem.data.ingest.canonical import read_impressions
from gem.data.keys import KeyIndex
from gem.data.schema import NULL, NUM_RESERVED, OOV
from gem.data.spec import FeatureSpec
from serving.context import ContextFields
from serving.fleet import load_scorers
from serving.spelling import categories, category, entity_keys
from tests.unit.serving.tiny import Tiny

ODD = ["", "nan", "NaN", "null", "NULL", "\\N", " ", " phone_high", "phone_high\u00a0", "phone_high", "1.0", " 1.00 "]
ODD += ["1", "01", "1.5", "NA", "None", "-1.0", "e\u0301", "\u00e9", "toaster", "Nan", "1e0"]


def odd_log(tiny: Tiny, folder: Path) -> pa.Table:
    """Rows of the world's log with odd texts for device, slot, user and ad: raw, and written to a file."""
    raw = tiny.raw_impressions(tiny.store.split.test_day).slice(0, len(ODD))
    slots = ["1.0" if i % 2 else " 2" for i in range(len(ODD))]
    users = [f" {u}.0" if i % 3 else f"{u} " for i, u in enumerate(raw["user_id"].to_pylist())]
    new = {"device": ODD, "slot": slots, "user_id": users, "ad_id": [f"{a}\t" for a in raw["ad_id"].to_pylist()]}
    for name, words in new.items():
        raw = raw.set_column(raw.column_names.index(name), name, pa.array(words, pa.string()))
    pq.write_table(raw, folder / "impressions.parquet")
    return raw


def test_a_request_becomes_the_row_that_training_makes_of_the_same_texts(tiny: Tiny, tmp_path: Path) -> None:
    raw, store = odd_log(tiny, tmp_path), tiny.store
    read = read_impressions(tiny.spec, tmp_path / "impressions.parquet").rows
    scorer = load_scorers(tiny.models[:1])[0]
    names = scorer.context.names
    assert set(names) == {"device", "slot"} and read.num_rows == len(ODD)
    times = np.full(len(ODD), 1_780_000_000_000, dtype=np.int64)
    want = store.encoder.context_columns({n: read[f"ctx:{n}"] for n in names}, times, read["surface"])
    seen = set()
    for i, row in enumerate(raw.to_pylist()):
        sent = scorer.context.values({n: row[n] for n in names})
        one = store.encoder.context_columns({n: [v] for n, v in sent.items()}, times[:1], [row["surface"]])
        assert {n: one[n].to_pylist() for n in one} == {n: want[n].slice(i, 1).to_pylist() for n in want}, row
        assert scorer.find_user(row["user_id"]) == store.users.index_of(read["user"][i].as_py())
        keys = entity_keys(store.ads, [row["ad_id"]])
        assert keys == [str(read["ad"][i].as_py())] and store.ads.index_of(keys[0]) > 0
        seen.add(min(one["device"][0].as_py(), NUM_RESERVED))
    assert seen == {NULL, OOV, NUM_RESERVED}, "no value, a new value and a known one"


def test_odd_texts_are_one_value_each() -> None:
    assert [category(v) for v in ODD] == columns.category_text(pa.array(ODD, pa.string())).to_pylist()
    assert (category(7), category(None)) == (7, None)
    assert categories(["a ", 3, "", "2.0", "nan"]) == ["a", 3, "2"]
    fields = ContextFields([FeatureSpec(name="tags", kind="multi"), FeatureSpec(name="page", kind="numeric")])
    assert fields.values({"tags": [" a", ""], "page": 1.0}) == {"tags": ["a"], "page": 1.0}


@pytest.mark.parametrize(
    ("keys", "ids"),
    [
        ([7, 8], ["7", " 7", "7.0", "8\n", "8.00"]),
        (["7.0", "caf\u00e9", "007", "guest-7"], ["7.0", "cafe\u0301", "caf\u00e9 ", " 007", "guest-7\t"]),
    ],
)
def test_ids_are_spelled_as_the_keys_of_the_table(keys: list[int | str], ids: list[str]) -> None:
    index = KeyIndex(pa.array([None, *keys]))
    column = columns.to_ids(pa.array(ids), "ids")  # a whole column decides whether its ids are numbers
    want = index.index_many(column).tolist()
    assert [index.index_of(k) for k in entity_keys(index, ids)] == want and min(want) > 0
    nobody = ["", "nan", " ", "07", "7.5", "cafe"]
    assert [index.index_of(k) for k in entity_keys(index, nobody)] == [0] * 6
    assert entity_keys(index, [7, "nan"]) == [7, None]
