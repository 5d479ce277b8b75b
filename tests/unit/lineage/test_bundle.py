"""Bundles: what is saved is what is loaded, and everything else is refused with the file's name."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from gem.config import ModelConfig, RunConfig, TransferConfig
from gem.data.schema import Field, Schema, Side, Task
from gem.errors import BundleError
from gem.lineage.bundle import BundleInfo, Parents, load_bundle, read_bundle, save_bundle, store_files

EXTRA: dict[str, Path | bytes] = {
    "spec.json": b'{"name": "toy"}',
    "encoder.json": b"{}",
    "vocabularies.parquet": b"PAR1",
}


def toy_schema(ad_rows: int = 9) -> Schema:
    return Schema(
        user=Side(fields=(Field("user_id", "user_id", 7),), numeric=("age",)),
        ad=Side(fields=(Field("ad_id", "ad_id", ad_rows),), vectors=(("creative", 4),)),
        context=Side(fields=(Field("surface", "surface", 5),)),
        kinds=("click",),
        flags=("like",),
        surfaces=("", "", "", "feed", "stories"),
        surface_groups=("feed", "stories"),
        group_of_surface=(0, 0, 0, 0, 1),
        tasks=(Task("click"), Task("conversion", "click")),
    )


def toy_info(**changes: Any) -> BundleInfo:
    parents = Parents(data="a" * 64, data_path="runs/x/store", commit="0123456789ab", lock="b" * 64, code="c" * 64)
    info = BundleInfo(
        name="gem",
        kind="foundation",
        group="",
        schema=toy_schema(),
        config=RunConfig(recipe="toy", model=ModelConfig(dim=8)),
        calibration={"global": [1.0, 0.0]},
        metrics={"click": {"ne": 0.9, "auc": float("nan")}},
        parents=parents,
    )
    return dataclasses.replace(info, **changes)


def toy_weights() -> dict[str, torch.Tensor]:
    table = torch.arange(12.0).reshape(3, 4)
    return {"weight": table.t(), "bias": torch.tensor([1.0, 2.0, 3.0, 4.0]), "tied": table.t()}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_bundle(tmp_path / "gem", toy_info(), toy_weights(), EXTRA)
    return tmp_path / "gem"


def resign(path: Path) -> None:
    """What somebody would do who changes a bundle and knows its format: hash all files again (own code)."""
    manifest = json.loads((path / "manifest.json").read_text())
    for name in manifest["files"]:
        data = (path / name).read_bytes()
        manifest["files"][name] = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    (path / "manifest.json").write_text(json.dumps(manifest))


def test_round_trip_keeps_every_weight_and_every_fact(saved: Path) -> None:
    bundle = load_bundle(saved, schema=toy_schema())
    assert bundle.info == dataclasses.replace(
        toy_info(created_utc=bundle.info.created_utc), metrics={"click": {"ne": 0.9, "auc": None}}
    )
    for name, value in toy_weights().items():
        assert torch.equal(bundle.weights[name], value), name
    assert [p.name for p in saved.parent.iterdir()] == ["gem"], "nothing but the bundle is left"


def test_hash_names_every_byte_independently_computed(saved: Path) -> None:
    manifest = json.loads((saved / "manifest.json").read_text())
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    assert load_bundle(saved).hash == hashlib.sha256(text.encode()).hexdigest()
    on_disk = {str(p.relative_to(saved)) for p in saved.rglob("*") if p.is_file()} - {"manifest.json"}
    assert set(manifest["files"]) == on_disk
    for name, want in manifest["files"].items():
        assert hashlib.sha256((saved / name).read_bytes()).hexdigest() == want["sha256"]


def test_each_flipped_byte_is_refused_naming_the_file(saved: Path) -> None:
    files = [p for p in saved.rglob("*") if p.is_file() and p.name != "manifest.json"]
    assert len(files) == 9
    for file in files:
        good = file.read_bytes()
        at = len(good) // 2
        file.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        with pytest.raises(BundleError, match=rf"{file.name} was changed or damaged"):
            load_bundle(saved)
        file.write_bytes(good)
    load_bundle(saved)


def test_a_changed_manifest_is_another_bundle(saved: Path) -> None:
    good = load_bundle(saved).hash
    (saved / "metrics.json").write_text('{"click": {"ne": 0.1}}')
    resign(saved)
    with pytest.raises(BundleError, match=f"expected {good[:16]}"):
        load_bundle(saved, expected_hash=good)


@pytest.mark.parametrize("name", ["weights.safetensors", "encoder.json", "vocabularies.parquet", "manifest.json"])
def test_missing_file_is_named(saved: Path, name: str) -> None:
    (saved / name).unlink()
    with pytest.raises(BundleError, match=name):
        load_bundle(saved)


def test_missing_bundle_and_truncated_manifest(saved: Path) -> None:
    with pytest.raises(BundleError, match=r"no manifest\.json"):
        load_bundle(saved.parent / "nothing")
    (saved / "manifest.json").write_text('{"version": 1, "files"')
    with pytest.raises(BundleError, match="cannot be read"):
        load_bundle(saved)
    (saved / "manifest.json").write_text('{"version": 99}')
    with pytest.raises(BundleError, match="format version 99"):
        load_bundle(saved)


def test_other_schema_is_refused_naming_the_fields(saved: Path) -> None:
    with pytest.raises(BundleError, match=r"ad\.fields\.ad_id: bundle table=ad_id rows=9 .* here .* rows=10"):
        load_bundle(saved, schema=toy_schema(ad_rows=10))


@pytest.mark.parametrize("missing", ["data", "data_path", "commit", "lock", "code"])
def test_missing_parent_is_refused_when_saving_and_when_loading(tmp_path: Path, saved: Path, missing: str) -> None:
    parents = dataclasses.replace(toy_info().parents, **{missing: ""})
    with pytest.raises(BundleError, match=rf"parents \({missing} missing\)"):
        save_bundle(tmp_path / "other", toy_info(parents=parents), toy_weights(), EXTRA)
    assert not (tmp_path / "other").exists()
    raw = json.loads((saved / "bundle.json").read_text())
    raw["parents"][missing] = ""
    (saved / "bundle.json").write_text(json.dumps(raw))
    resign(saved)
    with pytest.raises(BundleError, match=rf"parents \({missing} missing\)"):
        load_bundle(saved)


def test_student_without_teacher_only_where_nothing_was_distilled(tmp_path: Path) -> None:
    student = toy_info(name="gem-feed", kind="vertical", group="feed")
    with pytest.raises(BundleError, match="teacher, teacher_path missing"):
        save_bundle(tmp_path / "s", student, toy_weights(), EXTRA)
    alone = dataclasses.replace(student, config=RunConfig(transfer=TransferConfig(enabled=False)))
    save_bundle(tmp_path / "s", alone, toy_weights(), EXTRA)
    with pytest.raises(BundleError, match=r"group \"fed\", allowed: \['feed', 'stories'\]"):
        save_bundle(tmp_path / "t", dataclasses.replace(alone, group="fed"), toy_weights(), EXTRA)


class Boom:
    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, ("executed",))


def test_pickle_is_refused_and_never_executed(tmp_path: Path, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (saved / "model.pkl").write_bytes(pickle.dumps(Boom()))
    with pytest.raises(BundleError, match=r"unknown file model\.pkl"):
        load_bundle(saved)
    (saved / "model.pkl").unlink()
    (saved / "weights.safetensors").write_bytes(pickle.dumps(Boom()))
    resign(saved)
    with pytest.raises(BundleError, match="no safetensors file"):
        load_bundle(saved)
    with pytest.raises(BundleError, match=r'"model\.pkl" is not allowed'):
        save_bundle(tmp_path / "b", toy_info(), toy_weights(), {**EXTRA, "model.pkl": b""})
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    "name", ["../x.json", "/etc/x.json", "a/../x.json", "%2e%2e/x.json", ".hidden.json", "a//b.json"]
)
def test_paths_that_leave_the_folder_are_refused(tmp_path: Path, saved: Path, name: str) -> None:
    with pytest.raises(BundleError, match="not allowed in a bundle"):
        save_bundle(tmp_path / "b", toy_info(), toy_weights(), {**EXTRA, name: b"{}"})
    manifest = json.loads((saved / "manifest.json").read_text())
    manifest["files"][name] = {"sha256": "", "bytes": 0}
    (saved / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match="not allowed in a bundle"):
        load_bundle(saved)


def test_symlinks_are_refused(tmp_path: Path, saved: Path) -> None:
    real = tmp_path / "real.json"
    shutil.move(saved / "encoder.json", real)
    (saved / "encoder.json").symlink_to(real)
    with pytest.raises(BundleError, match=r"encoder\.json is a symbolic link"):
        load_bundle(saved)
    with pytest.raises(BundleError, match="not a plain file"):
        save_bundle(tmp_path / "b", toy_info(), toy_weights(), {**EXTRA, "encoder.json": saved / "encoder.json"})
    (tmp_path / "link").symlink_to(saved)
    with pytest.raises(BundleError, match="name the real folder"):
        load_bundle(tmp_path / "link")


def test_weights_other_than_the_manifest_says_are_refused(saved: Path) -> None:
    weights = toy_weights()
    del weights["bias"], weights["tied"]
    weights = {k: v.contiguous() for k, v in weights.items()} | {"bais": torch.ones(4)}
    save_file(weights, saved / "weights.safetensors")
    resign(saved)
    with pytest.raises(BundleError, match="missing bias, tied; unexpected bais"):
        load_bundle(saved)


def test_load_into_wants_exactly_the_models_keys_types_and_shapes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, other = nn.Linear(3, 4), nn.Linear(3, 4)
    save_bundle(tmp_path / "gem", toy_info(), model.state_dict(), EXTRA)
    bundle = load_bundle(tmp_path / "gem")
    bundle.load_into(other)
    x = torch.ones(2, 3)
    assert torch.equal(model(x), other(x))
    with pytest.raises(BundleError, match="unexpected bias"):
        bundle.load_into(nn.Linear(3, 4, bias=False))
    with pytest.raises(BundleError, match=r"missing 0\.bias, 0\.weight; unexpected bias, weight"):
        bundle.load_into(nn.Sequential(nn.Linear(3, 4)))
    with pytest.raises(BundleError, match=r"weight \(needs float32\[4, 5\], is float32\[4, 3\]\)"):
        bundle.load_into(nn.Linear(5, 4))
    with pytest.raises(BundleError, match=r"bias \(needs float64\[4\], is float32\[4\]\)"):
        bundle.load_into(nn.Linear(3, 4, dtype=torch.float64))


def test_nothing_is_overwritten(saved: Path) -> None:
    before = load_bundle(saved).hash
    with pytest.raises(BundleError, match="never overwritten"):
        save_bundle(saved, toy_info(), {"weight": torch.zeros(1)}, EXTRA)
    assert load_bundle(saved).hash == before


def test_failed_save_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    source = tmp_path / "encoder.json"
    source.write_text("{}")
    with pytest.raises(OSError, match="No space left"):
        save_bundle(tmp_path / "out" / "gem", toy_info(), toy_weights(), {**EXTRA, "encoder.json": source})
    assert list((tmp_path / "out").iterdir()) == []


def test_calibration_must_be_finite_and_store_files_are_taken(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="calibration holds NaN"):
        save_bundle(tmp_path / "gem", toy_info(calibration={"a": float("inf")}), toy_weights(), EXTRA)
    store = tmp_path / "store"
    store.mkdir()
    for name, data in EXTRA.items():
        assert isinstance(data, bytes)
        (store / name).write_bytes(data)
    with pytest.raises(BundleError, match=r"encoder\.json missing"):
        save_bundle(tmp_path / "gem", toy_info(), toy_weights(), {"spec.json": b"{}"})
    save_bundle(tmp_path / "gem", toy_info(), toy_weights(), store_files(store))
    assert (tmp_path / "gem" / "vocabularies.parquet").read_bytes() == b"PAR1"
    assert read_bundle(tmp_path / "gem")[0].name == "gem"
