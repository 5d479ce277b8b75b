"""Bundle: a model and all its parents in one folder (contract 4), the unit of promotion and rollback.

    <bundle>/bundle.json        name, kind, group, parents, created_utc
             schema.json config.json calibration.json metrics.json
             spec.json encoder.json vocabularies.parquet  how raw data become ids (copied from the store)
             weights.safetensors
             manifest.json      sha256 and size of every file; key, dtype and shape of every weight

The bundle hash is the sha256 of the manifest's canonical JSON, so it names every byte of the folder.
Nothing in a bundle is ever executed: weights are safetensors, all else is JSON or Parquet.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gem.config import RunConfig
from gem.data.schema import Schema
from gem.errors import BundleError, GemError
from gem.lineage.files import canonical_json, commit, finite, sha256_file, sha256_text, write_json

if TYPE_CHECKING:  # reading lineage needs no torch
    from torch import Tensor, nn

FORMAT_VERSION = 2
KINDS = ("foundation", "vertical")
MANIFEST = "manifest.json"
WEIGHTS = "weights.safetensors"
OWN_FILES = ("bundle.json", "schema.json", "config.json", "calibration.json", "metrics.json", WEIGHTS)
FROM_STORE = ("spec.json", "encoder.json")
VOCABULARIES = "vocabularies.parquet"  # the values of encoder.json
ENDINGS = (".json", ".parquet", ".safetensors", ".txt", ".yaml")
_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=-]{0,127}")
_HASH = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Parents:
    """What a model was made of. All hashes are hex sha256; paths are hints, the hashes decide."""

    data: str  # hash of the feature store
    data_path: str
    commit: str  # git commit, "+dirty" behind it if the tree was changed, "unknown" outside git
    lock: str  # hash of the requirements lock
    code: str  # hash of the source files that built the model
    teacher: str = ""  # bundle hash; empty for a foundation model and for a student without distillation
    teacher_path: str = ""


@dataclass(frozen=True)
class BundleInfo:
    """Everything about a model except its weights. `group` is the surface group of a vertical model."""

    name: str
    kind: str
    group: str
    schema: Schema
    config: RunConfig
    calibration: dict[str, Any]
    metrics: dict[str, Any]
    parents: Parents
    created_utc: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))


@dataclass(frozen=True)
class Bundle:
    """A loaded and verified bundle. `weights`: state-dict key -> CPU tensor."""

    info: BundleInfo
    weights: dict[str, Tensor]
    hash: str
    path: Path

    def load_into(self, model: nn.Module) -> None:
        """Copy the weights into `model`. BundleError lists every missing, unexpected or differing key."""
        problems = compare_weights(model.state_dict(), self.weights)
        if problems:
            raise BundleError(f"bundle {self.path}: weights do not fit the model: {'; '.join(problems)}")
        model.load_state_dict(self.weights, strict=True)


def save_bundle(
    path: Path, info: BundleInfo, weights: Mapping[str, Tensor], extra_files: Mapping[str, Path | bytes]
) -> str:
    """Write a bundle beside `path`, flush, rename; returns its hash. Never overwrites.

    extra_files: relative name -> content or file to copy; `spec.json` and `encoder.json` must be there,
    see `store_files`. Non-finite metrics are stored as null. Raises BundleError.
    """
    _check_info(str(path), info)
    _check_extra(str(path), extra_files)
    if path.exists() or path.is_symlink():
        raise BundleError(f"bundle {path}: exists already, bundles are never overwritten; choose another folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    temp = path.parent / f".tmp-{path.name}-{os.getpid()}"
    shutil.rmtree(temp, ignore_errors=True)
    try:
        temp.mkdir()
        described = _write_files(temp, info, weights, extra_files)
        manifest = {"version": FORMAT_VERSION, "files": _hash_files(temp), "weights": described}
        write_json(temp / MANIFEST, manifest)
        commit(temp, path)
    except FileExistsError:
        raise BundleError(f"bundle {path}: another process wrote it meanwhile; bundles are never overwritten") from None
    finally:
        shutil.rmtree(temp, ignore_errors=True)
    return sha256_text(canonical_json(manifest))


def read_bundle(
    path: Path, *, expected_hash: str | None = None, schema: Schema | None = None
) -> tuple[BundleInfo, str]:
    """Verify every byte of a bundle without building its tensors; returns (info, hash). Raises BundleError."""
    manifest = _read_manifest(path)
    got = sha256_text(canonical_json(manifest))
    if expected_hash and got != expected_hash:
        raise BundleError(f"bundle {path}: its hash is {got[:16]}, expected {expected_hash[:16]}; it is another bundle")
    _check_folder(path, manifest)
    info = _read_info(path)
    _check_info(str(path), info)
    if schema is not None and schema.hash != info.schema.hash:
        raise BundleError(
            f"bundle {path}: made for another schema ({'; '.join(schema_differences(info.schema, schema))}); "
            "use the bundle of this feature store or train again"
        )
    return info, got


def load_bundle(path: Path, *, expected_hash: str | None = None, schema: Schema | None = None) -> Bundle:
    """Verify and load a bundle. Refused (BundleError): missing, changed or unknown files, links, another
    schema (naming the fields that differ), missing parents, weights that differ from the manifest.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    info, got = read_bundle(path, expected_hash=expected_hash, schema=schema)
    data = (path / WEIGHTS).read_bytes()
    try:
        weights = load(data)
    except (SafetensorError, ValueError, KeyError) as e:
        raise BundleError(f"bundle {path}: {WEIGHTS} is no safetensors file ({e})") from None
    problems = _manifest_differences(_read_manifest(path)["weights"], _describe(weights))
    if problems:
        raise BundleError(f"bundle {path}: {WEIGHTS} does not fit its manifest: {'; '.join(problems)}")
    return Bundle(info, weights, got, path)


