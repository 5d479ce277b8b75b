"""One more window on a small store: what is written, what stays as it was, and what the manifest says of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from gem.data.build import sanity, store_write
from gem.data.build.pieces import shard_name
from gem.data.schema import NUM_RESERVED
from gem.data.store import FeatureStore
from gem.errors import DataError
from tests.unit.data.regular_log import (
    END,
    END_MS,
    FIRST,
    LOG,
    ONCE,
    USERS,
    at,
    buy,
    day_rows,
    deliver,
    people,
    show,
    view,
    write_first,
)  # fmt: skip
from tests.unit.data.window_log import DAY_MS, HOUR_MS, Row, build, oracle, read_back


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("before")
    build(LOG, write_first(folder / "raw"), folder / "store")
    return folder


class Grown:
    """The first store, and a store of one more window beside it."""

    def __init__(self, before: Path, folder: Path) -> None:
        self.raw, self.old, self.out = folder / "raw", before / "store", folder / "store"
        shutil.copytree(before / "raw", self.raw)
        self.rows = {t: list(rows) for t, rows in FIRST.items()}

    def add(self, name: str = "next", **rows: list[Row]) -> Grown:
        deliver(self.raw, name, **rows)
        for table, found in rows.items():
            self.rows[table] += found
        return self

    def build(self, **data: Any) -> Grown:
        self.record = build(LOG, self.raw, self.out, self.old, **data)
        return self

    @property
    def manifest(self) -> dict[str, Any]:
        return store_write.read_manifest(self.out)

    def changed(self, kind: str) -> set[str]:
        """Partitions that are not the very files of the store before, as `<day>/<shard>`."""
        files = store_write.paths_of(self.manifest["files"], kind)
        new = (f for f in files if not (self.old / f).is_file() or not (self.old / f).samefile(self.out / f))
        return {f.split("=")[1].removesuffix(".parquet") for f in new}

    def is_right(self) -> bool:
        """Is the store what a naive reading of all rows says?"""
        shows, lines = oracle(self.rows, LOG)
        seen, told = read_back(self.out)
        return seen == shows and {u: sorted(e) for u, e in told.items()} == lines


@pytest.fixture
def grown(before: Path, tmp_path: Path) -> Grown:
    return Grown(before, tmp_path)


def where(store: Path, user: int) -> str:
    """Shard of a user."""
    for shard in range(3):
        if user in pq.read_table(store / store_write.index_path(shard))["key"].to_pylist():
            return shard_name(shard)
    raise AssertionError(user)


def relabelled(old: dict[int, Row], new: dict[int, Row]) -> dict[int, tuple[int, int]]:
    """Impression -> label of the delayed outcome before and now, where it changed."""
    both = {s: (old[s]["conversion"], new[s]["conversion"]) for s in old}
    return {s: pair for s, pair in both.items() if pair[0] != pair[1]}


def text(day: int) -> str:
    return f"2024-03-{4 + day:02d}"


def test_cost_follows_the_new_day_and_the_store_before_stays_whole(grown: Grown) -> None:
    hashed = FeatureStore.open(grown.old).hash
    end = END | {"at": END_MS + DAY_MS}
    grown.add(**{**day_rows(4), "buys": [*day_rows(4)["buys"], end]}).build()
    shards = [shard_name(s) for s in range(3)]
    last = f"{text(5)}/{where(grown.out, 0)}"  # the end of the log of outcomes, an event too
    assert grown.changed("timelines") == {f"{text(4)}/{s}" for s in shards} | {last}
    assert grown.changed("impressions") == {f"{text(d)}/{s}" for s in shards for d in (3, 4)}  # day 3 is settled now
    assert grown.is_right()
    assert FeatureStore.open(grown.old, verify=True).hash == hashed  # nothing was changed through a link
    FeatureStore.open(grown.out, verify=True)


def test_a_late_event_rewrites_its_partition_and_the_cuts_behind_it(grown: Grown) -> None:
    grown.add(views=[view(1, 5, hour=6.5)]).build()
    shard = where(grown.out, 5)
    assert grown.changed("timelines") == {f"{text(1)}/{shard}"}
    assert grown.changed("impressions") == {f"{text(d)}/{shard}" for d in (1, 2, 3)}
    assert grown.is_right()
    old, new = read_back(grown.old)[0], read_back(grown.out)[0]
    assert {s for s in old if old[s] != new[s]} == {105, 205, 305}
    assert all(new[s]["cut"] == old[s]["cut"] + 1 for s in (105, 205, 305))


def test_a_late_event_behind_all_impressions_of_its_user_changes_no_cut(grown: Grown) -> None:
    grown.add(views=[view(1, ONCE)]).build()
    assert grown.changed("timelines") == {f"{text(1)}/{where(grown.out, ONCE)}"}
    assert not grown.changed("impressions") and grown.is_right()


def test_a_late_outcome_changes_its_label_and_time_settles_the_others(grown: Grown) -> None:
    sold = show(3, 12)  # clicked, on the last afternoon: not known so far
    old = read_back(grown.old)[0]
    assert sold["clicked"] and old[312]["conversion"] == -1
    end = END | {"at": END_MS + HOUR_MS}  # an hour later: one more hour of shows is settled
    grown.add(buys=[buy(sold, 20), buy(show(1, 14), 25), end]).build()
    new = read_back(grown.out)[0]
    assert grown.is_right()
    changed = relabelled(old, new)
    young = [s for s, r in old.items() if r["conversion"] == -1 and r["at"] + 24 * HOUR_MS <= END_MS + HOUR_MS]
    assert changed == dict.fromkeys(young, (-1, 0)) and young == [311]
    assert {p.split("/")[0] for p in grown.changed("impressions")} == {text(3)}


def test_an_outcome_within_its_time_turns_0_into_1(grown: Grown) -> None:
    shown = next(r for r in FIRST["shows"] if r["clicked"] and r["person"] % 4 == 3 and r["at"] < at(2, 0))
    old = read_back(grown.old)[0]
    grown.add(buys=[buy(shown, 24)]).build()
    new = read_back(grown.out)[0]
    assert relabelled(old, new) == {shown["show_id"]: (0, 1)} and grown.is_right()


def test_d3_one_id_with_two_payloads_in_two_windows(grown: Grown, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one with more positive labels stays, then the earlier one; the other goes to the quarantine."""
    monkeypatch.setattr(sanity, "MAX_CONFLICT_SHARE", 0.1)
    loses = show(3, 4, show_id=102, person=2, clicked=0)  # 102 was clicked, on the second day
    wins = show(1, 6, show_id=206, person=6, clicked=1)  # 206 was not, on the third
    grown.add(shows=[loses, wins]).build()
    assert grown.is_right()
    seen = read_back(grown.out)[0]
    assert seen[102] == read_back(grown.old)[0][102] and (seen[206]["day"], seen[206]["clicked"]) == (text(1), 1)
    old, new = store_write.read_manifest(grown.old)["rows"], grown.manifest["rows"]
    assert (new["conflicts"], new["conflicting_events"]) == (old["conflicts"] + 2, old["conflicting_events"] + 2)
    assert (new["impressions"], new["events"]) == (old["impressions"], old["events"])
    assert grown.manifest["quarantined"]["shows"] == {"conflicting_duplicate": 2}
    rows = pq.read_table(grown.out / "quarantine" / "shows-00001.parquet")["row"].to_pylist()
    found = sorted((json.loads(r)["user"], json.loads(r)["time_ms"]) for r in rows)
    assert found == [(2, loses["at"]), (6, show(2, 6)["at"])]
    assert grown.changed("timelines") == {f"{text(d)}/{where(grown.out, 6)}" for d in (1, 2)}


