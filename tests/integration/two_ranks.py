"""What the processes of the sharded-training tests run, and how they are started: gloo, no Ray, bounded.

Results come back as files: tensors in queues need shared memory that may be small.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

BATCH = 32
STEPS_BEFORE_KILL = 30  # in the second epoch; the checkpoint before it is of step 28
LIMIT_S = 200


def start(world: int, target: Callable[[int, int, Path], None], folder: Path) -> list[int | None]:
    """Run `target(rank, world, folder)` in `world` processes; their exit codes. Processes that hang are killed."""
    context = multiprocessing.get_context("spawn")
    meeting = folder / f"meet-{target.__name__}-{world}"
    processes = [context.Process(target=_enter, args=(target, r, world, folder, meeting)) for r in range(world)]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(LIMIT_S)
        return [process.exitcode for process in processes]
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join(10)


def _enter(target: Callable[[int, int, Path], None], rank: int, world: int, folder: Path, meeting: Path) -> None:
    import torch
    import torch.distributed as dist

    from gem.training import sharding

    os.environ["LOCAL_WORLD_SIZE"] = str(world)
    torch.set_num_threads(1)
    sharding.ROW_WISE_FROM = 10  # several small tables are split by rows, unevenly; the others lie whole on a rank
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    target(rank, world, folder)
    dist.barrier()
    dist.destroy_process_group()


def make_parts() -> tuple[Any, Any]:
    """World and reader. One user is very active, and a day of its own holds a single impression."""
    from gem.training.data import Knowledge, StoreReader
    from tests.unit.model.synthetic import make_world

    num = 19 * BATCH
    world = make_world(5, num_users=40, num_ads=31, num_impressions=num)
    imp = world.impressions
    user, day = imp.user.copy(), imp.day.copy()
    busy = np.arange(0, num, 4)
    user[busy], day[-1] = 2, 3
    cut = np.minimum(imp.cut, world.timelines.lengths()[user]).astype(np.int32)
    world = replace(world, impressions=replace(imp, user=user, day=day, cut=cut, days=(*imp.days, "2023-11-18")))
    rng = np.random.default_rng(0)
    soft = rng.random((num, 2)).astype(np.float32)
    soft[:, 1] *= soft[:, 0]
    known = (rng.random(num) < 0.9).astype(np.float32)
    soft[known == 0] = np.nan
    return world, StoreReader(world, world.timelines, world.impressions, 6, Knowledge(soft, known))  # type: ignore[arg-type]


def make_job(rows: int, checkpoints: Path | None) -> Any:
    """Two epochs of 20 steps and some, with distillation."""
    from gem.config import TrainConfig, TransferConfig
    from gem.training.loop import Job
    from tests.unit.model.synthetic import MODEL

    train = TrainConfig(epochs=2, batch_impressions=BATCH, lr_sparse=0.05, checkpoint_every_steps=4)
    return Job("tiny", MODEL, train, np.arange(rows), TransferConfig(), checkpoints)


def train_and_write(folder: Path, name: str, checkpoints: Path | None = None, kill: bool = False) -> None:
    """Train on this rank's share; rank 0 writes weights and the losses of every step."""
    import torch
    import torch.distributed as dist

    from gem.training.learner import Learner
    from gem.training.loop import train

    world, reader = make_parts()
    sums: list[list[float]] = []
    step = Learner.step

    def recorded(self: Learner, batch: Any, global_rows: int) -> Any:
        report = step(self, batch, global_rows)
        sums.append([x * report.rows for x in report.losses])
        return report

    def progress(done: int, total: int, figures: dict[str, float]) -> None:
        if kill and done == STEPS_BEFORE_KILL:
            os.kill(os.getpid(), signal.SIGKILL)

    Learner.step = recorded  # type: ignore[method-assign]
    try:
        trained = train(make_job(len(world.impressions), checkpoints), world.schema, reader, progress)
    finally:
        Learner.step = step  # type: ignore[method-assign]
    losses = torch.tensor(sums, dtype=torch.float64)
    dist.all_reduce(losses)
    if dist.get_rank() == 0:
        weights = {k: v.numpy() for k, v in trained.weights.items()}
        np.savez(folder / f"{name}.npz", losses=losses.numpy(), **weights)
        (folder / f"{name}.json").write_text(json.dumps(trained.record))


def whole_life(rank: int, world: int, folder: Path) -> None:
    """An uninterrupted run, faults, and at two ranks a run that is killed in its second epoch."""
    train_and_write(folder, f"whole-{world}")
    notes = {"nan": faults(rank, world, "nan"), "gradient": faults(rank, world, "gradient"), "rate": rates()}
    notes["start"] = {"equal": starts_from()}
    (folder / f"notes-{world}-{rank}.json").write_text(json.dumps(notes))
    if world > 1:
        train_and_write(folder, "never", folder / "checkpoints", kill=True)


