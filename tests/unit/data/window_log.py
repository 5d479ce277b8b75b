"""Random small logs that arrive in windows, what a naive reading makes of them, and what a store says of the same.

One log holds some hundred users; nothing is shared between users but the ads, so each of them is a small log of its
own: times on a coarse grid (ties), late rows, rows delivered twice, ids delivered again with another payload, users and
ads that appear later, four kinds of events that are known after different delays.
"""

from __future__ import annotations

import datetime as dt
import random
from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gem.config import DataConfig, RunConfig
from gem.data.spec import DatasetSpec, parse_spec
from gem.data.store import FeatureStore
from pipelines.distribute import in_process
from pipelines.preprocess import Base, build_store

Row = dict[str, Any]
HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
SHOW_DELAY_MS, BUY_DELAY_MS, WAIT_MS = 30_000, 60_000, 24 * HOUR_MS
TABLES = ("shows", "views", "buys", "visits")
AHEAD_MS = 120_000  # how far the clock of an outcome may stand before that of its impression
FIRST_DAYS = 4  # of the first window; each later one brings a day
_AT = {"column": "at", "unit": "ms"}

SPEC: dict[str, Any] = {
    "name": "windows",
    "tables": {t: {"files": [f"{t}-*.parquet"], "optional": t == "visits"} for t in TABLES}
    | {"people": {"files": ["people.csv"]}, "items": {"files": ["items.csv"]}},
    "impressions": {
        "table": "shows", "user": "person", "ad": "item", "surface": "place", "time": _AT, "id": "show_id",
        "duplicate_key": ["show_id"], "outcomes": ["clicked"],
    },
    "labels": {
        "click": {"column": "clicked"},
        "conversion": {"table": "buys", "key": "show_id", "time": _AT, "window_hours": 24, "given": "click"},
    },
    "events": [
        {"kind": "show", "table": "shows", "user": "person", "ad": "item", "time": _AT, "surface": "place",
         "flags": {"click": "clicked"}, "available_after_ms": SHOW_DELAY_MS},
        {"kind": "view", "table": "views", "user": "person", "ad": "item", "time": _AT,
         "ingested": {"column": "arrived", "unit": "ms"}},
        {"kind": "buy", "table": "buys", "user": "person", "ad": "item", "time": _AT,
         "available_after_ms": BUY_DELAY_MS},
        {"kind": "visit", "table": "visits", "user": "person", "ad": "item", "time": _AT, "id": "visit_id"},
    ],
    "users": {"table": "people", "key": "person", "min_count": 1,
              "features": [{"name": "town", "kind": "categorical"}]},
    "ads": {"table": "items", "key": "item", "features": [{"name": "brand", "kind": "categorical"}]},
    "context": {"features": [{"name": "device", "kind": "categorical"}]},
    "surfaces": {"min_rows": 1, "names": {"1": "feed", "2": "stories"}},
}  # fmt: skip


@dataclass
class Log:
    """Rows by table, each with the window `w` that delivers it; entity tables as delivered in each window.

    logged: impressions have a day of their own, which begins three hours early. twofold: users and ads of an impression
    with two payloads, or of an event with two times of arrival.
    """

    zone: str
    windows: int
    logged: bool = False
    rows: dict[str, list[Row]] = field(default_factory=lambda: {t: [] for t in TABLES})
    twofold: set[str] = field(default_factory=set)
    people: list[dict[int, str]] = field(default_factory=list)
    items: list[dict[int, str]] = field(default_factory=list)

    @property
    def start_ms(self) -> int:
        return int(dt.datetime(2024, 3, 4, tzinfo=ZoneInfo(self.zone)).timestamp() * 1000)

    def spec(self) -> DatasetSpec:
        own = {"zone": self.zone} | ({"day": "logged"} if self.logged else {})
        return parse_spec(SPEC | {"impressions": SPEC["impressions"] | own})

    def day(self, at: int) -> dt.date:
        """Day of an impression."""
        return dt.datetime.fromtimestamp(at / 1000 + 3 * 3600 * self.logged, ZoneInfo(self.zone)).date()

    def until(self, window: int) -> dict[str, list[Row]]:
        return {t: [r for r in rows if r["w"] <= window] for t, rows in self.rows.items()}


