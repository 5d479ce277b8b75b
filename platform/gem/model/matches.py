"""Match counts: how often has this user met what the candidate is, how recently and with what outcome?

Legend: N impressions, U users, A distinct things (ads, or surfaces), T events, K events kept for one match,
M matches, W windows, S signals (kinds, then flags), B words of packed signals, X = M · W, D width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gem.data.batch import Batch, EntityRows
from gem.data.schema import NUM_RESERVED, PAD, Field, Schema
from gem.model.history import visible_range
from gem.model.packing import GAP_BUCKETS, gap_bucket

DENSE = 16  # a table over all values is used while there are at most so many for every thing
CELLS = 64  # of the filter per impression: one event in so many is kept without need
SPREAD = 0x9E3779B1  # odd: spreads users over the filter
FEW = 255  # different numbers: then all events are sorted, which costs less than leaving some out
FLAGS_AT_ONCE = 8  # so many flags of an event are looked up in one table


class MatchCounts(nn.Module):
    """Hard search: how often, how recently and with what outcome has this user met what the candidate is?

    For "anything", the surface, the ad itself and the ad fields with most rows (of a multi-valued one, its first
    value), counts of event kinds and flags among the visible events that share the candidate's value, in nested
    windows of elapsed time and for the newest match alone:

        c[m, w, s] = Σ_{visible t, t in w} [value_m(t) = value_m(candidate)] · signal_s(t)

    given as log1p(c) and as c / (c[m, w, any kind] + 4), mapped to `num_tokens` tokens. (The hard search of SIM,
    arXiv 2006.05639, as counts.) No gradient flows into the counts. A value of an open vocabulary matches where all
    its rows do; reserved rows match nothing: no value, an unknown value, an ad whose own id is unknown.

    Events are sorted by value once per match; a count is then a difference of two prefix sums between places found
    by binary search. Only events that became known late (after one of a later time) are looked at one by one, and
    only those inside a window.
    """

    MAX_FIELDS = 6
    GAPS = (GAP_BUCKETS, 17, 13)  # any age; below 2^17 s = 36 hours; below 2^13 s = 2.3 hours

    def __init__(self, schema: Schema, dim: int, num_tokens: int) -> None:
        super().__init__()
        self.own_id, *others = schema.ad.fields  # an entity's own id is the first field of its side
        self.fields = tuple(sorted(others, key=lambda f: -f.rows)[: self.MAX_FIELDS])
        self.num_surfaces = len(schema.surfaces)
        # Data without any event has one kind that never occurs: tokens of their bias alone.
        self.num_kinds, self.num_flags = max(len(schema.kinds), 1), len(schema.flags)
        self.num_tokens, self.dim = num_tokens, dim
        self.limits_ms = tuple(first_ms(gap) for gap in self.GAPS[1:])
        self.width = 2 * (len(self.fields) + 3) * (len(self.GAPS) + 1) * (self.num_kinds + self.num_flags)
        self.mlp = nn.Sequential(nn.Linear(self.width, 2 * dim), nn.GELU(), nn.Linear(2 * dim, num_tokens * dim))

    def forward(self, batch: Batch, max_history: int) -> Tensor:
        """-> tokens [N, num_tokens, D]; the `max_history` newest events before the cut are visible."""
        out: Tensor = self.mlp(self.counts(batch, max_history))
        return out.view(-1, self.num_tokens, self.dim)

    @torch.no_grad()
    def counts(self, batch: Batch, max_history: int) -> Tensor:
        """-> [N, M · W · 2S] features: for every match and window S times log1p(c), then S shares."""
        t = batch.timeline
        num_events = t.ad.numel()
        if not num_events or not len(batch):
            return torch.zeros(len(batch), self.width, device=t.ad.device)
        signals = Signals(self.num_kinds, self.num_flags, min(max_history, num_events))
        words_BT = signals.pack(t.kind, t.flags)
        seen = visible(batch, max_history, self.limits_ms)
        parts = []
        for match in self._matches(batch):
            counts_BWN = match.count(words_BT, batch, seen)
            for w, (of, row) in enumerate(seen.late, 1):
                match.take_away(counts_BWN[:, w], words_BT, of, row)
            parts.append(counts_BWN)
        counts_NXS = signals.unpack(torch.cat(parts, 1))
        total = counts_NXS[..., : self.num_kinds].sum(2, keepdim=True)
        out = counts_NXS.new_empty(*counts_NXS.shape[:2], 2, counts_NXS.shape[2])
        torch.div(counts_NXS, total + 4, out=out[:, :, 1])
        torch.log1p(counts_NXS, out=out[:, :, 0])
        return out.flatten(1)

    def _matches(self, batch: Batch) -> list[Match]:
        t = batch.timeline
        ads_A = torch.arange(len(batch.ads), device=t.ad.device)
        ads_A = torch.where(single_values(batch.ads, self.own_id) < NUM_RESERVED, -1, ads_A)
        surfaces_A = torch.arange(self.num_surfaces, device=t.ad.device)
        found = [
            Match(None, torch.zeros_like(batch.ad_of), t.ad, 0),
            match_on(surfaces_A, self.num_surfaces, t.surface, batch.surface),
            match_on(ads_A, len(batch.ads), t.ad, batch.ad_of),
        ]
        for field in self.fields:
            values_A = single_values(batch.ads, field)
            values_A = torch.where(values_A < NUM_RESERVED, -1, values_A)
            found.append(match_on(values_A, 0 if field.hashes else field.rows, t.ad, batch.ad_of))
        return found


def one_number(rows: Tensor, hashes: int) -> Tensor:
    """Rows of an open vocabulary, [A * hashes] -> [A]: equal where all rows are, reserved rows as they are."""
    rows_AK = rows.view(-1, hashes)
    mixed = torch.zeros_like(rows_AK[:, 0])
    for k in range(hashes):
        mixed = mixed * 0x5851F42D4C957F2D + rows_AK[:, k]  # modulo 2^64
    return torch.where(rows_AK[:, 0] < NUM_RESERVED, rows_AK[:, 0], (mixed & ((1 << 62) - 1)) | (1 << 62))


def single_values(rows: EntityRows, field: Field) -> Tensor:
    """One number per entity [A]: its value, or of several the first; PAD where there is none."""
    ids = rows.ids[field.name]
    if field.hashes:
        return one_number(ids, field.hashes)
    if not field.multi:
        return ids
    starts, ends = rows.offsets[field.name][:-1], rows.offsets[field.name][1:]
    padded = torch.cat([ids, ids.new_full((1,), PAD)])
    return padded[torch.where(ends > starts, starts, len(ids))]


def first_ms(gap: int) -> int:
    """The shortest elapsed time, in ms, that falls into bucket `gap` or a later one (see `packing.gap_bucket`)."""
    now, row = torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int64)
    low, high = 0, 1000 << gap
    while low < high:
        middle = (low + high) // 2
        if int(gap_bucket(now, torch.tensor([-middle]), row)) >= gap:
            high = middle
        else:
            low = middle + 1
    return low


@dataclass(frozen=True)
class Signals:
    """Kinds (one of them per event) and flags as fields of 64-bit words, so that one sum adds up many signals.

    A field holds any count of up to `most` events. Prefix sums run over, modulo 2^64; their differences do not.
    """

    num_kinds: int
    num_flags: int
    most: int

    @property
    def bits(self) -> int:
        """Width of a field."""
        return max(self.most.bit_length(), 1)

    @property
    def per_word(self) -> int:
        """Fields in a word."""
        return 64 // self.bits

    def pack(self, kind_T: Tensor, flags_T: Tensor) -> list[Tensor]:
        """-> B words [T] each; kind 0 and flags beyond the known ones count nowhere."""
        some = min(self.num_flags, FLAGS_AT_ONCE)
        kinds_CS = torch.eye(self.num_kinds + 1, dtype=torch.int64, device=kind_T.device)[:, 1:]
        kinds_CS = kinds_CS.repeat_interleave(1 << some, dim=0)
        flags_CS = _bits(some, kind_T.device).repeat(self.num_kinds + 1, 1)
        code_T = (kind_T << some) + (flags_T & ((1 << some) - 1))
        words = [table.index_select(0, code_T) for table in self._tables(torch.cat([kinds_CS, flags_CS], dim=1), 0)]
        for first in range(some, self.num_flags, FLAGS_AT_ONCE):
            some = min(self.num_flags - first, FLAGS_AT_ONCE)
            code_T = (flags_T >> first) & ((1 << some) - 1)
            more = self._tables(_bits(some, kind_T.device), self.num_kinds + first)
            words = [w.add_(table.index_select(0, code_T)) for w, table in zip(words, more, strict=True)]
        return words

    def _tables(self, signals_CS: Tensor, first: int) -> list[Tensor]:
        """Words [C] of codes that stand for some signals [C, s]; `first`: the number of the first of these."""
        num_words = -(-(self.num_kinds + self.num_flags) // self.per_word)
        tables = [torch.zeros_like(signals_CS[:, 0]) for _ in range(num_words)]
        for s, column in enumerate(signals_CS.unbind(1), first):
            tables[s // self.per_word] += column << (s % self.per_word * self.bits)
        return tables

    def unpack(self, words_BXN: Tensor) -> Tensor:
        """Sums of words -> counts [N, X, S]."""
        num = self.num_kinds + self.num_flags
        words_BNX = words_BXN.transpose(1, 2).contiguous()
        out = torch.empty(*words_BNX.shape[1:], num, device=words_BNX.device)
        for s in range(num):
            field = words_BNX[s // self.per_word] >> (s % self.per_word * self.bits)
            out[..., s] = field & ((1 << self.bits) - 1)
        return out


def _bits(num: int, device: torch.device) -> Tensor:
    """Every combination of `num` bits, [2^num, num]."""
    return (torch.arange(1 << num, device=device).unsqueeze(1) >> torch.arange(num, device=device)) & 1


@dataclass(frozen=True)
class Visible:
    """Event rows that impressions may read.

    high:  [N] row after the newest one
    low:   [W, N] oldest row, by window of elapsed time from any age to the shortest
    late:  per window but the first, pairs (impression, row): rows inside [low, high) whose time lies before the window
    user:  [T] int32 user of every event, as `_spread`
    scratch: [1 + T] room for prefix sums, the first of which is 0
    """

    high: Tensor
    low: Tensor
    late: list[tuple[Tensor, Tensor]]
    user: Tensor
    scratch: Tensor


def visible(batch: Batch, max_history: int, limits_ms: tuple[int, ...]) -> Visible:
    """Ranges of the events in [cut - max_history, cut) and, for each limit, of those younger than it.

    A timeline is sorted by when its events became known, not by their times. The range of a window therefore begins
    at the first event inside it, and the late ones in the range that lie before the window are named one by one.
    """
    t = batch.timeline
    lengths = t.offsets[1:] - t.offsets[:-1]
    users = torch.arange(lengths.numel(), device=t.ad.device)
    user_T = torch.repeat_interleave(users, lengths, output_size=t.ad.numel())
    low_N, high_N = visible_range(batch, max_history)

    oldest, newest = torch.aminmax(t.time_ms)
    span = newest - oldest + 2
    clock_T = user_T * span + (t.time_ms - oldest + 1)
    latest_T = torch.cummax(clock_T, 0).values
    late_K = torch.nonzero(clock_T < latest_T).squeeze(1)
    low, late = [low_N], []
    for limit in limits_ms:
        since_N = batch.time_ms - limit  # events of a window are later than this
        # Beyond the user's events this leaves the user; the bounds below bring it back.
        first_N = torch.searchsorted(latest_T, batch.user_of * span + (since_N - oldest + 1), right=True)
        low.append(torch.minimum(torch.maximum(low_N, first_N), high_N))
        late.append(_late_before(late_K, t.time_ms, since_N, (low[-1], high_N)))
    return Visible(
        high_N,
        torch.stack(low),
        late,
        _spread(user_T),
        torch.zeros(1 + user_T.numel(), dtype=torch.int64, device=user_T.device),
    )


def _late_before(
    late_K: Tensor, time_T: Tensor, since_N: Tensor, rows_N: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Pairs (impression, late event in its range of rows [low, high)) with the event not after `since`."""
    begin_N, end_N = (torch.searchsorted(late_K, r) for r in rows_N)
    num_N = end_N - begin_N
    of = torch.repeat_interleave(num_N)
    place = torch.arange(of.numel(), device=of.device) + (begin_N - torch.cumsum(num_N, 0) + num_N)[of]
    row = late_K[place]
    before = torch.nonzero(time_T[row] <= since_N[of]).squeeze(1)
    return of[before], row[before]


