"""Rules on time: missing and thin days, unit, time zone, the log's own day, the split, unsettled outcomes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from gem.data.build.sanity import check_settled
from gem.data.days import choose_split, missing_days
from gem.errors import GemError
from pipelines.check.finding import ERROR, HINT, OK, WARN, Finding, percent, some
from pipelines.check.gather import Facts, RoleFacts
from pipelines.check.measures import Measures

MIN_EVENT_ROWS = 100
THIN = 0.4  # of a usual day's rows
QUIET_HOURS = 6
NIGHT = (22, 6)  # where the quietest window may begin
MIN_HOUR_ROWS = 500
MIN_DAY_ROWS = 300
CLEAR_NIGHT = 0.5  # quiet window's activity against a flat day's
SHIFT_GAIN, SHIFT_FIT = 0.25, 0.8  # of correlation with the other days: over no shift, and at least
DAY_WRONG = 0.05
HOUR = 3_600_000

F64 = npt.NDArray[np.float64]


def days(facts: Facts, measures: Measures) -> Iterator[Finding]:
    """Days covered, missing and thin, and whether they can be split."""
    role = facts.roles.get("impressions")
    if role is None:
        return
    found = sorted(role.by_day)
    yield from _split(facts, found)
    yield from _event_gaps(facts)
    if not found:
        return
    gaps = missing_days(found)
    numbers: dict[str, Any] = {"first": found[0], "last": found[-1], "days": len(found), "missing": gaps}
    if gaps:
        what = f"{len(gaps)} days between {found[0]} and {found[-1]} have no impressions: {some(gaps)}"
        todo = "a lost partition? Histories and label rates around the gap are wrong; load it or start after it"
        yield Finding(WARN, "missing days", "impressions", what, todo, numbers)
    else:
        what = f"{len(found)} days without a gap, {found[0]} to {found[-1]}"
        yield Finding(OK, "days", "impressions", what, numbers=numbers)
    usual = float(np.median([one["rows"] for one in role.by_day.values()]))
    thin = [d for d in found if role.by_day[d]["rows"] < THIN * usual]
    if thin and len(found) > 2:
        rows = {d: role.by_day[d]["rows"] for d in thin}
        what = f"{some([f'{d} ({n:,} rows)' for d, n in rows.items()])} against {usual:,.0f} on a usual day"
        last = thin[-1] == found[-1] and not facts.config.data.test_day
        todo = (
            "the last day is the test day: wait until it is complete or set data.test_day" if last else "a part lost?"
        )
        yield Finding(WARN if last else HINT, "thin days", "impressions", what, todo, rows)


def _event_gaps(facts: Facts) -> Iterator[Finding]:
    """Days without events of a source that has some every day."""
    for role in _timed(facts):
        usual = float(np.median([one["rows"] for one in role.by_day.values()]))
        gaps = missing_days(list(role.by_day))
        if role.key.startswith("events") and gaps and usual >= MIN_EVENT_ROWS:
            what = f"{len(gaps)} days without any, {usual:,.0f} on a usual day: {some(gaps)}"
            yield Finding(WARN, "missing days", role.title, what, "a lost partition? Histories miss these days")


def _split(facts: Facts, found: list[str]) -> Iterator[Finding]:
    """The split into training, validation and test days, as preprocess makes it."""
    try:
        split = choose_split(found, facts.config.data)
        check_settled(facts.spec, split, facts.log_end_ms)
    except (GemError, KeyError) as e:
        yield Finding(ERROR, "split", "impressions", str(e), "preprocess stops here too")


def zone(facts: Facts, measures: Measures) -> Iterator[Finding]:
    """People sleep at night: quiet hours in the middle of the local day mean a wrong zone or unit."""
    for role in _timed(facts):
        hours = np.sum([one["hours"] for one in role.by_day.values()], axis=0).astype(np.float64)
        if hours.sum() < MIN_HOUR_ROWS:
            continue
        start, share = quiet_window(hours)
        numbers = {"hours": hours.astype(int).tolist(), "quiet_from": start, "quiet_share": share}
        span = f"{start:02d}:00-{(start + QUIET_HOURS) % 24:02d}:00"
        if share > CLEAR_NIGHT * QUIET_HOURS / 24:
            what = f"no clear night (quietest {span} holds {percent(share)}): the zone cannot be told from the activity"
            yield Finding(OK, "time zone", role.title, what, numbers=numbers)
        elif NIGHT[1] < start < NIGHT[0]:
            away = (start - 1 + 11) % 24 - 11
            what = (
                f"quietest {span} in {facts.spec.impressions.zone} ({percent(share)} of the rows): a night at daytime"
            )
            todo = f"are the times UTC, and is impressions.zone right? They look shifted by about {away:+d} h"
            yield Finding(WARN, "time zone", role.title, what, todo, numbers)
        else:
            what = f"quietest {span} in {facts.spec.impressions.zone} ({percent(share)} of the rows), as it should be"
            yield Finding(OK, "time zone", role.title, what, numbers=numbers)
        if share <= CLEAR_NIGHT * QUIET_HOURS / 24:
            yield from _shifted(role)


def _shifted(role: RoleFacts) -> Iterator[Finding]:
    """Days whose activity looks like that of the other days moved by whole hours."""
    total = np.sum([one["hours"] for one in role.by_day.values()], axis=0).astype(np.float64)
    usual = float(np.median([one["rows"] for one in role.by_day.values()]))
    for day, one in sorted(role.by_day.items()):
        mine = np.asarray(one["hours"], np.float64)
        others = total - mine
        if mine.sum() < max(MIN_DAY_ROWS, THIN * usual) or others.sum() < MIN_DAY_ROWS:
            continue  # a part of a day has a shape of its own
        lag, gain = best_shift(others, mine)
        if lag and gain > SHIFT_GAIN:
            what = f"activity of {day} looks like the other days' moved by {lag:+d} h (correlation {gain:.2f} better)"
            todo = "was this day written in another time zone? Times must be UTC"
            yield Finding(WARN, "shifted day", f"{role.title} {day}", what, todo, {"hours": lag, "gain": gain})


def quiet_window(hours: F64) -> tuple[int, float]:
    """First hour and share of rows of the quietest `QUIET_HOURS` neighbouring hours; hours [24]."""
    sums = np.array([np.roll(hours, -h)[:QUIET_HOURS].sum() for h in range(24)])
    start = int(sums.argmin())
    return start, float(sums[start] / hours.sum())


def best_shift(usual: F64, mine: F64) -> tuple[int, float]:
    """Hours (-11..12) by which `mine` [24] looks moved against `usual` [24], and the gain in correlation over 0."""
    if not usual.std() or not mine.std():
        return 0, 0.0
    scores = np.array([np.corrcoef(np.roll(usual, lag), mine)[0, 1] for lag in range(24)])
    lag = int(scores.argmax())
    if scores[lag] < SHIFT_FIT:
        return 0, 0.0
    return (lag + 11) % 24 - 11, float(scores[lag] - scores[0])


def own_day(facts: Facts, measures: Measures) -> Iterator[Finding]:
    """The log's day column against the day of its times in the declared zone."""
    role = facts.roles.get("impressions")
    if role is None or not role.mismatch or not role.rows:
        return
    share = role.mismatch["rows"] / role.rows
    column = facts.spec.impressions.day
    if not share:
        yield Finding(OK, "day column", f"impressions.{column}", "agrees with time and zone on every row")
        return
    hours = np.asarray(role.mismatch["hours"])
    top = int(hours.argmax())
    what = f"{role.mismatch['rows']:,} rows ({percent(share)}) name another day than their time in "
    what += (
        f"{facts.spec.impressions.zone}; {percent(hours[top] / hours.sum())} of them at {top:02d}:00-{top + 1:02d}:00"
    )
    level = WARN if share > DAY_WRONG else HINT
    todo = "is the zone right? The split goes by the column" if level == WARN else "the split goes by the column"
    yield Finding(level, "day column", f"impressions.{column}", what, todo, {"share": share, "hours": hours.tolist()})


