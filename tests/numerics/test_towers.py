"""Side towers and pooling against loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gem.data.batch import EntityRows
from gem.data.schema import Field, Side
from gem.model.towers import CreativeToken, SideTower, mean_pool
from tests.numerics.naive import check_gradients, doubles, gelu, linear, loud, norm, weights


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
    w = weights(tower)
    for b in range(5):
        start, end = rows.offsets["tags"][b : b + 2].tolist()
        tags = emb["tags"][start:end].double().mean(0).numpy() if end > start else np.zeros(dim)
        flat = np.concatenate([tags, emb["x"][b], rows.numeric[b], rows.vectors[b]]).astype(np.float64)
        hidden = gelu(linear(w, "compress.1", norm(w, "compress.0", flat)))
        rest = linear(w, "expand", hidden).reshape(num_tokens - 1, dim)
        np.testing.assert_allclose(got[b].detach().numpy(), np.vstack([emb["id"][b].numpy(), rest]), atol=1e-5)


def test_tower_with_nothing_but_an_id_repeats_it() -> None:
    side = Side((Field("id", "id", 9),))
    emb = {"id": torch.randn(2, 4)}
    out = SideTower(side, 4, 3)(EntityRows({}, {}, torch.zeros(2, 0), torch.zeros(2, 0)), emb)
    assert torch.equal(out, emb["id"].unsqueeze(1).expand(2, 3, 4))


def test_gradients_of_towers_are_finite_differences() -> None:
    side, rows, emb = rows_and_embeddings(3, 2)
    rows = EntityRows({}, rows.offsets, rows.numeric.double(), rows.vectors.double())
    given = [doubles(*emb[n].shape) for n in ("id", "tags", "x")]
    check_gradients(
        SideTower(side, 2, 2), lambda run, *e: run(rows, dict(zip(("id", "tags", "x"), e, strict=True))), *given
    )


def test_creative_token_projects_the_frozen_vectors() -> None:
    side = Side((Field("id", "id", 9),), (), (("text", 3), ("image", 2)))
    token, vectors = loud(CreativeToken(side, 4)), torch.randn(6, 5)
    got, w = token(vectors), weights(token, "project.")
    assert got.shape == (6, 1, 4)
    for a in range(6):
        hidden = gelu(linear(w, "1", norm(w, "0", vectors[a].double().numpy())))
        np.testing.assert_allclose(got[a, 0].detach().numpy(), linear(w, "3", hidden), atol=1e-5)
    check_gradients(CreativeToken(side, 2), lambda run, v: run(v), doubles(2, 5))
