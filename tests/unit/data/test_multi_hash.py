"""Open vocabularies: hashed rows, their encoding in every place a value can stand, collisions, and models over them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch

from gem.config import ModelConfig
from gem.data.batch import check_batch
from gem.data.collate import ImpressionRows, collate
from gem.data.encoding import Encoder
from gem.data.fitting import EntityCounts, TrainCounts, fit_encoder, grow_encoder, table_figures
from gem.data.hashed_vocabulary import HashedVocabulary, collision_rate
from gem.data.hashing import stable_hash64
from gem.data.past import num_signals, past_matches
from gem.data.rows import SideRows
from gem.data.schema import NULL, NUM_RESERVED
from gem.data.spec import DatasetSpec, parse_spec
from gem.data.store import Timelines
from gem.data.vocabulary import Vocabulary, count_values
from gem.errors import SpecError
from gem.model.matches import one_number
from gem.model.ranker import Ranker
from tests.unit.data.test_encoding import counts
from tests.unit.data.toy_log import SPEC

WORDS = {"hash_rows": 1000, "table": "words"}
TIME_MS = np.array([1_709_542_800_000] * 4, np.int64)


def hashed_spec(**device: Any) -> DatasetSpec:
    town = {"name": "town", "kind": "categorical", "hashes": 2, **WORDS}
    tags = {"name": "tags", "kind": "multi", **WORDS}
    return parse_spec(
        SPEC
        | {
            "users": {"table": "people", "key": "person", "hash_rows": 40, "hashes": 3, "features": [town]},
            "ads": {"table": "items", "key": "item", "features": [tags]},
            "context": {"features": [{"name": "device", "kind": "categorical", **WORDS, **device}]},
        }
    )


def train_counts() -> TrainCounts:
    users = pa.table({"key": [1, 2, 3], "town": ["a", "b", "a"]})
    ads = pa.table({"key": [8, 9], "tags": [["x", "y"], ["x"]]})
    seen = (np.array([1, 3, 0]), np.array([5, 2]))
    sides = [EntityCounts(t, s, s) for t, s in zip((users, ads), seen, strict=True)]
    return TrainCounts(*sides, counts(**{"1": 100}), {"device": counts(ios=9, a=1)})


def make() -> Encoder:
    return fit_encoder(hashed_spec(), train_counts())


def test_a_value_has_its_rows_and_nothing_else_decides_them() -> None:
    vocabulary = HashedVocabulary(1000, 3)
    values = [5, -7, 2**53 + 1, None, 2**63 - 1]
    rows = vocabulary.lookup(pa.array(values), "f")
    assert rows.shape == (5, 3) and rows[3].tolist() == [NULL] * 3
    words = pa.array([None if v is None else str(v) for v in values])
    assert vocabulary.lookup(words, "f").tolist() == rows.tolist()
    for i, word in enumerate(words):
        assert vocabulary.lookup(pa.array([word.as_py()], pa.string()), "f").tolist() == [rows[i].tolist()]
    others = np.delete(vocabulary.lookup(words, "g"), 3, 0)
    assert not (others == np.delete(rows, 3, 0)).all(axis=1).any()


def test_rows_are_spread_evenly_and_the_hashes_are_independent() -> None:
    rows = HashedVocabulary(64, 2).lookup(pa.array(np.arange(64_000)), "f") - NUM_RESERVED
    assert rows.min() == 0 and rows.max() == 63
    for counted in (np.bincount(rows[:, 0]), np.bincount(rows[:, 1]), np.bincount((rows[:, 0] - rows[:, 1]) % 64)):
        # chi-square with 63 degrees of freedom: mean 63, standard deviation 11.2; five of them above
        assert ((counted - 1000) ** 2 / 1000).sum() < 63 + 5 * 11.2


@pytest.mark.parametrize(("hash_rows", "hashes"), [(20_000, 1), (150, 2), (40, 3)])
def test_collisions_are_as_many_as_chance_makes(hash_rows: int, hashes: int) -> None:
    """Expected share 1 - E[(1 - p)^(n - 1)], p the probability of one's own multiset of rows, by drawing them."""
    num = 10_000
    rate = collision_rate(HashedVocabulary(hash_rows, hashes).lookup(pa.array(np.arange(num)), "f"))
    drawn = np.sort(np.random.default_rng(0).integers(0, hash_rows, (20_000, hashes)), axis=1)
    same = np.stack([(drawn == drawn[:, [i]]).sum(1) for i in range(hashes)], 1)
    orders = {1: {1: 1}, 2: {2: 2, 4: 1}, 3: {3: 6, 5: 3, 9: 1}}[hashes]  # equal pairs -> orders of the multiset
    p = np.vectorize(orders.__getitem__)(same.sum(1)) / hash_rows**hashes
    expected = 1 - np.mean((1 - p) ** (num - 1))
    assert rate == pytest.approx(expected, abs=5 * np.sqrt(2 * expected / num))
    assert 0.1 < expected < 0.9


