"""Past counts: what all users have done with an ad, and with whatever shares a value with it, before the day began.

The other side of a timeline. An event counts for the impressions of a local day if it became known strictly before
that day's start, so a count changes once a day, in training, evaluation and serving alike, and cannot hold an outcome
of the impressions it describes.

    c[match, kind, 0]      events of a kind         c[match, kind, 1 + f]   those of them with flag f

Matches: every event; the impression's surface; the candidate ad; the ad fields with most rows (`past_fields`; of
several values an ad's first counts).
Only real values match: unknown, null and absent ones count nothing.

On disk (`gem.data.reader_cache`) for each match: keys int64 [E] = code · slots + slot, rising, and sums float32 [E, S]
within a code up to that slot. A look-up is one binary search; memory follows the number of distinct (value, day)
pairs, not values × days.

Legend: T events, N impressions, A ads, D days, S signals = kinds · (1 + flags), M matches.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from zoneinfo import ZoneInfo

import numpy as np
import numpy.typing as npt

from gem.data.schema import NUM_RESERVED, Schema

I64 = npt.NDArray[np.int64]
F32 = npt.NDArray[np.float32]
Ids = npt.NDArray[np.integer]
MAX_FIELDS = 5
EVERYTHING, SURFACE, AD = "everything", "surface", "ad"


def past_fields(schema: Schema) -> tuple[str, ...]:
    """The ad fields whose values are counted: those with most rows, the ad's own id and hashed fields aside."""
    closed = [f for f in schema.ad.fields[1:] if not f.hashes]
    return tuple(f.name for f in sorted(closed, key=lambda f: -f.rows)[:MAX_FIELDS])


def past_matches(schema: Schema) -> tuple[str, ...]:
    """Names of the M matches, in the order of `PastCounts.at`."""
    return (EVERYTHING, SURFACE, AD, *past_fields(schema))


def num_signals(schema: Schema) -> int:
    """S: for each kind of event its number and that of each flag."""
    return max(len(schema.kinds), 1) * (1 + len(schema.flags))


def day_starts(days: Sequence[str], zone: str) -> I64:
    """Starts of the local days in ms UTC, in order, and of the day after the last. [D + 1]"""
    info, order = ZoneInfo(zone), sorted(days)
    # The day after is not always 24 hours later: clocks may change on the last day.
    after = [(dt.date.fromisoformat(order[-1]) + dt.timedelta(days=1)).isoformat()] if order else []
    starts = [int(dt.datetime.fromisoformat(d).replace(tzinfo=info).timestamp() * 1000) for d in [*order, *after]]
    return np.array(starts or [0], np.int64)


@dataclass(frozen=True)
class CountTable:
    """Sums [E, S] by rising `keys` = code · slots + slot; codes below NUM_RESERVED are never asked for."""

    keys: I64
    sums: F32
    slots: int

    def at(self, code: Ids, slot: I64) -> F32:
        """Sums of all events of `code` [N] in slots up to `slot` [N]; zeros where there is none. [N, S]"""
        code = code.astype(np.int64)
        place = np.searchsorted(self.keys, code * self.slots + slot, side="right") - 1
        found = (place >= 0) & (slot >= 0) & (code >= NUM_RESERVED)
        place = np.maximum(place, 0)
        if not self.keys.size:
            return np.zeros((code.size, self.sums.shape[1]), np.float32)
        found &= self.keys[place] // self.slots == code
        out: F32 = np.where(found[:, None], self.sums[place], np.float32(0))
        return out


@dataclass(frozen=True)
class AdValues:
    """Code of every ad [A] for the matches on ads, and the field rows; codes below NUM_RESERVED match nothing."""

    codes: Mapping[str, Ids]

    @classmethod
    def of(cls, schema: Schema, ids: Callable[[str], Ids], num_ads: int) -> AdValues:
        """`ids`: ad field -> its value (or first value) [A]. An ad's own code is its index; index 0 is unknown."""
        own = np.arange(num_ads, dtype=np.int64) + NUM_RESERVED
        own[:1] = 0
        return cls({AD: own, **{name: ids(name) for name in past_fields(schema)}})


class PastCounts:
    """Look-up of past counts for impressions at any time."""

    def __init__(self, tables: Mapping[str, CountTable], values: AdValues, starts_ms: I64) -> None:
        self._tables, self._values, self._starts = dict(tables), values, starts_ms
        self._direct: DirectIndex | None = None

    def at(self, ad: Ids, surface: Ids, time_ms: I64) -> F32:
        """Counts before the local day of each impression: ad index, surface code and ms UTC [N] -> [N, M, S]."""
        # An event of slot e is known before the start of day e; an impression of day d reads slots up to d.
        slot = np.searchsorted(self._starts, time_ms, side="right").astype(np.int64) - 1
        codes = [self._codes(name, ad, surface) for name in self._tables]
        tables = list(self._tables.values())
        if self._direct is None and DirectIndex.fits(tables):
            self._direct = DirectIndex.of(tables)
        if self._direct is not None:
            return self._direct.at(codes, slot)
        return np.stack([table.at(code, slot) for table, code in zip(tables, codes, strict=True)], 1)

    def _codes(self, name: str, ad: Ids, surface: Ids) -> Ids:
        if name == EVERYTHING:
            return np.full(len(ad), NUM_RESERVED, np.int64)
        return surface if name == SURFACE else self._values.codes[name][ad]


