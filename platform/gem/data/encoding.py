"""The fitted encoding of a data set: raw values to table rows, standardised numbers and vectors.

One code path for preprocess and serving. `gem.data.fitting` builds an `Encoder` from training days only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gem.data.build import store_write
from gem.data.days import hours, weekdays
from gem.data.hashed_vocabulary import HashedVocabulary
from gem.data.schema import NULL, NUM_RESERVED, OOV, Schema
from gem.data.vocabulary import Vocabulary, as_text, as_values
from gem.errors import DataError, StoreError

if TYPE_CHECKING:
    from gem.data.batch import EntityRows

CLAMP = 5.0  # standardised numbers are cut to +-CLAMP
ID_FIELD: dict[str, str] = {"user": "user_id", "ad": "ad_id"}
SURFACE, HOUR, WEEKDAY = "surface", "hour", "weekday"
VOCABULARIES = "vocabularies.parquet"
_VERSION = 2

SideName = Literal["user", "ad", "context"]
AnyVocabulary = Vocabulary | HashedVocabulary
F64 = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Feature:
    """One fitted feature. `table` for categorical and multi; `mean`, `std` for numeric; `width` for embedding."""

    name: str
    kind: Literal["categorical", "multi", "numeric", "embedding"]
    table: str = ""
    transform: Literal["none", "log1p"] = "none"
    mean: float = 0.0
    std: float = 1.0
    width: int = 0


@dataclass(frozen=True)
class Encoder:
    """Everything fitted on the training days.

    features:        side -> its features, without ids and without surface, hour and weekday
    vocabularies:    embedding table -> values, or the numbers of an open vocabulary
    surface_values:  raw text of surface codes 3, 4, ...; `schema.surfaces` holds their readable names
    weekday:         whether training saw every weekday often enough to learn from it; else the field is NULL
    vocabulary_version: 0 after the first fit, one more with every growth that added rows
    """

    schema: Schema
    zone: str
    features: Mapping[str, tuple[Feature, ...]]
    vocabularies: Mapping[str, AnyVocabulary]
    surface_values: tuple[str, ...]
    weekday: bool = True
    vocabulary_version: int = 0

    def __post_init__(self) -> None:
        names = {n: c for c, n in enumerate(self.schema.surfaces) if c >= NUM_RESERVED}
        raw = {v: c + NUM_RESERVED for c, v in enumerate(self.surface_values)}
        object.__setattr__(self, "_surface_code", {**names, **raw})

    def surface_code(self, value: str | int | None) -> int:
        """Code of a surface by its raw value or readable name; NULL for None, OOV if never met in training."""
        return int(self.surface_codes([value])[0])

    def surface_codes(self, values: Any) -> npt.NDArray[np.int16]:
        """Codes of many surfaces, [N] -> [N] int16."""
        text = as_text(values).dictionary_encode()
        table: dict[str, int] = self._surface_code  # type: ignore[attr-defined]
        codes = np.array([table.get(v, OOV) for v in text.dictionary.to_pylist()] + [NULL], np.int16)
        out: npt.NDArray[np.int16] = codes[pc.fill_null(text.indices, len(codes) - 1).to_numpy(zero_copy_only=False)]
        return out

    def encode_context(
        self, raw: Mapping[str, Sequence[object]], time_ms: npt.NDArray[np.int64], surface: Sequence[object]
    ) -> EntityRows:
        """Context features of N requests or impressions. `raw`: feature name -> N values; absent ones are NULL/NaN."""
        from gem.data.rows import SideRows  # brings torch, which preprocess does without

        columns = self.context_columns(raw, time_ms, surface)
        return SideRows(self.schema.context, columns, len(time_ms)).take(np.arange(len(time_ms)))

    def context_columns(
        self, raw: Mapping[str, Any], time_ms: npt.NDArray[np.int64], surface: Any
    ) -> dict[str, pa.Array]:
        """Encoded context columns by field name, surface, hour and weekday included."""
        columns = self.encode_columns("context", raw, len(time_ms))
        columns[SURFACE] = pa.array(self.surface_codes(surface), pa.int32())
        columns[HOUR] = pa.array(hours(time_ms, self.zone) + NUM_RESERVED, pa.int32())
        weekday = weekdays(time_ms, self.zone) + NUM_RESERVED if self.weekday else np.full(len(time_ms), NULL)
        columns[WEEKDAY] = pa.array(weekday, pa.int32())
        return columns

    def encode_entities(self, side: Literal["user", "ad"], table: pa.Table) -> pa.Table:
        """`key` and raw feature columns to `key` and encoded columns, row by row.

        A null key is the unknown entity: its id is OOV, like an id too rare to have a row of its own. Hashed ids have
        no OOV: there it is NULL.
        """
        keys = table["key"].combine_chunks()
        field = ID_FIELD[side]
        vocabulary = self.vocabularies[field]
        ids = _encode_single(vocabulary, as_values(keys), field)
        if isinstance(vocabulary, Vocabulary):
            ids = pc.if_else(keys.is_null(), pa.scalar(OOV, pa.int32()), ids)
        raw = {n: table[n] for n in table.column_names if n != "key"}
        columns = self.encode_columns(side, raw, table.num_rows)
        return pa.table({"key": keys, field: ids, **columns})

    def encode_columns(self, side: SideName, raw: Mapping[str, Any], num_rows: int) -> dict[str, pa.Array]:
        """Encode the features of one side; a feature without a column is NULL (ids), NaN or a zero vector."""
        return {f.name: self._encode(f, raw.get(f.name), num_rows) for f in self.features[side]}

    def _encode(self, feature: Feature, values: Any, num_rows: int) -> pa.Array:
        if values is not None and len(values) != num_rows:
            raise DataError(f'feature "{feature.name}": {len(values)} values for {num_rows} rows')
        if feature.kind == "categorical":
            single = pa.nulls(num_rows, pa.string()) if values is None else as_values(values)
            return _encode_single(self.vocabularies[feature.table], single, feature.name)
        if feature.kind == "multi":
            return _encode_multi(self.vocabularies[feature.table], values, num_rows, feature.name)
        if feature.kind == "numeric":
            return pa.array(standardise(feature, _floats(values, num_rows)), pa.float32())
        return _encode_vectors(feature, values, num_rows)

    def to_json(self) -> str:
        """Self-contained text; `from_json` restores an encoder that encodes alike."""
        return _to_text(self, with_values=True)

    @classmethod
    def from_json(cls, text: str) -> Encoder:
        """Inverse of `to_json`. Raises StoreError for another version or a broken text."""
        return _from_text(text, None)

    def save(self, folder: Path) -> dict[str, store_write.Entry]:
        """Write encoder.json (without the values) and vocabularies.parquet; relative path -> manifest entry."""
        closed = {n: v.values for n, v in sorted(self.vocabularies.items()) if isinstance(v, Vocabulary)}
        codes = np.repeat(np.arange(len(closed), dtype=np.int32), [len(v) for v in closed.values()])
        names = pa.DictionaryArray.from_arrays(pa.array(codes, pa.int32()), pa.array(list(closed), pa.string()))
        values = pa.chunked_array(list(closed.values()), pa.string())
        table = pa.table({"table": names, "value": values})
        return {
            store_write.ENCODER: store_write.write_text(folder, store_write.ENCODER, _to_text(self, with_values=False)),
            VOCABULARIES: store_write.write_table(folder, VOCABULARIES, table),
        }

    @classmethod
    def load(cls, folder: Path) -> Encoder:
        """Inverse of `save`. Raises StoreError if a file is absent, broken, or does not fit the other."""
        try:
            text = (folder / store_write.ENCODER).read_text(encoding="utf-8")
            table = pq.read_table(folder / VOCABULARIES, read_dictionary=["table"])
            values = _by_table(table)
        except (OSError, UnicodeDecodeError, pa.ArrowException, KeyError) as e:
            raise StoreError(f"{folder}: cannot read the encoder ({type(e).__name__}: {e}); preprocess again") from None
        return _from_text(text, values)


def _to_text(encoder: Encoder, with_values: bool) -> str:
    plain = {
        "version": _VERSION,
        "schema": encoder.schema.to_dict(),
        "zone": encoder.zone,
        "features": {side: [asdict(f) for f in fs] for side, fs in encoder.features.items()},
        "vocabularies": {name: _plain(v, with_values) for name, v in encoder.vocabularies.items()},
        "surface_values": list(encoder.surface_values),
        "weekday": encoder.weekday,
        "vocabulary_version": encoder.vocabulary_version,
    }
    return json.dumps(plain, sort_keys=True, ensure_ascii=False)


def _plain(vocabulary: AnyVocabulary, with_values: bool) -> list[str] | dict[str, int]:
    if isinstance(vocabulary, HashedVocabulary):
        return {"hash_rows": vocabulary.hash_rows, "hashes": vocabulary.hashes}
    return vocabulary.to_list() if with_values else {"values": len(vocabulary.values)}


def _from_text(text: str, stored: Mapping[str, pa.Array] | None) -> Encoder:
    """An encoder from its text; `stored`: table -> values where they stand in a file of their own."""
    try:
        raw = json.loads(text)
        if raw["version"] != _VERSION:
            raise StoreError(f"encoder: version {raw['version']}, this code reads {_VERSION}; preprocess again")
        _check_stored(raw["vocabularies"], stored)
        return Encoder(
            schema=Schema.from_dict(raw["schema"]),
            zone=raw["zone"],
            features={side: tuple(Feature(**f) for f in fs) for side, fs in raw["features"].items()},
            vocabularies={name: _vocabulary(name, v, stored) for name, v in raw["vocabularies"].items()},
            surface_values=tuple(raw["surface_values"]),
            weekday=bool(raw["weekday"]),
            vocabulary_version=int(raw["vocabulary_version"]),
        )
    except (json.JSONDecodeError, KeyError, TypeError) as e:
        raise StoreError(f"encoder: not a text written by Encoder.to_json ({type(e).__name__}: {e})") from None


def _vocabulary(name: str, plain: list[str] | dict[str, int], stored: Mapping[str, pa.Array] | None) -> AnyVocabulary:
    if isinstance(plain, list):
        return Vocabulary(plain)
    if "hash_rows" in plain:
        return HashedVocabulary(int(plain["hash_rows"]), int(plain["hashes"]))
    if stored is None:
        raise StoreError(f"encoder: the values of table {name} stand in {VOCABULARIES}; read it with Encoder.load")
    return Vocabulary(stored.get(name, pa.array([], pa.string())))


def _check_stored(plain: Mapping[str, Any], stored: Mapping[str, pa.Array] | None) -> None:
    """The values in the file of their own must be as many as the text says, table by table."""
    if stored is not None:
        said = {n: v["values"] for n, v in plain.items() if isinstance(v, dict) and v.get("values")}
        have = {n: len(v) for n, v in stored.items()}
        differ = {n: (have.get(n, 0), said.get(n, 0)) for n in {*said, *have} if have.get(n, 0) != said.get(n, 0)}
        if differ:
            raise StoreError(
                f"{VOCABULARIES} and {store_write.ENCODER} are of two stores: (values there, values said here) are "
                f"{dict(sorted(differ.items()))}; preprocess again"
            )


def _by_table(stored: pa.Table) -> dict[str, pa.Array]:
    """Values by table; the rows of a table are neighbours."""
    names, values = stored["table"].combine_chunks(), stored["value"].combine_chunks().cast(pa.string())
    codes = names.indices.to_numpy(zero_copy_only=False)
    starts = np.flatnonzero(np.diff(codes, prepend=-1))
    ends = np.append(starts, len(codes))[1:].tolist()
    known = names.dictionary.to_pylist()
    pieces = zip(starts.tolist(), ends, strict=True)
    return {known[codes[a]]: pa.concat_arrays([values.slice(a, b - a)]) for a, b in pieces}


def transform(kind: Literal["none", "log1p"], values: F64) -> F64:
    """Apply the transform of a numeric feature, [N] -> [N]; what cannot be a number becomes NaN (missing).

    log1p of a negative value is missing, as are infinities.
    """
    finite = np.where(np.isfinite(values), values, np.nan)
    if kind == "none":
        return finite
    out: F64 = np.log1p(np.where(finite >= 0, finite, np.nan))
    return out


def standardise(feature: Feature, values: F64) -> npt.NDArray[np.float32]:
    """(transform(x) - mean) / std cut to +-CLAMP, NaN where missing, [N] float32."""
    scaled = (transform(feature.transform, values) - feature.mean) / feature.std
    return np.clip(scaled, -CLAMP, CLAMP).astype(np.float32)


def _floats(values: Any, num_rows: int) -> F64:
    if values is None:
        return np.full(num_rows, np.nan)
    array = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
    if not isinstance(array, pa.Array):
        array = pa.array([None if v is None else float(v) for v in array], pa.float64())
    out: F64 = pc.fill_null(array.cast(pa.float64()), float("nan")).to_numpy(zero_copy_only=False)
    return out


def _rows(vocabulary: AnyVocabulary, values: pa.Array, name: str) -> npt.NDArray[np.int32]:
    """Table rows of values, [N] -> [N, k]; k = 1 but for an open vocabulary."""
    if isinstance(vocabulary, HashedVocabulary):
        return vocabulary.lookup(values, name)
    return vocabulary.lookup(values)[:, None]


def _encode_single(vocabulary: AnyVocabulary, values: pa.Array, name: str) -> pa.Array:
    """One row per value, or for an open vocabulary a list of `hashes` rows."""
    rows = _rows(vocabulary, values, name)
    flat = pa.array(rows.reshape(-1), pa.int32())
    if isinstance(vocabulary, Vocabulary):
        return flat
    offsets = np.arange(len(rows) + 1, dtype=np.int32) * np.int32(vocabulary.hashes)
    return pa.ListArray.from_arrays(pa.array(offsets), flat)


def _encode_multi(vocabulary: AnyVocabulary, values: Any, num_rows: int, name: str) -> pa.Array:
    """A list of rows per entity: [NULL] where the list is null, empty where it is empty."""
    if values is None:
        values = pa.nulls(num_rows, pa.list_(pa.string()))
    array = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
    if not isinstance(array, pa.Array):
        lists = [None if v is None else as_text(v).to_pylist() for v in array]
        array = pa.array(lists, pa.list_(pa.string()))
    rows = _rows(vocabulary, as_values(pc.list_flatten(array)), name)
    lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False) * rows.shape[1]
    absent = array.is_null().to_numpy(zero_copy_only=False)
    lengths[absent] = 1
    offsets = np.zeros(num_rows + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    flat = np.full(int(offsets[-1]), NULL, np.int32)
    given = np.ones(len(flat), np.bool_)
    given[offsets[:-1][absent]] = False
    flat[given] = rows.reshape(-1)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat))


def _encode_vectors(feature: Feature, values: Any, num_rows: int) -> pa.Array:
    """Frozen vectors [N, width]; a zero vector where there is none or it is not finite. DataError on another width."""
    width = feature.width
    out = np.zeros((num_rows, width), np.float32)
    if values is not None:
        array = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
        if not isinstance(array, pa.Array):
            array = pa.array(list(array), pa.list_(pa.float32()))
        present = pc.is_valid(array).to_numpy(zero_copy_only=False)
        rows = array.filter(pa.array(present))
        flat = pc.list_flatten(rows).to_numpy(zero_copy_only=False).astype(np.float32)
        lengths = pc.list_value_length(rows).to_numpy(zero_copy_only=False)
        if len(lengths) and bool((lengths != width).any()):
            bad = int(lengths[lengths != width][0])
            raise DataError(f'feature "{feature.name}": a vector has {bad} numbers, the spec says width {width}')
        out[present] = np.nan_to_num(flat.reshape(-1, width), nan=0.0, posinf=0.0, neginf=0.0)
    return pa.FixedSizeListArray.from_arrays(pa.array(out.reshape(-1)), width)