def store_files(store: Path) -> dict[str, Path | bytes]:
    """The files a bundle takes over from a feature store: spec, encoder and vocabularies."""
    out: dict[str, Path | bytes] = {name: store / name for name in FROM_STORE}
    if (store / VOCABULARIES).is_file():
        out[VOCABULARIES] = store / VOCABULARIES
    return out


def schema_differences(bundle: Schema, other: Schema) -> list[str]:
    """Where two schemas differ, as `user.fields.age: bundle rows=9, here rows=12` sentences."""
    out: list[str] = []
    ours, theirs = _flat(bundle), _flat(other)
    for key in sorted(set(ours) | set(theirs)):
        a, b = ours.get(key, "absent"), theirs.get(key, "absent")
        if a != b:
            out.append(f"{key}: bundle {a}, here {b}")
    return out if len(out) <= 8 else [*out[:8], f"and {len(out) - 8} more"]


def compare_weights(expected: Mapping[str, Tensor], got: Mapping[str, Tensor]) -> list[str]:
    """Differences of key set, dtype and shape between what a model needs and what a bundle has."""
    return _manifest_differences(_describe(expected), _describe(got))


def _flat(schema: Schema) -> dict[str, str]:
    raw = schema.to_dict()
    out = {k: str(v) for k, v in raw.items() if k not in ("user", "ad", "context")}
    for side in ("user", "ad", "context"):
        part = raw[side]
        for f in part["fields"]:
            kind = f"multi={f['multi']}" + (f" hashes={f['hashes']}" if f["hashes"] else "")
            out[f"{side}.fields.{f['name']}"] = f"table={f['table']} rows={f['rows']} {kind}"
        out[f"{side}.numeric"] = str(list(part["numeric"]))
        out[f"{side}.vectors"] = str([list(v) for v in part["vectors"]])
    return out


