"""`python -m pipelines cost RECIPE`: what a recipe's models cost, before anything is trained.

Parameters, FLOPs per impression by part and memory per rank of the foundation model and of a student. The networks are
built and run on the meta device (`gem.model.cost`), so that the largest recipe takes seconds and no memory.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gem.config import ModelConfig, RunConfig, TrainConfig
from gem.data.batch import Batch
from gem.data.schema import Schema
from gem.data.store import FeatureStore
from gem.errors import ConfigError
from gem.model.cost import Cost, Memory, Plan, Workload, cost, memory
from gem.model.planned import LARGE_WORKLOAD, generated_schema, large_schema
from gem.training.data import StoreReader
from gem.training.plan import plan_epoch
from gem.training.sharding import ROW_WISE_FROM
from pipelines.stage import read_stage
from pipelines.table import aligned

PLANNED_LARGE = ("xl",)  # recipes planned for data that no generated world is like
GENERATED = "generated"
DEVICES_GB = (8, 16, 24, 40, 80, 141, 192)
SPARE = 0.25  # of a device, for kernels' work space, communication and what the allocator wastes
PLAN_DEVICE_GB = 80
MAX_WORLD = 65_536
COUNTED_ROWS = 2048  # at most so many impressions of a store are counted


@dataclass(frozen=True)
class Request:
    """What is asked for; an empty text or None = by the recipe. `store` wins over `dataset`."""

    config: RunConfig
    dataset: str = ""
    store: str = ""
    world: int | None = None
    runs: Path = Path("runs")


@dataclass(frozen=True)
class Data:
    """Schema, where it comes from, and the store if there is one (else the workload is planned)."""

    schema: Schema
    about: str
    store: FeatureStore | None = None
    planned: Workload | None = None


def figures(request: Request) -> dict[str, Any]:
    """Everything the table shows, as plain values: counts, FLOPs per impression, bytes."""
    if request.world is not None and not 0 < request.world <= MAX_WORLD:
        raise ConfigError(f"--world {request.world}: allowed are 1 to {MAX_WORLD} ranks")
    data, config = _data(request), request.config
    models = {
        "teacher": _model(data, config.model, config.train, request.world),
        "student": _model(data, config.student, config.student_train, request.world),
    }
    return {"recipe": config.recipe, "data": data.about, "models": models}


def render(found: dict[str, Any]) -> str:
    """The table of `figures`, at most 100 columns."""
    models: dict[str, Any] = found["models"]
    rows = [["architecture", *(m["arch"] for m in models.values())]]
    rows += [[label, *(f"{m[key]:,}" for m in models.values())] for label, key in COUNTS]
    rows += [["forward FLOPs per impression", *(short(m["forward_flops"]) for m in models.values())]]
    for part in next(iter(models.values()))["parts"]:
        rows.append([f"  {part}", *(_share(m["parts"][part], m["forward_flops"]) for m in models.values())])
    rows += [["training FLOPs per impression (3 x)", *(short(m["training_flops"]) for m in models.values())]]
    rows += [["ranks x impressions of a batch", *(f"{m['world']} x {m['rank_impressions']}" for m in models.values())]]
    rows += [["memory of the fullest rank", *(bytes_of(m["memory"]["total"]) for m in models.values())]]
    rows += [[f"  {label}", *(bytes_of(m["memory"][key]) for m in models.values())] for label, key in MEMORY]
    rows += [["memory if the dense part is whole (DDP)", *(bytes_of(m["replicated"]) for m in models.values())]]
    rows += [["fits, a quarter to spare", *(_device(m["fits_gb"]) for m in models.values())]]
    rows += [[f"least ranks of {PLAN_DEVICE_GB} GB", *(str(m["least_world"] or "none") for m in models.values())]]
    table = aligned(["", *models], rows, [42, *[18 for _ in models]])
    work = "\n".join(f"{name}: {m['workload']}" for name, m in models.items())
    return f"cost of recipe {found['recipe']} · {found['data']}\n\n{table}\n\n{work}"


COUNTS = (
    ("dense parameters", "dense_parameters"),
    ("table rows", "table_rows"),
    ("table parameters", "table_parameters"),
)
MEMORY = (
    ("tables, split by rows", "tables"),
    ("their row-wise AdaGrad moments", "table_moments"),
    ("dense weights, gradients, AdamW (FSDP)", "dense"),
    ("blocks gathered for a while", "gathered"),
    ("activations kept for the backward pass", "activations"),
    ("looked-up rows and their gradients", "lookups"),
)


def as_json(found: dict[str, Any]) -> str:
    return json.dumps(found, indent=2)


def short(value: float) -> str:
    """1,640,960 -> "1.64 M"."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}" if value < 999.5 * size else f"{value / size:.0f} {unit}"
    return f"{value:.0f}"


