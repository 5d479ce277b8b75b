"""Mini-batches of an exported folder as the dicts of tensors that both libraries take (peers' environment).

Letters: B rows of a batch, F single-valued fields, L events of a history.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.benchmarks.peers.exported import Exported

BUCKETS = 32  # of a number, for models that take codes only


@dataclass(frozen=True)
class Sizes:
    """dim: width of an embedding; hidden: widths of the MLP; layers: cross layers, mask blocks or Wukong layers.

    l2: weight of the squared norm of the embeddings (FuxiCTR) or Adam's weight decay (torch-rechub: theirs is 1e-5).
    """

    dim: int = 32
    hidden: tuple[int, ...] = (256, 128)
    layers: int = 3
    dropout: float = 0.0
    lr: float = 1e-3
    l2: float = 0.0


@dataclass(frozen=True)
class Feature:
    """One input of a peer: kind is categorical, numeric or sequence; `shares` names the field whose table it reads."""

    name: str
    kind: str
    rows: int = 0
    width: int = 1
    shares: str = ""
    history: bool = False


class Batches:
    """Rows of an export as batches: name -> [B] int64, [B] float32 or [B, L] int64; "label" is float32 [B].

    Ids and numbers are read into memory; histories stay mapped, of which the newest `history` events and the first
    `sequences` fields are taken (0: all that were exported). With `every_task`, batches also carry "labels" and
    "known", float32 [B, K].
    """

    every_task = False

    def __init__(self, data: Exported, target: str, history: int = 0, sequences: int = 0) -> None:
        meta = data.meta
        self.data = data
        self.ids, self.numbers = np.array(data.array("ids")), np.array(data.array("numeric"))
        self.label, self.mask = data.target(target)
        self.task = meta["tasks"].index(target)
        self.length = min(history or meta["history"], meta["history"])
        carried = meta["sequences"][: sequences or None]
        self.multi = {f"m_{f['name']}": np.array(data.array(f"multi_{f['name']}")) for f in meta["multi"]}
        self.histories = {s["name"]: data.array(s["name"]) for s in carried}
        rows_of = {f["name"]: f["rows"] for f in meta["fields"]}
        # A model's inputs name its submodules: with a prefix, none is called like an attribute (`type`) of a module.
        self.fields = [Feature(f"c_{f['name']}", "categorical", f["rows"]) for f in meta["fields"]]
        self.numeric = [Feature(f"n_{n}", "numeric") for n in meta["numeric"]]
        self.bags = [Feature(f"m_{f['name']}", "sequence", f["rows"], f["width"]) for f in meta["multi"]]
        self.sequences = [
            Feature(s["name"], "sequence", rows_of[s["of"]], self.length, f"c_{s['of']}", history=True) for s in carried
        ]

    def take(self, rows: NDArray[np.integer]) -> dict[str, Tensor]:
        """The rows as one batch."""
        ids = torch.from_numpy(np.ascontiguousarray(self.ids[rows].T).astype(np.int64))
        numbers = torch.from_numpy(np.ascontiguousarray(self.numbers[rows].T))
        out = {f.name: ids[i] for i, f in enumerate(self.fields)}
        out |= {f.name: numbers[i] for i, f in enumerate(self.numeric)}
        out |= {n: torch.from_numpy(v[rows].astype(np.int64)) for n, v in self.multi.items()}
        for name, values in self.histories.items():
            # Whole rows first: of a mapped file, that is one read a row.
            out[name] = torch.from_numpy(values[rows][:, values.shape[1] - self.length :].astype(np.int64))
        out["label"] = torch.from_numpy(self.label[rows])
        if self.every_task:
            for name, file in (("labels", "labels"), ("known", "mask")):
                out[name] = torch.from_numpy(self.data.array(file)[rows].astype(np.float32))
        return out

    def known(self, split: str) -> NDArray[np.int64]:
        """Rows of a split whose outcome is known."""
        part = self.data.split(split)
        return np.flatnonzero(self.mask[part] > 0) + part.start

    def edges(self) -> NDArray[np.float32]:
        """[D, BUCKETS - 1] quantiles of every number over the training rows."""
        inner = np.linspace(0, 1, BUCKETS + 1)[1:-1]
        return np.quantile(self.numbers[self.data.split("train")], inner, axis=0).T.astype(np.float32)


def in_time_order(batches: Batches, batch_size: int, seed: int, epoch: int = 0) -> Iterator[NDArray[np.int64]]:
    """Training rows day after day, shuffled within a day, `batch_size` at a time (a last single row is left out)."""
    rows = batches.known("train")
    day = batches.data.array("day")[rows]
    rng = np.random.default_rng((seed, epoch))
    order = np.lexsort((rng.random(len(rows)), day))
    for start in range(0, len(rows), batch_size):
        part = rows[order[start : start + batch_size]]
        if len(part) > 1:  # batch normalisation needs two
            yield part


def in_parts(split: slice, size: int) -> Iterator[NDArray[np.int64]]:
    """The rows of a split in order, `size` at a time."""
    for start in range(split.start, split.stop, size):
        yield np.arange(start, min(start + size, split.stop))
