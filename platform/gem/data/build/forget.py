"""Delete users from a feature store: a new store without them, and the proof in its manifest.

Indices of other users, ads and vocabulary rows stay, so that everything encoded before stays right. A deleted user's
entity row has no key and no features any more, and the vocabulary keeps an empty place for the id.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gem.data.build import store_write
from gem.data.build.counting import USER
from gem.data.build.entities import with_unknown
from gem.data.build.forgotten import Forgotten
from gem.data.encoding import ID_FIELD, VOCABULARIES, Encoder
from gem.data.spec import DatasetSpec, parse_spec
from gem.data.vocabulary import Vocabulary
from gem.errors import DataError

PLACE = "\x00forgotten-"  # vocabulary value that no id can have: readers refuse NUL in ids


@dataclass
class _Work:
    """A store on its way: what changed and how many rows went, by kind of file."""

    store: Path
    spec: DatasetSpec
    manifest: dict[str, Any]
    forgotten: Forgotten
    users: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))  # entity indices
    found: set[str] = field(default_factory=set)  # digests of users who were in it
    removed: dict[str, int] = field(default_factory=dict)
    rewritten: dict[str, list[str]] = field(default_factory=dict)

    def replace(self, relative: str, table: pa.Table, gone: int) -> None:
        """Write a file anew; its entry and the count of removed rows follow."""
        self.note(relative, store_write.write_table(self.store, relative, table))
        kind = relative.split("/")[0]
        self.removed[kind] = self.removed.get(kind, 0) + gone

    def note(self, relative: str, entry: store_write.Entry) -> None:
        """A file that was written anew; its hashes before and now are part of the proof."""
        self.rewritten[relative] = [self.manifest["files"][relative]["sha256"], entry["sha256"]]
        self.manifest["files"][relative] = entry

    def named(self, keys: pa.ChunkedArray) -> npt.NDArray[np.bool_]:
        """[N] which keys are of forgotten users; these are `found`."""
        mask = self.forgotten.mask(keys)
        self.found |= self.forgotten.digests_of(keys.filter(pa.array(mask)))
        return mask

    def files(self, kind: str) -> list[str]:
        return [f for f in self.manifest["files"] if f.startswith(f"{kind}/")]


def forget_users(source: Path, out: Path, forgotten: Forgotten, when: str) -> tuple[dict[str, Any], str]:
    """Write to `out` the store `source` without the forgotten users. Returns (manifest, store hash).

    `when`: time of the request, for the proof. Raises DataError if a file still refers to one of them afterwards.
    """
    manifest = store_write.read_manifest(source)
    before = store_write.manifest_hash(manifest)
    store_write.link_files(source, out, manifest["files"])
    work = _Work(out, parse_spec_of(out), manifest, forgotten)
    work.users = _indices(work)
    keys = _partitions(work)
    _outcomes(work, keys)
    _index(work)
    _entities(work)
    _counts(work)
    _quarantine(work)
    manifest["hot_users"] = [u for u in manifest["hot_users"] if not _names(forgotten, [u["user"]]).any()]
    days = manifest["days"]
    rows = manifest["rows"]
    files = manifest["files"]
    rows["impressions_by_day"] = {
        d: sum(files[f]["rows"] for f in store_write.paths_of(files, "impressions", d)) for d in days
    }
    rows["impressions"] = sum(rows["impressions_by_day"].values())
    rows["events"] = sum(files[f]["rows"] for f in work.files("timelines"))
    proof = {
        "when": when,
        "store_before": before,
        "digests": list(forgotten.digests),
        "users": len(work.users),
        "found": sorted(work.found),
        "removed": dict(sorted(work.removed.items())),
        "rewritten": dict(sorted(work.rewritten.items())),
        "files_checked": check_forgotten(out, manifest, forgotten, work.users),
    }
    manifest["forgotten"] = [*manifest["forgotten"], proof]
    return manifest, store_write.write_manifest(out, manifest)


def check_forgotten(
    store: Path, manifest: Mapping[str, Any], forgotten: Forgotten, users: npt.NDArray[np.int32]
) -> int:
    """Read every file that could name one of the users; returns how many. Raises DataError if one still does.

    `users`: their entity indices before they were deleted.
    """
    gone = pa.array(users, pa.int32())
    by_user = _keyed_by_user(parse_spec_of(store), manifest)
    checked = 0
    for relative in manifest["files"]:
        path = store / relative
        kind = relative.split("/")[0]
        if kind in ("timelines", "impressions"):
            found = pc.any(pc.is_in(store_write.read_table(path, columns=["user"])["user"], value_set=gone)).as_py()
        elif kind == "index" or relative in (store_write.USERS, store_write.RAW_USERS, *by_user):
            found = bool(forgotten.mask(store_write.read_table(path, columns=["key"])["key"]).any())
        elif relative == store_write.ENTITY_COUNTS:
            found = bool(_counted(store_write.read_table(path), users).any())
        elif relative == VOCABULARIES:
            found = _without_ids(encoder := Encoder.load(store), forgotten) is not encoder
        elif kind == "quarantine":
            table = store_write.read_table(path)
            found = bool(forgotten.rows_naming(table)[0].any())
        else:
            continue
        checked += 1
        if found:
            raise DataError(
                f"{path}: still names a user who was to be forgotten; the store was not finished, run again"
            )
    return checked


def parse_spec_of(store: Path) -> DatasetSpec:
    """The spec a store was built from."""
    import json

    return parse_spec(json.loads((store / store_write.SPEC).read_text(encoding="utf-8")))


def _indices(work: _Work) -> npt.NDArray[np.int32]:
    found = [np.zeros(0, np.int32)]
    for shard in range(int(work.manifest["num_shards"])):
        table = store_write.read_table(work.store / store_write.index_path(shard), columns=["key", "user"])
        found.append(table["user"].to_numpy()[work.named(table["key"])])
    return np.concatenate(found).astype(np.int32)


def _partitions(work: _Work) -> dict[str, list[pa.Array]]:
    """Take the users' rows out of timelines and impressions; returns their outcome keys by label."""
    gone = pa.array(work.users, pa.int32())
    keys: dict[str, list[pa.Array]] = {}
    for relative in [*work.files("timelines"), *work.files("impressions")]:
        users = store_write.read_table(work.store / relative, columns=["user"])["user"]
        mask = pc.is_in(users, value_set=gone)
        if not pc.any(mask).as_py():
            continue
        table = store_write.read_table(work.store / relative)
        mine = table.filter(mask)
        for name in mine.column_names:
            if name.startswith("key_"):
                keys.setdefault(name[4:], []).append(mine[name].combine_chunks())
        work.replace(relative, table.filter(pc.invert(mask)), mine.num_rows)
    return keys


