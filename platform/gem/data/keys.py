"""Raw entity keys to entity indices; index 0 is the unknown entity."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gem.data.lookup import Positions
from gem.data.schema import UNKNOWN_ENTITY
from gem.data.vocabulary import as_text, as_values

I32 = npt.NDArray[np.int32]


class KeyIndex:
    """Key -> index, where `keys[i]` is the key of entity i and `keys[0]` (null) is the unknown entity.

    Numbers and their decimal text are the same key, as in the hash of a key. Nobody is found at a null key.
    """

    def __init__(self, keys: pa.Array | pa.ChunkedArray) -> None:
        self.keys = keys.combine_chunks() if isinstance(keys, pa.ChunkedArray) else keys
        self._positions: Positions | None = None
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
        if self._positions is None:
            self._positions = Positions(self.keys)
        return np.maximum(self._positions.find(as_values(keys)), UNKNOWN_ENTITY)
