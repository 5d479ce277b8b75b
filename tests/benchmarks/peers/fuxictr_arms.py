"""FuxiCTR's models on its own `BaseModel` (peers' environment).

Theirs: FeatureEmbedding(Dict) with its pooling, MLP_Block, CrossNetV2, DIN_Attention with Dice, the loss, Adam over all
parameters (dense, also over tables) and `train_step` with its clipping at norm 10. The wheel has no model zoo, so the
assembly is ours, after the papers: DIN (1706.06978), DCNv2 (2008.13535), MaskNet in series (2102.07619), FinalMLP
(2304.00902), Wukong (2403.02545). DIN reads histories by target attention, the others by masked average pooling.

Letters: B rows, F fields, D width of an embedding, C = F D.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from fuxictr.features import FeatureMap
from fuxictr.pytorch.layers import CrossNetV2, DIN_Attention, FeatureEmbedding, FeatureEmbeddingDict, MLP_Block
from fuxictr.pytorch.models import BaseModel
from fuxictr.version import __version__
from torch import Tensor, nn

from tests.benchmarks.peers.batches import Batches, Feature, Sizes

LIBRARY = f"fuxictr {__version__}"
CLIP = 10.0  # the default of BaseModel.fit


def feature_map(batches: Batches, dim: int, pool_histories: bool) -> FeatureMap:
    """What its preprocessing would have written to feature_map.json."""
    out = FeatureMap("exported", ".")
    out.features = OrderedDict()
    for f in (*batches.fields, *batches.numeric, *batches.bags, *batches.sequences):
        out.features[f.name] = _spec(f, pool_histories or not f.history)
    out.labels = ["label"]
    out.default_emb_dim = dim
    out.num_fields = out.get_num_fields()
    out.set_column_index()
    return out


def _spec(f: Feature, pooled: bool) -> dict[str, Any]:
    if f.kind == "numeric":
        return {"source": "", "type": "numeric"}
    spec: dict[str, Any] = {"source": "", "type": f.kind, "padding_idx": 0, "vocab_size": f.rows}
    if f.kind == "sequence":
        spec["max_len"] = f.width
        spec["feature_encoder"] = "layers.MaskedAveragePooling()" if pooled else None
    if f.shares:
        spec["share_embedding"] = f.shares
    return spec


class Peer(BaseModel):  # type: ignore[misc]
    """A model with one output; subclasses give `logit(X)` and call `ready` at the end of their constructor."""

    EVERY_TASK = False

    def __init__(self, features: FeatureMap, sizes: Sizes) -> None:
        regularizer = sizes.l2 or None
        super().__init__(features, embedding_regularizer=regularizer, verbose=0, model_root=".", metrics=["AUC"])
        self._max_gradient_norm = CLIP

    def ready(self, lr: float) -> None:
        self.compile("adam", "binary_crossentropy", lr)
        self.reset_parameters()
        self.model_to_device()

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"y_pred": self.output_activation(self.logit(self.get_inputs(inputs)))}

    @property
    def module(self) -> nn.Module:
        return self

    def step(self, batch: dict[str, Tensor]) -> None:
        self.train_step(batch)

    def predict_batch(self, batch: dict[str, Tensor]) -> Tensor:
        """Probabilities [B]."""
        return self(batch)["y_pred"][:, 0]


class DIN(Peer):
    """MLP over all embeddings, the histories reduced by attention to the candidate's fields of the same tables."""

    def __init__(self, batches: Batches, sizes: Sizes) -> None:
        features = feature_map(batches, sizes.dim, pool_histories=False)
        super().__init__(features, sizes)
        self.dim, self.sequences = sizes.dim, batches.sequences
        self.embedding_layer = FeatureEmbeddingDict(features, sizes.dim)
        self.attention = DIN_Attention(
            sizes.dim * len(self.sequences), attention_units=[64], hidden_activations="Dice", dropout_rate=sizes.dropout
        )
        width = features.sum_emb_out_dim()
        self.dnn = MLP_Block(width, list(sizes.hidden), output_dim=1, dropout_rates=sizes.dropout)
        self.ready(sizes.lr)

    def logit(self, X: dict[str, Tensor]) -> Tensor:
        emb = self.embedding_layer(X)
        target = torch.cat([emb[s.shares] for s in self.sequences], -1)
        history = torch.cat([emb[s.name] for s in self.sequences], -1)
        read = self.attention(target, history, X[self.sequences[0].name] != 0)
        for s, part in zip(self.sequences, read.split(self.dim, -1), strict=True):
            emb[s.name] = part
        return self.dnn(self.embedding_layer.dict2tensor(emb, flatten_emb=True))


