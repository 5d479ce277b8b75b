"""`python -m pipelines forget USER…`: take users out of every feature store of a data set, and keep them out."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gem.data.build import store_write
from gem.data.build.forget import forget_users
from gem.data.build.forgotten import Forgotten
from gem.errors import ConfigError
from gem.lineage.files import locked
from pipelines.data_stages import WORK
from pipelines.stage import lock_path, read_stage, run_stage
from pipelines.windows import key_part, list_lock, read_forgotten, write_forgotten

DERIVED = ("generate-knowledge", "check")  # made from a store or its raw data: cheaper to make anew than to search
TEMP = ".tmp-"  # what a process that was killed had built of a store
_LISTED = "they are on the list all the same"
Say = Callable[[str], None]


@dataclass
class Forgot:
    """stores: folders written anew without rows of the users. others: stores that had none, under their new key.

    removed: rows by kind of file. absent: users who were in no store. running: keys of builds that go on meanwhile.
    models: finished stages that were trained before.
    """

    stores: list[Path] = field(default_factory=list)
    others: list[Path] = field(default_factory=list)
    removed: dict[str, int] = field(default_factory=dict)
    absent: list[str] = field(default_factory=list)
    running: list[str] = field(default_factory=list)
    models: list[Path] = field(default_factory=list)


def forget(dataset: str, users: Sequence[str], runs: Path, say: Say = print) -> Forgot:
    """Delete the users from all stores of the data set and remember them, hashed, for every store to come.

    Raises ConfigError for no user or a data set without any store. Stores that were replaced are removed. Raw files and
    models are not touched; see what is printed. `say` is told what it waits for.
    """
    root = runs / dataset
    home = root / "preprocess"
    if not users:
        raise ConfigError("forget: name at least one user: python -m pipelines forget USER --dataset NAME")
    if not home.is_dir():
        known = sorted(p.parent.name for p in runs.glob("*/preprocess"))
        raise ConfigError(
            f'forget: no store of data set "{dataset}" under {runs}; there are: {", ".join(known) or "none"}'
        )
    with _alone(lock_path(home, "forget"), "another forget of this data set", say):
        with _alone(list_lock(root), "a store that is being finished", say):
            forgotten = read_forgotten(root).with_users(users)
            write_forgotten(root, forgotten)  # a build that ends later stops, one that starts later leaves them out
        return _forget(root, users, forgotten, say)


def _forget(root: Path, users: Sequence[str], forgotten: Forgotten, say: Say) -> Forgot:
    home, out = root / "preprocess", Forgot()
    for folder in sorted(home.glob("[0-9a-f]*")):
        if _older(folder, forgotten) is None:
            continue
        with _alone(lock_path(home, folder.name), f"a run that builds or checks the store {folder.name}", say):
            if (described := _older(folder, forgotten)) is not None:
                _replace(root, folder, described, forgotten, out, say)
    for left in sorted(p for prefix in (WORK, TEMP) for p in home.glob(f"{prefix}*")):
        key = left.name.split("-")[1]
        with locked(lock_path(home, key), wait=False) as dead:
            if dead:
                shutil.rmtree(left, ignore_errors=True)
            elif key not in out.running:
                out.running.append(key)
    for name in DERIVED:
        shutil.rmtree(root / name, ignore_errors=True)
    for rows in root.glob("quarantine-*.parquet"):  # of a run that was stopped by too many of them
        rows.unlink()
    out.absent = forgotten.absent(list(dict.fromkeys(users)), _found(home))
    out.models = [p for name in ("pretrain", "distill") for p in sorted((root / name).glob("[0-9a-f]*"))]
    return out


def _older(folder: Path, forgotten: Forgotten) -> dict[str, Any] | None:
    """What a finished store says of itself, if it was made by another list."""
    described = read_stage(folder)
    return None if described is None or described["key_parts"].get("forgotten") == key_part(forgotten) else described


@contextlib.contextmanager
def _alone(path: Path, what: str, say: Say) -> Iterator[None]:
    """Hold a lock; say so before waiting for it."""
    with locked(path, wait=False) as got:
        if got:
            yield
            return
    say(f"forget: waiting for {what}")
    with locked(path):
        yield


def _found(home: Path) -> set[str]:
    """Digests of all users who were taken out of a store, now or by a forget before."""
    manifests = [store_write.read_manifest(f) for f in sorted(home.glob("[0-9a-f]*")) if read_stage(f) is not None]
    return {digest for m in manifests for proof in m["forgotten"] for digest in proof.get("found", ())}


def _replace(root: Path, folder: Path, described: dict[str, Any], forgotten: Forgotten, out: Forgot, say: Say) -> None:
    when = datetime.now(UTC).isoformat(timespec="seconds")
    old_hash = described["record"]["store_hash"]

    def build(target: Path) -> dict[str, Any]:
        manifest, digest = forget_users(folder, target, forgotten, when)
        record = {k: manifest.get(k, v) for k, v in described["record"].items()}
        return {**record, "store_hash": digest, "rows_out": manifest["rows"]["impressions"]}

    parts = {**described["key_parts"], "forgotten": key_part(forgotten)}
    result = run_stage("preprocess", key_parts=parts, root=root, build=build, on_wait=say)
    proofs = store_write.read_manifest(result.path)["forgotten"]
    removed = proofs[-1]["removed"] if proofs else {}
    for kind, rows in removed.items():
        out.removed[kind] = out.removed.get(kind, 0) + int(rows)
    (out.stores if sum(removed.values()) else out.others).append(result.path)
    shutil.rmtree(folder)
    shutil.rmtree(root / "preprocess" / ".readers" / str(old_hash)[:16], ignore_errors=True)


def report(found: Forgot, users: int) -> str:
    """What a person who must prove it wants to read."""
    rows = ", ".join(f"{n:,} of {kind}" for kind, n in sorted(found.removed.items())) or "none"
    lines = [
        f"forgot {users} user{'s' if users > 1 else ''} in {len(found.stores)} store(s); rows removed: {rows}",
        *(f"  proof: {store / store_write.MANIFEST} (forgotten)" for store in found.stores),
        *([f"  {len(found.others)} other store(s) had no row of theirs"] if found.others else []),
        *([f"  not found in any store: {', '.join(found.absent)}; {_LISTED}"] if found.absent else []),
        *(f"  a build is running ({key}); it will stop with an error; then start it again" for key in found.running),
        "  the list (hashed) keeps them out of every store built from now on",
        "  not touched: the raw files, and requests that serving logged",
    ]
    if found.models:
        lines.append(
            f"  {len(found.models)} trained model(s) still carry an embedding row of theirs: run the loop again, then "
            "remove " + ", ".join(sorted({str(m.parent) for m in found.models}))
        )
    return "\n".join(lines)
