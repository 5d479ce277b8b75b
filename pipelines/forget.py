"""`python -m pipelines forget USER…`: take users out of every feature store of a data set, and keep them out."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gem.data.build import store_write
from gem.data.build.forget import forget_users
from gem.data.build.forgotten import Forgotten
from gem.errors import ConfigError
from pipelines.data_stages import WORK
from pipelines.stage import read_stage, run_stage
from pipelines.windows import key_part, read_forgotten, write_forgotten

DERIVED = ("generate-knowledge", "check")  # made from a store or its raw data: cheaper to make anew than to search


@dataclass
class Forgot:
    """stores: folders written anew. removed: rows by kind of file. models: finished stages that were trained before."""

    stores: list[Path] = field(default_factory=list)
    removed: dict[str, int] = field(default_factory=dict)
    models: list[Path] = field(default_factory=list)


def forget(dataset: str, users: Sequence[str], runs: Path) -> Forgot:
    """Delete the users from all stores of the data set and remember them, hashed, for every store to come.

    Raises ConfigError for no user or a data set without any store. Stores that were replaced are removed. Raw files and
    models are not touched; see what is printed.
    """
    root = runs / dataset
    if not users:
        raise ConfigError("forget: name at least one user: python -m pipelines forget USER --dataset NAME")
    if not (root / "preprocess").is_dir():
        known = sorted(p.parent.name for p in runs.glob("*/preprocess"))
        raise ConfigError(
            f'forget: no store of data set "{dataset}" under {runs}; there are: {", ".join(known) or "none"}'
        )
    forgotten = read_forgotten(root).with_users(users)
    write_forgotten(root, forgotten)  # first: a build that starts now leaves them out
    out = Forgot()
    for folder in sorted((root / "preprocess").glob("[0-9a-f]*")):
        described = read_stage(folder)
        if described is not None and described["key_parts"].get("forgotten") != key_part(forgotten):
            _replace(root, folder, described, forgotten, out)
    for left in [*(root / "preprocess").glob(f"{WORK}*"), *(root / name for name in DERIVED)]:
        shutil.rmtree(left, ignore_errors=True)
    for rows in root.glob("quarantine-*.parquet"):  # of a run that was stopped by too many of them
        rows.unlink()
    out.models = [p for name in ("pretrain", "distill") for p in sorted((root / name).glob("[0-9a-f]*"))]
    return out


def _replace(root: Path, folder: Path, described: dict[str, Any], forgotten: Forgotten, out: Forgot) -> None:
    when = datetime.now(UTC).isoformat(timespec="seconds")
    old_hash = described["record"]["store_hash"]

    def build(target: Path) -> dict[str, Any]:
        manifest, digest = forget_users(folder, target, forgotten, when)
        record = {k: manifest.get(k, v) for k, v in described["record"].items()}
        return {**record, "store_hash": digest, "rows_out": manifest["rows"]["impressions"]}

    parts = {**described["key_parts"], "forgotten": key_part(forgotten)}
    result = run_stage("preprocess", key_parts=parts, root=root, build=build)
    proof = store_write.read_manifest(result.path)["forgotten"][-1]
    for kind, rows in proof["removed"].items():
        out.removed[kind] = out.removed.get(kind, 0) + int(rows)
    out.stores.append(result.path)
    shutil.rmtree(folder)
    shutil.rmtree(root / "preprocess" / ".readers" / str(old_hash)[:16], ignore_errors=True)


def report(found: Forgot, users: int) -> str:
    """What a person who must prove it wants to read."""
    rows = ", ".join(f"{n:,} of {kind}" for kind, n in sorted(found.removed.items())) or "none"
    lines = [
        f"forgot {users} user{'s' if users > 1 else ''} in {len(found.stores)} store(s); rows removed: {rows}",
        *(f"  proof: {store / store_write.MANIFEST} (forgotten)" for store in found.stores),
        "  the list (hashed) keeps them out of every store built from now on",
        "  not touched: the raw files, and requests that serving logged",
    ]
    if found.models:
        lines.append(
            f"  {len(found.models)} trained model(s) still carry an embedding row of theirs: run the loop again, then "
            "remove " + ", ".join(sorted({str(m.parent) for m in found.models}))
        )
    return "\n".join(lines)
