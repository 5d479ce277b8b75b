"""Checkpoints on disk: whole or not there, verified, refused when they belong to something else."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gem.errors import TrainingError
from gem.training import checkpoint
from gem.training.checkpoint import KEEP, Position, load_checkpoint, newest_valid, save_checkpoint
from gem.training.learner import Learner
from tests.unit.model.synthetic import make_world
from tests.unit.training.one_rank import batches, everything, make_learner

pytestmark = pytest.mark.usefixtures("one_rank")
WORLD = make_world(0)
BATCHES = batches(WORLD, 3)
KEY = "k" * 64


def trained(folder: Path, steps: int = 3) -> Learner:
    """A learner that wrote a checkpoint after every step."""
    learner = make_learner(WORLD)
    for i in range(steps):
        learner.step(BATCHES[i % 3], 20)
        save_checkpoint(folder, learner, Position(0, i + 1, i + 1), KEY)
    return learner


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_all_state_comes_back(tmp_path: Path) -> None:
    learner, fresh = trained(tmp_path), make_learner(WORLD, seed=9)
    assert load_checkpoint(tmp_path, fresh, KEY) == Position(0, 3, 3)
    assert fresh.step_index == 3
    want, got = everything(learner), everything(fresh)
    assert want.keys() == got.keys()
    assert all(torch.equal(v, got[k]) for k, v in want.items())
    learner.step(BATCHES[0], 20)
    fresh.step(BATCHES[0], 20)
    assert all(torch.equal(v, everything(fresh)[k]) for k, v in everything(learner).items())


def test_no_checkpoint_is_the_beginning(tmp_path: Path) -> None:
    assert load_checkpoint(tmp_path / "none", make_learner(WORLD), KEY) == Position()


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    trained(tmp_path, steps=5)
    assert names(tmp_path) == ["step-00000004", "step-00000005"]
    assert KEEP == 2


def break_flip(path: Path) -> None:
    data = bytearray((path / "state.safetensors").read_bytes())
    data[-3] ^= 1
    (path / "state.safetensors").write_bytes(bytes(data))


def break_meta(path: Path) -> None:
    (path / "meta.json").write_text("[]")


BREAKS = {
    "flipped bit": break_flip,
    "emptied": lambda p: (p / "state.safetensors").write_bytes(b""),
    "state gone": lambda p: (p / "state.safetensors").unlink(),
    "meta cut off": lambda p: (p / "meta.json").write_text('{"position": {"ep'),
    "meta of another form": break_meta,
    "meta without hash": lambda p: (p / "meta.json").write_text("{}"),
    "meta gone": lambda p: (p / "meta.json").unlink(),
}


@pytest.mark.parametrize("how", BREAKS)
def test_broken_newest_falls_back_to_the_one_before(how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trained(tmp_path)
    BREAKS[how](tmp_path / "step-00000003")
    fresh = make_learner(WORLD)
    assert load_checkpoint(tmp_path, fresh, KEY) == Position(0, 2, 2)
    assert "step-00000003" in caplog.text
    assert "falling back" in caplog.text


def test_all_broken_is_the_beginning(tmp_path: Path) -> None:
    trained(tmp_path)
    for path in tmp_path.iterdir():
        break_flip(path)
    assert newest_valid(tmp_path) is None


@pytest.mark.parametrize("where", ["save_file", "_sha256"])
def test_a_write_that_fails_leaves_the_old_ones_and_no_rest(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = trained(tmp_path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, where, full)
        with pytest.raises(OSError, match="No space left"):
            save_checkpoint(tmp_path, learner, Position(0, 4, 4), KEY)
    assert names(tmp_path) == ["step-00000002", "step-00000003"]
    assert load_checkpoint(tmp_path, make_learner(WORLD), KEY).step == 3


def test_half_written_is_never_listed_and_the_next_write_removes_it(tmp_path: Path) -> None:
    """A process killed while it wrote leaves its folder beside; no pid of ours has that number."""
    learner = trained(tmp_path)
    half = tmp_path / ".step-00000004.999999999"
    half.mkdir()
    (half / "state.safetensors").write_bytes(b"half")
    found = newest_valid(tmp_path)
    assert found is not None
    assert found[0].name == "step-00000003"
    save_checkpoint(tmp_path, learner, Position(0, 4, 4), KEY)
    assert names(tmp_path) == ["step-00000003", "step-00000004"]
    assert str(os.getpid()) not in "".join(names(tmp_path))


def test_another_configuration_is_refused(tmp_path: Path) -> None:
    trained(tmp_path)
    fresh = make_learner(WORLD)
    before = everything(fresh)
    with pytest.raises(TrainingError, match=r"belongs to another configuration \(kkkkkkkkkkkk, this run is zzz"):
        load_checkpoint(tmp_path, fresh, "z" * 64)
    assert all(torch.equal(v, before[k]) for k, v in everything(fresh).items())


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "dense.model.heads.head.weight",
            "dense.model.heads.top.weight",
            r"missing keys \['dense.model.heads.head.weight'\], unexpected",
        ),
        ("adam.exp_avg.model.heads.head.weight", None, r"missing keys \['adam.exp_avg.model.heads.head.weight'\]"),
        ("moment.brand.name", None, r"missing keys \['moment.brand.name'\]"),
        ("table.type", "table.kind", r"missing keys \['table.type'\], unexpected keys \['table.kind'\]"),
    ],
)
def test_renamed_or_missing_keys_are_refused_by_name(old: str, new: str | None, said: str, tmp_path: Path) -> None:
    """Never an optimizer slot or a table left at its start without a word."""
    trained(tmp_path, steps=1)
    file = tmp_path / "step-00000001/state.safetensors"
    tensors = load_file(str(file))
    value = tensors.pop(old)
    save_file(tensors | ({new: value} if new else {}), str(file))
    meta = json.loads((file.parent / "meta.json").read_text())
    (file.parent / "meta.json").write_text(json.dumps(meta | {"sha256": checkpoint._sha256(file)}))
    fresh = make_learner(WORLD)
    before = everything(fresh)
    with pytest.raises(TrainingError, match=said):
        load_checkpoint(tmp_path, fresh, KEY)
    assert all(torch.equal(v, before[k]) for k, v in everything(fresh).items())
