"""Sharded tables against plain row-wise AdaGrad in float64: tables fetched whole, tables read by row, shared ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from gem.data.schema import Field, Schema, Side
from gem.training.sharding import ShardedTables

DIM, RATE = 4, 0.3
ROWS = {"small": 6, "large": 40, "both": 9}
FIELDS = {"a": "small", "b": "large", "c": "both", "d": "both"}
# The small table has fewer rows than ids; "both" is fetched whole for c and read by row for d.
COUNTS = {"a": 25, "b": 30, "c": 20, "d": 5}


@pytest.fixture
def tables() -> Iterator[ShardedTables]:
    fields = tuple(Field(name, table, ROWS[table]) for name, table in FIELDS.items())
    schema = Schema(Side(fields), Side(), Side(), (), (), (), (), (), ())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield ShardedTables(schema, DIM, RATE, seed=3)
    finally:
        dist.destroy_process_group()


def test_lookups_and_updates_are_those_of_row_wise_adagrad(tables: ShardedTables) -> None:
    generator = torch.Generator().manual_seed(5)
    want = {name: w.double().clone() for name, w in tables.weights().items()}
    sums = {name: torch.zeros(rows, dtype=torch.float64) for name, rows in ROWS.items()}
    for _ in range(3):
        ids = {f: torch.randint(0, ROWS[t] - 1, (COUNTS[f],), generator=generator) for f, t in FIELDS.items()}
        given = {f: torch.randn(n, DIM, generator=generator) for f, n in COUNTS.items()}
        found = tables.lookup(ids)
        for f, rows in found.items():
            torch.testing.assert_close(rows.detach().double(), want[FIELDS[f]][ids[f]], rtol=1e-5, atol=1e-6)
        torch.autograd.backward([found[f] for f in given], list(given.values()))
        for name in ROWS:
            for row in range(ROWS[name]):
                parts = [
                    given[f][i].double()
                    for f, table in FIELDS.items()
                    if table == name
                    for i in range(COUNTS[f])
                    if int(ids[f][i]) == row
                ]
                if parts:
                    gradient = torch.stack(parts).sum(0)
                    sums[name][row] += (gradient**2).mean()
                    want[name][row] -= RATE * gradient / (sums[name][row].sqrt() + 1e-8)
        for name in ROWS:
            torch.testing.assert_close(tables.weights()[name].double(), want[name], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(tables.moments()[name].double(), sums[name], rtol=1e-5, atol=1e-5)
    # The last row of every table was never read: it has not moved.
    assert all(float(sums[name][-1]) == 0.0 for name in ROWS)
