"""Checkpoints: complete, verified, never half-visible.

Layout of one checkpoint `step-00000120/`: state.safetensors (dense weights, whole tables, both
optimizers), meta.json (step, epoch position, config hash, sha256). It is written beside and renamed; a
reader takes the newest that verifies and falls back to an older one with a warning. Tables are stored
whole, so a checkpoint loads under any number of ranks.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from gem.errors import TrainingError
from gem.training.learner import Learner

log = logging.getLogger(__name__)
KEEP = 2
ADAM = ("step", "exp_avg", "exp_avg_sq")  # AdamW's state of one parameter


@dataclass(frozen=True)
class Position:
    """Where training stands: the next batch of `epoch` to train, and the steps done so far."""

    epoch: int = 0
    batch: int = 0
    step: int = 0


def save_checkpoint(folder: Path, learner: Learner, position: Position, config_hash: str) -> None:
    """Collective: rank 0 gathers the tables and writes. Keeps the newest `KEEP`."""
    tensors = {f"table.{k}": v for k, v in learner.tables.weights().items()}
    tensors |= {f"moment.{k}": v for k, v in learner.tables.moments().items()}
    if dist.get_rank() == 0:
        tensors |= {f"dense.{k}": v for k, v in learner.objective.state_dict().items()}
        tensors |= _optimizer_tensors(learner)
        _write(folder, tensors, position, config_hash)
    dist.barrier()


def load_checkpoint(folder: Path, learner: Learner, config_hash: str) -> Position:
    """Load the newest valid checkpoint into the learner; Position() if there is none. Collective.

    Raises TrainingError for a checkpoint of another configuration, with another key set, or that not all
    ranks see.
    """
    found = newest_valid(folder)
    _check_agreement(folder, found)
    if found is None:
        return Position()
    path, meta = found
    if meta["config_hash"] != config_hash:
        raise TrainingError(
            f"checkpoint {path} belongs to another configuration ({meta['config_hash'][:12]}, this run is "
            f"{config_hash[:12]}); remove the folder or use another run name"
        )
    tensors = load_file(str(path / "state.safetensors"))
    _check_keys(learner, tensors, path)
    learner.tables.load(_part(tensors, "table."), _part(tensors, "moment."))
    learner.objective.load_state_dict(_part(tensors, "dense."))
    _load_optimizer(learner, tensors)
    position = Position(**meta["position"])
    learner.step_index = position.step
    return position


def newest_valid(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """The newest checkpoint whose hash verifies, or None; broken ones are named in a warning."""
    for path in sorted(folder.glob("step-*"), reverse=True):
        try:
            meta: dict[str, Any] = json.loads((path / "meta.json").read_text())
            if _sha256(path / "state.safetensors") == meta["sha256"]:
                return path, meta
            log.warning("checkpoint %s does not match its hash; falling back to an older one", path)
        except (OSError, ValueError, KeyError, TypeError) as e:
            log.warning("checkpoint %s is unreadable (%s); falling back to an older one", path, e)
    return None


def _write(folder: Path, tensors: dict[str, Tensor], position: Position, config_hash: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / f"step-{position.step:08d}"
    beside = folder / f".{final.name}.{os.getpid()}"
    for left in folder.glob(".step-*"):  # of a process that died while it wrote
        shutil.rmtree(left, ignore_errors=True)
    beside.mkdir()
    try:
        save_file({k: v.contiguous().clone() for k, v in tensors.items()}, str(beside / "state.safetensors"))
        meta = {
            "position": asdict(position),
            "config_hash": config_hash,
            "sha256": _sha256(beside / "state.safetensors"),
        }
        (beside / "meta.json").write_text(json.dumps(meta, indent=1))
        for name in ("state.safetensors", "meta.json"):
            with open(beside / name, "rb") as f:
                os.fsync(f.fileno())
        shutil.rmtree(final, ignore_errors=True)
        beside.rename(final)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    for old in sorted(folder.glob("step-*"))[:-KEEP]:
        shutil.rmtree(old, ignore_errors=True)


def _optimizer_tensors(learner: Learner) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}
    for name, parameter in learner.objective.named_parameters():
        for key, value in learner.optimizer.state.get(parameter, {}).items():
            out[f"adam.{key}.{name}"] = torch.as_tensor(value)
    return out


def _load_optimizer(learner: Learner, tensors: dict[str, Tensor]) -> None:
    for name, parameter in learner.objective.named_parameters():
        state = {k: tensors[f"adam.{k}.{name}"] for k in ADAM if f"adam.{k}.{name}" in tensors}
        if state:
            learner.optimizer.state[parameter] = state


def _check_agreement(folder: Path, found: tuple[Path, dict[str, Any]] | None) -> None:
    seen: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(seen, "" if found is None else f"{found[0].name} {found[1]['sha256']}")
    if len(set(seen)) > 1:
        raise TrainingError(
            f"checkpoints under {folder}: ranks see different newest ones ({[s[:20] or 'none' for s in seen]}); "
            "the folder must be shared by all workers"
        )


def _check_keys(learner: Learner, tensors: dict[str, Tensor], path: Path) -> None:
    names = learner.tables.schema.tables()
    want = {f"{part}.{name}" for part in ("table", "moment") for name in names}
    want |= {f"dense.{name}" for name in learner.objective.state_dict()}
    if any(key.startswith("adam.") for key in tensors):  # there are none before the first good step
        want |= {f"adam.{part}.{name}" for part in ADAM for name, _ in learner.objective.named_parameters()}
    missing, extra = sorted(want - set(tensors)), sorted(set(tensors) - want)
    if missing or extra:
        raise TrainingError(f"checkpoint {path}: missing keys {missing[:5]}, unexpected keys {extra[:5]}")


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


def _sha256(path: Path) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()
