"""How far a row's time may run ahead: of its partition's day, or of now (fault scenario D7), and whether a whole
partition holds another time than its folder says (D6)."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from zoneinfo import ZoneInfo

import numpy as np
import numpy.typing as npt

from gem.data.days import NO_DAY, day_numbers, day_text
from gem.errors import DataError

_DAY_MS = 86_400_000
_LATE_DAYS = 31

I64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Limits:
    """A time at most `max_skew_ms` beyond its limit is moved back to it; `now_ms` is the time of the run."""

    max_skew_ms: int
    now_ms: int


def day_bounds(day: dt.date, zone: str) -> tuple[int, int]:
    """First and last ms (UTC) of a local day."""
    info = ZoneInfo(zone)
    start, end = (
        dt.datetime.combine(d, dt.time(), info).astimezone(dt.UTC).timestamp()
        for d in (day, day + dt.timedelta(days=1))
    )
    return int(start * 1000), int(end * 1000) - 1


def check_partition(time_ms: I64, day: dt.date, zone: str, limits: Limits, where: str) -> None:
    """Raise DataError if a partition's day has not begun, or if most of its times [N] are far from the day: a wrong
    unit, zone or folder. Late rows of up to 31 days are fine."""
    if not len(time_ms):
        return
    start, end = day_bounds(day, zone)
    if start > limits.now_ms + limits.max_skew_ms:
        raise DataError(
            f"{where}: the partition's day {day} has not begun yet (days begin in {zone}). Check the folder that the "
            "file lies in, and the clock of this machine."
        )
    far = (time_ms < start - _LATE_DAYS * _DAY_MS) | (time_ms > end + _DAY_MS)
    if 2 * int(far.sum()) <= len(time_ms):
        return
    middle = dt.datetime.fromtimestamp(int(np.median(time_ms)) / 1000, dt.UTC).strftime("%Y-%m-%d %H:%M:%S")
    raise DataError(
        f"{where}: {int(far.sum())} of {len(time_ms)} times are not near the partition's day {day} (allowed are "
        f"{_LATE_DAYS} days before to one day after it); the median is {middle} UTC. Check the unit of the column (s, "
        f"ms, us), its time zone (it must be UTC; days begin in {zone}) and the folder that the file lies in. The file "
        "was refused, no row was read."
    )


def limit_times(time_ms: I64, day: dt.date | None, zone: str, limits: Limits) -> tuple[I64, Bools, Bools]:
    """(times with small skews moved back to the limit, mask of those, mask of times beyond any skew), each [N].

    The limit is the last ms of the partition's day, or now for a file without one.
    """
    latest = limits.now_ms if day is None else day_bounds(day, zone)[1]
    beyond = time_ms > latest + limits.max_skew_ms
    moved = (time_ms > latest) & ~beyond
    return np.where(moved, latest, time_ms), moved, beyond


def check_days(time_ms: I64, own: npt.NDArray[np.int32], zone: str, where: str) -> Bools:
    """Mask [N] of rows whose own day lies more than one day from the local day of their time; NO_DAY is never wrong.

    Raises DataError if that is most of them: a wrong column, unit or zone.
    """
    given = own != NO_DAY
    days = day_numbers(time_ms, zone)
    wrong: Bools = given & (np.abs(own.astype(np.int64) - days) > 1)
    if 2 * int(wrong.sum()) <= int(given.sum()):
        return wrong
    at = int(np.flatnonzero(wrong)[0])
    when = dt.datetime.fromtimestamp(int(time_ms[at]) / 1000, dt.UTC).strftime("%Y-%m-%d %H:%M:%S")
    raise DataError(
        f"{where}: {int(wrong.sum())} of {int(given.sum())} rows say a day that is more than one day from that of "
        f"their time (days begin in {zone}), such as {day_text(int(own[at]))} for {when} UTC. Check impressions.day, "
        "impressions.zone and the unit of impressions.time. The file was refused, no row was read."
    )
