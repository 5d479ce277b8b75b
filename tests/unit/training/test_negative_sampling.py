"""Training on a share of the negatives: which are kept, what they weigh, and that nothing measured or served moves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from gem.config import RunConfig, TrainConfig, TransferConfig, apply_overrides
from gem.errors import ConfigError, TrainingError
from gem.model.gem import build_model
from gem.model.ranker import Ranker
from gem.model.tables import PlainTables
from gem.training import loop
from gem.training.data import Knowledge, RankShare, StoreReader
from gem.training.learner import Objective
from gem.training.loop import Job, job_hash, train
from gem.training.objective import task_losses
from gem.training.predict import predict
from gem.training.sampling import Sample, sample_rows
from tests.unit.model.synthetic import MODEL, World, loud_ranker, make_world
from tests.unit.training.one_rank import FakeTables

NUM = 4000
SMALL = replace(MODEL, num_layers=1)


def planted(num: int = NUM, bias: float = -3.0) -> World:
    """Few clicks: p = sigmoid(bias + sin user); of the clicks 40 % convert. Every outcome is known."""
    world = make_world(3, num_users=100, num_impressions=num, events_per_user=3)
    rng, imp = np.random.default_rng(0), world.impressions
    click = rng.random(num) < 1 / (1 + np.exp(-bias - np.sin(imp.user)))
    labels = np.stack([click, click & (rng.random(num) < 0.4)], 1).astype(np.float32)
    return replace(world, impressions=replace(imp, labels=labels, mask=np.ones_like(labels)))


WORLD = planted()
POSITIVE = WORLD.impressions.labels[:, 0] > 0
ALL = np.arange(NUM)


def reader_of(world: World = WORLD, sample: Sample | None = None, knowledge: Knowledge | None = None) -> StoreReader:
    weight = sample.weight if sample else 1.0
    reader = StoreReader(world, world.timelines, world.impressions, MODEL.max_history, knowledge)  # type: ignore[arg-type]
    return replace(reader, negative_weight=weight)


def drawn(keep: float, seed: int = 1, world: World = WORLD, rows: np.ndarray = ALL) -> Sample:
    return sample_rows(world.impressions, rows, TrainConfig(negative_keep=keep, seed=seed))


@pytest.mark.parametrize("keep", [0.5, 0.1, 0.05])
def test_every_positive_is_kept_and_the_weights_add_up_to_the_log(keep: float) -> None:
    sample = drawn(keep)
    assert set(np.flatnonzero(POSITIVE)) <= set(sample.rows.tolist())
    negatives = int((~POSITIVE).sum())
    kept = int((~POSITIVE[sample.rows]).sum())
    assert kept / negatives == pytest.approx(keep, abs=4 * np.sqrt(keep * (1 - keep) / negatives))
    assert sample.weight == pytest.approx(1 / keep, rel=0.3)
    mask = reader_of(sample=sample).batch(sample.rows).mask
    assert mask[:, 0].sum().item() == pytest.approx(NUM, rel=1e-5)
    assert sample.of == NUM and sample.stands_for * sample.rows.size == pytest.approx(NUM)


def test_which_are_kept_depends_on_the_impression_and_the_seed_only() -> None:
    """Not on the order, on what else is trained, on the epochs or on the number of workers."""
    kept = set(drawn(0.1).rows.tolist())
    half = ALL[::-2]
    assert set(drawn(0.1, rows=half).rows.tolist()) == kept & set(half.tolist())
    assert drawn(0.1, rows=ALL[::-1]).rows.tolist() == drawn(0.1).rows.tolist()[::-1]
    other = TrainConfig(negative_keep=0.1, epochs=3, num_workers=8, batch_impressions=7)
    assert set(sample_rows(WORLD.impressions, ALL, other).rows.tolist()) == kept
    fewer, again = set(drawn(0.05).rows.tolist()), set(drawn(0.1, seed=2).rows.tolist())
    assert fewer < kept  # a smaller share is a part of a larger one
    negatives = set(np.flatnonzero(~POSITIVE).tolist())
    assert len(kept & again & negatives) < 0.3 * len(kept & negatives)  # two seeds are independent draws


def test_all_rows_are_trained_unless_asked_otherwise() -> None:
    sample = drawn(1.0)
    assert sample.rows is ALL and sample.weight == 1.0 and sample.stands_for == 1.0
    everything = planted(50, bias=9.0)
    assert drawn(0.1, world=everything, rows=np.flatnonzero(everything.impressions.labels[:, 0])).weight == 1.0
    assert drawn(0.1, rows=np.zeros(0, np.int64)).stands_for == 0.0


def test_a_share_that_keeps_no_negative_is_refused() -> None:
    with pytest.raises(TrainingError, match=r"negative_keep 1e-09 keeps none of \d+ rows without a positive label"):
        drawn(1e-9)


@pytest.mark.parametrize("bad", ["0", "-0.1", "1.5", "nan"])
def test_a_share_outside_zero_to_one_is_refused(bad: str) -> None:
    with pytest.raises(ConfigError, match=r"negative_keep: got .*; allowed: above 0, at most 1"):
        apply_overrides(RunConfig(), [f"train.negative_keep={bad}"])
    raw = RunConfig().to_dict()
    raw["student_train"]["negative_keep"] = float(bad)
    with pytest.raises(ConfigError, match="negative_keep"):
        RunConfig.from_dict(raw)


def test_the_gradient_of_a_sample_is_on_average_that_of_all_rows() -> None:
    world = planted(160, bias=-1.0)
    tables = PlainTables(world.schema, MODEL.dim)
    objective = Objective(build_model(world.schema, SMALL), None)

    def gradient(sample: Sample, weighted: bool = True) -> torch.Tensor:
        batch = reader_of(world, sample if weighted else None).batch(sample.rows)
        objective.zero_grad()
        objective(batch, tables(batch.lookups())).sum().backward()
        return torch.cat([p.grad.flatten() for p in objective.parameters() if p.grad is not None])

    rows = np.arange(160)
    whole = gradient(Sample(rows, 1.0, 160))
    samples = [drawn(0.3, seed, world, rows) for seed in range(60)]
    mean = torch.stack([gradient(s) for s in samples]).mean(0)
    one, plain = gradient(samples[0]), gradient(samples[0], weighted=False)
    assert (mean - whole).norm() < 0.1 * whole.norm()
    assert (mean - whole).norm() < 0.4 * (one - whole).norm()
    assert (plain - whole).norm() > 0.5 * whole.norm()  # the control: without weights it is another one


@pytest.mark.parametrize("keep", [0.1, 0.05])
def test_a_fit_on_the_sample_predicts_the_rate_of_the_log(keep: float) -> None:
    """T20: a logistic regression, trained to the end on the sample, on all rows; a control without the weights."""
    world = planted(60_000, bias=-3.2)
    sample, labels, user = drawn(keep, world=world, rows=np.arange(60_000)), world.impressions.labels, None
    batch = reader_of(world, sample).batch(sample.rows)
    at = {int(i): n for n, i in enumerate(world.impressions.impression_id)}
    user = world.impressions.user[[at[int(i)] for i in batch.impression_id]]

    def ratio(mask: torch.Tensor) -> list[float]:
        theta = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.LBFGS([theta], max_iter=60, line_search_fn="strong_wolfe")

        def logits(users: np.ndarray) -> torch.Tensor:
            x = torch.from_numpy(np.stack([np.ones(users.size), np.sin(users), np.cos(users)], 1))
            return x @ theta.T

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = task_losses(logits(user), batch.labels.double(), mask.double(), world.schema).sum() / sample.of
            loss.backward()
            return loss

        optimizer.step(closure)
        p = torch.sigmoid(logits(world.impressions.user)).detach().numpy()
        return [float(p[:, 0].sum() / labels[:, 0].sum()), float((p[:, 0] * p[:, 1]).sum() / labels[:, 1].sum())]

    assert ratio(batch.mask) == pytest.approx([1.0, 1.0], abs=0.02)
    assert ratio((batch.mask > 0).float())[0] > 4


def test_teacher_knowledge_weighs_as_much_and_what_is_unknown_stays_so() -> None:
    imp = WORLD.impressions
    unknown = imp.mask.copy()
    unknown[::3, 1] = 0
    world = replace(WORLD, impressions=replace(imp, mask=unknown))
    known = (ALL % 5 > 0).astype(np.float32)
    sample = drawn(0.1)
    reader = reader_of(world, sample, Knowledge(np.full((NUM, 2), 0.1, np.float32), known))
    batch = reader.batch(sample.rows)
    at = {int(i): n for n, i in enumerate(imp.impression_id)}
    for n, key in enumerate(batch.impression_id.tolist()):
        weight = 1.0 if POSITIVE[at[key]] else pytest.approx(sample.weight)
        assert batch.mask[n, 0] == weight
        assert batch.mask[n, 1] == (0.0 if at[key] % 3 == 0 else weight)
        assert batch.soft["known"][n] == (0.0 if at[key] % 5 == 0 else weight)
    assert unknown.max() == known.max() == 1.0  # the store's own arrays are not touched
    assert not reader.placeholder(sample.rows[:1]).mask.any()


def test_two_ranks_carry_the_weight_of_one() -> None:
    sample = drawn(0.1)
    at = sample.rows[:200]
    whole = RankShare(reader_of(sample=sample)).build(at)
    parts = [RankShare(reader_of(sample=sample), rank, 2).build(at) for rank in range(2)]
    assert sum(p.mask.sum(0) for p in parts).tolist() == pytest.approx(whole.mask.sum(0).tolist())


def test_scores_do_not_depend_on_weights() -> None:
    model = loud_ranker(WORLD.schema)
    plain, weighted = (predict(model, reader_of(sample=s), ALL[:300]) for s in (None, drawn(0.1)))
    assert np.array_equal(plain.logits, weighted.logits)


@pytest.mark.usefixtures("one_rank")
def test_training_keeps_the_rate_and_says_what_it_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(loop, "ShardedTables", lambda schema, dim, lr, seed: FakeTables(schema, dim))
    config = TrainConfig(epochs=2, batch_impressions=32, lr_dense=0.01, negative_keep=0.1, checkpoint_every_steps=4)
    job = Job("gem", SMALL, config, ALL, checkpoint_dir=tmp_path)
    done = train(job, WORLD.schema, reader_of())
    sample = drawn(0.1)
    want = {"train_rows": sample.rows.size, "log_rows": NUM, "negative_keep": 0.1, "negative_weight": sample.weight}
    assert {k: done.record[k] for k in want} == want
    assert 0.1 < done.record["last_loss"] < 0.4  # per row of the log, not per trained row
    model = Ranker(WORLD.schema, SMALL)
    model.load_state_dict(done.weights)
    p = 1 / (1 + np.exp(-predict(model, reader_of(), ALL).logits[:, 0]))
    assert 0.5 < p.mean() / POSITIVE.mean() < 2  # from 10 at the start; unweighted it would end at 7
    again = train(job, WORLD.schema, reader_of())  # goes on from the last checkpoint
    assert again.record["resumed_from_step"] > 0
    assert all(torch.equal(v, again.weights[k]) for k, v in done.weights.items())


def test_the_share_belongs_to_the_model() -> None:
    """It stands in the configuration that a bundle holds, and a checkpoint of another share is not taken."""
    config = apply_overrides(RunConfig(), ["train.negative_keep=0.05"])
    assert RunConfig.from_dict(config.to_dict()).train.negative_keep == 0.05
    old = config.to_dict()
    del old["train"]["negative_keep"]  # a bundle from before there was such a share
    assert RunConfig.from_dict(old).train.negative_keep == 1.0
    job = Job("gem", MODEL, config.train, ALL, TransferConfig())
    other = replace(job, train=TrainConfig())
    assert job_hash(job, WORLD.schema, reader_of(), 10) != job_hash(other, WORLD.schema, reader_of(), 10)
