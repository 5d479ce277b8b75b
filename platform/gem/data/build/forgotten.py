"""Users who asked to be forgotten: kept as keyed digests, so that the list does not name them.

The key is random and lies beside the list, readable by its owner only; manifests carry digests alone.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import unicodedata
from collections.abc import Iterator, Sequence
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
_SEPARATORS = re.compile(r"[,;\t|: ]+")
_ZERO_FRACTION = re.compile(r"(-?\d+)\.0+")
_ROWS = 1 << 16  # quarantined rows that are taken apart at a time


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
        words = [_as_key(u) for u in users]
        digests = {listed._digest(w[0].as_py()) for w in words}
        buckets = {int((stable_hash64(w) & _BUCKETS)[0]) for w in words}
        return Forgotten(
            listed.key, tuple(sorted({*listed.digests, *digests})), tuple(sorted({*listed.buckets, *buckets}))
        )

    def without(self, quarantined: pa.Table) -> pa.Table:
        """Quarantined rows (JSON text in `row`) that name no forgotten user in any cell or piece of a line."""
        return quarantined.filter(pa.array(~self.rows_naming(quarantined)[0])) if self else quarantined

    def rows_naming(self, quarantined: pa.Table) -> tuple[Bools, set[str]]:
        """[N] which quarantined rows have a forgotten user in a cell or in a piece of a line; and whose digests."""
        out, found = np.zeros(quarantined.num_rows, np.bool_), set[str]()
        for start in range(0, quarantined.num_rows if self else 0, _ROWS):
            parts = [list(_pieces(text)) for text in quarantined["row"].slice(start, _ROWS).to_pylist()]
            pieces = pa.array([piece for part in parts for piece in part], pa.string())
            mask = self.mask(pieces)
            out[start + np.repeat(np.arange(len(parts)), [len(part) for part in parts])[mask]] = True
            found |= self.digests_of(pieces.filter(pa.array(mask)))
        return out, found

    def digests_of(self, keys: pa.Array | pa.ChunkedArray) -> set[str]:
        """Digests on the list that belong to these keys."""
        words = as_text(keys.unique()).to_pylist()
        return {self._digest(word) for word in words if word is not None}.intersection(self.digests)

    def absent(self, users: Sequence[str], digests: set[str]) -> list[str]:
        """Those of the users whose digest is not among these."""
        return [u for u in users if self._digest(_as_key(u)[0].as_py()) not in digests]

    def _digest(self, key: str) -> str:
        return hashlib.blake2b(key.encode(), digest_size=16, key=bytes.fromhex(self.key)).hexdigest()


def _as_key(user: str) -> pa.Array:
    """[1] an id as the readers spell it."""
    return as_text(to_ids(pa.array([str(user)], pa.string()), "user"))


def _pieces(text: str) -> Iterator[str]:
    """What may be an id in the JSON text of a quarantined row: its cells, and the fields of a line."""
    row = json.loads(text)
    yield from _cells(row)
    line = row.get("line") if isinstance(row, dict) else None
    if isinstance(line, str):  # it was not split: no one knows by what, and an id may hold the other separators
        fields = [field for separator in ",;\t|" for field in line.split(separator)]
        yield from (_plain(field.strip().strip("\"'")) for field in [*fields, *_SEPARATORS.split(line)])


def _cells(value: Any) -> Iterator[str]:
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _cells(inner)
    elif isinstance(value, str | int | float):
        yield _plain(str(value))


def _plain(text: str) -> str:
    """As the readers compare text; whole numbers without their fraction."""
    word = unicodedata.normalize("NFC", text).strip()
    whole = _ZERO_FRACTION.fullmatch(word)
    return whole[1] if whole else word
