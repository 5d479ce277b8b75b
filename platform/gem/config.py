"""Frozen run configuration: one dataclass tree, overridden by `--set path.to.field=value` only."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from gem.errors import ConfigError, suggest


@dataclass(frozen=True)
class WorldConfig:
    """Size and seed of the generated ads world (used when `data.dataset` is `generated`)."""

    num_users: int = 3000
    num_ads: int = 1500
    num_days: int = 10
    num_impressions: int = 150_000
    num_organic_events: int = 400_000
    seed: int = 7
    duplicate_share: float = 0.005  # of impression rows written twice, for the guards to find
    null_user_share: float = 0.001  # of impression rows without their user id


@dataclass(frozen=True)
class DataConfig:
    """Which data set is read, how its days are split and how many bad rows are borne."""

    dataset: str = "generated"  # a name under pipelines/datasets or a path to a spec file
    data_dir: str = ""  # folder of the raw tables; empty only for `generated`
    test_day: str = ""  # YYYY-MM-DD; empty = last day in the log
    validation_day: str = ""  # empty = the day before the test day
    num_shards: int = 0  # user-hash shards; 0 = by the number of rows
    max_quarantine_share: float = 0.05  # of the rows of a table; above it the run stops
    incremental: bool = True  # add new files to the last finished store instead of building it anew
    allow_missing_days: bool = False  # a gap between the day partitions of a table is accepted
    max_clock_skew_s: float = 300.0  # events this far ahead of their partition's day (or of now) are moved back
    max_rows_per_user_day: int = 10_000  # events, and impressions, of one user on one day; later ones are dropped
    world: WorldConfig = field(default_factory=WorldConfig)


ARCHS = ("gem", "lr", "dlrm", "dcnv2", "din", "wukong")
INTERLEAVING = ("pooled", "separate", "one_way", "both")
MAX_SPAN = 1 << 40  # events that one token of the pyramid may stand for; more overflow an index long before they exist


@dataclass(frozen=True)
class ModelConfig:
    """One size dial for foundation model, students and baselines alike."""

    arch: str = "gem"  # gem, or a baseline in the same trunk: lr, dlrm, dcnv2, din, wukong
    dim: int = 32  # D, width of a token and of an embedding row
    num_layers: int = 2  # InterFormer layers
    num_heads: int = 2
    max_history: int = 128  # newest events of a timeline that are read
    window: int = 32  # newest events read one by one; older ones through summaries, if num_levels > 1
    block: int = 8  # tokens of a level that one token of the next level summarises; also the attention block
    num_levels: int = 2  # of the pyramid; a token of level k stands for block ** k events
    event_attention: bool = False  # events of a block attend to the earlier ones of it
    num_pma: int = 1  # learned queries per layer
    num_recent: int = 1  # newest events that become tokens as they are
    interleaving: str = "both"  # pooled, separate, one_way or both
    cross_layer: bool = True  # every layer may attend to the outputs of all earlier ones
    surface_adapters: bool = True
    counts: bool = True  # hard-search counts of the user's own events as tokens
    past: bool = True  # what all users did with the ad, as tokens
    num_fmb: int = 4  # Wukong rows from the factorization machine block
    num_lcb: int = 4  # Wukong rows from the linear compression block
    rank: int = 8  # k of the optimised factorization machine
    mlp_hidden: int = 128
    representation_dim: int = 32  # R, what a knowledge record stores
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name, allowed in (("arch", ARCHS), ("interleaving", INTERLEAVING)):
            value = getattr(self, name)
            if value not in allowed:
                raise ConfigError(
                    f'model.{name}: got "{value}".{suggest(value, allowed)} Allowed: {", ".join(allowed)}'
                )
        for names, least in (_AT_LEAST_1, 1), (_AT_LEAST_0, 0):
            for name in names:
                if getattr(self, name) < least:
                    raise _refused(name, getattr(self, name), f"{least} and more")
        if not 0.0 <= self.dropout < 1.0:
            raise _refused("dropout", self.dropout, "0 and more, below 1")
        if self.arch == "gem" and self.num_levels > 1 and self.num_recent > self.window:
            raise _refused(
                "num_recent", self.num_recent, f"at most the window, {self.window} (older ones are summed up)"
            )
        if self.num_fmb + self.num_lcb == 0:
            raise _refused("num_fmb and num_lcb", 0, "at least one of them 1 and more")
        if self.arch == "gem" and self.cross_layer and self.dim < 2:
            raise _refused("dim", self.dim, "2 and more with cross_layer, whose keys are half as wide")
        if self.arch == "gem" and self.dim % self.num_heads:
            fit = [n for n in range(1, self.dim + 1) if self.dim % n == 0]
            raise _refused("num_heads", self.num_heads, f"divisors of dim {self.dim}: {', '.join(map(str, fit))}")
        if self.block > 1 and self.num_levels * math.log2(self.block) > math.log2(MAX_SPAN):
            most = int(math.log2(MAX_SPAN) / math.log2(self.block))
            raise _refused("num_levels", self.num_levels, f"1 to {most} with blocks of {self.block}")

    @property
    def align(self) -> int:
        """Timelines must reach a model cut at multiples of this many events, or blocks would depend on the batch."""
        return int(self.block ** max(self.num_levels - 1, int(self.event_attention)))


_AT_LEAST_1 = (
    "dim", "num_layers", "num_heads", "block", "num_levels", "rank", "mlp_hidden", "representation_dim",
)  # fmt: skip
_AT_LEAST_0 = ("max_history", "window", "num_pma", "num_recent", "num_fmb", "num_lcb")


def _refused(name: str, got: float, allowed: str) -> ConfigError:
    return ConfigError(f"{name}: got {got}; allowed: {allowed}; set model.{name} (or student.{name})")


@dataclass(frozen=True)
class TrainConfig:
    """How one model is trained; learning rates are per step, batch sizes over all workers."""

    epochs: int = 1  # passes over the training rows, each in time order
    fresh_tables: bool = True  # tables begin every pass as they began the first; dense weights go on
    batch_impressions: int = 512  # global, over all workers
    window_days: int = 1  # impressions of so many days are shuffled together, windows in time order
    lr_dense: float = 1.2e-3
    lr_sparse: float = 0.1
    weight_decay: float = 1e-5
    warmup_share: float = 0.05
    clip_norm: float = 1.0
    num_workers: int = 2
    checkpoint_every_steps: int = 200
    seed: int = 1
    negative_keep: float = 1.0  # share of the rows without any positive label that are trained; the rest weigh more

    def __post_init__(self) -> None:
        for names, least in (_TRAIN_AT_LEAST_1, 1), (_TRAIN_AT_LEAST_0, 0):
            for name in names:
                if not least <= getattr(self, name) < math.inf:
                    raise _untrainable(name, getattr(self, name), f"{least} and more")
        if not 0.0 <= self.warmup_share < 1.0:
            raise _untrainable("warmup_share", self.warmup_share, "0 and more, below 1")
        if not self.clip_norm > 0.0:
            raise _untrainable("clip_norm", self.clip_norm, "above 0 (inf clips nothing)")
        if not 0.0 < self.negative_keep <= 1.0:
            raise _untrainable("negative_keep", self.negative_keep, "above 0, at most 1 (1 trains every row)")


_TRAIN_AT_LEAST_1 = ("epochs", "batch_impressions", "window_days", "num_workers")
_TRAIN_AT_LEAST_0 = ("checkpoint_every_steps", "lr_dense", "lr_sparse", "weight_decay", "seed")


def _untrainable(name: str, got: float, allowed: str) -> ConfigError:
    return ConfigError(f"{name}: got {got}; allowed: {allowed}; set train.{name} (or student_train, finetune)")


@dataclass(frozen=True)
class TransferConfig:
    """Distillation weights; the serving head sees only ground truth (auxiliary head, ExFM 3.3)."""

    enabled: bool = True
    distill_weight: float = 1.0
    label_scale: float = 1.0
    gradient_scale: float = 1.0


@dataclass(frozen=True)
class GateConfig:
    """What a challenger must reach on the test day to become champion."""

    min_calibration: float = 0.9
    max_calibration: float = 1.1
    outer_calibration: float = 1.5  # beyond this factor either way even an unresolved calibration refuses
    max_ne: float = 1.0  # must beat the base rate
    max_ne_increase_vs_champion: float = 0.002  # relative, on the same rows


@dataclass(frozen=True)
class RunConfig:
    """Everything one run of the loop depends on; written beside its results."""

    recipe: str = "default"
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    student: ModelConfig = field(default_factory=lambda: ModelConfig(dim=16, num_layers=1, num_heads=2, max_history=32))
    student_train: TrainConfig = field(default_factory=TrainConfig)  # the shared student, on all surfaces
    finetune: TrainConfig = field(  # each vertical model from there, on its own surfaces
        default_factory=lambda: TrainConfig(batch_impressions=256, lr_dense=4e-4, lr_sparse=0.02)
    )
    transfer: TransferConfig = field(default_factory=TransferConfig)
    gates: GateConfig = field(default_factory=GateConfig)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> RunConfig:
        return typing.cast(RunConfig, _build(cls, raw, ""))


def config_hash(config: Any) -> str:
    """sha256 over the canonical JSON of a dataclass tree (or of plain JSON values)."""
    plain = dataclasses.asdict(config) if dataclasses.is_dataclass(config) and not isinstance(config, type) else config
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def apply_overrides(config: RunConfig, overrides: Iterable[str]) -> RunConfig:
    """Apply `path.to.field=value` strings and return a new config; of two for one field the later counts.

    All are set at once: fields that must fit together (dim and num_heads) may come in any order. Raises ConfigError
    for an unknown path (naming the nearest one), a value of the wrong type, and values a config does not allow.
    """
    changes: dict[str, Any] = {}
    for item in overrides:
        path, eq, value = item.partition("=")
        if not eq:
            raise ConfigError(f'--set "{item}": expected path.to.field=value')
        _note(changes, config, path.strip(), path.strip().split("."), value.strip())
    return typing.cast(RunConfig, _replaced(config, changes))


def field_paths(config: Any, prefix: str = "") -> list[str]:
    """All leaf paths of a config tree, as `--set` takes them."""
    out: list[str] = []
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        path = f"{prefix}{f.name}"
        out += field_paths(value, path + ".") if dataclasses.is_dataclass(value) else [path]
    return out


def _note(changes: dict[str, Any], node: Any, full: str, parts: list[str], value: str) -> None:
    """Put a value into the tree of changes, at its path below `node`."""
    names = {f.name for f in dataclasses.fields(node)} if dataclasses.is_dataclass(node) else set()
    if parts[0] not in names:
        raise ConfigError(f'--set {full}: no field "{parts[0]}".{suggest(parts[0], names)} Allowed: {sorted(names)}')
    current = getattr(node, parts[0])
    if len(parts) > 1:
        _note(changes.setdefault(parts[0], {}), current, full, parts[1:], value)
    elif dataclasses.is_dataclass(current):
        raise ConfigError(f"--set {full}: is a group, set one of {field_paths(current, full + '.')}")
    else:
        changes[parts[0]] = _coerce(full, typing.get_type_hints(type(node))[parts[0]], value)


def _replaced(node: Any, changes: dict[str, Any]) -> Any:
    """`node` with a tree of changes, every group built once."""
    groups = {k for k in changes if dataclasses.is_dataclass(getattr(node, k))}
    new = {k: _replaced(getattr(node, k), v) if k in groups else v for k, v in changes.items()}
    return dataclasses.replace(node, **new)


def _coerce(path: str, hint: Any, value: str) -> Any:
    if isinstance(hint, types.UnionType):
        if value.lower() in ("none", "null"):
            return None
        hint = next(a for a in typing.get_args(hint) if a is not type(None))
    try:
        if hint is bool:
            return {"true": True, "1": True, "false": False, "0": False}[value.lower()]
        if typing.get_origin(hint) is tuple:
            item = typing.get_args(hint)[0]
            return tuple(_coerce(path, item, v) for v in value.split(",") if v)
        return hint(value)
    except (KeyError, ValueError):
        raise ConfigError(f'--set {path}: "{value}" is not a {getattr(hint, "__name__", hint)}') from None


def _build(cls: Any, raw: dict[str, Any], prefix: str) -> Any:
    hints = typing.get_type_hints(cls)
    unknown = sorted(set(raw) - set(hints))
    if unknown:
        near = suggest(unknown[0], hints)
        raise ConfigError(f'config: no field "{prefix}{unknown[0]}".{near} Allowed: {sorted(hints)}')
    values: dict[str, Any] = {}
    for name, value in raw.items():
        hint = hints[name]
        if dataclasses.is_dataclass(hint):
            values[name] = _build(hint, value, f"{prefix}{name}.")
        else:
            values[name] = tuple(value) if typing.get_origin(hint) is tuple else value
    return cls(**values)
