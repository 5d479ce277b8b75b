"""A complete model for one process: dense network plus plain tables. This is what a bundle holds."""

from __future__ import annotations

import hashlib

from torch import Tensor, nn

from gem.config import ModelConfig
from gem.data.batch import Batch
from gem.data.schema import Schema
from gem.model.gem import build_model
from gem.model.heads import Output
from gem.model.tables import PlainTables, module_key, table_name


class Ranker(nn.Module):
    """forward: Batch -> Output. State keys: `dense.*` and `tables.tables.<module_key(table)>.weight`."""

    def __init__(self, schema: Schema, config: ModelConfig, seed: int = 0) -> None:
        super().__init__()
        self.schema, self.config = schema, config
        self.dense = build_model(schema, config, seed)
        self.tables = PlainTables(schema, config.dim, seed)

    def forward(self, batch: Batch) -> Output:
        out: Output = self.dense(batch, self.tables(batch.lookups()))
        return out


def ranker_weights(dense: dict[str, Tensor], tables: dict[str, Tensor]) -> dict[str, Tensor]:
    """State dict of a `Ranker` from a dense state dict and whole tables (name -> [rows, dim])."""
    out = {f"dense.{k}": v.detach().clone().contiguous() for k, v in dense.items()}
    return out | {f"tables.tables.{module_key(k)}.weight": v.detach().clone().contiguous() for k, v in tables.items()}


def split_weights(weights: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The inverse of `ranker_weights`: (dense state dict, table name -> [rows, dim])."""
    dense = {k.removeprefix("dense."): v for k, v in weights.items() if k.startswith("dense.")}
    tables = {table_name(k.split(".")[2]): v for k, v in weights.items() if k.startswith("tables.tables.")}
    return dense, tables


def weights_hash(weights: dict[str, Tensor]) -> str:
    """sha256 over names and values, in name order."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode())
        digest.update(weights[name].contiguous().numpy().tobytes())
    return digest.hexdigest()


def num_parameters(model: nn.Module) -> dict[str, int]:
    """Parameter counts: {'dense': ..., 'tables': ...}."""
    tables = sum(p.numel() for n, p in model.named_parameters() if n.startswith("tables."))
    return {"dense": sum(p.numel() for p in model.parameters()) - tables, "tables": tables}
