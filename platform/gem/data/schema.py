"""The encoded shape of a data set: which id fields, numbers and vectors each side carries.

A `Schema` is what remains of a `DatasetSpec` once vocabularies are fitted: plain integers and names,
enough to build a model, and hashed into every bundle so that a model never meets another encoding.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

PAD, NULL, OOV = 0, 1, 2
NUM_RESERVED = 3  # rows 0, 1, 2 of every vocabulary are never a real value
DWELL_BUCKETS = 16  # 0 = not known, 1 = below one second, then powers of two
UNKNOWN_ENTITY = 0  # index 0 of the user and ad tables is the entity nobody has seen


@dataclass(frozen=True)
class Field:
    """One categorical input: `name` reads rows of embedding table `table` (shared tables allowed).

    multi:   any number of rows for an entity, their mean is read
    hashes:  above 0, one value of an open vocabulary: exactly so many rows for every entity (then also `multi`)
    """

    name: str
    table: str
    rows: int
    multi: bool = False
    hashes: int = 0


@dataclass(frozen=True)
class Side:
    """What one side (user, ad or context) of an impression carries.

    `numeric` are standardised floats (NaN = missing); `vectors` are (name, width) of frozen
    representations such as creative embeddings.
    """

    fields: tuple[Field, ...] = ()
    numeric: tuple[str, ...] = ()
    vectors: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Task:
    """One binary outcome. `given` names the task it is conditional on (conversion given click)."""

    name: str
    given: str | None = None


@dataclass(frozen=True)
class Schema:
    """Everything a model needs to know about the data, and nothing about where it lies."""

    user: Side
    ad: Side
    context: Side
    kinds: tuple[str, ...]  # timeline event kinds; code 0 is padding, code k is kinds[k - 1]
    flags: tuple[str, ...]  # bit b of an event's flags is flags[b]
    surfaces: tuple[str, ...]  # surface code c is surfaces[c]; codes 0..2 are reserved rows
    surface_groups: tuple[str, ...]  # vertical-model groups
    group_of_surface: tuple[int, ...]  # surface code -> index into surface_groups
    tasks: tuple[Task, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Schema:
        """Read back `to_dict` (after JSON, lists in place of tuples)."""

        def side(part: dict[str, Any]) -> Side:
            return Side(
                fields=tuple(Field(**f) for f in part["fields"]),
                numeric=tuple(part["numeric"]),
                vectors=tuple((str(n), int(w)) for n, w in part["vectors"]),
            )

        return cls(
            user=side(raw["user"]),
            ad=side(raw["ad"]),
            context=side(raw["context"]),
            kinds=tuple(raw["kinds"]),
            flags=tuple(raw["flags"]),
            surfaces=tuple(raw["surfaces"]),
            surface_groups=tuple(raw["surface_groups"]),
            group_of_surface=tuple(int(g) for g in raw["group_of_surface"]),
            tasks=tuple(Task(**t) for t in raw["tasks"]),
        )

    @property
    def hash(self) -> str:
        """sha256 over the canonical JSON of this schema."""
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def tables(self) -> dict[str, int]:
        """Embedding tables: name -> rows (the largest any field that shares it needs)."""
        rows: dict[str, int] = {}
        for side in (self.user, self.ad, self.context):
            for f in side.fields:
                rows[f.table] = max(rows.get(f.table, 0), f.rows)
        return rows

    def table_of(self) -> dict[str, str]:
        """Field name -> table name, over all three sides (field names are unique)."""
        return {f.name: f.table for side in (self.user, self.ad, self.context) for f in side.fields}
