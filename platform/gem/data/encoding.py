"""The fitted encoding of a data set: raw values to table rows, standardised numbers and vectors.

One code path for preprocess and serving. `gem.data.fitting` builds an `Encoder` from training days only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gem.data.batch import EntityRows
from gem.data.days import hours, weekdays
from gem.data.rows import SideRows
from gem.data.schema import NULL, NUM_RESERVED, OOV, Schema
from gem.data.vocabulary import Vocabulary, as_text
from gem.errors import DataError, StoreError

CLAMP = 5.0  # standardised numbers are cut to +-CLAMP
ID_FIELD: dict[str, str] = {"user": "user_id", "ad": "ad_id"}
SURFACE, HOUR, WEEKDAY = "surface", "hour", "weekday"
_VERSION = 1

SideName = Literal["user", "ad", "context"]
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
    vocabularies:    embedding table -> values
    surface_values:  raw text of surface codes 3, 4, ...; `schema.surfaces` holds their readable names
    weekday:         whether training saw every weekday often enough to learn from it; else the field is NULL
    """

    schema: Schema
    zone: str
    features: Mapping[str, tuple[Feature, ...]]
    vocabularies: Mapping[str, Vocabulary]
    surface_values: tuple[str, ...]
    weekday: bool = True

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

        A null key is the unknown entity: its id is OOV, like an id too rare to have a row of its own.
        """
        keys = table["key"].combine_chunks()
        field = ID_FIELD[side]
        ids = self.vocabularies[field].lookup(as_text(keys))
        ids[ids == NULL] = OOV
        raw = {n: table[n] for n in table.column_names if n != "key"}
        columns = self.encode_columns(side, raw, table.num_rows)
        return pa.table({"key": keys, field: pa.array(ids, pa.int32()), **columns})

    def encode_columns(self, side: SideName, raw: Mapping[str, Any], num_rows: int) -> dict[str, pa.Array]:
        """Encode the features of one side; a feature without a column is NULL (ids), NaN or a zero vector."""
        return {f.name: self._encode(f, raw.get(f.name), num_rows) for f in self.features[side]}

    def _encode(self, feature: Feature, values: Any, num_rows: int) -> pa.Array:
        if values is not None and len(values) != num_rows:
            raise DataError(f'feature "{feature.name}": {len(values)} values for {num_rows} rows')
        if feature.kind == "categorical":
            text = pa.nulls(num_rows, pa.string()) if values is None else as_text(values)
            return pa.array(self.vocabularies[feature.table].lookup(text), pa.int32())
        if feature.kind == "multi":
            return _encode_multi(self.vocabularies[feature.table], values, num_rows)
        if feature.kind == "numeric":
            return pa.array(standardise(feature, _floats(values, num_rows)), pa.float32())
        return _encode_vectors(feature, values, num_rows)

    def to_json(self) -> str:
        """Self-contained text; `from_json` restores an encoder that encodes alike."""
        plain = {
            "version": _VERSION,
            "schema": self.schema.to_dict(),
            "zone": self.zone,
            "features": {side: [asdict(f) for f in fs] for side, fs in self.features.items()},
            "vocabularies": {name: v.to_list() for name, v in self.vocabularies.items()},
            "surface_values": list(self.surface_values),
            "weekday": self.weekday,
        }
        return json.dumps(plain, sort_keys=True, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Encoder:
        """Inverse of `to_json`. Raises StoreError for another version or a broken text."""
        try:
            raw = json.loads(text)
            if raw["version"] != _VERSION:
                raise StoreError(f"encoder: version {raw['version']}, this code reads {_VERSION}; preprocess again")
            return cls(
                schema=Schema.from_dict(raw["schema"]),
                zone=raw["zone"],
                features={side: tuple(Feature(**f) for f in fs) for side, fs in raw["features"].items()},
                vocabularies={name: Vocabulary(values) for name, values in raw["vocabularies"].items()},
                surface_values=tuple(raw["surface_values"]),
                weekday=bool(raw["weekday"]),
            )
        except (json.JSONDecodeError, KeyError, TypeError) as e:
            raise StoreError(f"encoder: not a text written by Encoder.to_json ({type(e).__name__}: {e})") from None


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


def _encode_multi(vocabulary: Vocabulary, values: Any, num_rows: int) -> pa.Array:
    """A list of rows per entity: [NULL] where the list is null, empty where it is empty."""
    if values is None:
        values = pa.nulls(num_rows, pa.list_(pa.string()))
    array = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
    if not isinstance(array, pa.Array):
        lists = [None if v is None else as_text(v).to_pylist() for v in array]
        array = pa.array(lists, pa.list_(pa.string()))
    lengths = pc.fill_null(pc.list_value_length(array), 1).to_numpy(zero_copy_only=False)
    offsets = np.zeros(num_rows + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    flat = np.full(int(offsets[-1]), NULL, np.int32)
    absent = array.is_null().to_numpy(zero_copy_only=False)
    given = np.ones(len(flat), np.bool_)
    given[offsets[:-1][absent]] = False
    flat[given] = vocabulary.lookup(as_text(pc.list_flatten(array)))
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