class DCNv2(Peer):
    """Cross network and MLP side by side."""

    def __init__(self, batches: Batches, sizes: Sizes) -> None:
        features = feature_map(batches, sizes.dim, pool_histories=True)
        super().__init__(features, sizes)
        self.embedding_layer = FeatureEmbedding(features, sizes.dim)
        width = features.sum_emb_out_dim()
        self.cross = CrossNetV2(width, sizes.layers)
        self.dnn = MLP_Block(width, list(sizes.hidden), dropout_rates=sizes.dropout)
        self.top = nn.Linear(width + sizes.hidden[-1], 1)
        self.ready(sizes.lr)

    def logit(self, X: dict[str, Tensor]) -> Tensor:
        flat_BC = self.embedding_layer(X, flatten_emb=True)
        return self.top(torch.cat([self.cross(flat_BC), self.dnn(flat_BC)], -1))


class MaskNet(Peer):
    """Mask blocks in series: h' = relu(LN(W (mask(e) * h))), mask(e) = W2 relu(W1 e); h starts as LN of each field."""

    def __init__(self, batches: Batches, sizes: Sizes) -> None:
        features = feature_map(batches, sizes.dim, pool_histories=True)
        super().__init__(features, sizes)
        self.embedding_layer = FeatureEmbedding(features, sizes.dim)
        fields, width = features.num_fields, features.num_fields * sizes.dim
        self.scale = nn.Parameter(torch.ones(fields, sizes.dim))
        self.shift = nn.Parameter(torch.zeros(fields, sizes.dim))
        widths = [width, *([sizes.hidden[-1]] * sizes.layers)]
        # The mask's inner width is the block's input's (reduction ratio 1), bounded so that block 1 stays of this size.
        inner = [min(w, max(sizes.hidden)) for w in widths]
        self.masks = nn.ModuleList(MLP_Block(width, [inner[i]], output_dim=widths[i]) for i in range(sizes.layers))
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(widths[i], widths[i + 1], bias=False), nn.LayerNorm(widths[i + 1]), nn.ReLU(),
                nn.Dropout(sizes.dropout),
            )
            for i in range(sizes.layers)
        )  # fmt: skip
        self.top = nn.Linear(widths[-1], 1)
        self.ready(sizes.lr)

    def logit(self, X: dict[str, Tensor]) -> Tensor:
        emb_BFD = self.embedding_layer(X)
        flat_BC = emb_BFD.flatten(1)
        h = (nn.functional.layer_norm(emb_BFD, emb_BFD.shape[-1:]) * self.scale + self.shift).flatten(1)
        for mask, block in zip(self.masks, self.blocks, strict=True):
            h = block(mask(flat_BC) * h)
        return self.top(h)


