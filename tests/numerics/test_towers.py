"""Side towers and pooling against loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from gem.data.batch import EntityRows
from gem.data.schema import Field, Side
from gem.model.towers import SideTower, mean_pool


@pytest.mark.parametrize("lengths", [[], [0], [3], [0, 0], [2, 0, 5, 1, 0], [0, 4]])
def test_mean_pool_is_the_mean_of_each_row(lengths: list[int]) -> None:
    values = torch.randn(sum(lengths), 4)
    offsets = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int64)
    expected, at = [], 0
    for n in lengths:
        rows = values[at : at + n].double()
        expected.append([sum(r[d] for r in rows.tolist()) / n if n else 0.0 for d in range(4)])
        at += n
    np.testing.assert_allclose(mean_pool(values, offsets).numpy(), np.array(expected).reshape(-1, 4), atol=1e-6)


def test_mean_pool_gradient_is_shared_equally() -> None:
    values = torch.randn(4, 2, requires_grad=True)
    mean_pool(values, torch.tensor([0, 3, 3, 4])).sum().backward()
    assert torch.allclose(values.grad, torch.tensor([[1 / 3] * 2] * 3 + [[1.0] * 2]))


def rows_and_embeddings(num: int, dim: int) -> tuple[Side, EntityRows, dict[str, torch.Tensor]]:
    side = Side(
        (Field("id", "id", 9), Field("tags", "tags", 9, multi=True), Field("x", "x", 9)), ("a", "b"), (("v", 3),)
    )
    offsets = torch.tensor([0, *np.cumsum(np.arange(num) % 3)])
    emb = {"id": torch.randn(num, dim), "x": torch.randn(num, dim), "tags": torch.randn(int(offsets[-1]), dim)}
    return side, EntityRows({}, {"tags": offsets}, torch.randn(num, 4), torch.randn(num, 3)), emb


def test_tower_keeps_the_first_field_and_compresses_the_rest() -> None:
    dim, num_tokens = 4, 3
    side, rows, emb = rows_and_embeddings(5, dim)
    tower = SideTower(side, dim, num_tokens)
    got = tower(rows, emb)
    w = {k: v.detach().double().numpy() for k, v in tower.state_dict().items()}
    for b in range(5):
        start, end = rows.offsets["tags"][b : b + 2].tolist()
        tags = emb["tags"][start:end].double().mean(0).numpy() if end > start else np.zeros(dim)
        flat = np.concatenate([tags, emb["x"][b], rows.numeric[b], rows.vectors[b]]).astype(np.float64)
        normed = (flat - flat.mean()) / math.sqrt(flat.var() + 1e-5) * w["compress.0.weight"] + w["compress.0.bias"]
        hidden = w["compress.1.weight"] @ normed + w["compress.1.bias"]
        hidden = np.array([0.5 * h * (1 + math.erf(h / math.sqrt(2))) for h in hidden])
        rest = (w["compress.3.weight"] @ hidden + w["compress.3.bias"]).reshape(num_tokens - 1, dim)
        np.testing.assert_allclose(got[b].detach().numpy(), np.vstack([emb["id"][b].numpy(), rest]), atol=1e-5)


def test_tower_with_nothing_but_an_id_repeats_it() -> None:
    side = Side((Field("id", "id", 9),))
    emb = {"id": torch.randn(2, 4)}
    out = SideTower(side, 4, 3)(EntityRows({}, {}, torch.zeros(2, 0), torch.zeros(2, 0)), emb)
    assert torch.equal(out, emb["id"].unsqueeze(1).expand(2, 3, 4))
