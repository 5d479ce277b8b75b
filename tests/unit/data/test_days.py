"""Days, zones and the split, against the standard library's calendar."""

from __future__ import annotations

import datetime as dt
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pytest

from gem.config import DataConfig
from gem.data.days import (
    NO_DAY,
    choose_split,
    day_number,
    day_numbers,
    day_text,
    hours,
    missing_days,
    parse_days,
    weekdays,
)
from gem.errors import DataError, SpecError

LOG = ["2024-01-01", "2024-01-02", "2024-01-03", "2024-01-05"]


@pytest.mark.parametrize("zone", ["UTC", "Asia/Shanghai", "America/New_York", "Australia/Lord_Howe", "Asia/Kathmandu"])
def test_wall_time_matches_the_calendar_over_clock_changes(zone: str) -> None:
    start = int(dt.datetime(2023, 10, 1, tzinfo=dt.UTC).timestamp())
    seconds = np.arange(start, start + 250 * 86_400, 1799)
    local = [dt.datetime.fromtimestamp(int(s), ZoneInfo(zone)) for s in seconds]
    ms = seconds.astype(np.int64) * 1000
    assert [day_text(n) for n in day_numbers(ms, zone)] == [t.date().isoformat() for t in local]
    assert hours(ms, zone).tolist() == [t.hour for t in local]
    assert weekdays(ms, zone).tolist() == [t.weekday() for t in local]


def test_unknown_zone_is_named() -> None:
    with pytest.raises(SpecError, match="Mars/Olympus"):
        hours(np.array([0], np.int64), "Mars/Olympus")


def test_log_days_are_parsed_and_bad_ones_named() -> None:
    texts = pa.array(["20220506", None, "2022-05-07"])
    assert parse_days(texts, "x").tolist() == [day_number("2022-05-06"), NO_DAY, day_number("2022-05-07")]
    with pytest.raises(DataError, match=r'log\.csv: "20221399" is not a day'):
        parse_days(pa.array(["20221399"]), "log.csv")


def test_default_split_is_the_last_two_days_with_rows() -> None:
    split = choose_split(LOG, DataConfig())
    assert (split.train_days, split.validation_day, split.test_day) == (tuple(LOG[:2]), LOG[2], LOG[3])
    assert type(split).from_dict(split.to_dict()) == split
    assert missing_days(LOG) == ["2024-01-04"]


def test_days_after_the_test_day_are_in_no_part() -> None:
    split = choose_split(LOG, DataConfig(test_day=LOG[2]))
    assert (split.train_days, split.validation_day, split.test_day) == ((LOG[0],), LOG[1], LOG[2])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (DataConfig(test_day="2024-01-04"), 'data.test_day: "2024-01-04" has no impressions; allowed are 2024-01-01'),
        (DataConfig(validation_day="2023-01-01"), "data.validation_day"),
        (DataConfig(test_day=LOG[1], validation_day=LOG[2]), "must lie before the test day"),
        (DataConfig(test_day=LOG[0]), "no day to train on"),
        (DataConfig(test_day=LOG[1]), "no day before the validation day 2024-01-01"),
    ],
)
def test_impossible_splits(config: DataConfig, message: str) -> None:
    with pytest.raises(DataError, match=message):
        choose_split(LOG, config)


def test_no_rows_at_all() -> None:
    with pytest.raises(DataError, match="no impressions are left"):
        choose_split([], DataConfig())