def _spread(user: Tensor) -> Tensor:
    """Users as 30 mixed bits, int32: a number below 2^30 can be added."""
    return ((user * SPREAD) & ((1 << 30) - 1)).int()


@dataclass(frozen=True)
class Match:
    """One kind of match: events have a number, and an impression reads those that have its own.

    number:  [A] int32 number of every thing, `num` for those no impression asks for; None: all events match
    own:     [N] number an impression asks for, `num` + 1 if it asks for none
    thing:   [T] thing of every event
    num:     different numbers that are asked for
    """

    number: Tensor | None
    own: Tensor
    thing: Tensor
    num: int

    def count(self, words_BT: list[Tensor], batch: Batch, seen: Visible) -> Tensor:
        """-> packed counts [B, W, N]: all windows of `seen`, then the newest match alone."""
        rows_K, place = self._sorted(batch, seen)
        end_N, *begin = place.unbind()
        begin_WN = torch.stack([*begin, torch.maximum(end_N - 1, begin[0])])
        sums = seen.scratch[: 1 + (self.thing.numel() if rows_K is None else rows_K.numel())]
        parts = []
        for words_T in words_BT:
            if rows_K is not None:
                words_T = torch.index_select(words_T, 0, rows_K, out=sums[1:])
            torch.cumsum(words_T, 0, out=sums[1:])
            parts.append(sums[end_N] - sums[begin_WN])
        return torch.stack(parts)

    def _sorted(self, batch: Batch, seen: Visible) -> tuple[Tensor | None, Tensor]:
        """Rows [K] of the events that may match, by (number, row), or None for all; places in them [1 + W, N].

        The places are those of `seen.high` and `seen.low` among the events with the impression's number. An event is
        left out if nobody asks for its (user, number). Few of the others may stay: no place leads to them.
        """
        wanted = torch.cat([seen.high.unsqueeze(0), seen.low])
        if self.number is None:
            return None, wanted
        number_T = self.number.index_select(0, self.thing)
        rows_K = self._asked(batch, seen, number_T) if self.num > FEW else None
        number_K = number_T.to(torch.uint8) if rows_K is None else number_T.index_select(0, rows_K)
        number_K, order_K = torch.sort(number_K, stable=True)
        rows_K = order_K if rows_K is None else rows_K.index_select(0, order_K)
        num_events = self.thing.numel()
        keys_K = number_K.long().mul_(num_events).add_(rows_K)
        return rows_K, torch.searchsorted(keys_K, wanted + self.own * num_events)

    def _asked(self, batch: Batch, seen: Visible, number_T: Tensor) -> Tensor:
        """Rows of the events whose (user, number) some impression asks for, and of few others."""
        size = 1 << (CELLS * len(batch)).bit_length()
        asked = torch.zeros(size, dtype=torch.bool, device=number_T.device)
        asked[(_spread(batch.user_of) + self.own) & (size - 1)] = True
        cell_T = (seen.user + number_T).bitwise_and_(size - 1)
        return torch.nonzero(asked.index_select(0, cell_T)).squeeze(1)

    def take_away(self, counts_BN: Tensor, words_BT: list[Tensor], of: Tensor, row: Tensor) -> None:
        """Subtract from `counts` the events `row` that match the impression `of` beside them."""
        if self.number is not None:
            same = torch.nonzero(self.number[self.thing[row]] == self.own[of]).squeeze(1)
            of, row = of[same], row[same]
        for counts_N, words_T in zip(counts_BN, words_BT, strict=True):
            counts_N.index_add_(0, of, words_T[row], alpha=-1)


def match_on(values_A: Tensor, bound: int, thing_T: Tensor, thing_N: Tensor) -> Match:
    """A match of equal values; values below 0 match nothing, all others are below `bound` (0: any size)."""
    found, place_N = torch.unique(values_A[thing_N], return_inverse=True)
    num = found.numel()
    real = found >= 0
    if 0 < bound <= DENSE * (values_A.numel() + thing_N.numel()):
        table = torch.full((bound + 1,), num, dtype=torch.int32, device=values_A.device)
        table[found[real]] = torch.nonzero(real).squeeze(1).int()
        number_A = table[values_A]  # -1 reads the last row, which nobody asks for
    else:
        at = torch.searchsorted(found, values_A).clamp(max=num - 1)
        number_A = torch.where((found[at] == values_A) & (values_A >= 0), at, num).int()
    return Match(number_A, torch.where(real[place_N], place_N, num + 1), thing_T, num)
