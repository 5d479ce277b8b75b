"""torch-rechub's models (peers' environment).

Theirs: the model classes with their embedding layers, and the optimizer its trainers build (Adam with weight decay
1e-5 over all parameters, no clipping) on binary cross-entropy. Ours: the step around them, without the trainer's
progress bar and its walk over all modules for a regularisation loss of weight zero.

DIN takes codes only (a dense feature breaks its shapes): its numbers come in quantile buckets of the training rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn
from torch_rechub.basic.features import DenseFeature, SequenceFeature, SparseFeature
from torch_rechub.models.multi_task import MMOE
from torch_rechub.models.ranking import DIN, DCNv2

from tests.benchmarks.peers.batches import BUCKETS, Batches, Feature, Sizes

LIBRARY = f"torch-rechub {version('torch-rechub')}"
WEIGHT_DECAY = 1e-5  # the default of its trainers


def _sparse(f: Feature, dim: int) -> SparseFeature:
    return SparseFeature(f.name, f.rows, embed_dim=dim, padding_idx=0)


def _sequence(f: Feature, dim: int, pooling: str) -> SequenceFeature:
    shared = f.shares or None
    return SequenceFeature(f.name, f.rows, embed_dim=dim, pooling=pooling, shared_with=shared, padding_idx=0)


class Peer(ABC):
    """One of its models, the optimizer, and a step."""

    EVERY_TASK = False

    def __init__(self, batches: Batches, sizes: Sizes) -> None:
        self.batches, self.sizes = batches, sizes
        self.module = self.build()
        decay = sizes.l2 or WEIGHT_DECAY
        self.optimizer = torch.optim.Adam(self.module.parameters(), lr=sizes.lr, weight_decay=decay)
        self.loss = nn.BCELoss()

    @abstractmethod
    def build(self) -> nn.Module:
        """Its model over the fields of the batches."""

    def step(self, batch: dict[str, Tensor]) -> None:
        loss = self.loss_of(self.module(self.inputs(batch)), batch)
        self.module.zero_grad()
        loss.backward()
        self.optimizer.step()

    def loss_of(self, found: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return self.loss(found, batch["label"])

    def predict_batch(self, batch: dict[str, Tensor]) -> Tensor:
        """Probabilities [B]."""
        return self.module(self.inputs(batch))

    def inputs(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return batch

    def all_features(self) -> list[Any]:
        """Every field; histories and multi-valued fields as masked means."""
        b, dim = self.batches, self.sizes.dim
        codes = [_sparse(f, dim) for f in b.fields]
        bags = [_sequence(f, dim, "mean") for f in (*b.bags, *b.sequences)]
        return [*codes, *bags, *(DenseFeature(f.name) for f in b.numeric)]

    def mlp(self) -> dict[str, Any]:
        return {"dims": list(self.sizes.hidden), "dropout": self.sizes.dropout}


class DINPeer(Peer):
    """Target attention over the histories of ad and author."""

    def build(self) -> nn.Module:
        b, dim = self.batches, self.sizes.dim
        targets = {s.shares for s in b.sequences}
        self.edges = torch.from_numpy(b.edges()).contiguous()
        numbers = [SparseFeature(f.name, BUCKETS + 1, embed_dim=dim) for f in b.numeric]
        other = [_sparse(f, dim) for f in b.fields if f.name not in targets]
        other += [*(_sequence(f, dim, "mean") for f in b.bags), *numbers]
        target = [_sparse(f, dim) for f in b.fields if f.name in targets]
        # Its attention pairs the i-th history with the i-th target.
        order = {f.name: i for i, f in enumerate(target)}
        sequences = sorted(b.sequences, key=lambda s: order[s.shares])
        history = [_sequence(f, dim, "concat") for f in sequences]
        return DIN(other, history, target, self.mlp(), {"dims": [64]})

    def inputs(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        names = [f.name for f in self.batches.numeric]
        if not names:
            return batch
        found = torch.searchsorted(self.edges, torch.stack([batch[n] for n in names]))
        return batch | dict(zip(names, found, strict=True))


class DCNv2Peer(Peer):
    """Cross network with full matrices beside an MLP."""

    def build(self) -> nn.Module:
        return DCNv2(self.all_features(), self.sizes.layers, self.mlp(), use_low_rank_mixture=False)


class MMOEPeer(Peer):
    """Four experts, one gate and tower per task; all tasks of the export are learned, one is predicted."""

    EVERY_TASK = True

    def build(self) -> nn.Module:
        tasks = len(self.batches.data.meta["tasks"])
        tower = {"dims": [64]}
        return MMOE(self.all_features(), ["classification"] * tasks, 4, self.mlp(), [tower] * tasks)

    def loss_of(self, found: Tensor, batch: dict[str, Tensor]) -> Tensor:
        every = nn.functional.binary_cross_entropy(found, batch["labels"], batch["known"], reduction="sum")
        return every / len(found)

    def predict_batch(self, batch: dict[str, Tensor]) -> Tensor:
        return self.module(self.inputs(batch))[:, self.batches.task]


ARMS: dict[str, type[Peer]] = {"rechub_din": DINPeer, "rechub_dcnv2": DCNv2Peer, "rechub_mmoe": MMOEPeer}
