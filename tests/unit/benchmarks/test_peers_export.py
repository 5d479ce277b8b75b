"""The exported arrays against loops over the store: histories end at the cut, rows and codes are the store's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gem.data.store import FeatureStore
from tests.benchmarks.peers.environment import key, present
from tests.benchmarks.peers.export import DELAY_MS, Options, export, match_table, rate_table
from tests.benchmarks.peers.exported import Exported, auc_and_ne, read_result, write_result
from tests.benchmarks.peers.past import STRENGTH
from tests.unit.data.random_store import Shape, write_store

LENGTH = 6


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> FeatureStore:
    # A grain of half the delay: outcomes become known exactly when others are shown, and histories have ties.
    store = write_store(tmp_path_factory.mktemp("peers") / "store", Shape(num_users=30, step_ms=DELAY_MS // 2))
    days = store.days
    store.manifest["split"] = {"train_days": [days[0]], "validation_day": days[1], "test_day": days[2]}  # type: ignore[index]
    return store


@pytest.fixture(scope="module", params=["all", "flagged"])
def exported(store: FeatureStore, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Exported:
    folder = tmp_path_factory.mktemp("out")
    export(store, folder, Options(history=LENGTH, events=request.param))
    return Exported.open(folder)


def test_rows_are_the_splits_in_the_stores_order(store: FeatureStore, exported: Exported) -> None:
    for name, day in zip(("train", "validation", "test"), store.days, strict=True):
        imp, part = store.impressions([day]), exported.split(name)
        for column in ("impression_id", "user", "ad", "cut", "time_ms", "surface"):
            assert (exported.array(column)[part] == getattr(imp, column)).all()
        for k, task in enumerate(exported.meta["tasks"]):
            label, mask = exported.target(task)
            assert (label[part] == imp.labels[:, k]).all() and (mask[part] == imp.mask[:, k]).all()


def test_histories_are_the_newest_events_before_the_cut(store: FeatureStore, exported: Exported) -> None:
    timelines, codes = store.timelines(), {s["name"]: s["of"] for s in exported.meta["sequences"]}
    assert codes == {"hist_ad_id": "ad_id", "hist_brand": "brand"}
    user, cut = exported.array("user"), exported.array("cut")
    assert cut.max() > LENGTH > 0 == cut.min()
    for name, field in codes.items():
        found, code = exported.array(name), store.ads.side_rows.field(field)
        for i in range(len(user)):
            start = timelines.offsets[user[i]]
            events = [e for e in range(start, start + cut[i]) if exported.meta["events"] == "all" or timelines.flags[e]]
            newest = [int(code[timelines.ad[e]]) for e in events[-LENGTH:]]
            assert found[i].tolist() == [0] * (LENGTH - len(newest)) + newest


def test_an_event_in_no_history_was_not_known(store: FeatureStore, exported: Exported) -> None:
    """The cut is the store's: no event that became known at or after the impression stands in its history."""
    timelines, imp = store.timelines(), store.impressions()
    for i in range(len(imp)):
        events = slice(timelines.offsets[imp.user[i]], timelines.offsets[imp.user[i]] + imp.cut[i])
        assert (timelines.known_ms[events] < imp.time_ms[i]).all()


def test_features_are_the_stores(store: FeatureStore, exported: Exported) -> None:
    imp, meta = store.impressions(), exported.meta
    ids = dict(zip([f["name"] for f in meta["fields"]], exported.array("ids").T, strict=True))
    assert (ids["town"] == store.users.side_rows.field("town")[imp.user]).all()
    assert (ids["brand"] == store.ads.side_rows.field("brand")[imp.ad]).all()
    assert (ids["device"] == imp.context.field("device")).all()
    numbers = dict(zip(meta["numeric"], exported.array("numeric").T, strict=True))
    assert {"tenure", "price", "slot", "slot_missing", "look_7", "page_1"} <= set(numbers)
    assert (numbers["look_7"] == store.ads.side_rows.vectors[imp.ad, 7]).all()
    offsets, values = store.ads.side_rows.multi["tags"]
    for i, ad in enumerate(imp.ad):
        assert [v for v in exported.array("multi_tags")[i] if v] == values[offsets[ad] : offsets[ad + 1]].tolist()


