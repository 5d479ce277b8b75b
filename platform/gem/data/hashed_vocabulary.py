"""Open vocabularies: a value is spread over several rows of one table by hashing (multi-hash).

Hash embeddings (Svenstrup, Hansen and Winther 2017, arXiv 1709.03933) without the importance weights: a value is the
mean of `hashes` rows. Two values are mistaken for each other only if all their rows agree.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gem.data.hashing import combine64, rehash64, stable_hash64
from gem.data.schema import NULL, NUM_RESERVED

I32 = npt.NDArray[np.int32]
_SALT = "rows:"


class HashedVocabulary:
    """A table of `hash_rows` rows behind the reserved ones, read at `hashes` rows a value.

    It never grows and has no unknown value: what training never met is a mean of rows that others share. Several
    features may share the table; each hashes with its own name, so that equal values of two features part.
    """

    def __init__(self, hash_rows: int, hashes: int) -> None:
        self.hash_rows, self.hashes = hash_rows, hashes

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HashedVocabulary) and (self.hash_rows, self.hashes) == (other.hash_rows, other.hashes)

    __hash__ = None  # type: ignore[assignment]

    @property
    def rows(self) -> int:
        """Rows an embedding table needs, reserved rows included."""
        return NUM_RESERVED + self.hash_rows

    def lookup(self, values: pa.Array, field: str) -> I32:
        """Rows of a field's values (integers or text), [N] -> [N, hashes] int32; NULL in every place for null."""
        base = stable_hash64(values, _SALT + field)
        out = np.empty((len(base), self.hashes), np.int32)
        for i in range(self.hashes):
            out[:, i] = (rehash64(base, i) % np.uint64(self.hash_rows)).astype(np.int32) + NUM_RESERVED
        if values.null_count:
            out[np.asarray(values.is_null())] = NULL
        return out


def collision_rate(rows: I32) -> float:
    """Share of values whose rows ([N, k], one line per distinct value) another value has too, in any order.

    The order does not count because a model reads the mean of the rows.
    """
    if not len(rows):
        return 0.0
    ordered = np.sort(rows, axis=1).astype(np.uint64)
    _, counts = np.unique(combine64(*ordered.T), return_counts=True)
    return float(counts[counts > 1].sum() / len(rows))