def test_the_same_window_again_is_the_same_store(grown: Grown, tmp_path: Path) -> None:
    grown.add(shows=day_rows(4)["shows"], buys=[END | {"at": END_MS + DAY_MS}]).build()
    again = build(LOG, grown.raw, tmp_path / "again", grown.old)
    assert again["store_hash"] == grown.record["store_hash"]
    more = build(LOG, grown.raw, tmp_path / "more", grown.out)  # no new file at all
    assert more["rows"] == grown.record["rows"] and more["vocab"] == grown.record["vocab"]
    assert (tmp_path / "more" / "impressions").is_dir()


def test_a_day_delivered_twice_under_another_name_changes_only_counts(grown: Grown) -> None:
    grown.add("again", **day_rows(2)).build()
    old, new = store_write.read_manifest(grown.old), grown.manifest
    assert not grown.changed("timelines") and not grown.changed("impressions")
    assert grown.is_right()
    assert new["duplicates"] == old["duplicates"] + len(USERS)
    sold = len(day_rows(2)["buys"])
    assert new["rows"]["duplicate_events"] == old["rows"]["duplicate_events"] + 2 * len(USERS) + sold
    names = ("impressions", "events", "users", "ads", "conflicts", "impressions_by_day")
    assert all(new["rows"][n] == old["rows"][n] for n in names) and new["vocab"] == old["vocab"]
    for name in (store_write.USERS, store_write.ADS, store_write.SCHEMA, "vocabularies.parquet"):
        assert new["files"][name]["sha256"] == old["files"][name]["sha256"]


