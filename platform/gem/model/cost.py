"""What a model costs before it is trained: parameters, FLOPs per impression, memory of one rank.

FLOPs and kept activations come from running the network once on the meta device (`counting`), hence for every
architecture and at any size. They are amortised: a user's timeline and an ad are encoded once per batch, so that
FLOPs per impression depend on how many impressions share them, which a `Workload` says.

    memory of a rank = tables / W · (weights + row-wise AdaGrad moment)     split by rows, D + 1 floats a row
                     + dense / W · (weights + gradient + 2 AdamW moments)   FSDP, 4 floats a parameter
                     + the largest block whole (weights twice, gradient)    FSDP gathers the next while one works
                     + N_rank · (kept activations + looked-up rows and their gradients)

All floats count 4 bytes. Not in it: work space of kernels, communication buffers, allocator waste, optimizer
temporaries; plan with a quarter of the device to spare.

Legend: N impressions, U users, A ads, T events, D width, W ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gem.config import ModelConfig
from gem.data.batch import Batch, EntityRows
from gem.data.collate import ImpressionRows, collate
from gem.data.past import num_signals, past_matches
from gem.data.schema import NUM_RESERVED, Schema, Side
from gem.data.store import Timelines
from gem.errors import ConfigError
from gem.model.counting import TRAINING_FACTOR, Counted, count, on_meta
from gem.model.gem import build_model

FLOAT = 4  # bytes
EVENT_EVERY_MS = 3_600_000
# events: from encoded events to the memory, once per user; reading: queries of every impression on the memory.
PARTS = ("towers", "events", "reading", "interaction", "heads")
# Name of a module -> the part that it and all below it belong to; the outermost name decides.
PART_OF = {
    "user": "towers", "ad": "towers", "context": "towers", "creative": "towers", "ad_vector": "towers",
    "counts": "towers", "events": "events", "pyramid": "events", "sequence": "events", "reading": "reading",
    "late": "reading", "heads": "heads",
}  # fmt: skip


@dataclass(frozen=True)
class Workload:
    """The shape of a batch, as means. `num_users` only decides how exact the ratios are met."""

    history: int = 128  # events of a user's timeline; a model reads its newest `max_history`
    impressions_per_user: float = 4.0
    first_seen: float = 0.25  # share of candidates and events whose ad is not in the batch yet: distinct ads
    values_per_multi: int = 3  # of a multi-valued field
    num_users: int = 4

    def __post_init__(self) -> None:
        least = min(self.num_users, self.num_users * self.impressions_per_user)
        if min(self.history, self.values_per_multi) < 0 or least < 1 or not 0 < self.first_seen <= 1:
            raise ConfigError(
                f"workload: got {self}; allowed: history and values_per_multi from 0, at least one user and one "
                "impression, first_seen above 0 and at most 1"
            )


@dataclass(frozen=True)
class Plan:
    """How a model lies on ranks. shard_dense=False replicates the dense network on every rank (DDP)."""

    world: int = 1
    rank_impressions: int = 512  # of a global batch, on one rank
    shard_dense: bool = True
    row_wise_from: int = 4096  # rows; smaller tables lie whole on one rank each, in turn


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest rank."""

    tables: int
    table_moments: int
    dense: int  # weights, gradients, two moments
    gathered: int  # blocks that FSDP has whole for a while, or the gradient buckets of DDP
    activations: int
    lookups: int

    @property
    def total(self) -> int:
        return self.tables + self.table_moments + self.dense + self.gathered + self.activations + self.lookups


@dataclass(frozen=True)
class Cost:
    """Figures of one model; everything "per impression" is a mean over the impressions of the workload."""

    dim: int
    tables: dict[str, int]  # rows
    dense_parameters: int
    largest_block: int  # parameters
    parts: dict[str, float]  # forward FLOPs per impression by part
    activation_bytes: float  # kept for the backward pass, per impression
    lookup_bytes: float  # looked-up rows and their gradients, per impression

    @property
    def table_rows(self) -> int:
        return sum(self.tables.values())

    @property
    def table_parameters(self) -> int:
        return self.table_rows * self.dim

    @property
    def forward_flops(self) -> float:
        """Per impression."""
        return sum(self.parts.values())

    @property
    def training_flops(self) -> float:
        """Per impression: forward and backward, by convention three times the forward pass."""
        return TRAINING_FACTOR * self.forward_flops


def cost(schema: Schema, config: ModelConfig, work: Workload | Batch) -> Cost:
    """Cost of a model on a workload, or on a real batch with all its padding. Nothing large is allocated."""
    batch = work if isinstance(work, Batch) else synthetic_batch(schema, work, config)
    model = on_meta(lambda: build_model(schema, config))
    ids = batch.lookups()
    emb = {f: torch.empty(i.numel(), config.dim, device="meta", requires_grad=True) for f, i in ids.items()}
    counted = count(model, batch, emb, memory=True)
    num = len(batch)
    looked_up = sum(i.numel() for i in ids.values())
    return Cost(
        dim=config.dim,
        tables=schema.tables(),
        dense_parameters=sum(p.numel() for p in model.parameters()),
        largest_block=largest_block(model),
        parts={part: flops / num for part, flops in by_part(counted).items()},
        activation_bytes=counted.saved_bytes / num,
        lookup_bytes=2 * FLOAT * config.dim * looked_up / num,
    )