class FinalMLP(Peer):
    """Two MLPs on gated inputs, fused: w1 x + w2 y + sum over heads of x_h' W_h y_h.

    One gate reads the user id, the other the ad id, both from tables of their own as in the paper.
    """

    HEADS = 4

    def __init__(self, batches: Batches, sizes: Sizes) -> None:
        features = feature_map(batches, sizes.dim, pool_histories=True)
        super().__init__(features, sizes)
        self.embedding_layer = FeatureEmbedding(features, sizes.dim)
        width, out = features.sum_emb_out_dim(), sizes.hidden[-1]
        by_side = {
            f["side"]: f"c_{f['name']}" for f in reversed(batches.data.meta["fields"])
        }  # the first field of a side
        self.context_tables = nn.ModuleList(
            FeatureEmbedding(features, sizes.dim, required_feature_columns=[by_side[s]]) for s in ("user", "ad")
        )
        self.gates = nn.ModuleList(
            MLP_Block(sizes.dim, [64], output_dim=width, output_activation="Sigmoid") for _ in range(2)
        )
        self.towers = nn.ModuleList(MLP_Block(width, list(sizes.hidden), dropout_rates=sizes.dropout) for _ in range(2))
        self.linear = nn.Linear(2 * out, 1)
        part = out // self.HEADS
        self.bilinear = nn.Parameter(nn.init.xavier_normal_(torch.empty(self.HEADS, part, part)))
        self.ready(sizes.lr)

    def logit(self, X: dict[str, Tensor]) -> Tensor:
        flat_BC = self.embedding_layer(X, flatten_emb=True)
        x, y = (
            tower(flat_BC * 2 * gate(context(X, flatten_emb=True)))
            for context, gate, tower in zip(self.context_tables, self.gates, self.towers, strict=True)
        )
        heads_x, heads_y = (v.unflatten(-1, (self.HEADS, -1)) for v in (x, y))
        fused = torch.einsum("bhi,hij,bhj->b", heads_x, self.bilinear, heads_y)
        return self.linear(torch.cat([x, y], -1)) + fused.unsqueeze(-1)


class WukongLayer(nn.Module):
    """X' = LN([FMB(X) ; LCB(X)] + residual), X [B, F, D] -> [B, 2 n, D] (equations 4 to 8 of the paper).

    FMB(X) = MLP(LN(flatten(X (X' Y)))) with Y [F, k]; LCB(X) = W X; the residual is linear where F changes.
    """

    def __init__(self, fields: int, rows: int, dim: int, hidden: int) -> None:
        super().__init__()
        rank = 8
        self.project = nn.Parameter(nn.init.xavier_normal_(torch.empty(fields, rank)))
        self.norm = nn.LayerNorm(fields * rank)
        self.mlp = MLP_Block(fields * rank, [hidden], output_dim=rows * dim)
        self.compress = nn.Linear(fields, rows, bias=False)
        self.residual = nn.Identity() if fields == 2 * rows else nn.Linear(fields, 2 * rows, bias=False)
        self.out = nn.LayerNorm(dim)
        self.rows, self.dim = rows, dim

    def forward(self, x_BFD: Tensor) -> Tensor:
        turned = x_BFD.transpose(1, 2)
        pairs = x_BFD @ (turned @ self.project)
        machine = self.mlp(self.norm(pairs.flatten(1))).unflatten(-1, (self.rows, self.dim))
        linear = self.compress(turned).transpose(1, 2)
        return self.out(torch.cat([machine, linear], 1) + self.residual(turned).transpose(1, 2))


class Wukong(Peer):
    """Wukong layers of 2 x 16 rows and an MLP, on FuxiCTR's embeddings: the wheel has no Wukong of its own."""

    ROWS = 16

    def __init__(self, batches: Batches, sizes: Sizes) -> None:
        features = feature_map(batches, sizes.dim, pool_histories=True)
        super().__init__(features, sizes)
        self.embedding_layer = FeatureEmbedding(features, sizes.dim)
        widths = [features.num_fields, *([2 * self.ROWS] * (sizes.layers - 1))]
        self.stack = nn.Sequential(*(WukongLayer(w, self.ROWS, sizes.dim, sizes.hidden[0]) for w in widths))
        self.dnn = MLP_Block(2 * self.ROWS * sizes.dim, list(sizes.hidden), output_dim=1, dropout_rates=sizes.dropout)
        self.ready(sizes.lr)

    def logit(self, X: dict[str, Tensor]) -> Tensor:
        return self.dnn(self.stack(self.embedding_layer(X)).flatten(1))


ARMS: dict[str, type[Peer]] = {
    "fuxictr_din": DIN,
    "fuxictr_dcnv2": DCNv2,
    "fuxictr_masknet": MaskNet,
    "fuxictr_finalmlp": FinalMLP,
    "fuxictr_wukong": Wukong,
}
