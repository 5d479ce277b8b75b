"""Cost of a model: memory of a rank by hand, workloads and the batches they become, parts, planned schemas."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from gem.config import ModelConfig, WorldConfig
from gem.data.batch import check_batch
from gem.data.schema import Schema
from gem.data.spec import load_spec
from gem.errors import ConfigError
from gem.model.cost import PARTS, Cost, Plan, Workload, cost, memory, rows_on_fullest_rank, synthetic_batch
from gem.model.cost import training_flops as training_flops_of
from gem.model.gem import build_model
from gem.model.planned import generated_schema, large_schema
from gem.model.ranker import Ranker, num_parameters
from tests.unit.model.synthetic import MODEL, make_schema

SCHEMA = make_schema()
WORK = Workload(history=12, impressions_per_user=3, first_seen=0.5)
HAND = Cost(
    dim=8,
    tables={"users": 10_001, "ads": 100, "towns": 40, "tags": 8_000},
    dense_parameters=1001,
    largest_block=500,
    parts={"towers": 10.0, "heads": 5.5},
    activation_bytes=100.0,
    lookup_bytes=64.0,
)


def rows_of(schema: Schema) -> dict[str, int]:
    return {f.name: f.rows for side in (schema.user, schema.ad, schema.context) for f in side.fields}


def test_sums() -> None:
    assert HAND.table_rows == 18_141 and HAND.table_parameters == 8 * 18_141
    assert HAND.forward_flops == 15.5 and HAND.training_flops == 46.5


def test_memory_of_a_rank_by_hand() -> None:
    got = memory(HAND, Plan(world=4, rank_impressions=10))
    rows = 2501 + 100 + 2000  # "ads" is the second table and lies whole on rank 1, "towns" on rank 2
    assert (got.tables, got.table_moments) == (rows * 8 * 4, rows * 4)
    assert (got.dense, got.gathered) == (251 * 16, 3 * 500 * 4)
    assert (got.activations, got.lookups) == (1000, 640)
    assert got.total == rows * 36 + 251 * 16 + 6000 + 1640


def test_one_rank_holds_everything_and_gathers_nothing() -> None:
    got = memory(HAND, Plan(world=1, rank_impressions=1))
    assert got.tables == HAND.table_parameters * 4 and got.dense == 1001 * 16 and got.gathered == 0


def test_replicated_dense_is_whole_on_every_rank_with_its_buckets() -> None:
    got = memory(HAND, Plan(world=4, rank_impressions=1, shard_dense=False))
    assert got.dense == 1001 * 16 and got.gathered == 1001 * 4


def test_no_row_is_lost_on_the_way_to_the_ranks() -> None:
    for world in (1, 2, 3, 7):
        fullest = rows_on_fullest_rank(HAND.tables, Plan(world=world))
        assert HAND.table_rows / world <= fullest <= HAND.table_rows


@pytest.mark.parametrize("work", [WORK, Workload(history=0), Workload(5, 0.5, 1.0, num_users=2), Workload(3, 2.5)])
def test_a_workload_becomes_that_batch(work: Workload) -> None:
    batch = synthetic_batch(SCHEMA, work, MODEL)
    check_batch(batch, rows_of(SCHEMA))
    num = round(work.num_users * work.impressions_per_user)
    users = min(work.num_users, num)
    events = users * min(work.history, MODEL.max_history)
    assert (len(batch), len(batch.users), batch.timeline.ad.numel()) == (num, users, events)
    shown = num + work.num_users * min(work.history, MODEL.max_history)
    assert len(batch.ads) <= max(round(work.first_seen * shown), 1)
    assert len(batch.ads) >= min(round(work.first_seen * shown), num + events)


def test_flops_per_impression_do_not_depend_on_the_number_of_users() -> None:
    some = cost(SCHEMA, MODEL, dataclasses.replace(WORK, num_users=2))
    more = cost(SCHEMA, MODEL, dataclasses.replace(WORK, num_users=8))
    for part in PARTS:
        assert more.parts[part] == pytest.approx(some.parts[part], rel=0.03), part
    assert more.activation_bytes == pytest.approx(some.activation_bytes, rel=0.1)


def test_sharing_a_timeline_makes_an_impression_cheaper() -> None:
    alone, shared = (cost(SCHEMA, MODEL, Workload(6, impressions_per_user=n, first_seen=0.5)).parts for n in (1.0, 8.0))
    assert shared["events"] < alone["events"] / 4
    assert shared["interaction"] == alone["interaction"] and shared["heads"] == alone["heads"]


def test_parameters_are_those_of_the_model() -> None:
    real = num_parameters(Ranker(SCHEMA, MODEL))
    got = cost(SCHEMA, MODEL, WORK)
    assert (got.dense_parameters, got.table_parameters) == (real["dense"], real["tables"])
    assert 0 < got.largest_block < got.dense_parameters


def test_every_part_of_gem_is_named() -> None:
    parts = cost(SCHEMA, MODEL, WORK).parts
    assert tuple(parts) == PARTS and all(flops > 0 for flops in parts.values())
    layers = build_model(SCHEMA, dataclasses.replace(MODEL, num_layers=4))
    assert cost(SCHEMA, layers.config, WORK).parts["heads"] == parts["heads"]


def test_a_real_batch_is_counted_as_it_is() -> None:
    batch = synthetic_batch(SCHEMA, WORK, MODEL)
    assert cost(SCHEMA, MODEL, batch) == cost(SCHEMA, MODEL, WORK)
    assert training_flops_of(SCHEMA, MODEL, batch) == cost(SCHEMA, MODEL, WORK).training_flops


def test_a_baseline_is_costed_too() -> None:
    din = cost(SCHEMA, dataclasses.replace(MODEL, arch="din"), WORK)
    assert din.parts["reading"] == 0 < din.parts["interaction"]


@pytest.mark.parametrize(
    "wrong", [{"history": -1}, {"impressions_per_user": 0.1}, {"first_seen": 0.0}, {"num_users": 0}]
)
def test_impossible_workloads(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"workload: got .* allowed"):
        Workload(**wrong)  # type: ignore[arg-type]


def test_generated_schema_follows_its_spec() -> None:
    spec = load_spec(Path("pipelines/datasets/generated.yaml"))
    schema = generated_schema(WorldConfig())
    sides = {"users": schema.user, "ads": schema.ad, "context": schema.context}
    for name, own in (("users", spec.users), ("ads", spec.ads), ("context", spec.context)):
        assert own is not None
        by_kind = {k: [f.name for f in own.features if f.kind == k] for k in ("numeric", "embedding")}
        ids = [f.name for f in own.features if f.kind in ("categorical", "multi")]
        assert [f.name for f in sides[name].fields if f.name in ids] == ids
        assert list(sides[name].numeric) == by_kind["numeric"]
        assert [v for v, _ in sides[name].vectors] == by_kind["embedding"]
    assert [t.name for t in schema.tasks] == list(spec.labels)
    assert set(schema.kinds) == {e.kind for e in spec.events}
    assert schema.surfaces[3:] == tuple(spec.surfaces.objective)


def test_the_large_schema_is_planned_for_billions_of_rows() -> None:
    schema = large_schema()
    assert sum(schema.tables().values()) > 2e9
    batch = synthetic_batch(schema, Workload(4, 2), ModelConfig(dim=8, num_heads=2))
    check_batch(batch, rows_of(schema))
    assert batch.ads.vectors.shape[1] == 768 and torch.isfinite(batch.ads.vectors).all()