def bytes_of(value: float) -> str:
    return short(value) + "B"


def _model(data: Data, model: ModelConfig, train: TrainConfig, world: int | None) -> dict[str, Any]:
    world = world or train.num_workers
    rank_impressions = -(-train.batch_impressions // world)
    work = _work(data, model, train, rank_impressions)
    found = cost(data.schema, model, work)
    plan = Plan(world, rank_impressions, row_wise_from=ROW_WISE_FROM)
    need = memory(found, plan)
    whole = memory(found, dataclasses.replace(plan, shard_dense=False))
    return {
        "arch": model.arch,
        "dense_parameters": found.dense_parameters,
        "table_rows": found.table_rows,
        "table_parameters": found.table_parameters,
        "forward_flops": found.forward_flops,
        "training_flops": found.training_flops,
        "parts": found.parts,
        "activation_bytes": found.activation_bytes,
        "world": world,
        "rank_impressions": rank_impressions,
        "memory": {**dataclasses.asdict(need), "total": need.total},
        "replicated": whole.total,
        "fits_gb": next((gb for gb in DEVICES_GB if fits(need, gb)), None),
        "least_world": least_world(found, plan),
        "workload": _describe(work),
    }


def fits(need: Memory, device_gb: float) -> bool:
    """Whether it fits on a device with a quarter to spare."""
    return need.total <= (1 - SPARE) * device_gb * 1e9


def least_world(found: Cost, plan: Plan) -> int | None:
    """The smallest power of two of ranks on which it fits, with as many impressions on each as planned."""
    world = 1
    while world <= MAX_WORLD:
        if fits(memory(found, dataclasses.replace(plan, world=world)), PLAN_DEVICE_GB):
            return world
        world *= 2
    return None


def _data(request: Request) -> Data:
    if request.store:
        return _stored(FeatureStore.open(Path(request.store), verify=False), request.store)
    if request.dataset:
        home = request.runs / Path(request.dataset).stem / "preprocess"
        done = [(d["finished_utc"], f) for f in home.glob("[0-9a-f]*") if (d := read_stage(f)) is not None]
        if done:
            newest = max(done)[1]
            return _stored(FeatureStore.open(newest, verify=False), str(newest))
        if request.dataset != GENERATED:
            raise ConfigError(
                f'no feature store of "{request.dataset}" below {home}; make one with "python -m pipelines preprocess '
                f'--dataset {request.dataset} --data-dir FOLDER" or name one with --store'
            )
    elif request.config.recipe in PLANNED_LARGE:
        return Data(large_schema(), "planned schema of a large platform (gem.model.planned)", planned=LARGE_WORKLOAD)
    return Data(generated_schema(request.config.data.world), "planned schema of the generated world")


def _stored(store: FeatureStore, where: str) -> Data:
    return Data(store.schema, f"{store.spec.name}, store {where}", store)


def _work(data: Data, model: ModelConfig, train: TrainConfig, rank_impressions: int) -> Workload | Batch:
    """A real batch of the last training day, or the planned workload with timelines as long as the model reads."""
    if data.store is None:
        planned = data.planned or Workload()
        return dataclasses.replace(planned, history=model.max_history)
    store = data.store
    days = list(store.split.train_days)[-train.window_days :]
    impressions = store.impressions(days)
    if not len(impressions):
        raise ConfigError(f"{store.path}: no impressions on the training days {days}; nothing to count")
    size = min(rank_impressions, COUNTED_ROWS)
    plan = plan_epoch(impressions.user, impressions.day, batch_size=size, window_days=len(days), seed=0, epoch=0)
    reader = StoreReader(store, store.timelines(), impressions, model.max_history, align=model.align)
    return reader.batch(plan.batch(0))


def _describe(work: Workload | Batch) -> str:
    if isinstance(work, Workload):
        return (
            f"{work.history} events and {work.impressions_per_user:g} impressions a user, {work.first_seen:.0%} of "
            "the ads in them distinct (planned)"
        )
    num, users = len(work), len(work.users)
    events = work.timeline.ad.numel()
    return (
        f"{events / users:.0f} events and {num / users:.1f} impressions a user, {len(work.ads) / (num + events):.0%} "
        f"of the ads in them distinct ({num} impressions of the store, padding included)"
    )


def _share(part: float, whole: float) -> str:
    return f"{short(part)} {100 * part / whole if whole else 0:3.0f} %"


def _device(gb: int | None) -> str:
    return "none" if gb is None else f"{gb} GB and more"
