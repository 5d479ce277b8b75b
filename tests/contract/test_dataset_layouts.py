"""Public data sets on disk as people have them: made-up rows in each layout, through the committed spec, to a store."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gem.config import DataConfig, ModelConfig, RunConfig
from gem.data.ingest.canonical import check_spec, flag_names, kind_names, read_impressions, resolve_files
from gem.data.schema import NULL, OOV
from gem.data.spec import DatasetSpec, load_spec, parse_spec
from gem.data.store import FeatureStore
from gem.errors import DataError
from gem.model.ranker import Ranker
from gem.training.data import StoreReader
from pipelines.distribute import in_process
from pipelines.preprocess import build_store
from tests.contract import dataset_rows as rows
from tests.contract.dataset_rows import DAY_MS, KUAIRAND_NOON, MOVIELENS_NOON, TAOBAO_MIDNIGHT

Row = tuple[Any, ...]  # user, ad, time_ms, day, cut, labels by task (None: not known)


def spec_of(root: Path, name: str, **log: Any) -> DatasetSpec:
    """The committed spec with small vocabularies that a handful of rows fills; `log` overrides the row time of the
    impression table, so that they span three days."""
    raw = load_spec(root / "pipelines" / "datasets" / f"{name}.yaml").model_dump(mode="json")
    for feature in (*raw["users"]["features"], *raw["ads"]["features"], *raw["context"]["features"]):
        feature |= {"min_count": 1} | ({"hash_rows": 1000} if feature["hash_rows"] else {})
    if log:
        raw["tables"][raw["impressions"]["table"]]["row_time"] |= log
    return parse_spec(raw)


def build(spec: DatasetSpec, raw: Path, out: Path, **data: Any) -> FeatureStore:
    config = RunConfig(data=DataConfig(num_shards=1, **data))
    build_store(config, spec, (raw, out / "run" / "preprocess" / "key"), lambda _: None, in_process)
    return FeatureStore.open(out / "run" / "preprocess" / "key")


def impressions(store: FeatureStore) -> list[Row]:
    seen = store.impressions()
    labels = [
        tuple(int(v) if m else None for v, m in zip(*r, strict=True)) for r in zip(seen.labels, seen.mask, strict=True)
    ]
    users = [store.users.keys[int(u)].as_py() for u in seen.user]
    ads = [store.ads.keys[int(a)].as_py() for a in seen.ad]
    days = [seen.days[d] for d in seen.day]
    return sorted(
        zip(users, ads, seen.time_ms.tolist(), days, seen.cut.tolist(), labels, strict=True), key=lambda r: r[2]
    )


def timeline(store: FeatureStore, user: object) -> list[tuple[Any, str, set[str], int]]:
    """(ad, kind, flags, time_ms) of every event of a user, in the order of the store."""
    events, i = store.timelines(), store.users.index_of(user)
    flags, kinds = flag_names(store.spec), kind_names(store.spec)
    return [
        (
            store.ads.keys[int(events.ad[e])].as_py(),
            kinds[events.kind[e] - 1],
            {name for bit, name in enumerate(flags) if events.flags[e] >> bit & 1},
            int(events.time_ms[e]),
        )
        for e in range(events.offsets[i], events.offsets[i + 1])
    ]


def surfaces(store: FeatureStore) -> list[int]:
    seen = store.impressions()
    return seen.surface[np.argsort(seen.time_ms, kind="stable")].tolist()


def category(store: FeatureStore, side: str, feature: str, key: object) -> int:
    table = store.users if side == "user" else store.ads
    return int(table.rows(np.array([table.index_of(key)])).ids[feature][0])


@pytest.mark.parametrize("size", ["1k", "27k"])
def test_kuairand_in_several_logs_and_parts(repo_root: Path, tmp_path: Path, size: str) -> None:
    spec = spec_of(repo_root, f"kuairand-{size}")
    folder = rows.kuairand(tmp_path / "raw", size)
    for data_dir in (folder, folder / "data"):
        files = resolve_files(spec, data_dir)
        check_spec(spec, files)
        assert len(files["log"]) == (3 if size == "27k" else 2) and len(files["videos"]) == 1
    store = build(spec, folder, tmp_path)
    noon = KUAIRAND_NOON
    assert impressions(store) == [
        (1, 20, noon, "2022-05-01", 0, (1, 1)),
        (1, 21, noon + DAY_MS, "2022-05-02", 1, (0, 0)),
        (1, 22, noon + DAY_MS + 30_000, "2022-05-02", 1, (1, 0)),  # 21 is known a minute later
        (2, 20, noon + 2 * DAY_MS, "2022-05-03", 0, (1, 0)),
    ]
    assert timeline(store, 1)[:2] == [
        (20, "impression", {"click", "long_view"}, noon),
        (21, "impression", {"like", "profile_enter"}, noon + DAY_MS),
    ]
    assert category(store, "user", "onehot_feat4", 1) > OOV > NULL == category(store, "user", "onehot_feat17", 1)


def test_taobaoad_tianchi(repo_root: Path, tmp_path: Path) -> None:
    spec, t0 = spec_of(repo_root, "taobaoad"), TAOBAO_MIDNIGHT * 1000
    store = build(spec, rows.taobaoad(tmp_path / "raw"), tmp_path)
    assert impressions(store) == [
        (5, "11", t0 + 3_600_000, "2017-05-06", 2, (1,)),  # the purchase of the same second is not yet known
        (5, "12", t0 + 3_630_000, "2017-05-06", 3, (0,)),  # nor is the click half a minute before
        (5, "12", t0 + 2 * DAY_MS - 1000, "2017-05-07", 5, (0,)),
        (9, "11", t0 + 2 * DAY_MS, "2017-05-08", 0, (0,)),
    ]
    events = timeline(store, 5)
    visits = [(json.loads(ad[1:]), kind, flags) for ad, kind, flags, _ in events if ad.startswith("~")]
    assert visits == [
        ({"cate_id": "99"}, "behaviour", {"cart"}),  # brand NULL is no brand
        ({"brand": "95471", "cate_id": "6406"}, "behaviour", {"view"}),
        ({"brand": "95471", "cate_id": "6406"}, "behaviour", {"buy"}),
    ]
    assert [(ad, flags) for ad, kind, flags, _ in events if kind == "impression"] == [
        ("11", {"click"}),
        ("12", set()),
        ("12", set()),
    ]
    visit = next(ad for ad, *_ in events if "95471" in ad)
    assert category(store, "ad", "cate_id", visit) == category(store, "ad", "cate_id", 11) > OOV
    assert category(store, "ad", "brand", visit) == category(store, "ad", "brand", 11) > OOV
    assert category(store, "ad", "brand", 12) == NULL
    level = [category(store, "user", "new_user_class_level", user) for user in (5, 9)]
    assert level[0] > OOV > NULL == level[1]


def test_taobaoad_without_the_large_behaviour_log(repo_root: Path, tmp_path: Path) -> None:
    folder = rows.taobaoad(tmp_path / "raw")
    (folder / "behavior_log.csv").unlink()
    store = build(spec_of(repo_root, "taobaoad"), folder, tmp_path)
    assert [r[4] for r in impressions(store)] == [0, 0, 2, 0]


def test_taobaoad_x1_of_reczoo(repo_root: Path, tmp_path: Path) -> None:
    folder = rows.taobaoad_x1(tmp_path / "raw")
    shipped = load_spec(repo_root / "pipelines" / "datasets" / "taobaoad-x1.yaml")
    start = 1_494_028_800_000  # 2017-05-06T00:00Z
    for data_dir in (folder, folder / "TaobaoAd_x1"):
        files = resolve_files(shipped, data_dir)["log"]
        times = [read_impressions(shipped, f).rows["time_ms"].to_pylist() for f in files]
        assert times == [[start + 7 * DAY_MS], [start, start + 27, start + 55]]  # test.csv sorts before train.csv
    step = shipped.tables["log"].row_time.step_us
    assert 6 < 21_929_911 * step / DAY_MS / 1000 < 7 and 3_099_515 * step < DAY_MS * 1000  # days of train and of test

    store = build(spec_of(repo_root, "taobaoad-x1", step_us=DAY_MS * 1000), folder, tmp_path)
    assert impressions(store) == [
        (964127, 577393, start, "2017-05-06", 0, (1,)),
        (1008890, 10402, start + DAY_MS, "2017-05-07", 0, (0,)),
        (964127, 10402, start + 2 * DAY_MS, "2017-05-08", 0, (0,)),
        (1008890, 577393, start + 7 * DAY_MS, "2017-05-13", 0, (1,)),
    ]
    assert len(store.timelines().ad) == 0
    seen = store.impressions()
    history = seen.context_rows(np.argsort(seen.time_ms)[:2])
    cate, brand = history.ids["cate_his"].tolist(), history.ids["brand_his"].tolist()
    assert history.offsets["cate_his"].tolist() == [0, 3, 4] and cate[3] == NULL
    assert cate[1] == cate[2] == category(store, "ad", "cate_id", 577393) != cate[0]
    assert brand[1] == category(store, "ad", "brand", 577393) > OOV


def test_criteo_kaggle(repo_root: Path, tmp_path: Path) -> None:
    folder = rows.criteo_kaggle(tmp_path / "raw")
    shipped = load_spec(repo_root / "pipelines" / "datasets" / "criteo-kaggle.yaml")
    start = 1_401_580_800_000  # 2014-06-01T00:00Z
    (path,) = resolve_files(shipped, folder)["log"]
    got = read_impressions(shipped, path).rows
    assert got["time_ms"].to_pylist() == [start, start + 13, start + 26, start + 39]
    assert got["label:click"].to_pylist() == [0, 1, 0, 1]
    assert got["ctx:I2"].to_pylist() == [-1.0, None, 65535.0, None] and got["ctx:C26"][0].as_py() == "5e000000"
    assert 6.99 < 45_840_617 * shipped.tables["log"].row_time.step_us / DAY_MS / 1000 < 7

    store = build(spec_of(repo_root, "criteo-kaggle", step_us=DAY_MS * 1000), folder, tmp_path)
    assert [(r[1], r[2], r[4], r[5]) for r in impressions(store)] == [
        ("ad", start + i * DAY_MS, 0, (label,)) for i, label in enumerate((0, 1, 0, 1))
    ]
    assert len(store.users) == 5 and len(store.ads) == 2  # with the unknown one
    assert {category(store, "user", "user_id", r[0]) for r in impressions(store)} == {OOV}  # no row is seen twice
    seen = store.impressions()
    context = seen.context_rows(np.argsort(seen.time_ms))
    pair = {name: context.ids[name].reshape(-1, 2).tolist() for name in ("C1", "C3")}
    assert pair["C1"][0] == pair["C1"][1] != pair["C1"][2]
    assert pair["C1"][1] != pair["C3"][1]  # one table, but the value means something else in another column


def test_a_model_reads_a_store_without_any_event(repo_root: Path, tmp_path: Path) -> None:
    spec = spec_of(repo_root, "criteo-kaggle", step_us=DAY_MS * 1000)
    store = build(spec, rows.criteo_kaggle(tmp_path / "raw"), tmp_path)
    seen = store.impressions()
    batch = StoreReader(store, store.timelines(), seen, 16).batch(np.arange(len(seen)))
    ranker = Ranker(store.schema, ModelConfig(dim=8, num_layers=1, num_heads=2, rank=3, num_fmb=3, num_lcb=3))
    assert ranker(batch).logits.isfinite().all()


def test_rows_of_a_named_day_end_where_the_next_one_begins(repo_root: Path, tmp_path: Path) -> None:
    folder = rows.taobaoad_x1(tmp_path)
    tight = spec_of(repo_root, "taobaoad-x1", step_us=4 * DAY_MS * 1000)  # the third row would lie beyond the test day
    test, train = resolve_files(tight, folder)["log"]
    assert read_impressions(tight, test).rows["time_ms"].to_pylist() == [1_494_028_800_000 + 7 * DAY_MS]
    with pytest.raises(DataError, match=r"lies beyond .* Set row_time\.step_us to at most 201600000000"):
        read_impressions(tight, train)
    with pytest.raises(DataError, match=r"no day for 'test'; row_time\.days has \['train'\]"):
        read_impressions(spec_of(repo_root, "taobaoad-x1", days={"train": 0}), test)


def test_criteo_terabyte_takes_the_day_from_the_file_name(repo_root: Path, tmp_path: Path) -> None:
    spec, folder = spec_of(repo_root, "criteo-terabyte"), rows.criteo_terabyte(tmp_path / "raw")
    store = build(spec, folder, tmp_path)
    start = 1_420_070_400_000  # 2015-01-01T00:00Z
    got = impressions(store)
    assert sorted(r[2:] for r in got) == [
        (start, "2015-01-01", 0, (0,)),
        (start, "2015-01-01", 0, (1,)),  # 0.4 ms later
        (start + 2 * DAY_MS, "2015-01-03", 0, (0,)),
        (start + 10 * DAY_MS, "2015-01-11", 0, (1,)),
    ]
    assert len({r[0] for r in got}) == 4
    assert 204_846_845 * spec.tables["log"].row_time.step_us < DAY_MS * 1000  # the largest day


def test_aliexpress_of_mtreclib(repo_root: Path, tmp_path: Path) -> None:
    spec = spec_of(repo_root, "aliexpress", step_us=DAY_MS * 1000)
    store = build(spec, rows.aliexpress(tmp_path / "raw"), tmp_path)
    start = 1_596_240_000_000  # 2020-08-01T00:00Z
    got = [(r[0], (r[2] - start) / DAY_MS, r[4], r[5]) for r in impressions(store)]
    assert sorted(got) == [
        (1, 7, 0, (0, 0)),
        (2, 7, 0, (1, 0)),
        (7, 0, 0, (0, 0)),
        (7, 0, 0, (0, 0)),  # one page of either country
        (7, 1, 0, (1, 0)),
        (8, 2, 0, (1, 1)),
    ]
    assert {category(store, "user", "user_id", page) for page in (7, 8)} == {OOV}
    codes = {country: store.encoder.surface_code(country) for country in ("NL", "ES")}
    assert len(set(codes.values())) == 2 and sorted(surfaces(store)) == sorted([codes["NL"]] * 4 + [codes["ES"]] * 2)
    first = store.impressions().context_rows(np.argsort(store.impressions().time_ms, kind="stable"))
    assert len(set(first.ids["categorical_1"].tolist())) == 3 and len(set(first.ids["categorical_2"].tolist())) == 1


def test_aliexpress_of_tianchi(repo_root: Path, tmp_path: Path) -> None:
    spec = spec_of(repo_root, "aliexpress-tianchi", step_us=DAY_MS * 1000)
    store = build(spec, rows.aliexpress_tianchi(tmp_path / "raw"), tmp_path)
    got = [(r[0], r[3], r[4], r[5]) for r in impressions(store)]
    assert got == [
        (70, "2020-08-01", 0, (0, 0)),
        (70, "2020-08-02", 0, (1, 0)),
        (80, "2020-08-03", 0, (1, 1)),
        (90, "2020-08-08", 0, (1, 0)),
    ]
    assert set(surfaces(store)) == {store.encoder.surface_code("nl")}
    assert category(store, "user", "user_2", 70) == category(store, "user", "user_2", 90) > OOV
    assert category(store, "user", "user_3", 80) == category(store, "user", "user_3", 70)


def test_movielens_csv(repo_root: Path, tmp_path: Path) -> None:
    spec, folder = spec_of(repo_root, "movielens"), rows.movielens(tmp_path / "raw")
    with pytest.raises(DataError, match="time_out_of_range 1"):  # the head of the spec says how to allow it
        build(spec, folder, tmp_path / "strict")
    store = build(spec, folder, tmp_path, max_quarantine_share=0.3)
    noon = MOVIELENS_NOON * 1000
    expected = [
        (1, 11, noon, "2019-11-01", 0, (1,)),
        (1, 12, noon + DAY_MS, "2019-11-02", 2, (1,)),
        (1, 13, noon + DAY_MS, "2019-11-02", 2, (0,)),  # 3.5 is below four stars; the same second is not seen
        (2, 11, noon + 2 * DAY_MS, "2019-11-03", 0, (1,)),
    ]
    assert sorted(impressions(store)) == expected
    assert sorted((ad, kind, sorted(flags)) for ad, kind, flags, _ in timeline(store, 1)) == [
        (11, "rating", ["like"]),
        (11, "tag", []),
        (12, "rating", ["like"]),
        (13, "rating", []),
    ]
    genres = store.ads.rows(np.array([store.ads.index_of(k) for k in (11, 13)]))
    ids = genres.ids["genres"].tolist()
    assert len(ids) == 4 and ids[1] == ids[3] > OOV  # Drama
    (folder / "ml-32m" / "tags.csv").unlink()
    assert resolve_files(spec, folder / "ml-32m")["tags"] == []


def test_movielens_1m_with_double_colons(repo_root: Path, tmp_path: Path) -> None:
    spec, folder = spec_of(repo_root, "movielens-1m"), rows.movielens_1m(tmp_path / "raw")
    store = build(spec, folder, tmp_path)
    t0 = 978_300_760_000
    assert impressions(store) == [
        (1, 1193, t0, "2000-12-31", 0, (1,)),
        (1, 914, t0 + DAY_MS, "2001-01-01", 1, (0,)),
        (2, 914, t0 + 2 * DAY_MS, "2001-01-02", 0, (1,)),
    ]
    assert [(ad, flags) for ad, _, flags, _ in timeline(store, 1)] == [(1193, {"like"}), (914, set())]
    assert category(store, "user", "gender", 1) > OOV and len(store.users) == 3
    assert len(store.ads.rows(np.array([store.ads.index_of(914)])).ids["genres"]) == 2


MAKERS: dict[str, Callable[[Path], Path]] = {
    "kuairand-1k": lambda folder: rows.kuairand(folder, "1k"),
    "kuairand-27k": lambda folder: rows.kuairand(folder, "27k"),
    "taobaoad": rows.taobaoad,
    "taobaoad-x1": rows.taobaoad_x1,
    "criteo-kaggle": rows.criteo_kaggle,
    "criteo-terabyte": rows.criteo_terabyte,
    "aliexpress": rows.aliexpress,
    "aliexpress-tianchi": rows.aliexpress_tianchi,
    "movielens": rows.movielens,
    "movielens-1m": rows.movielens_1m,
}


@pytest.mark.parametrize("name", MAKERS)
def test_the_shipped_spec_fits_the_layout(repo_root: Path, tmp_path: Path, name: str) -> None:
    spec = load_spec(repo_root / "pipelines" / "datasets" / f"{name}.yaml")
    check_spec(spec, resolve_files(spec, MAKERS[name](tmp_path)))