def make_log(seed: int, users: int = 250, windows: int = 3) -> Log:
    """A random log; see the module."""
    rng = random.Random(seed)
    log = Log(rng.choice(["UTC", "Asia/Shanghai", "America/New_York"]), windows, rng.random() < 0.5)
    hours = range(3, (FIRST_DAYS + windows - 1) * 24 - 3, rng.choice([1, 3]))
    for user in range(users):
        since = rng.choice([0, 0, 0, 80, 110])  # some users appear later
        grid = [log.start_ms + h * HOUR_MS for h in rng.sample([h for h in hours if h >= since], rng.randint(1, 4))]
        _shows(log, rng, user, grid)
        for _ in range(rng.randint(0, 5)):
            at = rng.choice(grid) - rng.choice([0, 0, HOUR_MS, 30 * HOUR_MS, 200 * HOUR_MS])
            arrived = rng.choice([None, at - 5, at + HOUR_MS, at + 26 * HOUR_MS])
            row = {"person": user, "item": rng.randrange(40), "at": at, "arrived": arrived}
            _deliver(log, rng, "views", row)
            if arrived and rng.random() < 0.05:  # the same event, said to have arrived at another time
                log.twofold.add(f"ad_id {row['item']}")
                _deliver(log, rng, "views", row | {"arrived": arrived + rng.choice([-1, 1]) * 25 * HOUR_MS})
        if rng.random() < 0.3:
            row = {"visit_id": f"v{user}", "person": user, "item": rng.randrange(12), "at": rng.choice(grid)}
            _deliver(log, rng, "visits", row)
            if rng.random() < 0.3:  # one id, two payloads
                _deliver(log, rng, "visits", row | {"at": row["at"] + rng.choice([-1, 1]) * 25 * HOUR_MS})
                log.twofold.add(f"ad_id {row['item']}")
    for w in range(windows):  # the log of outcomes goes on until noon after the last day
        end = log.start_ms + (FIRST_DAYS + w) * DAY_MS + 12 * HOUR_MS
        log.rows["buys"].append({"show_id": -1, "person": 0, "item": 0, "at": end, "w": w})
        known = range(users // 2 if w == 0 else users)
        log.people.append({p: "ab"[(p + w // 2) % 2] for p in known})
        log.items.append({i: "xyz"[(i + w // 2) % 3] for i in range(10 + 10 * w)})
    return log


def _shows(log: Log, rng: random.Random, user: int, grid: list[int]) -> None:
    ids = len(log.rows["shows"]) + 1_000 * user
    for n in range(rng.randint(1, 6)):
        at = rng.choice(grid) + rng.choice([0, 0, SHOW_DELAY_MS, SHOW_DELAY_MS + 1])
        row = {"show_id": ids + n, "person": user, "item": rng.randrange(12), "at": at}
        row |= {"place": rng.choice("12"), "device": rng.choice(["ios", "web"]), "clicked": int(rng.random() < 0.6)}
        known = _deliver(log, rng, "shows", row)
        soonest = -AHEAD_MS
        if rng.random() < 0.03:  # one id, two payloads, perhaps on two days
            moved = row["at"] - rng.choice([HOUR_MS, -HOUR_MS, DAY_MS])
            log.twofold.add(f"user_id {user}")
            soonest = 0
            _deliver(log, rng, "shows", row | {"at": moved, "clicked": int(rng.random() < 0.5)}, again=False)
        if row["clicked"] and rng.random() < 0.6:
            later = at + rng.choice([soonest, 0, HOUR_MS, WAIT_MS, WAIT_MS + 1, 30 * HOUR_MS])
            buy = {"show_id": row["show_id"], "person": user, "item": row["item"], "at": later}
            _deliver(log, rng, "buys", buy, soonest=known)
    if rng.random() < 0.04:
        _deliver(log, rng, "shows", row | {"show_id": ids + 9, "person": None}, again=False)


def _deliver(log: Log, rng: random.Random, table: str, row: Row, again: bool = True, soonest: int = 0) -> int:
    """In the window of its day or later, which is returned; one row in ten a second time."""
    day = (row["at"] + 3 * HOUR_MS * log.logged - log.start_ms) // DAY_MS
    own = min(max(soonest, day - FIRST_DAYS + 1), log.windows - 1)
    window = rng.randint(own, log.windows - 1) if rng.random() < 0.2 else own
    log.rows[table].append(row | {"w": window})
    if again and rng.random() < 0.1:
        log.rows[table].append(row | {"w": rng.randint(window, log.windows - 1)})
    return window


def write_window(folder: Path, log: Log, window: int, seed: int = 0) -> Path:
    """Add the files of one window; rows in random order, in two files. Entity tables replace those before."""
    folder.mkdir(parents=True, exist_ok=True)
    for table in TABLES:
        rows = [{k: v for k, v in r.items() if k != "w"} for r in log.rows[table] if r["w"] == window]
        if table == "shows" and log.logged:
            rows = [r | {"logged": int(log.day(r["at"]).strftime("%Y%m%d"))} for r in rows]
        random.Random(seed).shuffle(rows)
        write_rows(folder / f"{table}-{window}a.parquet", rows[::2])
        write_rows(folder / f"{table}-{window}b.parquet", rows[1::2])
    for name, key, value, found in (
        ("people", "person", "town", log.people[window]), ("items", "item", "brand", log.items[window])
    ):  # fmt: skip
        lines = [f"{key},{value}", *(f"{k},{v}" for k, v in found.items())]
        (folder / f"{name}.csv").write_text("\n".join(lines) + "\n")
    return folder


def write_rows(path: Path, rows: list[Row]) -> None:
    if rows:
        table = pa.Table.from_pylist(rows)
        arrived = table.schema.get_field_index("arrived")
        if arrived >= 0:  # may be null throughout
            table = table.set_column(arrived, "arrived", table["arrived"].cast(pa.int64()))
        pq.write_table(table, path)


def build(log: Log, raw: Path, out: Path, parent: Path | None = None, **data: Any) -> dict[str, Any]:
    """One store of all files in `raw`, added to the one before if there is one."""
    config = RunConfig(data=replace(DataConfig(num_shards=3), **data))
    return build_store(config, log.spec(), (raw, out), lambda text: None, in_process, Base(parent))


def oracle(rows: dict[str, list[Row]], log: Log) -> tuple[dict[int, Row], dict[int, list[tuple[int, ...]]]]:
    """(show id -> day, cut, labels, …; user -> its events as (known, time, kind, ad, clicked)), row by row."""
    shows: dict[tuple[int, int], Row] = {}
    for r in (r for r in rows["shows"] if r["person"] is not None):
        have = shows.get((r["person"], r["show_id"]))
        if have is None or (-r["clicked"], r["at"]) < (-have["clicked"], have["at"]):
            shows[r["person"], r["show_id"]] = r
    events = [(r["person"], r["at"] + SHOW_DELAY_MS, r["at"], 1, r["item"], r["clicked"]) for r in shows.values()]
    views: dict[tuple[int, int, int], int] = {}
    for r in rows["views"]:
        key, known = (r["person"], r["item"], r["at"]), max(r["at"], r["arrived"] or 0)
        views[key] = min(known, views.get(key, known))
    events += [(person, known, at, 2, item, 0) for (person, item, at), known in views.items()]
    shown = {show_id: r["at"] for (_, show_id), r in shows.items()}
    buys = {(r["person"], r["item"], r["at"], shown.get(r["show_id"], 0)) for r in rows["buys"]}
    events += [(person, max(at + BUY_DELAY_MS, since), at, 3, item, 0) for person, item, at, since in buys]
    visits: dict[tuple[int, str], tuple[int, int]] = {}
    for r in rows.get("visits", []):
        key, found = (r["person"], r["visit_id"]), (r["at"], r["item"])
        visits[key] = min(found, visits.get(key, found))
    events += [(person, at, at, 4, item, 0) for (person, _), (at, item) in visits.items()]
    lines: dict[int, list[tuple[int, ...]]] = defaultdict(list)
    for person, *event in sorted(events):
        lines[person].append(tuple(event))
    bought = defaultdict(list)
    for r in rows["buys"]:
        bought[r["show_id"]].append(r["at"])
    end = max(r["at"] for table in ("shows", "buys") for r in rows[table])
    out = {}
    for r in shows.values():
        late = [b for b in bought[r["show_id"]] if -AHEAD_MS <= b - r["at"] <= WAIT_MS]
        young = r["at"] + WAIT_MS > end
        out[r["show_id"]] = {
            "day": log.day(r["at"]).isoformat(),
            "cut": sum(1 for known, *_ in lines[r["person"]] if known < r["at"]),
            "conversion": -1 if young else int(bool(r["clicked"]) and bool(late)),
            **{k: r[k] for k in ("person", "item", "at", "place", "clicked")},
        }
    return out, lines


def read_back(folder: Path) -> tuple[dict[int, Row], dict[int, list[tuple[int, ...]]]]:
    """What the store says, in the oracle's words. Events of a user come in the store's order."""
    store = FeatureStore.open(folder, verify=False)
    people, items = store.users.keys.to_pylist(), store.ads.keys.to_pylist()
    seen, lines, names = store.impressions(), store.timelines(), [t.name for t in store.schema.tasks]
    places = {store.encoder.surface_code(p): p for p in "12"}
    out: dict[int, Row] = {}
    known = np.where(seen.mask > 0, seen.labels, -1).astype(int)
    for i, show in enumerate(seen.impression_id.tolist()):
        assert show not in out, f"show {show} twice"
        out[show] = {
            "day": seen.days[seen.day[i]], "cut": int(seen.cut[i]), "person": people[seen.user[i]],
            "item": items[seen.ad[i]], "at": int(seen.time_ms[i]), "place": places[int(seen.surface[i])],
            "conversion": int(known[i, names.index("conversion")]), "clicked": int(known[i, names.index("click")]),
        }  # fmt: skip
    columns = (lines.known_ms, lines.time_ms, lines.kind, lines.ad, lines.flags)
    told: dict[int, list[tuple[int, ...]]] = {}
    for u, person in enumerate(people):
        start, end = lines.offsets[u], lines.offsets[u + 1]
        mine = zip(*(c[start:end].tolist() for c in columns), strict=True)
        if start < end:
            told[person] = [(k, t, kind, items[ad], flags) for k, t, kind, ad, flags in mine]
    return out, told
