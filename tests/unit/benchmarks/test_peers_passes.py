"""Passes of a peer over the training rows: with fresh tables the second begins as the first did, but for the rest."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.benchmarks.peers import run_peer


class Toy:
    """A table, a line above it, and notes of both before every step."""

    EVERY_TASK = False

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.module = nn.Sequential(nn.Embedding(5, 2), nn.Linear(2, 1))
        self.optimizer: torch.optim.Optimizer = torch.optim.Adam(self.module.parameters(), lr=0.1)
        self.met: list[tuple[Tensor, Tensor, int]] = []

    def step(self, batch: dict[str, Tensor]) -> None:
        table, line = self.module[0].weight, self.module[1].weight
        self.met.append((table.detach().clone(), line.detach().clone(), len(self.optimizer.state)))
        self.optimizer.zero_grad()
        self.module(batch["ids"]).square().sum().backward()
        self.optimizer.step()

    def predict_batch(self, batch: dict[str, Tensor]) -> Tensor:
        return torch.sigmoid(self.module(batch["ids"]))


@pytest.mark.parametrize("fresh", [0, 1])
def test_tables_begin_the_second_pass_anew_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch, fresh: int) -> None:
    rows = [np.arange(5), np.arange(3)]
    monkeypatch.setattr(run_peer, "in_time_order", lambda *_: rows)
    batches: Any = SimpleNamespace(take=lambda at: {"ids": torch.from_numpy(at)})
    peer = Toy()
    run_peer.train(peer, batches, SimpleNamespace(epochs=2, fresh_tables=fresh, batch_size=5, seed=0))  # type: ignore[arg-type]
    (table, line, states), (again, later, left) = peer.met[0], peer.met[2]
    assert torch.equal(table, again) == bool(fresh) and not torch.equal(line, later)
    assert (states, left) == (0, 2 if fresh else 3)
    assert run_peer.num_parameters(peer.module) == {"dense": 3, "tables": 10}
