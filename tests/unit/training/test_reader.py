"""Batches and scores by position: every row keeps its own knowledge and gets its own score, in the order asked for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from gem.config import TrainConfig, TransferConfig
from gem.errors import JaggedError, TrainingError
from gem.training.data import Knowledge, StoreReader
from gem.training.loop import Job, job_hash, train
from gem.training.predict import predict
from tests.unit.model.synthetic import MODEL, World, loud_ranker, make_world

WORLD = make_world(0)
NUM = len(WORLD.impressions)
SOFT = np.stack([np.arange(NUM), np.arange(NUM) / 2], 1).astype(np.float32) / 100


def make_reader(world: World = WORLD, knowledge: Knowledge | None = None) -> StoreReader:
    return StoreReader(world, world.timelines, world.impressions, MODEL.max_history, knowledge)  # type: ignore[arg-type]


def test_knowledge_stays_with_its_impression_though_batches_are_reordered() -> None:
    known = (np.arange(NUM) % 3 > 0).astype(np.float32)
    at = np.random.default_rng(1).permutation(NUM)[:40]
    batch = make_reader(knowledge=Knowledge(SOFT, known)).batch(at)
    row_of = {int(i): n for n, i in enumerate(WORLD.impressions.impression_id)}
    assert batch.impression_id.tolist() != WORLD.impressions.impression_id[at].tolist()
    for n, key in enumerate(batch.impression_id.tolist()):
        assert batch.soft["p"][n].tolist() == SOFT[row_of[key]].tolist()
        assert batch.soft["known"][n] == known[row_of[key]]


def test_a_placeholder_has_rows_and_nothing_to_learn() -> None:
    knowledge = Knowledge(SOFT, np.ones(NUM, np.float32))
    reader = make_reader(knowledge=knowledge)
    batch = reader.placeholder(np.array([4]))
    assert len(batch) == 1
    assert not batch.mask.any()
    assert not batch.soft["known"].any()
    assert WORLD.impressions.mask[4].any()
    assert knowledge.known.all()


def test_costs_count_the_events_that_are_read() -> None:
    got = make_reader().costs()
    assert got.tolist() == [1 + min(int(c), MODEL.max_history) for c in WORLD.impressions.cut]


def test_a_batch_with_an_impossible_cut_never_leaves_the_reader() -> None:
    cut = WORLD.impressions.cut.copy()
    cut[7] = 10**6
    broken = replace(WORLD, impressions=replace(WORLD.impressions, cut=cut))
    with pytest.raises((JaggedError, IndexError)):
        make_reader(broken).batch(np.arange(20))


@pytest.mark.parametrize("batch_size", [1, 7, 1000])
def test_scores_come_in_the_order_asked_for_whatever_the_batch_size(batch_size: int) -> None:
    at = np.random.default_rng(2).permutation(NUM)[:50]
    model = loud_ranker(WORLD.schema).train()
    got = predict(model, make_reader(), at, batch_size)
    assert model.training
    for place, position in enumerate(at.tolist()):
        with torch.inference_mode():
            alone = model.eval()(WORLD.batch([position]))
        np.testing.assert_allclose(got.logits[place], alone.logits[0].numpy(), atol=2e-5)
        np.testing.assert_allclose(got.representation[place], alone.representation[0].numpy(), atol=2e-5)


def test_no_rows_no_scores() -> None:
    got = predict(loud_ranker(WORLD.schema), make_reader(), np.zeros(0, np.int64))
    assert got.logits.shape == (0, 2)
    assert got.representation.shape == (0, MODEL.representation_dim)


JOB = Job("gem", MODEL, TrainConfig(), np.arange(NUM), TransferConfig())


def test_a_checkpoint_belongs_to_all_that_shapes_the_weights() -> None:
    def key(job: Job = JOB, world: World = WORLD, steps: int = 10) -> str:
        return job_hash(job, world.schema, make_reader(world), steps)

    same = replace(JOB, train=replace(JOB.train, num_workers=7, checkpoint_every_steps=1), checkpoint_dir=Path("x"))
    assert key(same) == key()
    others = [
        replace(JOB, name="other"),
        replace(JOB, model=replace(MODEL, dim=16)),
        replace(JOB, train=replace(JOB.train, lr_sparse=0.01)),
        replace(JOB, transfer=None),
        replace(JOB, transfer=TransferConfig(distill_weight=2.0)),
        replace(JOB, rows=np.arange(NUM)[::-1]),
        replace(JOB, start_from=loud_ranker(WORLD.schema).state_dict()),
    ]
    other_ids = replace(WORLD, impressions=replace(WORLD.impressions, impression_id=np.arange(NUM)))
    other_rows = make_world(0, num_users=13)
    keys = [key(), *map(key, others), key(steps=11), key(world=other_ids), key(world=other_rows)]
    assert len(set(keys)) == len(keys)


def test_distilling_without_knowledge_is_refused_before_anything_starts() -> None:
    with pytest.raises(TrainingError, match=r"gem: distillation is on but there is no knowledge"):
        train(JOB, WORLD.schema, make_reader())
