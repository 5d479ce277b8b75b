"""Times that run ahead of their partition's day or of now, and partitions that hold another time than they say."""

from __future__ import annotations

import datetime as dt
from zoneinfo import ZoneInfo

import pytest

from gem.data.ingest.canonical import Limits, read_events, read_impressions, read_label_log
from gem.errors import DataError
from tests.unit.data.small_log import NOON, log_table, make_spec, reasons, write

DAY_MS = 86_400_000
LIMITS = Limits(max_skew_ms=300_000, now_ms=NOON + 365 * DAY_MS)
EVENT = {"kind": "show", "table": "log", "user": "u", "ad": "a", "time": {"column": "t"}}


def spec_in(zone="UTC", unit="ms"):
    imp = make_spec().impressions.model_dump() | {"zone": zone, "time": {"column": "t", "unit": unit}}
    return make_spec(impressions=imp, events=[EVENT | {"time": {"column": "t", "unit": unit}}])


def day_file(folder, times, name="day=2022-05-01"):
    (folder / name).mkdir(exist_ok=True)
    return write(folder / name, log_table(t=times))


@pytest.mark.parametrize("zone", ["UTC", "Asia/Shanghai", "America/New_York"])
@pytest.mark.parametrize("name", ["day=2022-05-01", "dt=20220501"])
def test_d7_future_or_skewed_clock(tmp_path, zone, name):
    """At most five minutes beyond the local day: moved to its last ms and counted; later ones are quarantined."""
    end = int(dt.datetime(2022, 5, 2, tzinfo=ZoneInfo(zone)).timestamp() * 1000)
    times = [end - 1, end, end + 299_999, end + 300_000, end - 10 * DAY_MS]
    path = day_file(tmp_path, times, name)
    got = read_impressions(spec_in(zone), path, None, LIMITS)
    assert got.rows["time_ms"].to_pylist() == [end - 1, end - 1, end - 1, end - 10 * DAY_MS]  # late rows are fine
    assert reasons(got) == ["future_time"] and got.counts == {"clamped_time": 2}
    events = read_events(spec_in(zone), 0, path, None, LIMITS)
    assert events.rows["time_ms"].to_pylist() == got.rows["time_ms"].to_pylist()
    assert events.rows["dup"].to_pylist() == got.rows["dup"].to_pylist()
    assert read_impressions(spec_in(zone), path).rows["time_ms"].to_pylist() == times  # no limits, no change


def test_d7_without_a_partition_now_is_the_limit(tmp_path):
    limits = Limits(max_skew_ms=1000, now_ms=NOON)
    path = write(tmp_path, log_table(t=[NOON, NOON + 1, NOON + 1000, NOON + 1001, NOON - 900 * DAY_MS]))
    got = read_impressions(spec_in(), path, None, limits)
    assert got.rows["time_ms"].to_pylist() == [NOON, NOON, NOON, NOON - 900 * DAY_MS]
    assert reasons(got) == ["future_time"] and got.counts == {"clamped_time": 2}
    table = log_table(t=[NOON // 1000, NOON // 1000 + 2]).select(["ref", "t"])
    sales = read_label_log(make_spec(), "conversion", write(tmp_path, table, "sales.parquet"), None, limits)
    assert reasons(sales) == ["future_time"] and sales.rows["key"].to_pylist() == [0]


@pytest.mark.parametrize(
    ("unit", "times"),
    [
        ("ms", [NOON + 40 * DAY_MS] * 3),  # another day
        ("ms", [NOON - 32 * DAY_MS, NOON - 33 * DAY_MS, NOON]),
        ("ms", [NOON - 22 * 365 * DAY_MS + i for i in range(3)]),
    ],
)
def test_d6_a_partition_far_from_its_day_is_refused(tmp_path, unit, times):
    path = day_file(tmp_path, times)
    with pytest.raises(DataError, match=r"of 3 times are not near the partition's day 2022-05-01 .* the median is 20"):
        read_impressions(spec_in(unit=unit), path, None, LIMITS)


def test_d6_ms_vs_s(tmp_path):
    """A day in seconds or microseconds among days in ms is refused as a whole, with the unit that fits."""
    for name, times, fits in (
        ("day=2022-05-01", [NOON // 1000, NOON // 1000 + 1], "seconds"),
        ("day=2022-05-02", [NOON * 1000, NOON * 1000 + 1], "microseconds"),
    ):
        with pytest.raises(DataError, match=rf"{name}.*`ms`.*fit {fits}.*no row was read"):
            read_impressions(spec_in(), day_file(tmp_path, times, name), None, LIMITS)


def test_a_partition_of_a_day_to_come_is_refused(tmp_path):
    path = day_file(tmp_path, [NOON + 3 * DAY_MS], "day=2022-05-04")
    with pytest.raises(DataError, match=r"the partition's day 2022-05-04 has not begun yet"):
        read_impressions(spec_in(), path, None, Limits(max_skew_ms=0, now_ms=NOON))


def test_half_of_a_partition_may_be_late(tmp_path):
    path = day_file(tmp_path, [NOON - 40 * DAY_MS, NOON])
    assert read_impressions(spec_in(), path, None, LIMITS).rows.num_rows == 2


def test_a_folder_that_names_no_day_says_nothing(tmp_path):
    path = day_file(tmp_path, [NOON + 40 * DAY_MS] * 2, "day=monday")
    assert read_impressions(spec_in(), path, None, LIMITS).rows.num_rows == 2