class DirectIndex:
    """The tables of a log of moderate size, with one row number for every (value, day): no search per look-up.

    rows_of: for each table row numbers [C + 1, slots] of its last sums up to that slot; sums [E + 1, S] of all
    tables, the last row zero.
    """

    MAX_CELLS, MAX_NUMBERS = 1 << 24, 1 << 26  # 64 MB of row numbers, 256 MB of sums

    def __init__(self, rows_of: Sequence[npt.NDArray[np.int32]], sums: F32) -> None:
        self._rows_of, self._sums = list(rows_of), sums

    @classmethod
    def fits(cls, tables: Sequence[CountTable]) -> bool:
        """Whether this costs little memory."""
        cells = sum((_num_codes(t) + 1) * t.slots for t in tables)
        return cells <= cls.MAX_CELLS and sum(t.sums.size for t in tables) <= cls.MAX_NUMBERS

    @classmethod
    def of(cls, tables: Sequence[CountTable]) -> DirectIndex:
        """Copy the sums and number the rows."""
        rows_of, base, none = [], 0, sum(len(t.keys) for t in tables)
        for table in tables:
            rows = np.full((_num_codes(table) + 1, table.slots), -1, np.int32)
            rows.reshape(-1)[table.keys] = np.arange(base, base + len(table.keys))
            rows = np.maximum.accumulate(rows, axis=1)
            rows_of.append(np.where(rows < 0, np.int32(none), rows))
            base += len(table.keys)
        zero = np.zeros((1, tables[0].sums.shape[1]), np.float32)
        return cls(rows_of, np.concatenate([*(t.sums for t in tables), zero]))

    def at(self, codes: Sequence[Ids], slot: I64) -> F32:
        """As `PastCounts.at`, from codes [N] per table."""
        none = len(self._sums) - 1
        rows = np.empty((len(slot), len(codes)), np.int32)
        for m, (code, rows_of) in enumerate(zip(codes, self._rows_of, strict=True)):
            rows[:, m] = rows_of[np.minimum(code, len(rows_of) - 1), slot]
        rows[slot < 0] = none
        return self._sums.take(rows, axis=0)


def _num_codes(table: CountTable) -> int:
    return int(table.keys[-1]) // table.slots + 1 if table.keys.size else 0


def count_events(code_T: Ids, slot_T: I64, signals_T: tuple[Ids, Ids], shape: tuple[int, int, int]) -> CountTable:
    """Count events by (code, slot), summed over slots within a code.

    signals_T: kind (1..) and flag bits [T]; shape: kinds, flags, slots. Events of reserved codes, and those known
    after the last start (slot = slots), are left out.
    """
    kinds, flags, slots = shape
    use = (code_T >= NUM_RESERVED) & (slot_T < slots)
    key = code_T[use].astype(np.int64) * slots + slot_T[use]
    kind, bits = signals_T[0][use].astype(np.int64) - 1, signals_T[1][use].astype(np.int64)
    order = np.argsort(key, kind="stable")
    key, kind, bits = key[order], kind[order], bits[order]
    first = np.flatnonzero(np.concatenate([[True], key[1:] != key[:-1]])) if key.size else np.zeros(0, np.int64)
    keys, group = key[first], np.cumsum(np.concatenate([[0], key[1:] != key[:-1]]))[: key.size]
    sums = np.zeros((keys.size, kinds, 1 + flags), np.float64)
    for f in range(1 + flags):
        has = np.ones(key.size, bool) if f == 0 else (bits >> (f - 1)) & 1 == 1
        found = np.bincount(group[has] * kinds + kind[has], minlength=keys.size * kinds)
        sums[:, :, f] = found.reshape(keys.size, kinds)
    flat = np.cumsum(sums.reshape(keys.size, kinds * (1 + flags)), axis=0)
    code = keys // slots
    begin = np.flatnonzero(np.concatenate([[True], code[1:] != code[:-1]])) if keys.size else np.zeros(0, np.int64)
    before = np.concatenate([np.zeros((1, flat.shape[1])), flat])[begin]
    flat -= np.repeat(before, np.diff(begin, append=keys.size), axis=0)
    return CountTable(keys, flat.astype(np.float32), slots)


def count_past(
    schema: Schema, events: Mapping[str, Ids], values: AdValues, starts_ms: I64
) -> Iterator[tuple[str, CountTable]]:
    """The tables of a log one by one, in the order of `past_matches`. Takes some 110 bytes of memory per event.

    `events` holds ad, kind, flags, surface and known_ms [T].
    """
    slot = np.searchsorted(starts_ms, events["known_ms"], side="right").astype(np.int64)
    shape = (max(len(schema.kinds), 1), len(schema.flags), len(starts_ms))
    for name in past_matches(schema):
        if name == EVERYTHING:
            code: Ids = np.full(slot.size, NUM_RESERVED, np.int64)
        else:
            code = events["surface"] if name == SURFACE else values.codes[name][events["ad"]]
        yield name, count_events(code, slot, (events["kind"], events["flags"]), shape)
