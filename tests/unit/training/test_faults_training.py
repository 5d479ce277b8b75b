"""Scenarios T13 and T18 through the whole loop: NaN batches are left out and counted, a second pass is a choice."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gem.config import TrainConfig
from gem.data.batch import Batch
from gem.errors import TrainingError
from gem.model.ranker import Ranker, split_weights
from gem.model.tables import initial_weight
from gem.recipes import RECIPES, recipe
from gem.training import loop
from gem.training.data import StoreReader
from gem.training.learner import Learner
from gem.training.loop import Job, Trained, train
from tests.unit.model.synthetic import MODEL, make_world
from tests.unit.training.one_rank import FakeTables

pytestmark = pytest.mark.usefixtures("one_rank")
WORLD = make_world(0)
NUM = len(WORLD.impressions)
CONFIG = TrainConfig(batch_impressions=6, lr_dense=1e-2, checkpoint_every_steps=2)


@pytest.fixture(autouse=True)
def plain_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "ShardedTables", lambda schema, dim, lr, seed: FakeTables(schema, dim))


class Reader(StoreReader):
    """Notes what is read; `spoil` says by the number of the batch where a NaN comes past all checks."""

    def batch(self, at: Any) -> Batch:
        out = super().batch(at)
        seen, spoil = self.store.notes  # type: ignore[attr-defined]
        if spoil(len(seen)):
            out.users.numeric[0, 0] = float("nan")
        seen.append(out.impression_id.tolist())
        return out


def run(config: TrainConfig = CONFIG, folder: Path | None = None, spoil: Any = lambda n: False, stop: int = 0) -> Any:
    """(what `train` gives, impressions of each batch); `stop`: the step after which the process falls over."""
    seen: list[list[int]] = []
    world = replace(WORLD)
    world.notes = (seen, spoil)  # type: ignore[attr-defined]
    reader = Reader(world, world.timelines, world.impressions, MODEL.max_history)  # type: ignore[arg-type]

    def fall(done: int, total: int, figures: dict[str, float]) -> None:
        if stop and done >= stop:
            raise KeyboardInterrupt

    return train(Job("gem", MODEL, config, np.arange(NUM), checkpoint_dir=folder), WORLD.schema, reader, fall), seen


def equal(a: Trained, b: Trained) -> bool:
    return a.weights.keys() == b.weights.keys() and all(torch.equal(v, b.weights[k]) for k, v in a.weights.items())


def test_t13_bad_batches_are_counted_and_leave_finite_weights() -> None:
    (good, _), (bad, seen) = run(), run(spoil=lambda n: n in (1, 4))
    assert good.record["skipped_steps"] == 0 and bad.record["skipped_steps"] == 2
    assert bad.record["steps"] == good.record["steps"] == len(seen)
    assert all(bool(torch.isfinite(v).all()) for v in bad.weights.values())
    assert np.isfinite(bad.record["last_loss"]) and not equal(good, bad)


def test_t13_nothing_but_bad_batches_stops_training_by_name() -> None:
    with pytest.raises(TrainingError, match=r"11 steps in a row had a non-finite.*look for NaN inputs"):
        run(replace(CONFIG, epochs=2), spoil=lambda n: True)


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_t18_no_recipe_shows_a_table_a_row_twice(name: str) -> None:
    config = recipe(name)
    trained = [f.name for f in fields(config) if isinstance(getattr(config, f.name), TrainConfig)]
    assert trained == ["train", "student_train", "finetune"]
    assert all(getattr(config, part).epochs == 1 or getattr(config, part).fresh_tables for part in trained)


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("given", [True, False])
def test_t18_tables_begin_a_second_pass_as_they_began_the_first(
    monkeypatch: pytest.MonkeyPatch, fresh: bool, given: bool
) -> None:
    """The dense part goes on: what its optimizer has gathered is not thrown away."""
    met: list[Any] = []  # (rows so far, tables, moments, dense weights with optimizer state) before every step
    step = Learner.step

    def noted(self: Learner, batch: Batch, global_rows: float) -> Any:
        rows = sum(m[0] for m in met[-1:]) + len(batch)
        met.append((rows, self.tables.weights(), self.tables.moments(), len(self.optimizer.state)))
        return step(self, batch, global_rows)

    monkeypatch.setattr(Learner, "step", noted)
    start = Ranker(WORLD.schema, MODEL, seed=9).state_dict() if given else None
    reader = StoreReader(WORLD, WORLD.timelines, WORLD.impressions, MODEL.max_history)  # type: ignore[arg-type]
    config = replace(CONFIG, epochs=2, fresh_tables=fresh)
    train(Job("gem", MODEL, config, np.arange(NUM), start_from=start), WORLD.schema, reader)
    second = next(i for i, m in enumerate(met) if m[0] == NUM) + 1
    _, weights, moments, dense = met[second]
    want = split_weights(start)[1] if start else {
        name: initial_weight(name, rows, MODEL.dim, config.seed) for name, rows in WORLD.schema.tables().items()
    }  # fmt: skip
    assert all(torch.equal(weights[n], want[n]) for n in want) == fresh
    assert all(float(m.sum()) == 0.0 for m in moments.values()) == fresh
    assert met[0][3] == 0 and dense > 0


@pytest.mark.parametrize(("keep", "stop"), [(1.0, 20), (0.5, 10)])
def test_t18_two_passes_read_every_row_twice_in_two_orders_and_resume(tmp_path: Path, keep: float, stop: int) -> None:
    config = replace(CONFIG, epochs=2, negative_keep=keep)
    whole, seen = run(config)
    sizes = np.cumsum([len(batch) for batch in seen])
    first = int(np.searchsorted(sizes, whole.record["train_rows"])) + 1
    passes = [[i for batch in part for i in batch] for part in (seen[:first], seen[first:])]
    assert sorted(passes[0]) == sorted(passes[1]) and passes[0] != passes[1]
    assert len(passes[0]) == whole.record["train_rows"] and (len(passes[0]) == NUM) == (keep == 1)
    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path, stop=stop)
    again, rest = run(config, tmp_path)
    start = again.record["resumed_from_step"]
    assert first < start < stop < len(seen) and rest == seen[start:]  # it fell over in the second pass
    assert equal(whole, again)


def test_t18_a_run_that_stops_between_two_passes_starts_its_tables_anew(tmp_path: Path) -> None:
    config = replace(CONFIG, epochs=2, checkpoint_every_steps=1)
    whole, seen = run(config)
    first = int(np.searchsorted(np.cumsum([len(batch) for batch in seen]), NUM)) + 1
    with pytest.raises(KeyboardInterrupt):
        run(replace(config, checkpoint_every_steps=first), tmp_path, stop=first + 1)
    again, rest = run(config, tmp_path)
    assert again.record["resumed_from_step"] == first and rest == seen[first:]
    assert equal(whole, again)
