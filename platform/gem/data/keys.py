"""Raw entity keys to entity indices; index 0 is the unknown entity."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gem.data.schema import UNKNOWN_ENTITY
from gem.data.vocabulary import as_text

I32 = npt.NDArray[np.int32]


class KeyIndex:
    """Key -> index, where `keys[i]` is the key of entity i and `keys[0]` (null) is the unknown entity.

    Numbers and their decimal text are the same key, as in the hash of a key.
    """

    def __init__(self, keys: pa.Array | pa.ChunkedArray) -> None:
        self.keys = keys.combine_chunks() if isinstance(keys, pa.ChunkedArray) else keys
        self._is_int = pa.types.is_integer(self.keys.type)
        self._order: npt.NDArray[np.int64] | None = None
        self._sorted: npt.NDArray[np.int64] | None = None
        self._index: dict[str, int] | None = None

    def __len__(self) -> int:
        return len(self.keys)

    def index_of(self, key: object) -> int:
        """Index of one key, given as int or text; 0 if nobody knows it."""
        if key is None or isinstance(key, bool):
            return UNKNOWN_ENTITY
        if self._index is None:
            text = as_text(self.keys).to_pylist()
            self._index = {k: i for i, k in enumerate(text) if k is not None}
        return self._index.get(str(key), UNKNOWN_ENTITY)

    def index_many(self, keys: Any) -> I32:
        """Indices of many keys (Arrow array of ints or text, or a sequence), [N] -> [N] int32; 0 where unknown."""
        array = keys.combine_chunks() if isinstance(keys, pa.ChunkedArray) else keys
        if isinstance(array, pa.Array) and pa.types.is_integer(array.type) and self._is_int:
            return self._index_ints(array)
        found = pc.index_in(as_text(array), value_set=as_text(self.keys).slice(1))
        out: I32 = pc.fill_null(pc.add(found, 1), UNKNOWN_ENTITY).to_numpy(zero_copy_only=False).astype(np.int32)
        if len(array):
            out[as_text(array).is_null().to_numpy(zero_copy_only=False)] = UNKNOWN_ENTITY
        return out

    def _index_ints(self, array: pa.Array) -> I32:
        if self._order is None or self._sorted is None:
            known = self.keys.slice(1).cast(pa.int64()).to_numpy(zero_copy_only=False)
            self._order = np.argsort(known, kind="stable")
            self._sorted = known[self._order]
        wanted = pc.fill_null(array.cast(pa.int64()), 0).to_numpy(zero_copy_only=False)
        if not len(self._sorted):
            return np.zeros(len(wanted), np.int32)
        at = np.minimum(np.searchsorted(self._sorted, wanted), len(self._sorted) - 1)
        hit = (self._sorted[at] == wanted) & array.is_valid().to_numpy(zero_copy_only=False)
        return np.where(hit, self._order[at] + 1, UNKNOWN_ENTITY).astype(np.int32)