def test_the_report_counts_values_and_collisions() -> None:
    figures = table_figures(hashed_spec(), make(), train_counts())
    assert figures["words"] == {"rows": 1003, "values": 6, "collision_rate": 0.0}  # town a b, tags x y, device ios a
    assert figures["user_id"]["values"] == 2 and figures["user_id"]["rows"] == 43
    assert figures["ad_id"] == {"rows": 5, "values": 2, "collision_rate": 0.0}
    assert figures["hour"] == {"rows": 27, "values": 24, "collision_rate": 0.0}
    narrow = hashed_spec(table="device", hash_rows=1)
    figures = table_figures(narrow, fit_encoder(narrow, train_counts()), train_counts())
    assert figures["device"] == {"rows": 4, "values": 2, "collision_rate": 1.0}


def test_one_table_serves_several_features_and_parts_their_values() -> None:
    encoder = make()
    words = [f for side in (encoder.schema.user, encoder.schema.ad, encoder.schema.context) for f in side.fields]
    got = {f.name: (f.table, f.rows, f.multi, f.hashes) for f in words if f.name in ("town", "tags", "device")}
    assert got == {name: ("words", 1003, True, k) for name, k in (("town", 2), ("tags", 0), ("device", 2))}
    assert encoder.schema.tables()["words"] == 1003
    towns = encoder.encode_columns("user", {"town": ["a"]}, 1)["town"].to_pylist()
    devices = encoder.encode_columns("context", {"device": ["a"]}, 1)["device"].to_pylist()
    assert towns != devices


@pytest.mark.parametrize("device", [{"hash_rows": 900}, {"hashes": 3}, {"hash_rows": None}])
def test_fields_of_one_table_must_agree(device: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match='embedding table "words": town has hash_rows: 1000, hashes: 2, device has '):
        fit_encoder(hashed_spec(**device), train_counts())


def test_entities_with_hashed_ids_and_features() -> None:
    encoder = make()
    raw = pa.table({"key": pa.array([None, 2, 77], pa.int64()), "town": [None, "b", "never seen"]})
    out = encoder.encode_entities("user", raw)
    ids, towns = out["user_id"].to_pylist(), out["town"].to_pylist()
    assert ids[0] == [NULL] * 3 and towns[0] == [NULL] * 2
    assert all(len(i) == 3 and min(i) >= NUM_RESERVED and max(i) < 43 for i in ids[1:])
    assert all(len(t) == 2 and min(t) >= NUM_RESERVED for t in towns[1:])
    text = encoder.encode_entities("user", raw.set_column(0, "key", raw["key"].cast(pa.string())))
    assert text["user_id"].to_pylist() == ids
    lists = pa.array([["x", "new"], [], None, ["x"]])
    tags = encoder.encode_entities("ad", pa.table({"key": [8, 9, 1, 2], "tags": lists}))["tags"].to_pylist()
    assert [len(t) for t in tags] == [4, 0, 1, 2] and tags[2] == [NULL] and tags[0][:2] == tags[3]


def test_a_request_hashes_like_a_row_of_the_log() -> None:
    encoder = Encoder.from_json(make().to_json())
    served = encoder.encode_context({"device": [5, "ios", None, "new"]}, TIME_MS, ["1"] * 4)
    logged = encoder.encode_context({"device": pa.array(["5", "ios", None, "new"])}, TIME_MS, pa.array([1] * 4))
    assert served.offsets["device"].tolist() == [0, 2, 4, 6, 8] == logged.offsets["device"].tolist()
    assert served.ids["device"].tolist() == logged.ids["device"].tolist()
    assert served.ids["device"].tolist()[4:6] == [NULL, NULL]
    assert encoder.encode_context({}, TIME_MS, [None] * 4).ids["device"].tolist() == [NULL] * 8


def test_open_vocabularies_do_not_grow() -> None:
    encoder = make()
    later = train_counts()
    later = TrainCounts(later.user, later.ad, later.surfaces, {"device": counts(ios=9, a=1, new=50)})
    assert grow_encoder(hashed_spec(), encoder, later) is encoder


def test_a_million_texts_have_a_million_hashes() -> None:
    """Short, long, and differing in one character; the chance of any equal pair is 10^12 / 2^65."""
    number = pa.array(np.arange(250_000)).cast(pa.string())
    join = pc.binary_join_element_wise
    kinds = [("u", ""), ("https://example.org/very/long/path?item=", "&ref=home"), ("", "é"), ("0", "\0")]
    parts = [join(a, number, b, "") for a, b in kinds]
    hashes = stable_hash64(pa.chunked_array(parts), "s")
    assert len(np.unique(hashes)) == 10**6
    assert abs(np.unpackbits(hashes.view(np.uint8)).mean() - 0.5) < 0.001
    some = np.random.default_rng(0).integers(0, 250_000, 50)
    for k, part in enumerate(parts):  # a hash does not depend on the rows around it
        alone = [int(stable_hash64(part.slice(i, 1), "s")[0]) for i in some.tolist()]
        assert alone == hashes[k * 250_000 + some].tolist()