def test_rates_read_only_outcomes_known_before(store: FeatureStore) -> None:
    imp = store.impressions()
    found, names = rate_table(store, imp)
    columns = dict(zip(names, found.T, strict=True))
    brand = store.ads.side_rows.field("brand")
    keys = {"user": imp.user, "brand": brand[imp.ad], "user_surface": imp.user * 10 + imp.surface}
    for i in range(0, len(imp), 3):
        known = np.flatnonzero((imp.time_ms + DELAY_MS < imp.time_ms[i]) & (imp.mask[:, 0] > 0))
        prior = (imp.labels[known, 0].sum() + 1) / (len(known) + 2)
        for group, code in keys.items():
            same = known[code[known] == code[i]]
            rate = (imp.labels[same, 0].sum() + STRENGTH * prior) / (len(same) + STRENGTH)
            assert columns[f"click_rate_{group}"][i] == pytest.approx(rate, rel=1e-5)


def test_meetings_read_only_events_before_the_cut(store: FeatureStore) -> None:
    imp, timelines = store.impressions(), store.timelines()
    found, names = match_table(store, timelines, imp)
    columns = dict(zip(names, found.T, strict=True))
    for i in range(len(imp)):
        events = slice(timelines.offsets[imp.user[i]], timelines.offsets[imp.user[i]] + imp.cut[i])
        same = timelines.ad[events] == imp.ad[i] if imp.ad[i] else np.zeros(imp.cut[i], bool)
        assert columns["met_ad"][i] == pytest.approx(np.log1p(same.sum()), rel=1e-5)
        assert columns["met_any"][i] == pytest.approx(np.log1p(imp.cut[i]), rel=1e-5)
        assert columns["met_ad_like"][i] == pytest.approx(np.log1p((timelines.flags[events][same] & 2 > 0).sum()))


def test_last_rows_of_a_store_without_a_split(store: FeatureStore, tmp_path: Path) -> None:
    split = store.manifest.pop("split")  # type: ignore[attr-defined]
    try:
        meta = export(store, tmp_path, Options(history=2, rates=False, last_rows=20))
    finally:
        store.manifest["split"] = split  # type: ignore[index]
    assert meta["splits"] == {"train": [0, 20]} and not (tmp_path / "rates.npy").exists()
    assert (Exported.open(tmp_path).array("impression_id") == store.impressions().impression_id[-20:]).all()


def test_unknown_events_are_refused(store: FeatureStore, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="events: got 'some'; allowed are 'all' and 'flagged'"):
        export(store, tmp_path, Options(events="some"))


def test_quick_figures_by_hand() -> None:
    found = auc_and_ne(np.array([1.0, 0.0, 1.0, 0.0]), np.array([0.5, 0.5, 0.9, 0.1]))
    assert found["auc"] == pytest.approx(3.5 / 4)
    assert auc_and_ne(np.array([1.0, 0.0]), np.array([0.5, 0.5])) == pytest.approx({"auc": 0.5, "ne": 1.0})


def test_results_come_back(tmp_path: Path) -> None:
    write_result(tmp_path / "new" / "a.npz", {"test": np.arange(3.0)}, {"arm": "x"})
    arrays, record = read_result(tmp_path / "new" / "a.npz")
    assert record == {"arm": "x"} and arrays["test"].tolist() == [0, 1, 2]


def test_environment_of_other_requirements_is_not_present(tmp_path: Path) -> None:
    wanted, other = tmp_path / "a.txt", tmp_path / "b.txt"
    wanted.write_text("x==1\n")
    other.write_text("x==2\n")
    assert not present(tmp_path, wanted)
    (tmp_path / "made-from").write_text(key(wanted))
    assert present(tmp_path, wanted) and not present(tmp_path, other)
