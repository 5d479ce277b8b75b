"""A batch: some users, the ads they meet, their timelines (jagged) and their impressions (flat).

Shapes, with U users, A distinct ads (candidates and timeline items together), T timeline events,
N impressions, K tasks:

    users.ids[field]  [U]            ads.ids[field]  [A]         context.ids[field]  [N]
    timeline.*        [T], split by timeline.offsets [U + 1]
    user_of, ad_of    [N] -> rows of users / ads;  cut [N] events of the user known before the impression
    past              [N, M, S] what all users did with the ad before the day (`gem.data.past`)
    labels, mask      [N, K]; mask 0 where the outcome is not (yet) known, else the row's weight in the loss (mostly 1)
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from gem.errors import JaggedError


@dataclass
class EntityRows:
    """Encoded features of B entities.

    ids:      single-valued field -> [B] int64 table rows; multi-valued field -> flat values [V]
    offsets:  multi-valued field -> [B + 1] int64 into its values (absent for single-valued fields)
    numeric:  [B, 2 D] float32: D standardised values (0 where missing), then D missing flags
    vectors:  [B, E] float32, all frozen representations side by side
    """

    ids: dict[str, Tensor]
    offsets: dict[str, Tensor]
    numeric: Tensor
    vectors: Tensor

    def __len__(self) -> int:
        return int(self.numeric.shape[0])


@dataclass
class TimelineRows:
    """Events of U users, oldest first within a user. `ad` indexes the batch's ads; times are ms UTC."""

    offsets: Tensor  # [U + 1] int64
    first: Tensor  # [U] int64, how many older events of the user are not carried
    ad: Tensor  # [T] int64
    kind: Tensor  # [T] int64, 1.. (0 is padding)
    flags: Tensor  # [T] int64 bit mask
    surface: Tensor  # [T] int64 surface code
    dwell: Tensor  # [T] int64 bucket
    time_ms: Tensor  # [T] int64


@dataclass
class Batch:
    """Everything one forward pass reads; shapes in the module docstring. Rows are sorted by `user_of`."""

    users: EntityRows
    ads: EntityRows
    context: EntityRows
    timeline: TimelineRows
    user_of: Tensor  # [N] int64
    ad_of: Tensor  # [N] int64
    cut: Tensor  # [N] int64, counted from the user's first event *in this batch*
    time_ms: Tensor  # [N] int64
    surface: Tensor  # [N] int64 surface code
    labels: Tensor  # [N, K] float32
    mask: Tensor  # [N, K] float32
    impression_id: Tensor  # [N] int64
    past: Tensor  # [N, M, S] float32 counts
    soft: dict[str, Tensor] = field(default_factory=dict)  # teacher knowledge, [N, ...]

    def __len__(self) -> int:
        return int(self.user_of.shape[0])

    def lookups(self) -> dict[str, Tensor]:
        """Field name -> flat table rows, over all three sides (names are unique across sides)."""
        return {**self.users.ids, **self.ads.ids, **self.context.ids}


def check_offsets(name: str, offsets: Tensor, num_values: int, num_rows: int | None = None) -> None:
    """Refuse offsets that do not start at 0, run backwards, do not end at `num_values` or are not `num_rows` + 1.

    Stock kernels read out of bounds or silently repair such input; see the jagged tests.
    """
    if offsets.ndim != 1 or offsets.numel() == 0 or int(offsets[0]) != 0:
        raise JaggedError(f"{name}: offsets must be one-dimensional and start at 0, got {_head(offsets)}")
    steps = offsets[1:] - offsets[:-1]
    if steps.numel() and int(steps.min()) < 0:
        at = int(torch.nonzero(steps < 0)[0])
        raise JaggedError(f"{name}: offsets run backwards at row {at} ({_head(offsets)}); lengths must be >= 0")
    if int(offsets[-1]) != num_values:
        raise JaggedError(f"{name}: offsets end at {int(offsets[-1])} but there are {num_values} values")
    if num_rows is not None and offsets.numel() != num_rows + 1:
        raise JaggedError(f"{name}: {offsets.numel()} offsets for {num_rows} rows; allowed: one more than rows")


def check_ids(name: str, ids: Tensor, rows: int) -> None:
    """Refuse table rows outside [0, rows); FBGEMM would read row 0 or crash instead."""
    if not ids.numel():
        return
    low, high = torch.aminmax(ids)
    if int(low) < 0 or int(high) >= rows:
        bad = ids[(ids < 0) | (ids >= rows)][0]
        raise JaggedError(f"{name}: id {int(bad)} is outside the table, allowed 0..{rows - 1}")


def check_batch(batch: Batch, rows_of: dict[str, int]) -> None:
    """Validate every jagged part and id of a batch. `rows_of`: field name -> rows of its table."""
    for side, rows in (("users", batch.users), ("ads", batch.ads), ("context", batch.context)):
        for name, ids in rows.ids.items():
            check_ids(f"{side}.{name}", ids, rows_of[name])
            if name in rows.offsets:
                check_offsets(f"{side}.{name}", rows.offsets[name], ids.numel(), len(rows))
            elif ids.numel() != len(rows):
                raise JaggedError(f"{side}.{name}: {ids.numel()} ids for {len(rows)} rows")
    _check_timeline(batch.timeline, len(batch.users), len(batch.ads))
    _check_impressions(batch)


def _check_timeline(timeline: TimelineRows, num_users: int, num_ads: int) -> None:
    num_events = timeline.ad.numel()
    check_offsets("timeline", timeline.offsets, num_events, num_users)
    check_ids("timeline.ad", timeline.ad, num_ads)
    if timeline.first.numel() != num_users or bool((timeline.first < 0).any()):
        raise JaggedError(f"timeline.first: got {_head(timeline.first)}; allowed: one count >= 0 for each user")
    for name in ("kind", "flags", "surface", "dwell", "time_ms"):
        got = getattr(timeline, name).numel()
        if got != num_events:
            raise JaggedError(f"timeline.{name}: {got} values for {num_events} events; give one per event")


def _check_impressions(batch: Batch) -> None:
    for name in ("ad_of", "cut", "time_ms", "surface", "labels", "mask", "impression_id", "context", "past"):
        got = len(getattr(batch, name))
        if got != len(batch):
            raise JaggedError(f"{name}: {got} rows for {len(batch)} impressions; give one per impression")
    check_ids("user_of", batch.user_of, len(batch.users))
    check_ids("ad_of", batch.ad_of, len(batch.ads))
    if bool((batch.user_of[1:] < batch.user_of[:-1]).any()):
        raise JaggedError("user_of: must not fall; sort the impressions by user, as `collate` does")
    lengths = batch.timeline.offsets[1:] - batch.timeline.offsets[:-1]
    if bool((batch.cut < 0).any() | (batch.cut > lengths[batch.user_of]).any()):
        raise JaggedError("cut: an impression's cut lies outside its user's timeline")


def _head(values: Tensor) -> str:
    return str(values.flatten()[:8].tolist())
