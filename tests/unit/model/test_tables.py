"""Plain embedding tables: what is looked up, how they start, what they refuse, which names they bear."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from gem.data.schema import PAD, Field
from gem.errors import BundleError
from gem.model.ranker import Ranker, num_parameters, ranker_weights, split_weights, weights_hash
from gem.model.tables import PlainTables, initial_weight, module_key, table_name
from tests.unit.model.synthetic import MODEL, make_schema, make_world

SCHEMA = make_schema()


def test_fields_that_share_a_table_read_the_same_rows() -> None:
    tables = PlainTables(SCHEMA, 4)
    ids = {"town": torch.tensor([3, 7]), "origin": torch.tensor([7]), "type": torch.tensor([4, 4, 0])}
    got = tables(ids)
    assert torch.equal(got["town"][1], got["origin"][0])
    for field, rows in ids.items():
        whole = tables.weights()[SCHEMA.table_of()[field]]
        assert torch.equal(got[field], torch.stack([whole[i] for i in rows.tolist()]))


def test_shared_table_is_as_large_as_its_largest_field_needs() -> None:
    ad = replace(SCHEMA.ad, fields=(*SCHEMA.ad.fields[:-1], Field("origin", "place", 30)))
    assert PlainTables(replace(SCHEMA, ad=ad), 4).weights()["place"].shape == (30, 4)


def test_start_depends_on_seed_and_table_name_only() -> None:
    first, again = initial_weight("brand", 50, 8, 1), initial_weight("brand", 50, 8, 1)
    assert torch.equal(first, again)
    assert torch.equal(initial_weight("brand", 20, 8, 1), first[:20])  # a grown vocabulary keeps the old rows
    assert not torch.equal(first, initial_weight("brand", 50, 8, 2))
    assert not torch.equal(first, initial_weight("type", 50, 8, 1))
    assert not first[PAD].any()
    assert 0.015 < float(first[1:].std()) < 0.025


def test_load_copies_and_refuses_other_names_or_shapes() -> None:
    tables = PlainTables(SCHEMA, 4, seed=1)
    fresh = {k: v + 1 for k, v in PlainTables(SCHEMA, 4, seed=2).weights().items()}
    tables.load_weights(fresh)
    assert all(torch.equal(v, fresh[k]) for k, v in tables.weights().items())
    with pytest.raises(BundleError, match=r"tables: got .*the model has"):
        tables.load_weights({k: v for k, v in fresh.items() if k != "type"})
    with pytest.raises(BundleError, match=r"table type: got shape \(5, 3\), expected \(5, 4\)"):
        tables.load_weights(fresh | {"type": torch.zeros(5, 3)})


# Column names that real tables have and that a torch module cannot hold as they are.
@pytest.mark.parametrize(
    "name", ["type", "items", "values", "keys", "training", "half", "a.b", "", "%", "user id", "%type"]
)
def test_any_column_name_can_be_a_table(name: str) -> None:
    schema = replace(SCHEMA, user=replace(SCHEMA.user, fields=(*SCHEMA.user.fields, Field("odd", name, 4))))
    tables = PlainTables(schema, 4)
    assert torch.equal(tables({"odd": torch.tensor([3])})["odd"][0], tables.weights()[name][3])


def test_module_keys_are_one_to_one_and_plain_names_stay() -> None:
    names = ["type", "%type", "%25type", "type_", "a.b", "a%2Eb", "a%b", "", "%", "items", "user_id", "brand"]
    keys = [module_key(n) for n in names]
    assert len(set(keys)) == len(names)
    assert not any("." in k for k in keys)
    assert module_key("user_id") == "user_id"
    assert [table_name(key) for key in keys] == names


def test_ranker_weights_are_the_state_of_a_ranker() -> None:
    source, target = Ranker(SCHEMA, MODEL, seed=1), Ranker(SCHEMA, MODEL, seed=2)
    weights = ranker_weights(source.dense.state_dict(), source.tables.weights())
    assert weights.keys() == target.state_dict().keys()
    target.load_state_dict(weights)
    batch = make_world(0).batch([0, 1, 2])
    assert torch.equal(source(batch).logits, target(batch).logits)
    for key, value in weights.items():
        assert value.data_ptr() != source.state_dict()[key].data_ptr(), key


def test_weights_split_into_dense_and_tables_by_their_own_names() -> None:
    """The tables of the small world are called "type" and "brand.name" on purpose."""
    source = Ranker(SCHEMA, MODEL, seed=1)
    dense, tables = split_weights(source.state_dict())
    assert dense.keys() == source.dense.state_dict().keys()
    assert tables.keys() == SCHEMA.tables().keys()
    weights = ranker_weights(dense, tables)
    assert all(torch.equal(v, weights[k]) for k, v in source.state_dict().items())


def test_weights_hash_sees_every_name_and_number_and_no_order() -> None:
    weights = {k: v.clone() for k, v in Ranker(SCHEMA, MODEL).state_dict().items()}
    first = weights_hash(weights)
    assert weights_hash(dict(reversed(weights.items()))) == first
    renamed = {("dense.other" if k == "dense.heads.head.bias" else k): v for k, v in weights.items()}
    assert weights_hash(renamed) != first
    weights["dense.heads.head.bias"][0] += 1e-6
    assert weights_hash(weights) != first


def test_parameters_are_counted_by_hand() -> None:
    model = Ranker(SCHEMA, MODEL)
    tables = sum(SCHEMA.tables().values()) * MODEL.dim
    assert num_parameters(model) == {"dense": sum(p.numel() for p in model.dense.parameters()), "tables": tables}
    assert all(re.match(r"(dense|tables)\.", n) for n, _ in model.named_parameters())