def dwell(facts: Facts, measures: Measures) -> Iterator[Finding]:
    """Durations that no person spends: a wrong unit."""
    for role in facts.roles.values():
        known = np.asarray(role.dwell[1:], np.float64)  # bucket k: 1 = below a second, then from 2^(k - 2) seconds
        if known.sum() < MIN_DAY_ROWS:
            continue
        index = int(role.key.partition(".")[2])
        when = facts.spec.events[index].dwell
        assert when is not None  # only then are there known buckets
        long, short = known[12:].sum() / known.sum(), known[0] / known.sum()
        where = f"{role.title}.{when.column}"
        if long > 0.5 or short > 0.98:
            what = f"{percent(long)} of the durations are above half an hour" if long > 0.5 else (
                f"{percent(short)} of the durations are below a second")  # fmt: skip
            yield Finding(WARN, "unit", where, what, f"is `unit: {when.unit}` right?", {"long": long, "short": short})


def immature(facts: Facts, measures: Measures) -> Iterator[Finding]:
    """Impressions too young for their outcome to be known."""
    for name, young in facts.immature.items():
        rows = facts.sample.num_rows if facts.sample is not None else 0
        share = young / rows if rows else 0.0
        hours = facts.spec.labels[name].window_hours
        what = f"{percent(share)} of the impressions are younger than the window of {hours:g} h: no label yet"
        level = WARN if share > 0.5 else HINT if share else OK
        todo = "they are left out of training; wait for the log, or set `complete: true` if it was waited for"
        yield Finding(level, "immature", f"labels.{name}", what, todo if share else "", {"share": share})


def _timed(facts: Facts) -> Iterator[RoleFacts]:
    """Each table once: impressions, then timed events and label logs over other tables."""
    seen: set[str] = set()
    for role in facts.roles.values():
        if role.by_day and role.table not in seen:
            seen.add(role.table)
            yield role


RULES = (days, zone, own_day, dwell, immature)