def _outcomes(work: _Work, keys: Mapping[str, list[pa.Array]]) -> None:
    """Take out the outcomes of the users' impressions, but for those that belong to another user's too."""
    for task, parts in keys.items():
        kind = pa.type_for_alias(work.manifest["key_types"][f"key:{task}"])
        gone = pc.drop_null(pa.concat_arrays([p.cast(kind) for p in parts]))
        for relative in work.files("impressions"):
            others = store_write.read_table(work.store / relative, [f"key_{task}"])[f"key_{task}"].cast(kind)
            gone = gone.filter(pc.invert(pc.is_in(gone, value_set=others.combine_chunks())))
        for relative in work.files(f"outcomes/{task}"):
            table = store_write.read_table(work.store / relative)
            mask = pc.is_in(table["key"].cast(kind), value_set=gone)
            if pc.any(mask).as_py():
                work.replace(relative, table.filter(pc.invert(mask)), int(pc.sum(mask).as_py()))
    for relative in _keyed_by_user(work.spec, work.manifest):
        table = store_write.read_table(work.store / relative)
        named = work.named(table["key"])
        if named.any():
            work.replace(relative, table.filter(pa.array(~named)), int(named.sum()))


def _keyed_by_user(spec: DatasetSpec, manifest: Mapping[str, Any]) -> list[str]:
    """Files of label logs whose key is the user: they name users who have no impression, too."""
    users = set(_user_columns(spec))
    tasks = [name for name, label in spec.labels.items() if label.table and label.key in users]
    return [f for f in manifest["files"] for task in tasks if f.startswith(f"outcomes/{task}/")]


def _index(work: _Work) -> None:
    for relative in work.files("index"):
        table = store_write.read_table(work.store / relative)
        mask = work.forgotten.mask(table["key"])
        if mask.any():
            work.replace(relative, table.filter(pa.array(~mask)), int(mask.sum()))


def _entities(work: _Work) -> None:
    """Rows of nulls in place of the users, and a place holder in the vocabulary."""
    stored = Encoder.load(work.store)
    encoder = _without_ids(stored, work.forgotten)
    raw = store_write.read_table(work.store / store_write.RAW_USERS)
    mask = work.named(raw["key"])
    if encoder is stored and not mask.any():
        return
    for relative, entry in encoder.save(work.store).items():
        work.note(relative, entry)
    blank = pa.array(mask)
    raw = pa.table({n: pc.if_else(blank, pa.scalar(None, raw[n].type), raw[n]) for n in raw.column_names})
    work.replace(store_write.RAW_USERS, raw.combine_chunks(), int(mask.sum()))
    work.replace(store_write.USERS, encoder.encode_entities("user", with_unknown(raw)), int(mask.sum()))


def _without_ids(encoder: Encoder, forgotten: Forgotten) -> Encoder:
    name = ID_FIELD["user"]
    vocabulary = encoder.vocabularies[name]
    if not isinstance(vocabulary, Vocabulary):
        return encoder
    mask = _names(forgotten, vocabulary.values)
    if not mask.any():
        return encoder
    places = pa.array([f"{PLACE}{i}" for i in range(len(mask))], pa.string())
    values = pc.if_else(pa.array(mask), places, vocabulary.values).to_pylist()
    return dataclasses.replace(encoder, vocabularies={**encoder.vocabularies, name: Vocabulary(values)})


def _counts(work: _Work) -> None:
    table = store_write.read_table(work.store / store_write.ENTITY_COUNTS)
    mask = _counted(table, work.users)
    if mask.any():
        work.replace(store_write.ENTITY_COUNTS, table.filter(pa.array(~mask)), int(mask.sum()))


def _counted(table: pa.Table, users: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
    """[N] counts of entities that are of one of the users."""
    out: npt.NDArray[np.bool_] = (table["group"].to_numpy() == USER) & np.isin(table["index"].to_numpy(), users)
    return out


def _quarantine(work: _Work) -> None:
    for relative in work.files("quarantine"):
        table = store_write.read_table(work.store / relative)
        mask, found = work.forgotten.rows_naming(table)
        work.found |= found
        if mask.any():
            work.replace(relative, table.filter(pa.array(~mask)), int(mask.sum()))


def _user_columns(spec: DatasetSpec) -> Iterator[str]:
    yield from {spec.impressions.user, *(e.user for e in spec.events), *([spec.users.key] if spec.users.key else [])}


def _names(forgotten: Forgotten, values: Any) -> npt.NDArray[np.bool_]:
    """[N] which texts are keys of forgotten users; a number and its decimal text are one key."""
    array = values if isinstance(values, pa.Array | pa.ChunkedArray) else pa.array(list(values), pa.string())
    return forgotten.mask(array)
