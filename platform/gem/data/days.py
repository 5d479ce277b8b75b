"""Local wall time, days and the time-ordered split. Times are int64 ms UTC; a day is text YYYY-MM-DD."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gem.config import DataConfig
from gem.errors import DataError, SpecError

I64 = npt.NDArray[np.int64]

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
_QUARTER_MS = 900_000  # zone offsets change on a quarter of an hour
_MAX_TABLE = 4_000_000  # quarters of an hour: more than a century
NO_DAY = -(2**31)
BEFORE = "before"  # partition of everything known before the first impression day


@dataclass(frozen=True)
class Split:
    """Days of training, validation and test; nothing is fitted on the last two."""

    train_days: tuple[str, ...]
    validation_day: str
    test_day: str

    def to_dict(self) -> dict[str, object]:
        return {**asdict(self), "train_days": list(self.train_days)}

    @classmethod
    def from_dict(cls, raw: dict[str, object]) -> Split:
        days = raw["train_days"]
        assert isinstance(days, Sequence)
        return cls(tuple(str(d) for d in days), str(raw["validation_day"]), str(raw["test_day"]))


def local_ms(time_ms: I64, zone: str) -> I64:
    """Wall-clock ms in `zone`, [N] -> [N]: ms UTC plus the zone's offset at that instant.

    Raises SpecError for a zone name nobody knows.
    """
    try:
        info = ZoneInfo(zone)
    except (ZoneInfoNotFoundError, ValueError):
        raise SpecError(f'impressions.zone: "{zone}" is not a time zone name such as UTC or Asia/Shanghai') from None
    if info.key == "UTC" or not len(time_ms):
        return time_ms
    quarter = time_ms // _QUARTER_MS
    first = int(quarter.min())
    if int(quarter.max()) - first < _MAX_TABLE:  # a table over the range: no sorting
        met = np.flatnonzero(np.bincount(quarter - first)) + first
        place = quarter - first
        offsets = np.zeros(int(quarter.max()) - first + 1, np.int64)
        offsets[met - first] = _offsets(met, info)
    else:
        met, place = np.unique(quarter, return_inverse=True)
        offsets = _offsets(met, info)
    out: I64 = time_ms + offsets[place.reshape(-1)]
    return out


def _offsets(quarters: I64, info: ZoneInfo) -> I64:
    """Offset from UTC in ms at the start of each quarter of an hour, [Q]."""
    out = np.empty(len(quarters), np.int64)
    for i, quarter in enumerate(quarters.tolist()):
        offset = dt.datetime.fromtimestamp(quarter * 900, tz=dt.UTC).astimezone(info).utcoffset()
        out[i] = int((offset or dt.timedelta()).total_seconds() * 1000)
    return out


def day_numbers(time_ms: I64, zone: str) -> npt.NDArray[np.int32]:
    """Local days since 1970-01-01, [N] -> [N] int32."""
    return (local_ms(time_ms, zone) // DAY_MS).astype(np.int32)


def hours(time_ms: I64, zone: str) -> npt.NDArray[np.int32]:
    """Local hour 0..23, [N] -> [N] int32."""
    return (local_ms(time_ms, zone) % DAY_MS // HOUR_MS).astype(np.int32)


def weekdays(time_ms: I64, zone: str) -> npt.NDArray[np.int32]:
    """Local weekday, Monday = 0, [N] -> [N] int32 (1970-01-01 was a Thursday)."""
    return ((local_ms(time_ms, zone) // DAY_MS + 3) % 7).astype(np.int32)


def day_text(number: int) -> str:
    """Days since 1970-01-01 to YYYY-MM-DD."""
    return (dt.date(1970, 1, 1) + dt.timedelta(days=int(number))).isoformat()


def day_number(text: str) -> int:
    """YYYY-MM-DD to days since 1970-01-01."""
    return (dt.date.fromisoformat(text) - dt.date(1970, 1, 1)).days


def parse_days(texts: pa.Array | pa.ChunkedArray, where: str) -> npt.NDArray[np.int32]:
    """Days since 1970-01-01 of yyyymmdd or yyyy-mm-dd, [N] -> [N] int32; NO_DAY for null. DataError names `where`."""
    coded = texts.combine_chunks() if isinstance(texts, pa.ChunkedArray) else texts
    coded = coded.dictionary_encode()
    numbers = [*(_parse_day(t, where) for t in coded.dictionary.to_pylist()), NO_DAY]
    codes = pc.fill_null(coded.indices, len(numbers) - 1).to_numpy(zero_copy_only=False)
    out: npt.NDArray[np.int32] = np.array(numbers, np.int32)[codes]
    return out


def _parse_day(text: str, where: str) -> int:
    try:
        return day_number(text)
    except ValueError:
        raise DataError(f'{where}: "{text}" is not a day; allowed are 20220506 and 2022-05-06') from None


def missing_days(days: Sequence[str]) -> list[str]:
    """Calendar days between the first and the last of `days` that are not among them."""
    present = {day_number(d) for d in days}
    return [day_text(n) for n in range(min(present), max(present)) if n not in present] if present else []


def choose_split(days: Iterable[str], config: DataConfig) -> Split:
    """Test = the configured or last day, validation = the configured day or the last one before it.

    Training = every day before validation. Raises DataError if a day is absent or none is left to train on.
    """
    known = sorted(set(days))
    if not known:
        raise DataError("no impressions are left after validation; see the quarantine files for the reasons")
    test = config.test_day or known[-1]
    _require("data.test_day", test, known)
    before = [d for d in known if d < test]
    if not before:
        raise DataError(
            f"test day {test} is the first day of the log ({known[0]} to {known[-1]}): no day to train on. At least "
            "three days of impressions are needed; choose a later data.test_day or give more days"
        )
    validation = config.validation_day or before[-1]
    _require("data.validation_day", validation, known)
    if validation >= test:
        raise DataError(f"data.validation_day {validation} must lie before the test day {test}")
    train = tuple(d for d in known if d < validation)
    if not train:
        raise DataError(
            f"no day before the validation day {validation} is left to train on; the log has {known[0]} to {known[-1]}."
            " At least three days of impressions are needed"
        )
    return Split(train, validation, test)


def _require(name: str, day: str, known: list[str]) -> None:
    if day not in known:
        raise DataError(f'{name}: "{day}" has no impressions; allowed are {", ".join(known)}')
