"""Labels from logs of their own (delayed conversions), and labels on the entire space.

Values are int8: 1 happened, 0 did not, -1 not known (not yet mature, or not recorded). N impressions, L log rows.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gem.data.build.timelines import count_before
from gem.data.days import HOUR_MS
from gem.data.schema import Task
from gem.errors import SpecError

I8 = npt.NDArray[np.int8]
I64 = npt.NDArray[np.int64]


def join_log(
    key: pa.Array, time_ms: I64, log: tuple[pa.Array, I64], window_hours: float | None, skew_ms: int = 0
) -> I8:
    """Label [N]: 1 if `log` (keys, times) has the key within [time - skew, time + window], else 0.

    Without a window any later row counts. Clocks of two machines may differ by `skew_ms`; an outcome that lies further
    before its impression is none. A null key is unknown (-1). See `immature` for rows that are too young.
    """
    log_key, log_time = log
    window = np.iinfo(np.int64).max // 4 if window_hours is None else int(window_hours * HOUR_MS)
    distinct = pc.unique(pc.drop_null(log_key))
    code = _codes(key, distinct)
    log_code = _codes(log_key, distinct)
    order = np.lexsort((log_time, log_code))
    log_code, log_time = log_code[order], log_time[order]
    at = count_before(log_code, log_time, code, time_ms - skew_ms)
    inside = at < len(log_code)
    safe = np.where(inside, at, 0)
    seen = np.zeros(len(code), np.bool_)
    if len(log_code):
        seen = inside & (code >= 0) & (log_code[safe] == code) & (log_time[safe] - time_ms <= window)
    unknown = key.is_null().to_numpy(zero_copy_only=False)
    return np.where(seen, 1, np.where(unknown, -1, 0)).astype(np.int8)


def shown_at(
    shown: tuple[pa.Array, I64], log: tuple[pa.Array, I64], window_ms: int, skew_ms: int
) -> tuple[I64, npt.NDArray[np.bool_]]:
    """When the impression was that each row of a log belongs to, and which rows belong to one; both [L].

    It is the last one of the row's key within [time - window, time + skew], else the first one after that. `shown` and
    `log` are keys (no nulls in the log's) and times.
    """
    distinct = pc.unique(log[0])
    code, log_code = _codes(shown[0], distinct), _codes(log[0], distinct)
    some = np.flatnonzero(code >= 0)
    order = some[np.lexsort((shown[1][some], code[some]))]
    code, time_ms = code[order], shown[1][order]
    after = count_before(code, time_ms, log_code, log[1] + skew_ms + 1)
    out, known = log[1].copy(), np.zeros(len(log_code), np.bool_)
    for at, since in ((after, log[1]), (after - 1, log[1] - window_ms)):  # the later choice decides
        inside = np.flatnonzero((at >= 0) & (at < len(code)))
        hit = inside[(code[at[inside]] == log_code[inside]) & (time_ms[at[inside]] >= since[inside])]
        out[hit], known[hit] = time_ms[at[hit]], True
    return out, known


def immature(time_ms: I64, window_hours: float | None, log_end_ms: int) -> npt.NDArray[np.bool_]:
    """[N]: the window of the impression reaches beyond the end of the log, so its outcome is not settled.

    All such rows have to be left out, those that converted early and those that were never clicked too:
    keeping either kind alone would bias the rate of what is left.
    """
    if window_hours is None:
        return np.zeros(time_ms.shape, np.bool_)
    young: npt.NDArray[np.bool_] = time_ms + int(window_hours * HOUR_MS) > log_end_ms
    return young


def entire_space(own: Mapping[str, I8], tasks: tuple[Task, ...]) -> dict[str, I8]:
    """Labels on all impressions: own AND the label it is given, whatever is unknown kept unknown.

    0 AND anything is 0: an impression that was not clicked did not convert, known or not.
    Raises SpecError if tasks are conditional on each other in a ring or on an unknown task.
    """
    out: dict[str, I8] = {}
    left = {t.name: t for t in tasks}
    while left:
        ready = [t for t in left.values() if t.given is None or t.given in out]
        if not ready:
            names = ", ".join(f"{t.name} given {t.given}" for t in left.values())
            raise SpecError(f"labels: conditions do not resolve: {names}; allowed is a label defined in the spec")
        for task in ready:
            mine = own[task.name]
            out[task.name] = mine if task.given is None else _and(out[task.given], mine)
            del left[task.name]
    return out


def _and(a: I8, b: I8) -> I8:
    return np.where((a == 0) | (b == 0), 0, np.where((a == 1) & (b == 1), 1, -1)).astype(np.int8)


def _codes(values: pa.Array, distinct: pa.Array) -> I64:
    """Index of each value in `distinct`, -1 where absent or null."""
    out: I64 = pc.fill_null(pc.index_in(values, value_set=distinct), -1).to_numpy(zero_copy_only=False).astype(np.int64)
    if values.null_count:
        out[values.is_null().to_numpy(zero_copy_only=False)] = -1
    return out