def training_flops(schema: Schema, config: ModelConfig, work: Workload | Batch) -> float:
    """FLOPs of training on one impression: three forward passes."""
    return cost(schema, config, work).training_flops


def by_part(counted: Counted) -> dict[str, int]:
    """FLOPs by part, all of `PARTS`. What no name tells is the network in between: "interaction"."""
    out = dict.fromkeys(PARTS, 0)
    for path, flops in counted.flops_of.items():
        known = [PART_OF[name] for name in path.split(".") if name in PART_OF]
        out[known[0] if known else "interaction"] += flops
    return out


def largest_block(model: nn.Module) -> int:
    """Parameters of the largest unit FSDP would gather: an entry of a ModuleList, else a child of the model."""
    units: list[nn.Module] = []
    for child in model.children():
        units += child.children() if isinstance(child, nn.ModuleList) else [child]
    return max((sum(p.numel() for p in unit.parameters()) for unit in units), default=0)


def memory(cost: Cost, plan: Plan) -> Memory:
    """Bytes on the fullest rank of a plan; see the module docstring for the formula."""
    rows = rows_on_fullest_rank(cost.tables, plan)
    dense, block = cost.dense_parameters, cost.largest_block
    share = -(-dense // plan.world) if plan.shard_dense else dense
    gathered = 3 * block if plan.world > 1 else 0
    return Memory(
        tables=FLOAT * rows * cost.dim,
        table_moments=FLOAT * rows,
        dense=4 * FLOAT * share,
        gathered=FLOAT * (gathered if plan.shard_dense else dense),
        activations=round(cost.activation_bytes * plan.rank_impressions),
        lookups=round(cost.lookup_bytes * plan.rank_impressions),
    )


def rows_on_fullest_rank(tables: Mapping[str, int], plan: Plan) -> int:
    """Rows of all tables on the rank with most: large tables are split evenly, small ones dealt in turn."""
    rows = [0] * plan.world
    for i, n in enumerate(tables.values()):
        if n >= plan.row_wise_from and plan.world > 1:
            part = -(-n // plan.world)
            rows = [have + min(part, max(n - part * rank, 0)) for rank, have in enumerate(rows)]
        else:
            rows[i % plan.world] += n
    return max(rows)


def synthetic_batch(schema: Schema, work: Workload, config: ModelConfig) -> Batch:
    """A batch of that shape: all users alike, every impression after its user's whole timeline."""
    users, length = work.num_users, min(work.history, config.max_history) if schema.kinds else 0
    num = max(round(users * work.impressions_per_user), 1)
    # Candidates first, events after them, in turn over all ads of the batch.
    num_shown = num + users * length
    shown = np.arange(num_shown) % max(round(num_shown * work.first_seen), 1)
    user = np.arange(num) * users // num
    length_of = np.full(users, length)
    now_ms = (length + 1) * EVENT_EVERY_MS
    rows = ImpressionRows(
        user=user,
        ad=shown[:num],
        time_ms=np.full(num, now_ms),
        cut=length_of[user],
        surface=np.full(num, len(schema.surfaces) - 1),
        context=_Source(schema.context, work.values_per_multi).rows(np.arange(num)),
        labels=np.zeros((num, len(schema.tasks)), np.float32),
        mask=np.ones((num, len(schema.tasks)), np.float32),
        impression_id=np.arange(num),
        past=np.ones((num, len(past_matches(schema)), num_signals(schema)), np.float32),
    )
    user_rows, ad_rows = _Source(schema.user, work.values_per_multi), _Source(schema.ad, work.values_per_multi)
    return collate(user_rows, ad_rows, _timelines(length_of, shown[num:]), rows, config.max_history, config.align)


def _timelines(lengths: NDArray[np.int64], ad: NDArray[np.int64]) -> Timelines:
    at = np.concatenate([np.arange(n) for n in lengths]) if len(lengths) else np.zeros(0, np.int64)
    time_ms = (at + 1) * EVENT_EVERY_MS
    return Timelines(
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        ad=ad.astype(np.int32),
        kind=np.ones(at.size, np.uint8),
        flags=np.ones(at.size, np.uint16),
        surface=np.zeros(at.size, np.int16),
        dwell=np.ones(at.size, np.uint8),
        time_ms=time_ms,
        known_ms=time_ms,
    )


@dataclass(frozen=True)
class _Source:
    """Features of made-up entities: `collate` reads it as it reads a store."""

    side: Side
    values_per_multi: int

    def rows(self, idx: NDArray[np.integer]) -> EntityRows:
        ids: dict[str, Tensor] = {}
        offsets: dict[str, Tensor] = {}
        for f in self.side.fields:
            each = (f.hashes or self.values_per_multi) if f.multi else 1
            at = (torch.from_numpy(idx.astype(np.int64))[:, None] * each + torch.arange(each)).flatten()
            ids[f.name] = NUM_RESERVED + at % (f.rows - NUM_RESERVED) if f.rows > NUM_RESERVED else at % f.rows
            if f.multi:
                offsets[f.name] = torch.arange(len(idx) + 1) * each
        width = sum(w for _, w in self.side.vectors)
        num = (len(idx), 2 * len(self.side.numeric))
        return EntityRows(ids, offsets, torch.zeros(num), torch.zeros(len(idx), width))