def test_vocabulary_rows_never_move_and_new_ads_get_one_at_their_second_training_event(
    grown: Grown, tmp_path: Path
) -> None:
    def vocabulary(store: Path) -> tuple[list[str], int]:
        encoder = FeatureStore.open(store, verify=False).encoder
        return encoder.vocabularies["ad_id"].to_list(), encoder.vocabulary_version

    first, version = vocabulary(grown.old)
    grown.add("one", views=[view(0, 1, item=99)]).build()
    assert vocabulary(grown.out) == (first, version)
    grown.add("two", views=[view(1, 2, item=99)])
    record = build(LOG, grown.raw, tmp_path / "two", grown.out)
    assert vocabulary(tmp_path / "two") == ([*first, "99"], version + 1)
    assert record["vocab"]["ad_id"]["rows"] == grown.record["vocab"]["ad_id"]["rows"] + 1
    ads = FeatureStore.open(tmp_path / "two").ads
    assert ads.rows(np.array([ads.index_of(99)])).ids["ad_id"].tolist() == [NUM_RESERVED + len(first)]


def test_every_window_has_a_manifest(grown: Grown) -> None:
    grown.add(shows=day_rows(4)["shows"], buys=[END | {"at": END_MS + DAY_MS}]).build()
    window = json.loads((grown.out / "windows" / "00001.json").read_text())
    parent = store_write.read_manifest(grown.old)
    assert window["number"] == 1 and window["parent"] == store_write.manifest_hash(parent)
    assert {t: list(f) for t, f in window["inputs"].items() if f} == {
        "shows": ["shows-next.parquet"], "buys": ["buys-next.parquet"]
    }  # fmt: skip
    assert all(s == store_write.file_sha256(grown.raw / f) for t in window["inputs"].values() for f, s in t.items())
    assert window["rows"]["raw"] == {"shows": len(USERS), "buys": 1}
    assert (window["rows"]["impressions"], window["rows"]["new_users"]) == (len(USERS), 0)
    assert window["days"] == [text(4)] and window["vocabulary_version"] == grown.manifest["vocabulary_version"]
    kinds = ("timelines", "impressions", "index")
    changed = {f for f in window["files"] if f.split("/")[0] in kinds}
    linked = {f for f in grown.manifest["files"] if f.split("/")[0] in kinds} - changed
    assert all((grown.old / f).samefile(grown.out / f) for f in linked) and len(linked) > 20
    assert all(store_write.file_sha256(grown.out / f) == s for f, s in window["files"].items())
    assert [w["number"] for w in grown.manifest["windows"]] == [0, 1]
    assert not (grown.out / ".merged").exists() and not (grown.out / ".pieces").exists()


def test_an_earlier_test_day_builds_anew(grown: Grown, tmp_path: Path) -> None:
    grown.add(views=[view(1, 5)]).build(test_day=text(2))
    once = build(LOG, grown.raw, tmp_path / "once", test_day=text(2))
    assert grown.record["store_hash"] == once["store_hash"] and once["windows"] == 1


