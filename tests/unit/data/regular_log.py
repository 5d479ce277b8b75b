"""A small log without chance in it: 20 users, one impression and one view each day; see `window_log` for its spec."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.unit.data.window_log import DAY_MS, HOUR_MS, Log, Row, write_rows

LOG = Log("UTC", 1)
USERS, DAYS = range(20), range(4)
ONCE = 25  # a user with one impression, on the first day
END_MS = LOG.start_ms + len(DAYS) * DAY_MS + 12 * HOUR_MS  # of the log of outcomes: the last afternoon is not settled


def at(day: int, hour: float) -> int:
    return LOG.start_ms + day * DAY_MS + int(hour * HOUR_MS)


def show(day: int, user: int, **other: Any) -> Row:
    row = {"show_id": 100 * day + user, "person": user, "item": user % 7, "at": at(day, 2 + user % 20)}
    return row | {"place": "12"[user % 2], "device": "ios", "clicked": (day + user) % 2} | other


def view(day: int, user: int, hour: float = 1, item: int = 8) -> Row:
    return {"person": user, "item": item, "at": at(day, hour), "arrived": None}


def buy(shown: Row, after_hours: float = 1) -> Row:
    return {n: shown[n] for n in ("show_id", "person", "item")} | {"at": shown["at"] + int(after_hours * HOUR_MS)}


def day_rows(day: int) -> dict[str, list[Row]]:
    shows = [show(day, u) for u in USERS]
    sold = [buy(s) for s in shows if s["clicked"] and s["person"] % 4 == 1 and s["at"] + HOUR_MS <= END_MS]
    return {"shows": shows, "views": [view(day, u) for u in USERS], "buys": sold}


END = {"show_id": -1, "person": 0, "item": 0, "at": END_MS}
FIRST = {t: [r for d in DAYS for r in day_rows(d)[t]] for t in ("shows", "views", "buys")}
FIRST = {**FIRST, "shows": [*FIRST["shows"], show(0, ONCE)], "buys": [*FIRST["buys"], END]}


def deliver(folder: Path, name: str, **rows: list[Row]) -> None:
    for table, found in rows.items():
        write_rows(folder / f"{table}-{name}.parquet", found)


def people(folder: Path, towns: str) -> None:
    (folder / "people.csv").write_text("person,town\n" + "".join(f"{u},{towns[u % len(towns)]}\n" for u in USERS))


def write_first(folder: Path) -> Path:
    """Raw files of the first window."""
    folder.mkdir(parents=True)
    people(folder, "ab")
    (folder / "items.csv").write_text("item,brand\n" + "".join(f"{i},x\n" for i in range(9)))
    deliver(folder, "first", **FIRST)
    return folder
