"""Embedding tables behind one small interface: field -> looked-up rows.

The dense network never sees a table. Here stands the plain version (serving, single process, tests);
the TorchRec version for sharded training is `gem.training.sharding`.
"""

from __future__ import annotations

import hashlib
from typing import cast

import torch
from torch import Tensor, nn

from gem.data.schema import PAD, Schema
from gem.errors import BundleError

INIT_STD = 0.02


def module_key(table: str) -> str:
    """The name under which PyTorch can hold a table: most names as they are.

    A module cannot hold "type" or "items" (its own attributes) or a name with a dot, and feature columns are
    called so. Such names are escaped with "%", one to one.
    """
    text = table.replace("%", "%25").replace(".", "%2E")
    return f"%{text}" if not text or hasattr(nn.ModuleDict(), text) else text


def table_name(key: str) -> str:
    """The table of a module key: the inverse of `module_key`."""
    text = key[1:] if key.startswith("%") and key[1:3] not in ("25", "2E") else key
    return text.replace("%2E", ".").replace("%25", "%")


def initial_weight(table: str, rows: int, dim: int, seed: int) -> Tensor:
    """Starting values of one table [rows, dim]: normal, the padding row zero.

    The generator is keyed by (seed, table), so that every process and every sharding starts equal.
    """
    key = hashlib.sha256(f"{seed}:{table}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "little") >> 1)
    weight = torch.randn(rows, dim, generator=generator) * INIT_STD
    weight[PAD] = 0.0
    return weight


def initial_weights(schema: Schema, dim: int, seed: int) -> dict[str, Tensor]:
    """Starting values of all tables of a schema: name -> [rows, dim]."""
    return {name: initial_weight(name, rows, dim, seed) for name, rows in schema.tables().items()}


class PlainTables(nn.Module):
    """One `nn.Embedding` per table of a schema, all of width `dim`.

    forward: {field: ids [n]} -> {field: [n, dim]}; fields that share a table read the same rows.
    """

    def __init__(self, schema: Schema, dim: int, seed: int = 0) -> None:
        super().__init__()
        self.names = tuple(schema.tables())
        self.key_of = {field: module_key(table) for field, table in schema.table_of().items()}
        self.tables = nn.ModuleDict()
        for name, weight in initial_weights(schema, dim, seed).items():
            self.tables[module_key(name)] = nn.Embedding(len(weight), dim, _weight=weight)

    def forward(self, ids: dict[str, Tensor]) -> dict[str, Tensor]:
        return {field: cast(Tensor, self.tables[self.key_of[field]](rows)) for field, rows in ids.items()}

    def weights(self) -> dict[str, Tensor]:
        """Table name -> [rows, dim], detached."""
        return {name: self._weight(name).detach() for name in self.names}

    def _weight(self, name: str) -> Tensor:
        return cast(nn.Embedding, self.tables[module_key(name)]).weight

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        """Copy table values in; BundleError if names or shapes differ."""
        if set(weights) != set(self.names):
            raise BundleError(f"tables: got {sorted(weights)}, the model has {sorted(self.names)}")
        with torch.no_grad():
            for name, value in weights.items():
                target = self._weight(name)
                if target.shape != value.shape:
                    raise BundleError(f"table {name}: got shape {tuple(value.shape)}, expected {tuple(target.shape)}")
                target.copy_(value)
