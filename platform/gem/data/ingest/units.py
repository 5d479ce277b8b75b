"""Epoch times: one unit inside (int64 ms UTC), and a guard against the wrong unit outside."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gem.errors import DataError

MS_2000 = 946_684_800_000  # 2000-01-01T00:00:00Z
MS_2100 = 4_102_444_800_000  # 2100-01-01T00:00:00Z
PER_SECOND = {"s": 1, "ms": 1_000, "us": 1_000_000}
UNIT_NAMES = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}
_MS_PER_YEAR = 365.2425 * 86_400_000

I64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


def in_range(times: I64, unit: str) -> Bools:
    """Which epoch times, read in `unit`, lie in the years 2000..2099."""
    per = 10**9 if unit == "ns" else PER_SECOND[unit]
    out: Bools = (times >= MS_2000 // 1000 * per) & (times < MS_2100 // 1000 * per)
    return out


def year_of(time: int, unit: str) -> int:
    """The (proleptic) year an epoch time means when it is read in `unit`."""
    per = 10**9 if unit == "ns" else PER_SECOND[unit]
    return int(1970 + time * 1000 // per / _MS_PER_YEAR)


def to_ms(times: I64, valid: Bools, unit: str, where: str) -> tuple[I64, Bools]:
    """Epoch times [N] in `unit` to int64 ms [N] and a mask of those in the years 2000..2099.

    Times outside (or not valid) become 0. Raises DataError if most valid times are outside while another
    unit would put most of them inside: then the declared unit is wrong, not the rows.
    """
    known = times[valid]
    good = in_range(times, unit) & valid
    if known.size and 2 * int(good.sum()) < known.size:
        for other in ("s", "ms", "us", "ns"):
            if other != unit and 2 * int(in_range(known, other).sum()) > known.size:
                _refuse(known, unit, other, where)
    per = PER_SECOND[unit]
    safe = np.where(good, times, 0)
    return (safe * (1000 // per) if per < 1000 else safe // (per // 1000)), good


def to_seconds(durations: npt.NDArray[np.float64], unit: str) -> npt.NDArray[np.float64]:
    """Durations in `unit` to seconds."""
    out: npt.NDArray[np.float64] = durations / PER_SECOND[unit]
    return out


def _refuse(known: I64, unit: str, other: str, where: str) -> None:
    middle = int(np.sort(known)[known.size // 2])
    what = f"set `unit: {other}` in the spec" if other in PER_SECOND else "divide the column by 1000 and set `unit: us`"
    raise DataError(
        f"{where}: time unit `{unit}` ({UNIT_NAMES[unit]}) was declared, but {middle} in {UNIT_NAMES[unit]} is the "
        f"year {year_of(middle, unit)}; allowed are the years 2000 to 2099. The values fit {UNIT_NAMES[other]} "
        f"(year {year_of(middle, other)}): {what}. The file was refused, no row was read."
    )
