"""What identifies an impression: its id and the key that makes two rows one."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gem.data.hashing import as_int63, combine64, stable_hash64
from gem.data.ingest import columns
from gem.data.ingest.row_reader import RowReader
from gem.data.spec import ImpressionSpec


def key_columns(imp: ImpressionSpec) -> list[str]:
    """Columns that `impression_keys` reads."""
    return [imp.user, imp.ad, imp.time.column, *([imp.id] if imp.id else []), *imp.duplicate_key]


def impression_keys(
    imp: ImpressionSpec, reader: RowReader, user: pa.Array, ad: pa.Array, time_ms: npt.NDArray[np.int64]
) -> tuple[pa.Array, npt.NDArray[np.int64]]:
    """impression_id and dup columns; marks rows whose own id is null."""
    if imp.id:
        ids = reader.ids(imp.id, "null_id")
        impression_id = ids if pa.types.is_integer(ids.type) else pa.array(as_int63(stable_hash64(ids, "impression")))
    else:
        parts = (stable_hash64(part, "impression") for part in (user, ad, pa.array(time_ms)))
        impression_id = pa.array(as_int63(combine64(*parts)))
    if not imp.duplicate_key:
        return impression_id, as_int63(stable_hash64(impression_id, "dup"))
    raw = (reader.column(c) for c in imp.duplicate_key)
    words = (c if pa.types.is_integer(c.type) else columns.category_text(c) for c in raw)
    return impression_id, as_int63(combine64(*(stable_hash64(c, "dup") for c in words)))
