"""Users who asked to be forgotten are nowhere in a store any more, and nobody else notices."""

from __future__ import annotations

import contextlib
import json
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from gem.config import DataConfig, RunConfig
from gem.data.build import forget as forget_module
from gem.data.build import sanity, store_write
from gem.data.build.forget import forget_users
from gem.data.build.forgotten import Forgotten
from gem.data.spec import DatasetSpec, parse_spec
from gem.data.store import FeatureStore
from gem.errors import ConfigError, DataError
from gem.lineage.files import locked
from pipelines.distribute import in_process
from pipelines.forget import Forgot, forget, report
from pipelines.preprocess import Base, build_store
from pipelines.stage import lock_path, run_stage
from pipelines.windows import FORGOTTEN, find_parent, key_part, list_lock, read_forgotten
from tests.unit.data.regular_log import END, END_MS, FIRST, LOG, USERS, day_rows, show, view, write_first
from tests.unit.data.window_log import DAY_MS, SPEC, Row, oracle, read_back, write_rows
from tests.unit.pipelines.test_preprocess_resume import Counting, make_loop, run

NUMBER = 910_000_000  # users are this and their number: text that stands nowhere else
GONE = (5, 8)
IDS = [str(NUMBER + u) for u in GONE]
SPILLED = str(NUMBER + 55)  # stands in a line only that cannot be split
FEATURES = [
    {"name": "town", "kind": "categorical"},
    {"name": "tags", "kind": "multi", "separator": "|"},
    {"name": "age", "kind": "numeric"},
    {"name": "look", "kind": "embedding", "width": 2, "separator": "|"},
]
TOY = parse_spec(SPEC | {"users": {"table": "people", "key": "person", "min_count": 1, "features": FEATURES}})
WHEN = "2026-01-01T00:00:00+00:00"


def named(rows: list[Row]) -> list[Row]:
    return [r | {"person": None if r["person"] is None else NUMBER + r["person"]} for r in rows]


def people(folder: Path, *more: str) -> None:
    lines = [f"{NUMBER + u},{'abc'[u % 3]},x|{'yz'[u % 2]},{20 + u},{u}|{u}" for u in USERS]
    (folder / "people.csv").write_text("\n".join(["person,town,tags,age,look", *lines, *more]) + "\n")


def dirty() -> dict[str, list[Row]]:
    """The first window, and of user 5: a row for the quarantine, one id with two payloads, a burst of views."""
    twice, bad = show(1, 5, at=show(1, 5)["at"] + 1, show_id=105), show(1, 5, show_id=905, item=None)
    burst = [{**view(2, 5, item=i % 9), "at": view(2, 5)["at"] + i} for i in range(12)]
    return {**FIRST, "shows": [*FIRST["shows"], twice, bad], "views": [*FIRST["views"], *burst]}


def build(raw: Path, out: Path, base: Base | None = None, spec: DatasetSpec = TOY) -> dict[str, Any]:
    config = RunConfig(data=replace(DataConfig(num_shards=9)))  # some shards have one user
    return build_store(config, spec, (raw, out), lambda text: None, in_process, base)


@pytest.fixture(scope="module", autouse=True)
def _few_rows() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sanity, "MAX_CONFLICT_SHARE", 0.1)
        yield


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("before")
    raw = write_first(folder / "raw")
    people(raw)
    people(raw, f"{IDS[0]},a,x,1,2,{SPILLED},,")
    for table, rows in dirty().items():
        write_rows(raw / f"{table}-first.parquet", named(rows))
    build(raw, folder / "store")
    return folder


@pytest.fixture(scope="module")
def after(before: Path) -> tuple[Path, dict[str, Any]]:
    return before / "after", forget_users(before / "store", before / "after", Forgotten().with_users(IDS), WHEN)[0]


def cells(path: Path) -> Iterator[str]:
    """All text and numbers of a table, lists item by item."""
    for column in pq.read_table(path).columns:
        while pa.types.is_list(column.type) or pa.types.is_fixed_size_list(column.type):
            column = pc.list_flatten(column)
        yield from pc.unique(column.cast(pa.string()).drop_null()).to_pylist()


