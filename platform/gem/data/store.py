"""Read side of the feature store: entities, timelines and impressions as flat numpy arrays.

Timelines and impressions are maps of files (see `gem.data.reader_cache`): read-only, shared by all processes.
Letters: U users and A ads (entity rows, row 0 unknown), E events, N impressions, K tasks.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from gem.data.batch import EntityRows
from gem.data.build import store_write
from gem.data.days import Split
from gem.data.encoding import Encoder
from gem.data.keys import KeyIndex
from gem.data.past import AdValues, CountTable, PastCounts, past_matches
from gem.data.reader_build import EVENT_COLUMNS, ROW_COLUMNS
from gem.data.reader_cache import ReaderCache, open_cache
from gem.data.rows import SideRows
from gem.data.schema import Schema, Side
from gem.data.spec import DatasetSpec, parse_spec
from gem.errors import StoreError

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
F32 = npt.NDArray[np.float32]
_VOCABULARIES = "vocabularies.parquet"


class EntityTable:
    """Encoded users or ads by entity index; index 0 is the unknown entity."""

    def __init__(self, side: Side, table: pa.Table) -> None:
        self.index = KeyIndex(table["key"])
        columns = {n: table[n].combine_chunks() for n in table.column_names if n != "key"}
        self.side_rows = SideRows(side, columns, table.num_rows)

    def __len__(self) -> int:
        return len(self.side_rows)

    @property
    def keys(self) -> pa.Array:
        """Raw keys, [B]; `keys[0]` is null."""
        return self.index.keys

    def index_of(self, key: object) -> int:
        """Entity index of a key given as int or text; 0 if nobody knows it."""
        return self.index.index_of(key)

    def index_many(self, keys: Any) -> I32:
        """Entity indices of many keys, [N] -> [N] int32; 0 where unknown."""
        return self.index.index_many(keys)

    def rows(self, idx: npt.NDArray[np.integer]) -> EntityRows:
        """Features of the entities `idx` [B]."""
        return self.side_rows.take(idx)


@dataclass
class Timelines:
    """All users' events, flat; user u owns [offsets[u], offsets[u + 1]), oldest known first."""

    offsets: I64  # [U + 1]
    ad: I32  # [E] entity index
    kind: npt.NDArray[np.uint8]  # [E] 1..; 0 is padding
    flags: npt.NDArray[np.uint16]  # [E] bit mask
    surface: npt.NDArray[np.int16]  # [E] surface code
    dwell: npt.NDArray[np.uint8]  # [E] bucket
    time_ms: I64  # [E]
    known_ms: I64  # [E]

    def lengths(self) -> I64:
        """Events per user, [U]."""
        out: I64 = np.diff(self.offsets)
        return out


@dataclass
class Impressions:
    """Impressions of some days, in (day, shard, user, time) order.

    labels and mask are [N, K] in the order of `schema.tasks`: mask 0 (and label 0) where the outcome is not known.
    `cut` counts events of the user's whole timeline; `day[i]` indexes `days`; `true` holds, for generated data
    only, the true probability of a task on the entire space.
    """

    impression_id: I64
    user: I32
    ad: I32
    time_ms: I64
    cut: I32
    surface: npt.NDArray[np.int16]
    labels: F32
    mask: F32
    context: SideRows
    true: dict[str, F32]
    day: npt.NDArray[np.int16]
    days: tuple[str, ...]
    rows: npt.NDArray[np.integer] | None = None  # [N] row of `context`; None: impression i has row i

    def __len__(self) -> int:
        return len(self.user)

    def context_rows(self, idx: npt.NDArray[np.integer]) -> EntityRows:
        """Context features of the impressions `idx` [B]."""
        return self.context.take(idx if self.rows is None else self.rows[idx])

    def take(self, idx: npt.NDArray[np.integer]) -> Impressions:
        """The impressions `idx`, in that order; context columns are shared, not copied."""
        return Impressions(
            impression_id=self.impression_id[idx],
            user=self.user[idx],
            ad=self.ad[idx],
            time_ms=self.time_ms[idx],
            cut=self.cut[idx],
            surface=self.surface[idx],
            labels=self.labels[idx],
            mask=self.mask[idx],
            context=self.context,
            true={name: p[idx] for name, p in self.true.items()},
            day=self.day[idx],
            days=self.days,
            rows=idx if self.rows is None else self.rows[idx],
        )


