"""Every baseline against loops in float64, and what no ranker may do: look ahead, or mind who else is in the batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from gem.data.batch import Batch
from gem.errors import ConfigError
from gem.model.baselines import BASELINES, LogisticRegression
from gem.model.gem import build_model
from gem.model.history import visible_mean, visible_pairs
from gem.model.inputs import Encoded
from gem.model.interactions import CrossNetwork, DotInteraction, TargetAttention, WukongStack
from gem.training.objective import task_losses
from tests.numerics.naive import Array, Weights, linear, weights
from tests.numerics.test_wukong import gelu, layer_norm, naive_layer
from tests.unit.model.synthetic import MODEL as DEFAULT
from tests.unit.model.synthetic import World, changed_after, loud_ranker, make_world

MODEL = replace(DEFAULT, counts=False)
WORLD = make_world(0)
NUM = len(WORLD.impressions)
NAMES = tuple(BASELINES)
READERS = tuple(n for n in NAMES if n != "lr")
RANKERS = {n: loud_ranker(WORLD.schema, replace(MODEL, arch=n), seed=1) for n in NAMES}


def visible(batch: Batch, n: int, max_history: int) -> range:
    """Event rows of the batch that impression n may read, counted one by one."""
    user = int(batch.user_of[n])
    first, seen = int(batch.timeline.offsets[user]), int(batch.cut[n])
    rows = [first + e for e in range(seen) if e >= seen - max_history]
    return range(rows[0], rows[-1] + 1) if rows else range(0)


# ---- one impression: tokens X [n, D], candidate q [D], visible events E [L, D] -> flat


def with_history(w: Weights, x: Array, events: Array) -> Array:
    mean = np.zeros(x.shape[1])
    for event in events:
        mean += event / len(events)
    return np.stack([*x, layer_norm(mean, w["tokens.norm.weight"], w["tokens.norm.bias"])])


def naive_dlrm(module: nn.Module, x: Array, q: Array, events: Array) -> Array:
    w = weights(module)
    x = with_history(w, x, events)
    dense = linear(w, "bottom.2", gelu(linear(w, "bottom.0", x.reshape(-1))))
    z = [*x, dense]
    dots = [sum(z[i] * z[j]) / math.sqrt(len(q)) for i in range(len(z)) for j in range(i + 1, len(z))]
    return np.array([*dense, *dots])


def naive_dcnv2(module: nn.Module, x: Array, q: Array, events: Array) -> Array:
    w = weights(module)
    x0 = with_history(w, x, events).reshape(-1)
    cross = x0
    for number in range(MODEL.num_layers):
        name = f"cross.{number}.mix"
        if f"{name}.weight" in w:
            mixed = linear(w, name, cross)
        else:
            mixed = w[f"{name}.1.weight"] @ w[f"{name}.0.weight"] @ cross + w[f"{name}.1.bias"]
        cross = np.array([x0[i] * mixed[i] + cross[i] for i in range(len(x0))])
    deep = gelu(linear(w, "deep.3", gelu(linear(w, "deep.0", x0))))
    return np.concatenate([cross, deep])


def naive_din(module: nn.Module, x: Array, q: Array, events: Array) -> Array:
    w = weights(module)
    total = np.zeros(len(q))
    for k in events:
        hidden = linear(w, "hidden", np.concatenate([k, q, k - q, k * q]))
        hidden = np.array([h if h > 0 else a * h for h, a in zip(hidden, w["activation.weight"], strict=True)])
        total += linear(w, "score", hidden)[0] * k
    return np.concatenate([x.reshape(-1), total / math.sqrt(MODEL.max_history)])


def naive_wukong(module: nn.Module, x: Array, q: Array, events: Array) -> Array:
    x = with_history(weights(module), x, events)
    for layer in module.layers:
        x = naive_layer(layer, x)
    return x.reshape(-1)


Naive = Callable[[nn.Module, Array, Array, Array], Array]
NAIVE: dict[str, Naive] = {"dlrm": naive_dlrm, "dcnv2": naive_dcnv2, "din": naive_din, "wukong": naive_wukong}


def naive_heads(heads: nn.Module, flat: Array, surface: int) -> tuple[Array, Array]:
    """(logits [K], representation [R]) of one impression."""
    w = weights(heads)
    r = gelu(linear(w, "represent.3", gelu(linear(w, "represent.0", flat))))
    scale, shift = np.split(w["adapter.affine.weight"][surface], 2)
    down = w["adapter.down.weight"][surface].reshape(-1, len(r))
    up = w["adapter.up.weight"][surface].reshape(len(r), -1)
    own = r * (1 + scale) + shift + up @ gelu(down @ r)
    return linear(w, "head", own) + w["surface_head.weight"][surface], r


def naive_lr(model: nn.Module, batch: Batch, tables: Weights, n: int) -> tuple[Array, Array]:
    w, table_of = weights(model), WORLD.schema.table_of()
    logits, total = w["bias"].copy(), np.zeros(MODEL.dim)
    numbers: list[float] = []
    for rows, at in ((batch.users, int(batch.user_of[n])), (batch.ads, int(batch.ad_of[n])), (batch.context, n)):
        for name, ids in rows.ids.items():
            own = ids[at : at + 1]
            if name in rows.offsets:
                own = ids[int(rows.offsets[name][at]) : int(rows.offsets[name][at + 1])]
            for row in own.tolist():
                total += tables[table_of[name]][row] / len(own)
        numbers += [*rows.numeric[at].tolist(), *rows.vectors[at].tolist()]
    for k in range(len(logits)):
        logits[k] += total[k] + sum(a * b for a, b in zip(w["linear.weight"][k], numbers, strict=True))
    padded = np.zeros(MODEL.representation_dim)
    padded[: min(MODEL.dim, MODEL.representation_dim)] = total[: MODEL.representation_dim]
    return logits, padded


def naive(name: str, batch: Batch) -> tuple[Array, Array]:
    """(logits [N, K], representation [N, R]) by loops, from the model's own encoded inputs."""
    ranker = RANKERS[name]
    if name == "lr":
        tables = {k: v.double().numpy() for k, v in ranker.tables.weights().items()}
        found = [naive_lr(ranker.dense, batch, tables, n) for n in range(len(batch))]
    else:
        encoded: Encoded = ranker.dense.inputs(batch, ranker.tables(batch.lookups()))
        x, q, e = (v.detach().double().numpy() for v in (encoded.tokens, encoded.candidate, encoded.events))
        found = []
        for n in range(len(batch)):
            seen = e[list(visible(batch, n, MODEL.max_history))]
            flat = NAIVE[name](ranker.dense.interact, x[n], q[n], seen)
            found.append(naive_heads(ranker.dense.heads, flat, int(batch.surface[n])))
    return np.array([logits for logits, _ in found]), np.array([r for _, r in found])