def naming(folder: Path, ids: list[str]) -> set[str]:
    """Files below a folder that hold one of the ids, in their bytes or in a cell of their table."""
    out = set()
    for path in (p for p in folder.rglob("*") if p.is_file()):
        texts = [path.read_bytes().decode("latin-1")]
        texts += cells(path) if path.suffix == ".parquet" else []
        texts += [str(v) for v in np.load(path).ravel().tolist()] if path.suffix == ".npy" else []
        if any(i in text for i in ids for text in texts):
            out.add(path.relative_to(folder).as_posix())
    return out


def test_nothing_names_a_forgotten_user(before: Path, after: tuple[Path, dict[str, Any]]) -> None:
    kinds = {f.split("/")[0] for f in naming(before / "store", IDS)}
    assert kinds == {"entities", "raw", "index", "quarantine", "vocabularies.parquet", "manifest.json"}
    assert naming(after[0], IDS) == set()
    store = FeatureStore.open(after[0], verify=True)
    assert [store.users.index_of(i) for i in IDS] == [0, 0] and store.hash == FeatureStore.open(after[0]).hash
    shows, lines = oracle({**FIRST, "shows": [r for r in FIRST["shows"] if r["person"] not in GONE]}, LOG)
    seen, told = read_back(after[0])
    assert seen == {s: {**r, "person": NUMBER + r["person"]} for s, r in shows.items()}
    assert {u - NUMBER: sorted(e) for u, e in told.items()} == {u: e for u, e in lines.items() if u not in GONE}


def test_rows_cuts_and_encodings_of_all_others_stay(before: Path, after: tuple[Path, dict[str, Any]]) -> None:
    old, new = FeatureStore.open(before / "store"), FeatureStore.open(after[0])
    indices = pa.array([old.users.index_of(i) for i in IDS], pa.int32())
    files = old.manifest["files"]
    assert set(files) == set(new.manifest["files"])
    for relative in (*store_write.paths_of(files, "timelines"), *store_write.paths_of(files, "impressions")):
        table, now = (pq.ParquetFile(s.path / relative).read() for s in (old, new))
        assert table.filter(pc.invert(pc.is_in(table["user"], value_set=indices))).equals(now)
    others = np.setdiff1d(np.arange(len(old.users)), indices.to_numpy())
    for relative in (store_write.USERS, store_write.ADS):
        rows = others if relative == store_write.USERS else slice(None)
        table, now = (pq.read_table(s.path / relative).to_pandas() for s in (old, new))
        assert table.iloc[rows].equals(now.iloc[rows])
    for name, vocabulary in old.encoder.vocabularies.items():
        pairs = list(zip(vocabulary.to_list(), new.encoder.vocabularies[name].to_list(), strict=True))
        assert {a for a, b in pairs if a != b} == (set(IDS) if name == "user_id" else set())
    blank = pq.read_table(after[0] / store_write.USERS).take(indices).to_pylist()
    unknown = pq.read_table(after[0] / store_write.USERS).slice(0, 1).to_pylist()[0]
    assert list(map(str, blank)) == [str(unknown)] * 2


def test_the_proof_counts_what_went_and_names_every_file_that_changed(
    before: Path, after: tuple[Path, dict[str, Any]]
) -> None:
    proof, (old, new) = after[1]["forgotten"][-1], (before / "store", after[0])
    mine = {t: [r for r in rows if r["person"] in GONE] for t, rows in dirty().items()}
    shown = {r["show_id"] for r in mine["shows"] if r["item"] is not None}
    bought = [r for r in dirty()["buys"] if r["show_id"] in shown]
    assert bought and proof["removed"] == {
        "timelines": len(shown) + len(mine["views"]) + len(mine["buys"]),
        "impressions": len(shown),
        "outcomes": len(bought),
        "index": 2,
        "entities": 2,
        "raw": 2,
        "counts": proof["removed"]["counts"],
        "quarantine": 3,
    }
    files = after[1]["files"]
    changed = {f for f in files if not (old / f).samefile(new / f)}
    assert set(proof["rewritten"]) == changed
    for relative, hashes in proof["rewritten"].items():
        assert hashes == [store_write.file_sha256(s / relative) for s in (old, new)]
    kinds = ("timelines/", "impressions/", "index/", "quarantine/", "entities/users", "raw/users", "vocabularies")
    assert proof["files_checked"] == len([f for f in files if f.startswith(kinds)]) + 1  # and the counts
    assert (proof["users"], proof["when"], len(proof["digests"])) == (2, WHEN, 2)
    assert proof["store_before"] == store_write.manifest_hash(store_write.read_manifest(old))
    rows = after[1]["rows"]
    assert rows["impressions"] == sum(rows["impressions_by_day"].values()) == len(FIRST["shows"]) - len(shown)
    FeatureStore.open(old, verify=True)