def test_texts_of_every_length_differ_from_their_prefixes() -> None:
    texts = ["ab" * n + "c" * odd for n in range(200) for odd in (0, 1)] + [
        "x" * n + "\0" * z for n in range(20) for z in range(1, 9)
    ]
    hashes = stable_hash64(pa.array(texts))
    assert len(set(hashes.tolist())) == len(set(texts)) == len(texts)
    assert stable_hash64(pa.array(["", *texts]).slice(1)).tolist() == hashes.tolist()


def test_a_model_reads_hashed_ids_and_finds_hashed_matches() -> None:
    """With a table so large that nothing collides, matches are those of a vocabulary, and gradients reach the rows."""
    parts = {}
    for name, extra in (("plain", {}), ("open", {"hash_rows": 10**6})):
        maker = {"name": "maker", "kind": "categorical", **extra}
        people = SPEC["users"] | {"features": [], **extra}
        spec = parse_spec(SPEC | {"users": people, "ads": SPEC["ads"] | {"features": [maker], **extra}, "context": {}})
        users = pa.table({"key": pa.array([None, 1, 2, 3], pa.int64())})
        makers = pa.array([None, "m", "n", "m", "n", None])
        ads = pa.table({"key": pa.array([None, 1, 2, 3, 4, 5], pa.int64()), "maker": makers})
        seen = [EntityCounts(t.slice(1), np.full(len(t) - 1, 5), np.full(len(t) - 1, 5)) for t in (users, ads)]
        parts[name] = (fit_encoder(spec, TrainCounts(*seen, count_values(pa.array(["1"])))), users, ads)
    found = {}
    for name, (encoder, users, ads) in parts.items():
        batch = tiny_batch(encoder, users, ads)
        schema = encoder.schema
        check_batch(batch, {f.name: f.rows for s in (schema.user, schema.ad, schema.context) for f in s.fields})
        ranker = Ranker(schema, ModelConfig(dim=8, num_layers=1, num_heads=2, representation_dim=8), seed=0)
        matches = ranker.dense.inputs.counts
        found[name] = matches.counts(batch, 10)
        assert [f.name for f in matches.fields] == ["maker"]
        ranker(batch).logits.sum().backward()
        grad = ranker.tables.tables["ad_id"].weight.grad
        assert len(grad.abs().sum(1).nonzero()) >= 2
    assert torch.equal(found["plain"], found["open"]) and bool(found["plain"].any())


def tiny_batch(encoder: Encoder, users: pa.Table, ads: pa.Table) -> Any:
    """Users 1..3 with 5 events each and two impressions each, over all ads."""

    class Source:
        def __init__(self, side: Any, table: pa.Table) -> None:
            self.side = SideRows(side, {n: table[n].combine_chunks() for n in table.column_names}, table.num_rows)

        def rows(self, idx: Any) -> Any:
            return self.side.take(idx)

    rng = np.random.default_rng(0)
    time_ms = np.tile(np.arange(5) * 60_000, 3)
    timelines = Timelines(
        offsets=np.array([0, 0, 5, 10, 15]), ad=rng.integers(0, 6, 15).astype(np.int32), kind=np.ones(15, np.uint8),
        flags=np.zeros(15, np.uint16), surface=np.full(15, 3, np.int16), dwell=np.zeros(15, np.uint8),
        time_ms=time_ms, known_ms=time_ms,
    )  # fmt: skip
    when = np.full(6, 10**6)
    rows = ImpressionRows(
        user=np.array([1, 1, 2, 2, 3, 3]), ad=np.array([1, 2, 3, 4, 5, 0]), time_ms=when, cut=np.full(6, 5),
        surface=np.full(6, 3), context=encoder.encode_context({}, when, ["1"] * 6), labels=np.zeros((6, 2), np.float32),
        mask=np.ones((6, 2), np.float32), impression_id=np.arange(6),
        past=np.zeros((6, len(past_matches(encoder.schema)), num_signals(encoder.schema)), np.float32),
    )  # fmt: skip
    sources = (
        Source(encoder.schema.user, encoder.encode_entities("user", users)),
        Source(encoder.schema.ad, encoder.encode_entities("ad", ads)),
    )
    return collate(*sources, timelines, rows, 10)


def test_many_rows_become_one_number_that_is_equal_where_they_are() -> None:
    rows = torch.from_numpy(np.random.default_rng(0).integers(3, 1003, (20_000, 2)))
    rows[5], rows[6] = torch.tensor([7, 9]), torch.tensor([9, 7])
    numbers = one_number(rows.flatten(), 2)
    assert len(numbers.unique()) == len(rows.unique(dim=0)) and int(numbers.min()) >= NUM_RESERVED
    assert one_number(torch.tensor([NULL, NULL, 0, 0]), 2).tolist() == [NULL, 0]
    assert isinstance(make().vocabularies["ad_id"], Vocabulary)