def logits_by_id(name: str, world: World, at: list[int] | Array) -> dict[int, torch.Tensor]:
    batch = world.batch(at)
    with torch.inference_mode():
        return dict(zip(batch.impression_id.tolist(), RANKERS[name](batch).logits, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_forward_is_the_equation(name: str) -> None:
    batch = WORLD.batch(np.arange(NUM))
    lengths = {len(visible(batch, n, MODEL.max_history)) for n in range(NUM)}
    assert {0, 1, MODEL.max_history} <= lengths, "the world must hold empty, one-event and full histories"
    assert int(batch.cut.max()) > MODEL.max_history
    with torch.inference_mode():
        out = RANKERS[name](batch)
    logits, representation = naive(name, batch)
    assert logits.std(0).min() > 0.1, "a trivial model would agree with anything"
    np.testing.assert_allclose(out.logits.numpy(), logits, atol=3e-5, rtol=3e-5)
    np.testing.assert_allclose(out.representation.numpy(), representation, atol=3e-5, rtol=3e-5)


@pytest.mark.parametrize("kind", [DotInteraction, CrossNetwork, TargetAttention, WukongStack])
def test_gradients_are_finite_differences(kind: type[nn.Module]) -> None:
    """Of every interaction, for tokens, candidate, events and every weight, over unlike histories."""
    tiny = replace(MODEL, dim=3, num_heads=1, num_layers=2, num_fmb=1, num_lcb=1, rank=1, mlp_hidden=3, max_history=2)
    cut = WORLD.impressions.cut
    at = [int(np.flatnonzero(cut == 0)[0]), int(np.flatnonzero(cut == 1)[0]), int(np.argmax(cut))]
    batch = WORLD.batch(at, max_history=2)
    torch.manual_seed(1)
    module = kind(2, tiny).double()
    shapes = ((len(batch), 2, 3), (len(batch), 3), (batch.timeline.ad.numel(), 3))
    given = [torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in shapes]
    named = {k: torch.randn_like(p).requires_grad_() for k, p in module.named_parameters()}

    def flat(tokens: torch.Tensor, candidate: torch.Tensor, events: torch.Tensor, *own: torch.Tensor) -> torch.Tensor:
        encoded = Encoded(tokens, candidate, tokens[:0], events, batch, tiny.max_history)
        return torch.func.functional_call(module, dict(zip(named, own, strict=True)), (encoded,))

    assert torch.autograd.gradcheck(flat, (*given, *named.values()), fast_mode=True)


def test_gradients_of_logistic_regression_are_finite_differences() -> None:
    batch = WORLD.batch(np.arange(0, NUM, 15))
    for rows in (batch.users, batch.ads, batch.context):
        rows.numeric, rows.vectors = rows.numeric.double(), rows.vectors.double()
    ranker = RANKERS["lr"]
    model = LogisticRegression(WORLD.schema, MODEL).double()
    emb = {k: v.detach().double().requires_grad_() for k, v in ranker.tables(batch.lookups()).items()}
    own = {k: torch.randn_like(p).requires_grad_() for k, p in model.named_parameters()}

    def logits(*values: torch.Tensor) -> torch.Tensor:
        parts = dict(zip(own, values[: len(own)], strict=True))
        return torch.func.functional_call(model, parts, (batch, dict(zip(emb, values[len(own) :], strict=True)))).logits

    assert torch.autograd.gradcheck(logits, (*own.values(), *emb.values()), fast_mode=True)


@pytest.mark.parametrize("name", NAMES)
def test_permuting_candidates_permutes_the_scores(name: str) -> None:
    busy = int(np.argmax(WORLD.impressions.cut))
    batch = WORLD.batch([busy] * 6)
    ads = torch.arange(6) % len(batch.ads)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    with torch.inference_mode():
        before = RANKERS[name](replace(batch, ad_of=ads)).logits
        after = RANKERS[name](replace(batch, ad_of=ads[order])).logits
    torch.testing.assert_close(after, before[order], atol=1e-6, rtol=1e-6)
    assert before.std(0).min() > 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_order_and_company_in_a_batch_do_not_matter(name: str) -> None:
    whole = logits_by_id(name, WORLD, np.arange(NUM))
    single: dict[int, torch.Tensor] = {}
    for part in np.array_split(np.random.default_rng(0).permutation(NUM), 20):
        single |= logits_by_id(name, WORLD, part)
    for key, value in whole.items():
        torch.testing.assert_close(value, single[key], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n", range(0, NUM, 12))
def test_events_after_the_cut_or_too_old_change_nothing(name: str, n: int) -> None:
    imp = WORLD.impressions
    user, key = int(imp.user[n]), int(imp.impression_id[n])
    changed = changed_after(WORLD, user, int(imp.cut[n]))
    t, start = changed.timelines, int(WORLD.timelines.offsets[user])
    ad = t.ad.copy()
    ad[start : start + max(int(imp.cut[n]) - MODEL.max_history, 0)] = 0
    changed = replace(changed, timelines=replace(t, ad=ad))
    before, after = logits_by_id(name, WORLD, np.arange(NUM)), logits_by_id(name, changed, np.arange(NUM))
    torch.testing.assert_close(before[key], after[key], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", READERS)
def test_the_newest_and_the_oldest_visible_event_do_change_something(name: str) -> None:
    """The test above has power; logistic regression alone reads no timeline."""
    imp = WORLD.impressions
    n = int(np.argmax(imp.cut))
    start, cut, key = int(WORLD.timelines.offsets[imp.user[n]]), int(imp.cut[n]), int(imp.impression_id[n])
    own = logits_by_id(name, WORLD, [n])[key]
    for event in (cut - 1, cut - MODEL.max_history):
        ad = WORLD.timelines.ad.copy()
        ad[start + event] = (ad[start + event] + 1) % 20
        changed = replace(WORLD, timelines=replace(WORLD.timelines, ad=ad))
        assert (logits_by_id(name, changed, [n])[key] - own).abs().max() > 1e-4


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("events_per_user", [0, 1, 14])
def test_every_parameter_gets_a_finite_gradient_in_every_batch(name: str, events_per_user: int) -> None:
    world = make_world(2, events_per_user=events_per_user)
    model = loud_ranker(world.schema, replace(MODEL, arch=name))
    batches = [np.arange(len(world.impressions))]
    if events_per_user > 1:
        batches.append(np.flatnonzero(world.impressions.cut == 0))
    for at in batches:
        batch = world.batch(at)
        task_losses(model(batch).logits, batch.labels, batch.mask, world.schema).sum().backward()
        for key, p in model.named_parameters():
            assert p.grad is not None, key
            assert torch.isfinite(p.grad).all(), key
        model.zero_grad(set_to_none=True)


@pytest.mark.parametrize("name", NAMES)
def test_weights_depend_on_the_seed_only(name: str) -> None:
    config = replace(MODEL, arch=name)
    first, second = (build_model(WORLD.schema, config, 7) for _ in range(2))
    assert isinstance(first, BASELINES[name])
    assert first.config == config
    assert first.schema == WORLD.schema
    assert all(torch.equal(v, second.state_dict()[k]) for k, v in first.state_dict().items())
    if name != "lr":  # which starts at zero, whatever the seed
        other = build_model(WORLD.schema, config, 8).state_dict()
        assert any(not torch.equal(v, other[k]) for k, v in first.state_dict().items())


def test_logistic_regression_needs_a_column_for_every_task() -> None:
    with pytest.raises(ConfigError, match=r"got 1 columns for 2 tasks; allowed: 2 and more; set model.dim=4"):
        LogisticRegression(WORLD.schema, replace(MODEL, arch="lr", dim=1, num_heads=1))


@pytest.mark.parametrize(("rank", "low"), [(1, True), (4, True), (50, False)])
def test_cross_layers_are_of_low_rank_where_that_saves_weights(rank: int, low: bool) -> None:
    mix = CrossNetwork(11, replace(MODEL, rank=rank)).cross[0].mix
    assert isinstance(mix, nn.Sequential) == low
    assert sum(p.numel() for p in mix.parameters()) <= 96 * 96 + 96


@pytest.mark.parametrize("max_history", [1, 3, 1000])
def test_mean_and_pairs_of_visible_events(max_history: int) -> None:
    """Against loops, with means far from zero, where prefix sums in float32 would lose the values."""
    world = make_world(3, num_users=40, num_impressions=120, events_per_user=200)
    batch = world.batch(np.arange(120), max_history)
    events = torch.randn(batch.timeline.ad.numel(), 3) * 1e-3 + 100
    expected, pairs = np.zeros((120, 3)), []
    for n in range(120):
        rows = visible(batch, n, max_history)
        pairs += [(n, t) for t in rows]
        for t in rows:
            expected[n] += events[t].double().numpy() / len(rows)
    np.testing.assert_allclose(visible_mean(events, batch, max_history).numpy(), expected, rtol=2e-7)
    n, t = visible_pairs(batch, max_history)
    assert list(zip(n.tolist(), t.tolist(), strict=True)) == pairs
