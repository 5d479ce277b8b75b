"""The whole model against its parts one after the other; batches, seeds, and log probabilities of the entire space."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from gem.config import ModelConfig
from gem.data.batch import check_batch
from gem.model.gem import build_model
from gem.model.heads import Output, log_probabilities, probabilities
from gem.model.inputs import Encoded
from gem.model.levels import plan_memory
from gem.training.objective import log_complements
from tests.numerics.naive import Array, weights
from tests.numerics.test_block_attention import naive_block_attention
from tests.numerics.test_heads import naive_output
from tests.numerics.test_interformer import naive_ffn, naive_reading
from tests.numerics.test_pyramid import naive_memory
from tests.numerics.test_wukong import naive_layer, naive_look_back
from tests.unit.model.synthetic import MODEL, World, loud_ranker, make_schema, make_world

WORLD = make_world(0)
NUM = len(WORLD.impressions)
MODEL_OF_WORLD = loud_ranker(WORLD.schema)


def logits_by_id(world: World, at: list[int] | np.ndarray) -> dict[int, torch.Tensor]:
    """impression id -> logits [K], scored in one batch."""
    batch = world.batch(at)
    check_batch(batch, world.rows_of())
    with torch.inference_mode():
        out = MODEL_OF_WORLD(batch)
    return dict(zip(batch.impression_id.tolist(), out.logits, strict=True))


def assert_same(a: dict[int, torch.Tensor], b: dict[int, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for key, value in a.items():
        torch.testing.assert_close(value, b[key], atol=1e-5, rtol=1e-5)


def test_the_model_is_not_trivial() -> None:
    got = torch.stack(list(logits_by_id(WORLD, np.arange(NUM)).values()))
    assert got.std(0).min() > 0.3


def naive_gem(model: nn.Module, encoded: Encoded, config: ModelConfig, n: int) -> Array:
    """Logits of impression n by loops, from the encoded inputs of its batch."""
    batch, plan = encoded.batch, plan_memory(encoded.batch, config)
    tokens, candidate, user, events = (
        v.detach().double().numpy() for v in (encoded.tokens, encoded.candidate, encoded.user, encoded.events)
    )
    q, people = candidate[n], [user[u].reshape(-1) for u in plan.user_of.tolist()]
    memory = naive_memory(model.pyramid, batch, config, events)
    outputs = [tokens[n]]
    for layer in model.layers:
        x = outputs[-1]
        if layer.look_back is not None:
            x = naive_look_back(weights(layer.look_back), x, outputs[:-1])
        if layer.sequence.ffn is not None:
            w = weights(layer.sequence.ffn)
            memory = memory + np.array([naive_ffn(w, m, p) for m, p in zip(memory, people, strict=True)])
        memory = memory + naive_block_attention(layer.sequence.attention, config.num_heads, plan, memory, config.block)
        if layer.reading is not None:
            x = np.concatenate([x, naive_reading(layer.reading, (x, q, memory), (batch, plan, n), config)])
        outputs.append(naive_layer(layer.interact, x))
    last = outputs[-1]
    if model.late is not None:
        last = np.concatenate([last, naive_reading(model.late, (last, q, memory), (batch, plan, n), config)])
    return naive_output(model.heads, last.reshape(-1), int(batch.surface[n]), tokens[n].reshape(-1))[0]


@pytest.mark.parametrize("interleaving", ["separate", "one_way", "both"])
def test_the_whole_network_is_its_parts_one_after_the_other(interleaving: str) -> None:
    config = replace(
        MODEL, interleaving=interleaving, num_layers=3, num_levels=2, block=3, window=2, max_history=12,
        event_attention=True, num_pma=1, num_recent=2,
    )  # fmt: skip
    ranker = loud_ranker(WORLD.schema, config)
    cut = WORLD.impressions.cut
    at = [int(np.argmax(cut)), int(np.flatnonzero(cut == 0)[0]), int(np.flatnonzero(cut == 1)[0]), 5]
    batch = WORLD.batch(at, config.max_history, config.align)
    with torch.inference_mode():
        encoded = ranker.dense.inputs(batch, ranker.tables(batch.lookups()))
        got = ranker(batch).logits.numpy()
    expected = [naive_gem(ranker.dense, encoded, config, n) for n in range(len(batch))]
    np.testing.assert_allclose(got, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("seed", range(3))
def test_order_and_split_of_a_batch_do_not_matter(seed: int) -> None:
    rng = np.random.default_rng(seed)
    whole = logits_by_id(WORLD, np.arange(NUM))
    assert_same(whole, logits_by_id(WORLD, rng.permutation(NUM)))
    parts: dict[int, torch.Tensor] = {}
    cuts = np.sort(rng.choice(np.arange(1, NUM), 6, replace=False))
    for at in np.split(rng.permutation(NUM), cuts):
        parts |= logits_by_id(WORLD, at)
    assert_same(whole, parts)


def test_weights_depend_on_the_seed_only_and_leave_the_global_generator_alone() -> None:
    schema = make_schema()
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = build_model(schema, MODEL, 7).state_dict()
    assert torch.equal(state, torch.get_rng_state())
    torch.rand(3)
    second, other = build_model(schema, MODEL, 7).state_dict(), build_model(schema, MODEL, 8).state_dict()
    assert all(torch.equal(first[k], second[k]) for k in first)
    assert any(not torch.equal(first[k], other[k]) for k in first)


LOGITS = [-90.0, -30.0, -17.0, -5.0, -1.0, 0.0, 0.5, 3.0, 15.0, 17.0, 40.0, 88.0]


def reference(a: float, b: float) -> tuple[float, float, float, float]:
    """(log p_click, log p_cv, log(1 - p_click), log(1 - p_cv)) of click logit a and conversion logit b, exactly."""
    from decimal import Decimal, localcontext

    with localcontext() as context:
        context.prec = 60  # beyond float64; 1 - 1e-40 still has 20 digits
        x, y = (Decimal(-v).exp() for v in (a, b))
        p, q = 1 / (1 + x), 1 / ((1 + x) * (1 + y))
        return float(p.ln()), float(q.ln()), float((1 - p).ln()), float((1 - q).ln())


@pytest.mark.parametrize("a", LOGITS)
def test_log_probabilities_and_complements_are_exact_everywhere(a: float) -> None:
    schema = make_schema()
    logits = torch.tensor([[a, b] for b in LOGITS])
    got = torch.cat([log_probabilities(logits, schema), log_complements(logits, schema)], 1)
    expected = np.array([reference(a, b) for b in LOGITS])
    np.testing.assert_allclose(got.numpy(), expected, rtol=3e-6, atol=1e-37)
    hot = logits.clone().requires_grad_()
    log_complements(hot, schema).sum().backward()
    # d log(1 - p_click) / da = -p_click; d log(1 - p_cv) / da = -p_cv (1 - p_click) / (1 - p_cv), by hand
    log_p, log_cv, log_not, log_not_cv = expected.T
    by_hand = -np.exp(log_p) - np.exp(log_cv + log_not - log_not_cv)
    np.testing.assert_allclose(hot.grad[:, 0].numpy(), by_hand, rtol=2e-5, atol=1e-30)
    p = probabilities(Output(logits, logits), schema)
    assert (p[:, 1] <= p[:, 0]).all()
    assert ((p >= 0) & (p <= 1)).all()