def resumed(rank: int, world: int, folder: Path) -> None:
    """The killed run, started again at any number of ranks from its own copy of the checkpoints."""
    train_and_write(folder, f"resumed-{world}", folder / f"checkpoints-{world}")


def faults(rank: int, world: int, kind: str) -> dict[str, bool]:
    """A bad batch on the last rank only, between two good ones."""
    import torch

    from gem.training.loop import make_learner

    synthetic, reader = make_parts()
    learner = make_learner(make_job(64, None), synthetic.schema, 10)
    good, bad = (reader.batch(np.arange(s + rank, s + 32, world)) for s in (0, 32))
    first = learner.step(good, 32)
    before = _state(learner)
    if kind == "nan" and rank == world - 1:
        bad.ads.numeric[0, 0] = float("nan")
    forward = learner.parallel
    if kind == "gradient" and rank == world - 1:
        learner.parallel = lambda batch, emb: forward(batch, emb) + _nan_gradient(emb["brand"])
    report = learner.step(bad, 32)
    learner.parallel = forward
    after = _state(learner)
    last = learner.step(good, 32)
    final = _state(learner)
    return {
        "first trained": not first.skipped,
        "bad skipped": report.skipped,
        "unchanged": before.keys() == after.keys() and all(torch.equal(v, after[k]) for k, v in before.items()),
        "next trained": not last.skipped and any(not torch.equal(v, final[k]) for k, v in before.items()),
        "finite": all(bool(torch.isfinite(v).all()) for v in final.values()),
    } | (gives_up(learner, bad, final) if kind == "nan" else {})


def gives_up(learner: Any, bad: Any, before: dict[str, Any]) -> dict[str, bool]:
    """Bad batches on the last rank only, until every rank stops at the same step, as it was before them."""
    import torch

    from gem.errors import TrainingError

    skipped = [learner.step(bad, 32).skipped for _ in range(learner.MAX_SKIPPED)]
    try:
        learner.step(bad, 32)
        said = ""
    except TrainingError as error:
        said = str(error)
    after = _state(learner)
    return {
        "all skipped": all(skipped),
        "gave up by name": said.startswith("11 steps in a row had a non-finite loss or gradient"),
        "unchanged at the end": all(torch.equal(v, after[k]) for k, v in before.items()),
    }


def _nan_gradient(x: Any) -> Any:
    """Zero, whose gradient with respect to `x` is NaN (the root at zero)."""
    return (x - x.detach()).abs().sum().sqrt()


def rates() -> float:
    """How far a step at rate 0 moves any table."""
    from gem.training.loop import make_learner

    synthetic, reader = make_parts()
    tables = make_learner(make_job(64, None), synthetic.schema, 10).tables
    before = tables.weights()
    tables.set_lr(0.0)
    sum(v.sum() for v in tables.lookup(reader.batch(np.arange(8)).lookups()).values()).backward()  # type: ignore[union-attr]
    return max([float((v - before[k]).abs().max()) for k, v in tables.weights().items()], default=0.0)


def starts_from() -> bool:
    """Whether a job that starts from given weights has exactly these before its first step, in shards too."""
    import torch
    import torch.distributed as dist

    from gem.model.ranker import ranker_weights
    from gem.training.loop import make_learner
    from tests.unit.model.synthetic import MODEL, loud_ranker

    synthetic, _ = make_parts()
    given = loud_ranker(synthetic.schema, MODEL, seed=4).state_dict()
    learner = make_learner(replace(make_job(64, None), start_from=given), synthetic.schema, 10)
    tables = learner.tables.weights()
    if dist.get_rank() > 0:
        return all(torch.equal(v, given[f"dense.{k}"]) for k, v in learner.model.state_dict().items())
    got = ranker_weights(learner.model.state_dict(), tables)
    return got.keys() == given.keys() and all(torch.equal(v, given[k]) for k, v in got.items())


def _state(learner: Any) -> dict[str, Any]:
    """Everything a step may change: dense weights and Adam on all ranks, tables and their sums on rank 0."""
    out = {f"dense.{k}": v.clone() for k, v in learner.objective.state_dict().items()}
    for name, p in learner.objective.named_parameters():
        out |= {f"adam.{k}.{name}": v.clone() for k, v in learner.optimizer.state.get(p, {}).items()}
    out |= {f"table.{k}": v for k, v in learner.tables.weights().items()}
    return out | {f"moment.{k}": v for k, v in learner.tables.moments().items()}
