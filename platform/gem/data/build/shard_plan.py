"""What every shard must know of a window of data before it is built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


class RebuildNeeded(Exception):
    """A window cannot be added to the store before; the message says why."""


@dataclass(frozen=True)
class ShardPlan:
    """Found in the first pass, over all files of the window and the store before.

    key_types:   "user", "ad" and "key:<label>" -> "int64" or "string", over all files and the store before
    first_day, last_train_day: local days since 1970-01-01
    log_end_ms:  label with a log of its own -> latest time seen in the impressions ("") and in that log
    settled_ms:  the same as the window before knew it; -1 in the first window
    window:      number of this window of data, from 0
    max_rows_per_user_day, max_skew_ms: limits of the run
    """

    key_types: Mapping[str, str]
    first_day: int
    last_train_day: int
    num_shards: int
    log_end_ms: Mapping[str, int] = field(default_factory=dict)
    settled_ms: Mapping[str, int] = field(default_factory=dict)
    window: int = 0
    max_rows_per_user_day: int = 10_000
    max_skew_ms: int = 300_000

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> ShardPlan:
        return cls(**raw)