class FeatureStore:
    """A finished feature store. Open it with `FeatureStore.open(path)`."""

    def __init__(self, path: Path, manifest: Mapping[str, Any], encoder: Encoder) -> None:
        self.path = path
        self.manifest = manifest
        self.encoder = encoder
        self._entities: dict[str, EntityTable] = {}
        self._arrays: ReaderCache | None = None
        self._past: PastCounts | None = None

    @classmethod
    def open(cls, path: Path | str, verify: bool = True) -> FeatureStore:
        """Read manifest and encoder. Raises StoreError naming a file that is missing or not as written.

        `verify` reads every file and compares its sha256; without it only presence and size are checked.
        """
        path = Path(path)
        manifest = _read_manifest(path)
        for relative, entry in manifest["files"].items():
            _check_file(path, relative, entry, verify)
        if _VOCABULARIES in manifest["files"]:
            encoder = Encoder.load(path)
        else:
            encoder = Encoder.from_json((path / store_write.ENCODER).read_text(encoding="utf-8"))
        if encoder.schema.hash != manifest["schema_hash"]:
            raise StoreError(f"{path}: encoder.json has another schema than the manifest; preprocess again")
        return cls(path, manifest, encoder)

    @property
    def schema(self) -> Schema:
        return self.encoder.schema

    @property
    def hash(self) -> str:
        """sha256 of the canonical manifest, which holds the sha256 of every file."""
        return store_write.manifest_hash(self.manifest)

    @property
    def split(self) -> Split:
        """Training, validation and test days."""
        return Split.from_dict(self.manifest["split"])

    @property
    def days(self) -> tuple[str, ...]:
        """Days with impressions, in order."""
        return tuple(self.manifest["days"])

    @property
    def spec(self) -> DatasetSpec:
        """The dataset spec the store was built from."""
        return parse_spec(json.loads((self.path / store_write.SPEC).read_text(encoding="utf-8")))

    @property
    def users(self) -> EntityTable:
        return self._entity("user", store_write.USERS, self.schema.user)

    @property
    def ads(self) -> EntityTable:
        return self._entity("ad", store_write.ADS, self.schema.ad)

    @property
    def past(self) -> PastCounts:
        """What all users did with each ad, by day."""
        if self._past is None:
            arrays, slots = self._cache(), len(self._cache().array("past/starts"))
            parts = [(n, f"past/{i}") for i, n in enumerate(past_matches(self.schema))]
            tables = {n: CountTable(arrays.array(f"{p}.keys"), arrays.array(f"{p}.sums"), slots) for n, p in parts}
            values = AdValues.of(self.schema, self.ads.side_rows.first, len(self.ads))
            self._past = PastCounts(tables, values, arrays.array("past/starts"))
        return self._past

    def timelines(self) -> Timelines:
        """Every user's events of all days, E rows in user order."""
        arrays = self._cache()
        return Timelines(arrays.array("timelines/offsets"), *(arrays.array(f"timelines/{n}") for n in EVENT_COLUMNS))

    def impressions(self, days: Sequence[str] | None = None) -> Impressions:
        """Impressions of the given days (all if None), N rows; a copy only if the days are no neighbours in order.

        Raises StoreError for a day that is not in the store.
        """
        wanted = self.days if days is None else tuple(days)
        absent = [d for d in wanted if d not in self.days]
        if absent:
            raise StoreError(f"{self.path}: no impressions on {absent}; the store has {list(self.days)}")
        if not wanted:
            raise StoreError(f"{self.path}: no day was asked for; the store has {list(self.days)}")
        arrays = self._cache()
        ends = dict(zip(arrays.days, np.cumsum(list(arrays.days.values())).tolist(), strict=True))
        bounds = [(ends[d] - arrays.days[d], ends[d]) for d in wanted]
        day = np.repeat(np.arange(len(wanted), dtype=np.int16), [end - start for start, end in bounds])
        if all(left[1] == right[0] for left, right in itertools.pairwise(bounds)):
            return self._impressions(bounds[0][0], bounds[-1][1], day, wanted)
        every = self._impressions(0, sum(arrays.days.values()), np.zeros(0, np.int16), wanted)
        every.day = np.zeros(len(every), np.int16)
        some = every.take(np.concatenate([np.arange(*bound) for bound in bounds]))
        some.day = day
        return some

    def _impressions(self, start: int, end: int, day: npt.NDArray[np.int16], days: tuple[str, ...]) -> Impressions:
        arrays = self._cache()

        def part(name: str) -> npt.NDArray[Any]:
            return arrays.array(f"impressions/{name}")[start:end]

        side, folder = self.schema.context, "impressions/context"
        multi = {
            f.name: (arrays.array(f"{folder}/multi/{f.name}.offsets"), arrays.array(f"{folder}/multi/{f.name}.values"))
            for f in side.fields
            if f.multi
        }
        matrices = (arrays.array(f"{folder}/numeric"), arrays.array(f"{folder}/vectors"))
        return Impressions(
            **{n: part(n) for n in ROW_COLUMNS},
            labels=part("labels"),
            mask=part("mask"),
            context=SideRows.of_arrays(side, arrays.array(f"{folder}/ids"), multi, matrices).part(start, end),
            true={n: part(f"true/{n}") for n in arrays.names("impressions/true")},
            day=day,
            days=days,
        )

    def _cache(self) -> ReaderCache:
        if self._arrays is None:
            self._arrays = open_cache(self.path, self.manifest, self.schema)
        return self._arrays

    def _entity(self, name: str, relative: str, side: Side) -> EntityTable:
        if name not in self._entities:
            self._entities[name] = EntityTable(side, pq.read_table(self.path / relative))
        return self._entities[name]


def _read_manifest(path: Path) -> dict[str, Any]:
    file = path / store_write.MANIFEST
    try:
        manifest: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise StoreError(f"{path}: no {store_write.MANIFEST}: not a finished feature store; run preprocess") from None
    except (OSError, ValueError) as e:
        raise StoreError(f"{file}: cannot be read ({e}); run preprocess again") from None
    if manifest.get("version") != store_write.VERSION:
        raise StoreError(
            f"{path}: store version {manifest.get('version')}, this code reads {store_write.VERSION}; preprocess again"
        )
    return manifest


def _check_file(path: Path, relative: str, entry: Mapping[str, Any], verify: bool) -> None:
    file = path / relative
    if not file.is_file():
        raise StoreError(f"{path}: {relative} is missing; run preprocess again")
    size = file.stat().st_size
    if size != entry["bytes"]:
        raise StoreError(f"{path}: {relative} has {size} bytes, the manifest says {entry['bytes']}; preprocess again")
    if verify and store_write.file_sha256(file) != entry["sha256"]:
        raise StoreError(f"{path}: {relative} is corrupted: its sha256 is not the manifest's; run preprocess again")
