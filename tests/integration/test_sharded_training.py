"""Training over sharded tables: two ranks do what one does, a killed run goes on as if nothing had been.

Three groups of processes for the whole file; see two_ranks.py for what they run.
"""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.integration.two_ranks import BATCH, resumed, start, whole_life


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which all groups have left their results."""
    folder = tmp_path_factory.mktemp("ranks")
    assert start(1, whole_life, folder) == [0]
    assert start(2, whole_life, folder) == [-signal.SIGKILL] * 2
    for world in (1, 2):
        shutil.copytree(folder / "checkpoints", folder / f"checkpoints-{world}")
        assert start(world, resumed, folder) == [0] * world
    return folder


def load(folder: Path, name: str) -> tuple[dict[str, np.ndarray], np.ndarray, dict[str, Any]]:
    """Weights, losses [steps, 3] and the record of one run."""
    with np.load(folder / f"{name}.npz") as found:
        weights = {k: found[k] for k in found.files if k != "losses"}
        return weights, found["losses"], json.loads((folder / f"{name}.json").read_text())


def assert_equal_weights(got: dict[str, np.ndarray], want: dict[str, np.ndarray], tolerance: float) -> None:
    assert got.keys() == want.keys()
    worst = {k: float(np.abs(got[k] - want[k]).max()) for k in want if not np.allclose(got[k], want[k], atol=tolerance)}
    assert not worst


def test_two_ranks_train_as_one_does(runs: Path) -> None:
    (one, loss_one, record), (two, loss_two, other) = load(runs, "whole-1"), load(runs, "whole-2")
    assert len(loss_one) == record["steps"] >= 40
    np.testing.assert_allclose(loss_two / BATCH, loss_one / BATCH, atol=1e-5)
    assert_equal_weights(two, one, 1e-5)
    assert loss_one.min() > 0  # distillation, too, counted in every step
    assert record["tokens_max_over_mean"] == record["tokens_max_over_mean_worst"] == 1
    # The last day has one impression: one rank reads it, the other nothing.
    assert 1 < other["tokens_max_over_mean"] < 1.2 and other["tokens_max_over_mean_worst"] == 2


def test_training_moves_every_table_and_the_dense_network(runs: Path) -> None:
    """Without it the equality above would prove nothing."""
    from gem.model.ranker import Ranker
    from tests.integration.two_ranks import make_job, make_parts

    world, _ = make_parts()
    job = make_job(1, None)
    start_of = Ranker(world.schema, job.model, job.train.seed).state_dict()
    trained, _, _ = load(runs, "whole-2")
    assert trained.keys() == start_of.keys()
    for name, value in trained.items():
        assert np.abs(value - start_of[name].numpy()).max() > 1e-4, name


@pytest.mark.parametrize("world", [2, 1])
def test_a_killed_run_goes_on_as_if_uninterrupted_at_any_number_of_ranks(runs: Path, world: int) -> None:
    (whole, whole_losses, _), (again, losses, record) = load(runs, "whole-2"), load(runs, f"resumed-{world}")
    assert record["resumed_from_step"] == 28
    assert len(losses) == record["steps"] - 28
    tolerance = 0.0 if world == 2 else 1e-5
    np.testing.assert_allclose(losses / BATCH, whole_losses[28:] / BATCH, atol=tolerance)
    assert_equal_weights(again, whole, tolerance)


def test_a_job_that_starts_from_weights_has_exactly_these(runs: Path) -> None:
    for world in (1, 2):
        for rank in range(world):
            assert json.loads((runs / f"notes-{world}-{rank}.json").read_text())["start"]["equal"]


@pytest.mark.parametrize("fault", ["nan", "gradient"])
def test_a_bad_batch_on_one_rank_is_skipped_by_all_and_changes_nothing(runs: Path, fault: str) -> None:
    for world in (1, 2):
        for rank in range(world):
            seen = json.loads((runs / f"notes-{world}-{rank}.json").read_text())[fault]
            assert all(seen.values()), (world, rank, seen)


def test_the_rate_of_the_tables_is_the_one_that_was_set(runs: Path) -> None:
    """The fused kernels keep a copy of their own, which a changed parameter group alone does not reach."""
    for world in (1, 2):
        assert json.loads((runs / f"notes-{world}-0.json").read_text())["rate"] == 0.0
