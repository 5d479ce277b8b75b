"""Embedding tables sharded over ranks by TorchRec, with a fused row-wise AdaGrad.

All ids of a batch travel in one KeyedJaggedTensor of stride 1: key = field, one bag with every id of
that field. One all-to-all then serves users, ads and context although they differ in number of rows.
Small tables are placed whole on one rank, large ones are split by rows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gem.data.schema import Schema
from gem.errors import BundleError
from gem.model.tables import initial_weights, module_key

ROW_WISE_FROM = 4096  # rows; smaller tables are cheaper whole
FUSED = "fused"  # the default kernel on CPU is a dense one without an optimizer of its own


class ShardedTables:
    """TorchRec `EmbeddingCollection` behind `DistributedModelParallel`; needs a process group.

    lookup: {field: ids [n]} -> {field: [n, dim]}. The optimizer runs inside the backward pass.
    """

    def __init__(self, schema: Schema, dim: int, lr: float, seed: int) -> None:
        self.schema, self.dim = schema, dim
        self.fields = tuple(schema.table_of())
        self._rows = {f: schema.tables()[t] for f, t in schema.table_of().items()}
        self.model = _wrap(schema, dim, lr)
        self.load(initial_weights(schema, dim, seed))

    def lookup(self, ids: dict[str, Tensor]) -> dict[str, Tensor]:
        """{field: ids [n]} -> {field: [n, dim]}; n may differ between fields and ranks. Collective both ways.

        A table with fewer rows than it has ids here is fetched whole and read on this side: its gradients are summed
        by row before they travel, which is what the update does anyway; rows nobody read get zero and stay.
        """
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

        whole = {f for f in self.fields if self._rows[f] < ids[f].numel()}
        asked = {f: torch.arange(self._rows[f]) if f in whole else ids[f] for f in self.fields}
        kjt = KeyedJaggedTensor(
            keys=list(self.fields),
            values=torch.cat([asked[f] for f in self.fields]),
            lengths=torch.tensor([asked[f].numel() for f in self.fields], dtype=torch.int64),
        )
        found = self.model(kjt)
        rows = {f: found[f].values() for f in self.fields}
        return {f: r.index_select(0, ids[f]) if f in whole else r for f, r in rows.items()}

    def set_lr(self, lr: float) -> None:
        """Learning rate of the updates in the backward passes from now on."""
        for group in self.model.fused_optimizer.param_groups:
            group["lr"] = lr
        self.model.fused_optimizer.step()  # moves no weight: hands the rate to the kernels, which have their own copy

    def weights(self) -> dict[str, Tensor]:
        """Whole tables on rank 0 (name -> [rows, dim]); empty elsewhere. Collective."""
        return _gather(_shards(self.model.state_dict(), ".weight"), self.schema)

    def moments(self) -> dict[str, Tensor]:
        """Row-wise AdaGrad sums on rank 0 (name -> [rows]); empty elsewhere. Collective."""
        return _gather(_shards(self.model.fused_optimizer.state_dict()["state"], "momentum1"), self.schema)

    def load(self, weights: dict[str, Tensor], moments: dict[str, Tensor] | None = None) -> None:
        """Copy whole tables (the same on every rank) into the local shards, whatever the sharding.

        Raises BundleError unless `weights`, and `moments` if given, hold every table with all its rows.
        """
        self._check("weights", weights)
        _scatter(_shards(self.model.state_dict(), ".weight"), weights)
        if moments is not None:
            self._check("moments", moments)
            _scatter(_shards(self.model.fused_optimizer.state_dict()["state"], "momentum1"), moments)

    def _check(self, what: str, given: dict[str, Tensor]) -> None:
        want, got = self.schema.tables(), {name: len(values) for name, values in given.items()}
        if got != want:
            raise BundleError(f"table {what}: got (name: rows) {got}, this model has {want}; use those of one model")


def _wrap(schema: Schema, dim: int, lr: float) -> Any:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
    from torchrec.distributed.types import ModuleSharder, ShardingEnv, ShardingPlan
    from torchrec.modules.embedding_configs import EmbeddingConfig
    from torchrec.modules.embedding_modules import EmbeddingCollection

    rows_of, table_of = schema.tables(), schema.table_of()
    configs = [
        EmbeddingConfig(
            name=module_key(name),
            num_embeddings=rows,
            embedding_dim=dim,
            feature_names=[f for f, t in table_of.items() if t == name],
        )
        for name, rows in rows_of.items()
    ]
    module = EmbeddingCollection(tables=configs, device=torch.device("cpu"))
    world = dist.get_world_size()
    sharder = EmbeddingCollectionSharder(
        fused_params={"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": lr, "eps": 1e-8}
    )
    placed = {
        module_key(name): row_wise(compute_kernel=FUSED)
        if rows >= ROW_WISE_FROM and world > 1
        else table_wise(i % world, compute_kernel=FUSED)
        for i, (name, rows) in enumerate(rows_of.items())
    }
    plan = construct_module_sharding_plan(
        module, per_param_sharding=placed, sharder=sharder, local_size=world, world_size=world, device_type="cpu"
    )
    sharders: list[ModuleSharder[Any]] = [sharder]
    return DistributedModelParallel(
        module=module,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=ShardingPlan(plan={"": plan}),
        sharders=sharders,
        init_data_parallel=False,
    )


def _shards(state: dict[str, Any], ending: str) -> dict[str, list[tuple[int, Tensor]]]:
    """module key of a table -> local pieces (first row, values) found in a TorchRec state dict."""
    out: dict[str, list[tuple[int, Tensor]]] = {}
    for key, value in _leaves(state):
        if ending.strip(".") not in key.split(".")[-1]:
            continue
        table = key.split("embeddings.")[1].split(".")[0]
        if hasattr(value, "local_shards"):
            shards = value.local_shards()
            out[table] = [(int(s.metadata.shard_offsets[0]), s.tensor) for s in shards]
        elif hasattr(value, "to_local"):
            local = value.to_local()
            pairs = zip(local.local_offsets(), local.local_shards(), strict=True)
            out[table] = [(int(offset[0]), piece) for offset, piece in pairs]
        else:
            out[table] = [(0, value)]
    return out


def _leaves(state: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    out: list[tuple[str, Any]] = []
    for key, value in state.items():
        out += _leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", value)]
    return out


def _gather(shards: dict[str, list[tuple[int, Tensor]]], schema: Schema) -> dict[str, Tensor]:
    world, rank = dist.get_world_size(), dist.get_rank()
    everyone: list[Any] = [None] * world
    # Pieces differ in number and size per rank; they travel as NumPy arrays in one object gather.
    mine = {table: [(row, piece.detach().cpu().numpy()) for row, piece in pieces] for table, pieces in shards.items()}
    dist.gather_object(mine, everyone if rank == 0 else None, dst=0)
    if rank != 0:
        return {}
    out: dict[str, Tensor] = {}
    for table, rows in schema.tables().items():
        pieces = [p for part in everyone for p in part.get(module_key(table), [])]
        whole = torch.cat([torch.from_numpy(values) for _, values in sorted(pieces, key=lambda p: p[0])])
        if whole.shape[0] != rows:
            raise BundleError(f"table {table}: gathered {whole.shape[0]} rows of {rows}; a shard is missing")
        out[table] = whole
    return out


def _scatter(shards: dict[str, list[tuple[int, Tensor]]], whole: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for table, values in whole.items():
            for row, piece in shards.get(module_key(table), []):
                piece.copy_(values[row : row + piece.shape[0]].view_as(piece))