@pytest.mark.parametrize("step", ["_partitions", "_index", "_entities", "_counts", "_quarantine", "_without_ids"])
def test_a_leftover_is_found(before: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    real, calls = getattr(forget_module, step), iter(range(100))

    def forgetful(first: Any, *rest: Any) -> Any:
        if step == "_partitions":  # one of the two users only
            whole, first.users = first.users, first.users[:1]
            out = real(first)
            first.users = whole
            return out
        if step == "_without_ids":  # where the store is changed, not where it is checked
            return real(first, *rest) if next(calls) else first
        return None

    monkeypatch.setattr(forget_module, step, forgetful)
    with pytest.raises(DataError, match="still names a user"):
        forget_users(before / "store", tmp_path / "out", Forgotten().with_users(IDS), WHEN)
    assert not (tmp_path / "out" / store_write.MANIFEST).exists()


def test_the_store_grows_on_and_the_forgotten_stay_out(before: Path, tmp_path: Path) -> None:
    listed = Forgotten().with_users(IDS)
    forget_users(before / "store", tmp_path / "after", listed, WHEN)
    raw = tmp_path / "raw"
    raw.mkdir()
    for file in (before / "raw").iterdir():
        (raw / file.name).hardlink_to(file)
    (raw / "people.csv").unlink()
    people(raw, f"{NUMBER + 30},c,y,1,2|2")
    bad = show(4, 8, show_id=908, item=None)
    more = {**day_rows(4), "buys": [*day_rows(4)["buys"], END | {"at": END_MS + DAY_MS}]}
    more["shows"] = [*more["shows"], bad, show(4, 30, show_id=430)]
    more["buys"].append(END | {"show_id": None, "person": 8, "item": None})  # the log of outcomes has no user column
    for table, rows in more.items():
        write_rows(raw / f"{table}-next.parquet", named(rows))
    build(raw, tmp_path / "next", Base(tmp_path / "after", forgotten=listed))
    assert naming(tmp_path / "next", IDS) == set()
    rows = {t: [r for r in [*FIRST[t], *more[t]] if r["item"] is not None] for t in FIRST}
    shows, lines = oracle({**rows, "shows": [r for r in rows["shows"] if r["person"] not in GONE]}, LOG)
    seen, told = read_back(tmp_path / "next")
    assert seen == {s: {**r, "person": NUMBER + r["person"]} for s, r in shows.items()}
    assert {u - NUMBER: sorted(e) for u, e in told.items()} == {u: e for u, e in lines.items() if u not in GONE}
    users = [pq.read_table(s / store_write.USERS)["key"].to_pylist() for s in (before / "store", tmp_path / "next")]
    kept = [k for k in users[0] if str(k) not in IDS]
    assert [k for k in users[1] if k] == [k for k in kept if k] + [NUMBER + 30]  # nobody gets a freed index
    assert [users[1].index(k) for k in kept if k] == [users[0].index(k) for k in kept if k]


def test_one_after_the_other_is_both_at_once(before: Path, after: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    one = Forgotten().with_users(IDS[:1])
    forget_users(before / "store", tmp_path / "one", one, WHEN)
    both = one.with_users(IDS[1:])
    assert set(one.digests) < set(both.digests) and both.key == one.key
    manifest, _ = forget_users(tmp_path / "one", tmp_path / "two", both, WHEN)
    assert [p["users"] for p in manifest["forgotten"]] == [1, 1]
    assert manifest["forgotten"][1]["removed"]["impressions"] == len(show_days(8))
    assert manifest["files"] == after[1]["files"] and manifest["rows"] == after[1]["rows"]
    again, _ = forget_users(tmp_path / "two", tmp_path / "three", both, WHEN)
    assert again["files"] == manifest["files"] and again["forgotten"][2]["users"] == 0
    assert again["forgotten"][2]["removed"] == again["forgotten"][2]["rewritten"] == {}


def show_days(user: int) -> list[int]:
    return [r["show_id"] for r in FIRST["shows"] if r["person"] == user]


def test_an_outcome_that_others_share_stays(before: Path, tmp_path: Path) -> None:
    """A label that is joined by ad: the rows of its log are of everybody who saw the ad."""
    label = SPEC["labels"]["conversion"] | {"key": "item"}
    spec = parse_spec(SPEC | {"labels": SPEC["labels"] | {"conversion": label}})
    build(before / "raw", tmp_path / "store", spec=spec)
    manifest, _ = forget_users(tmp_path / "store", tmp_path / "after", Forgotten().with_users(IDS), WHEN)
    outcomes = [f for f in manifest["files"] if f.startswith("outcomes/")]
    assert outcomes and all((tmp_path / "store" / f).samefile(tmp_path / "after" / f) for f in outcomes)


def test_a_log_of_outcomes_that_is_keyed_by_user_names_none_of_them(before: Path, tmp_path: Path) -> None:
    """Also not those who bought and were never shown anything: no impression leads to their rows."""
    label = SPEC["labels"]["conversion"] | {"key": "person"}
    spec = parse_spec(SPEC | {"labels": SPEC["labels"] | {"conversion": label}})
    raw = tmp_path / "raw"
    raw.mkdir()
    for file in (before / "raw").iterdir():
        (raw / file.name).hardlink_to(file)
    stranger = NUMBER + 77
    write_rows(raw / "buys-stranger.parquet", [END | {"person": stranger}])
    build(raw, tmp_path / "store", spec=spec)
    gone = [*IDS, str(stranger)]
    assert any(f.startswith("outcomes/") for f in naming(tmp_path / "store", gone))
    forget_users(tmp_path / "store", tmp_path / "after", Forgotten().with_users(gone), WHEN)
    assert naming(tmp_path / "after", gone) == set()


def test_a_number_and_its_text_are_one_user() -> None:
    listed = Forgotten().with_users(["7", "é"])
    assert listed.mask(pa.array([7, 8, 77])).tolist() == [True, False, False]
    assert listed.mask(pa.array(["7", "07", "e\u0301", "é", None])).tolist() == [True, False, False, True, False]
    assert Forgotten.from_dict(json.loads(json.dumps(listed.to_dict()))) == listed


def test_forget_leaves_no_trace_below_the_runs_of_the_data_set(before: Path, tmp_path: Path) -> None:
    root = tmp_path / "runs" / "windows"
    settings = {"incremental": True, "num_shards": 16, "test_day": ""}
    files = {"shows": {"shows-first.parquet": "1"}}
    parts = {"spec": TOY.model_dump(mode="json"), "files": files, "settings": settings, "code": "c", "forgotten": None}

    def make(out: Path) -> dict[str, Any]:
        return build(before / "raw", out)

    stage = run_stage("preprocess", key_parts=parts, root=root, build=make)
    FeatureStore.open(stage.path).timelines()  # makes the arrays that readers map
    arrays = root / "preprocess" / ".readers" / stage.record["store_hash"][:16]
    pieces = [root / "preprocess" / f".{name}" / "a.arrow" for name in ("work-1", "tmp-1-1")]
    for left in (*pieces, root / "generate-knowledge" / "1" / "k.bin", root / "check" / "index.html"):
        left.parent.mkdir(parents=True)
        left.write_text(IDS[0])
    write_rows(root / "quarantine-shows.parquet", [{"row": IDS[1]}])
    (root / "pretrain" / "ab12").mkdir(parents=True)
    assert arrays.is_dir() and naming(root, IDS)
    found = forget("windows", IDS, tmp_path / "runs")
    assert (
        not (root / "check").exists() and not stage.path.exists() and not arrays.exists() and naming(root, IDS) == set()
    )
    assert stat.S_IMODE((root / FORGOTTEN).stat().st_mode) == 0o600
    listed = read_forgotten(root)
    assert (
        len(found.stores) == 1
        and find_parent(root / "preprocess", parts | {"forgotten": key_part(listed), "files": files}, TOY)
        == found.stores[0]
    )
    assert find_parent(root / "preprocess", parts, TOY) is None
    assert found.removed["impressions"] == 8 and found.models == [root / "pretrain" / "ab12"]
    said = report(found, 2)
    assert (
        "not found" not in said
        and "forgot 2 users in 1 store(s)" in said
        and str(found.stores[0]) in said
        and "1 trained model" in said
    )
    FeatureStore.open(found.stores[0], verify=True)
    again = forget("windows", IDS, tmp_path / "runs")
    assert not again.stores and not again.absent and found.stores[0].is_dir() and read_forgotten(root) == listed
    with pytest.raises(ConfigError, match=r'no store of data set "other" .*there are: windows'):
        forget("other", IDS, tmp_path / "runs")
    with pytest.raises(ConfigError, match="at least one user"):
        forget("windows", [], tmp_path / "runs")


def finished(before: Path, root: Path) -> Path:
    """The store of `before` as a stage."""

    def make(out: Path) -> dict[str, Any]:
        manifest = store_write.read_manifest(before / "store")
        store_write.link_files(before / "store", out, manifest["files"])
        return {"store_hash": store_write.write_manifest(out, manifest), "rows_out": 1}

    return run_stage("preprocess", key_parts={"forgotten": None}, root=root, build=make).path


def test_users_who_are_in_no_store_are_named_and_nothing_is_written_anew(before: Path, tmp_path: Path) -> None:
    old = finished(before, tmp_path / "windows")
    entities = (old / store_write.USERS).stat().st_ino
    found = forget("windows", ["99999999", "nobody"], tmp_path)
    assert not found.stores and not found.removed and not old.exists()
    assert (found.others[0] / store_write.USERS).stat().st_ino == entities
    said = report(found, 2)
    assert "in 0 store(s)" in said and "1 other store(s) had" in said
    assert "not found in any store: 99999999, nobody; they are on the list all the same" in said
    found = forget("windows", [SPILLED, "nobody"], tmp_path)  # one of them in the quarantine only
    assert found.removed == {"quarantine": 1} and found.absent == ["nobody"] and len(found.stores) == 1


def test_a_quarantined_row_names_a_user_in_any_cell_or_piece_of_a_line() -> None:
    listed = Forgotten().with_users(["7", "u:8", "é"])
    lines = ["7,3,abc", 'x;"7";', "3\t 7 |z", "a:7 b", "1, u:8 ,2"]  # the last id has a separator in it
    cells: list[Any] = [7, 7.0, " 7 ", [{"id": "7"}], "e\u0301", "7,8", None]
    rows = [*({"line": x} for x in lines), *({"at": 77, "who": x} for x in cells), {"line": "17,77,7a"}]
    table = pa.table({"row": [json.dumps(row) for row in rows]})
    assert listed.rows_naming(table)[0].tolist() == [True] * 10 + [False] * 3
    assert listed.without(table).equals(table.slice(10))
    assert Forgotten().without(table) is table


def test_a_build_that_runs_meanwhile_keeps_its_pieces_and_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw, runs, found = write_first(tmp_path / "raw"), tmp_path / "runs", list[Forgot]()
    home = runs / "windows" / "preprocess"

    def meanwhile() -> None:
        found.append(forget("windows", ["5"], runs))
        assert list(home.glob(".work-*")) and list(home.glob(".tmp-*"))

    with pytest.raises(DataError, match=r"users were forgotten while .* Run the same command again"):
        run(make_loop(runs, raw), Counting(4, meanwhile), monkeypatch)
    assert len(found[0].running) == 1 and "it will stop with an error" in report(found[0], 1)
    assert [p.name for p in home.iterdir()] == [".locks"]
    store = FeatureStore.open(run(make_loop(runs, raw), Counting(), monkeypatch).path)
    assert store.users.index_of("5") == 0 != store.users.index_of("6")
    assert forget("windows", ["6"], runs).running == []


def test_forget_waits_for_who_holds_the_list_or_a_store(before: Path, tmp_path: Path) -> None:
    root = tmp_path / "windows"
    old, said, holders = finished(before, root), list[str](), list[contextlib.ExitStack]()
    for path in (lock_path(old.parent, "forget"), list_lock(root), lock_path(old.parent, old.name)):
        holders.append(contextlib.ExitStack())
        holders[-1].enter_context(locked(path))

    def say(text: str) -> None:
        assert old.exists() and (root / FORGOTTEN).exists() == (len(said) == 2)
        holders[len(said)].close()
        said.append(text)

    assert len(forget("windows", IDS, tmp_path, say).stores) == 1 and not old.exists()
    assert [w in t for w, t in zip(("another forget", "being finished", old.name), said, strict=True)] == [True] * 3
