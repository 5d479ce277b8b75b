"""Users who asked to be forgotten: kept as keyed digests, so that the list does not name them.

The key is random and lies beside the list, readable by its owner only; manifests carry digests alone.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gem.data.hashing import stable_hash64
from gem.data.ingest.columns import to_ids
from gem.data.vocabulary import as_text

Bools = npt.NDArray[np.bool_]
_BUCKETS = np.uint64(0xFFF)


@dataclass(frozen=True)
class Forgotten:
    """digests: BLAKE2b of user keys (hex, 16 bytes), keyed. buckets: twelve bits of a fast hash of each, which spare
    the digest of nearly all other users. Empty: nobody."""

    key: str = ""
    digests: tuple[str, ...] = ()
    buckets: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.digests)

    def to_dict(self) -> dict[str, Any]:
        return {"key": self.key, "digests": list(self.digests), "buckets": list(self.buckets)}

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Forgotten:
        return cls(str(raw["key"]), tuple(raw["digests"]), tuple(int(b) for b in raw["buckets"]))

    def mask(self, keys: pa.Array | pa.ChunkedArray) -> Bools:
        """[N] which keys (numbers, or text as the readers spell it) belong to forgotten users."""
        out = np.zeros(len(keys), np.bool_)
        if not self or not len(keys):
            return out
        array = keys.combine_chunks() if isinstance(keys, pa.ChunkedArray) else keys
        near = np.flatnonzero(np.isin(stable_hash64(array) & _BUCKETS, np.array(self.buckets, np.uint64)))
        some = as_text(array.take(pa.array(near))).dictionary_encode()
        mine = [k is not None and self._digest(k) in self.digests for k in some.dictionary.to_pylist()]
        codes = pc.fill_null(some.indices, len(mine)).to_numpy(zero_copy_only=False)
        out[near] = np.array([*mine, False], np.bool_)[codes]
        return out

    def with_users(self, users: Sequence[str]) -> Forgotten:
        """The list with these users added; a new key if there was none."""
        listed = self if self.key else Forgotten(secrets.token_hex(32))
        words = [as_text(to_ids(pa.array([str(u)], pa.string()), "user")) for u in users]
        digests = {listed._digest(w[0].as_py()) for w in words}
        buckets = {int((stable_hash64(w) & _BUCKETS)[0]) for w in words}
        return Forgotten(
            listed.key, tuple(sorted({*listed.digests, *digests})), tuple(sorted({*listed.buckets, *buckets}))
        )

    def without(self, quarantined: pa.Table, column: str | None) -> pa.Table:
        """Quarantined rows (JSON text in `row`) that do not name a forgotten user in `column`."""
        if not self or column is None or not quarantined.num_rows:
            return quarantined
        users = pa.array(list(_values(quarantined["row"].to_pylist(), column)), pa.string())
        return quarantined.filter(pa.array(~self.mask(to_ids(users, "quarantined user"))))

    def _digest(self, key: str) -> str:
        return hashlib.blake2b(key.encode(), digest_size=16, key=bytes.fromhex(self.key)).hexdigest()


def _values(texts: Iterable[str], column: str) -> Iterable[str | None]:
    for text in texts:
        row = json.loads(text)
        value = row.get(column) if isinstance(row, dict) else None
        yield None if value is None else str(value)