def _describe(weights: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    return {k: {"dtype": str(v.dtype).removeprefix("torch."), "shape": list(v.shape)} for k, v in weights.items()}


def _manifest_differences(expected: Mapping[str, Any], got: Mapping[str, Any]) -> list[str]:
    def listed(title: str, keys: list[str]) -> list[str]:
        tail = f" and {len(keys) - 8} more" if len(keys) > 8 else ""
        return [f"{title} {', '.join(keys[:8])}{tail}"] if keys else []

    differ = [
        f"{k} (needs {expected[k]['dtype']}{expected[k]['shape']}, is {got[k]['dtype']}{got[k]['shape']})"
        for k in sorted(set(expected) & set(got))
        if expected[k] != got[k]
    ]
    return [
        *listed("missing", sorted(set(expected) - set(got))),
        *listed("unexpected", sorted(set(got) - set(expected))),
        *listed("other type or shape", differ),
    ]


def _check_name(where: str, name: str) -> None:
    parts = name.split("/")
    if not all(_PART.fullmatch(p) for p in parts) or len(parts) > 3 or not name.endswith(ENDINGS):
        raise BundleError(
            f'bundle {where}: file "{name}" is not allowed in a bundle; allowed are plain relative names ending in '
            f"{', '.join(ENDINGS)} (no pickles, no links, no paths upwards)"
        )


def _check_info(where: str, info: BundleInfo) -> None:
    if info.kind not in KINDS:
        raise BundleError(f'bundle {where}: kind "{info.kind}", allowed: {", ".join(KINDS)}')
    if not _PART.fullmatch(info.name):
        raise BundleError(f'bundle {where}: name "{info.name}" must be letters, digits, ".", "_", "=" or "-"')
    if info.kind == "vertical" and info.group not in info.schema.surface_groups:
        raise BundleError(f'bundle {where}: group "{info.group}", allowed: {list(info.schema.surface_groups)}')
    p = info.parents
    missing = [k for k in ("data", "data_path", "commit", "lock", "code") if not getattr(p, k)]
    if info.kind == "vertical" and info.config.transfer.enabled:
        missing += [k for k in ("teacher", "teacher_path") if not getattr(p, k)]
    if missing:
        raise BundleError(
            f"bundle {where}: without its parents ({', '.join(missing)} missing) nobody can say what the model was "
            "made of; record them when saving"
        )
    bad = [k for k in ("data", "teacher") if getattr(p, k) and not _HASH.fullmatch(getattr(p, k))]
    if bad:
        raise BundleError(f"bundle {where}: parents.{bad[0]} must be a hex sha256, got {getattr(p, bad[0])!r}")


def _check_extra(where: str, extra: Mapping[str, Path | bytes]) -> None:
    missing = [n for n in FROM_STORE if n not in extra]
    if missing:
        raise BundleError(f"bundle {where}: {', '.join(missing)} missing; pass store_files(<feature store>)")
    for name, source in extra.items():
        _check_name(where, name)
        if name in OWN_FILES or name == MANIFEST:
            raise BundleError(f'bundle {where}: "{name}" is written by save_bundle, do not pass it')
        if isinstance(source, Path) and (source.is_symlink() or not source.is_file()):
            raise BundleError(f"bundle {where}: {source} is not a plain file")


def _write_files(
    folder: Path, info: BundleInfo, weights: Mapping[str, Tensor], extra: Mapping[str, Path | bytes]
) -> dict[str, Any]:
    import torch
    from safetensors.torch import save_file

    if not weights:
        raise BundleError(f"bundle {folder}: no weights")
    plain = {k: v.detach().to("cpu").clone(memory_format=torch.contiguous_format) for k, v in weights.items()}
    save_file(plain, folder / WEIGHTS)
    write_json(folder / "schema.json", info.schema.to_dict())
    write_json(folder / "config.json", info.config.to_dict())
    write_json(folder / "metrics.json", finite(info.metrics))
    try:
        write_json(folder / "calibration.json", info.calibration)
    except ValueError:
        raise BundleError(f"bundle {folder}: the calibration holds NaN or infinity; fit it on more rows") from None
    head = {k: getattr(info, k) for k in ("name", "kind", "group", "created_utc")}
    write_json(folder / "bundle.json", {**head, "parents": asdict(info.parents)})
    for name, source in extra.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(source, bytes):
            target.write_bytes(source)
        else:
            shutil.copyfile(source, target)
    return _describe(plain)


def _hash_files(folder: Path) -> dict[str, dict[str, Any]]:
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return {p.relative_to(folder).as_posix(): {"sha256": sha256_file(p), "bytes": p.stat().st_size} for p in files}


def _read_manifest(path: Path) -> dict[str, Any]:
    file = path / MANIFEST
    if path.is_symlink() or file.is_symlink():
        raise BundleError(f"bundle {path}: is a symbolic link; name the real folder")
    try:
        raw = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise BundleError(f"bundle {path}: no {MANIFEST}; it is no bundle or was never finished") from None
    except (OSError, ValueError) as e:
        raise BundleError(f"bundle {path}: {MANIFEST} cannot be read ({e}); restore the bundle") from None
    if not isinstance(raw, dict) or raw.get("version") != FORMAT_VERSION:
        got = raw.get("version") if isinstance(raw, dict) else type(raw).__name__
        raise BundleError(f"bundle {path}: format version {got}, this code reads version {FORMAT_VERSION}")
    if not isinstance(raw.get("files"), dict) or not isinstance(raw.get("weights"), dict):
        raise BundleError(f"bundle {path}: {MANIFEST} lists no files or weights; restore the bundle")
    return raw


def _check_folder(path: Path, manifest: dict[str, Any]) -> None:
    """Exactly the files of the manifest, all plain, all with their bytes."""
    files: dict[str, Any] = manifest["files"]
    for name in files:
        _check_name(str(path), name)
    absent = sorted({*OWN_FILES, *FROM_STORE} - set(files))
    if absent:
        raise BundleError(f"bundle {path}: {MANIFEST} does not list {', '.join(absent)}; restore the bundle")
    for found in sorted(path.rglob("*")):
        name = found.relative_to(path).as_posix()
        if found.is_symlink():
            raise BundleError(f"bundle {path}: {name} is a symbolic link, bundles hold plain files only")
        if not found.is_dir() and name not in files and name != MANIFEST:
            raise BundleError(f"bundle {path}: unknown file {name}; a bundle holds only what its manifest lists")
    for name, want in files.items():
        file = path / name
        if not file.is_file():
            raise BundleError(f"bundle {path}: {name} is missing; restore the bundle")
        if file.stat().st_size != want["bytes"] or sha256_file(file) != want["sha256"]:
            raise BundleError(f"bundle {path}: {name} was changed or damaged (sha256 differs); restore the bundle")


def _read_info(path: Path) -> BundleInfo:
    def part(name: str) -> Any:
        return json.loads((path / name).read_bytes())

    try:
        head = part("bundle.json")
        return BundleInfo(
            name=head["name"],
            kind=head["kind"],
            group=head["group"],
            schema=Schema.from_dict(part("schema.json")),
            config=RunConfig.from_dict(part("config.json")),
            calibration=part("calibration.json"),
            metrics=part("metrics.json"),
            parents=Parents(**head["parents"]),
            created_utc=head["created_utc"],
        )
    except (GemError, KeyError, TypeError, ValueError) as e:
        text = f"lacks {e}" if isinstance(e, KeyError) else str(e)
        raise BundleError(
            f"bundle {path}: its description cannot be read: {text}; was it written by other code?"
        ) from None