def test_an_outcome_that_outran_its_impression_is_not_in_its_history(grown: Grown, tmp_path: Path) -> None:
    """Its clock runs two minutes ahead and its file came a window earlier: the stores are one again, built anew."""
    shown = show(3, 4, show_id=999)
    grown.add("one", buys=[buy(shown, -1 / 30)]).build()
    assert grown.is_right() and grown.record["windows"] == 2
    grown.add("two", shows=[shown])
    grown.old, grown.out = grown.out, tmp_path / "two"
    grown.build()
    assert grown.is_right() and grown.record["windows"] == 1
    grown.add("again", shows=[shown])  # only what is new counts
    grown.old, grown.out = grown.out, tmp_path / "three"
    grown.build()
    assert grown.is_right() and grown.record["windows"] == 2


def test_another_test_day_without_a_new_file(before: Path, grown: Grown, tmp_path: Path) -> None:
    build(LOG, grown.raw, tmp_path / "early", test_day=text(2))
    grown.old = tmp_path / "early"
    grown.build(test_day=text(3))
    assert grown.manifest["split"]["test_day"] == text(3) and grown.is_right()
    assert not grown.changed("timelines") and not grown.changed("impressions")
    first, now = (FeatureStore.open(s).encoder.vocabularies["user_id"].to_list() for s in (grown.old, grown.out))
    assert now[: len(first)] == first and set(now) == {str(u) for u in (*USERS, ONCE)}


def test_a_window_with_only_impressions_and_new_users(grown: Grown) -> None:
    shows = [show(2, 40, show_id=940), show(2, 41, show_id=941), show(-2, 3, show_id=-203)]  # one before the first day
    grown.add(shows=shows).build()
    assert grown.is_right() and grown.manifest["days"][0] == "2024-03-02"
    assert grown.manifest["rows"]["users"] == len(USERS) + 3
    assert "2024-03-02" not in {p.split("/")[0] for p in grown.changed("timelines")}  # the past is one partition
    assert f"before/{where(grown.out, 3)}" in grown.changed("timelines")


def test_a_window_with_only_an_entity_table(grown: Grown) -> None:
    people(grown.raw, "bc")
    grown.build()
    assert not grown.changed("timelines") and not grown.changed("impressions") and grown.is_right()
    users = FeatureStore.open(grown.out).users
    towns = users.rows(users.index_many([0, 1, ONCE])).ids["town"].tolist()
    old = FeatureStore.open(grown.old).users
    assert towns[0] == old.rows(old.index_many([1])).ids["town"].tolist()[0]  # 0 moved to where 1 was
    assert len(set(towns)) == 3


def test_text_keys_in_a_later_window_turn_all_keys_to_text(grown: Grown) -> None:
    with (grown.raw / "people.csv").open("a") as f:
        f.write("guest,c\n")
    with (grown.raw / "items.csv").open("a") as f:
        f.write("house,y\n")
    grown.add(views=[view(1, 5, hour=6.5), view(2, 60)], shows=[show(2, 5), show(2, 61, show_id=961)]).build()
    assert grown.manifest["key_types"]["user"] == grown.manifest["key_types"]["ad"] == "string"
    shows, lines = oracle(grown.rows, LOG)
    seen, told = read_back(grown.out)
    assert seen == {s: {**r, "person": str(r["person"]), "item": str(r["item"])} for s, r in shows.items()}
    assert {u: [e[:3] for e in events] for u, events in told.items()} == {
        str(u): [e[:3] for e in events] for u, events in lines.items()
    }
    store = FeatureStore.open(grown.out)
    assert store.users.index_of("guest") > 0 and store.ads.index_of("house") > 0
    assert store.users.index_of("5") == FeatureStore.open(grown.old).users.index_of(5)
    again = build(LOG, grown.raw, grown.out.with_name("again"), grown.out)  # and the store still grows
    assert again["rows"] == grown.record["rows"]


def test_a_window_that_cannot_be_split_says_so_and_leaves_the_store_before(grown: Grown) -> None:
    with pytest.raises(DataError, match="no impressions; allowed are"):
        grown.add(views=[view(1, 5)]).build(test_day="2024-05-01")
    FeatureStore.open(grown.old, verify=True)
