"""A served score is the offline score of the same bundle, and depends on nothing else."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from gem.errors import BundleError, StoreError
from gem.lineage.bundle import Bundle, load_bundle
from gem.model.ranker import Ranker
from gem.training.data import StoreReader
from gem.training.predict import predict
from serving.config import ServingConfig
from serving.fleet import ServedModel, find_store, load_scorers
from serving.replay import largest_difference, offline_scores
from serving.request_log import RequestLog, read
from serving.router import Router
from serving.scorer import Scorer, Scores
from serving.service import RankService
from serving.store import MemoryHistories
from tests.unit.serving.tiny import Tiny, sampled, save_random

LATE_MS = 1_780_000_000_000  # after every event of the world


@pytest.fixture(scope="module")
def scorers(tiny: Tiny) -> dict[str, Scorer]:
    return {s.group: s for s in load_scorers(tiny.models)}


def serve(scorer: Scorer, user_id: object, time_ms: int, ads: list[int | str], **context: object) -> Scores:
    user = scorer.find_user(user_id)  # type: ignore[arg-type]
    surface = next(iter(scorer.surfaces))
    return scorer.score(user, time_ms, surface, context, ads, scorer.history(user, time_ms))


def offline(tiny: Tiny, bundle: Bundle, day: str) -> dict[int, NDArray[np.float64]]:
    """impression_id -> [K] by the offline batch path, with the heads' formulas written out again."""
    info, store = bundle.info, tiny.store
    model = Ranker(info.schema, info.config.student)
    model.load_state_dict(bundle.weights)
    impressions = store.impressions([day])
    config = info.config.student
    reader = StoreReader(store, store.timelines(), impressions, config.max_history, align=config.align)
    logits = predict(model, reader, np.arange(len(impressions)), batch_size=97).logits.astype(np.float64)
    p = np.empty_like(logits)
    for k, task in enumerate(info.schema.tasks):
        c = info.calibration[task.name]
        shift = [c["shift"] + c["group_shift"][info.schema.surfaces[s]] for s in impressions.surface]
        p[:, k] = 1 / (1 + np.exp(-(c["slope"] * logits[:, k] + shift)))
    p[:, 1] *= p[:, 0]
    return dict(zip(impressions.impression_id.tolist(), p, strict=True))


def test_served_scores_of_raw_impressions_equal_the_offline_scores(tiny: Tiny, scorers: dict[str, Scorer]) -> None:
    day = tiny.store.split.test_day
    for model in tiny.models:
        bundle = load_bundle(Path(model.path))
        want, scorer = offline(tiny, bundle, day), scorers[bundle.info.group]
        rows = [r for r in sampled(tiny.raw_impressions(day), 400) if r["surface"] == bundle.info.group][:60]
        assert len(rows) > 30
        spread = []
        for r in rows:
            got = serve(scorer, r["user_id"], r["time_ms"], [r["ad_id"]], device=r["device"], slot=r["slot"])  # type: ignore[arg-type, list-item]
            np.testing.assert_allclose(got.p[0], want[r["impression_id"]], rtol=0, atol=1e-5)  # type: ignore[index]
            spread.append(got.p[0, 0])
        assert np.std(spread) > 0.02, "a constant would prove nothing"


def test_logged_requests_replayed_in_one_offline_batch_give_the_served_scores(tiny: Tiny, tmp_path: Path) -> None:
    service = RankService(Router(load_scorers(tiny.models)), ServingConfig(), RequestLog(tmp_path, "r", 10**8))
    rng = np.random.default_rng(5)
    rows = list(sampled(tiny.raw_impressions(tiny.store.split.test_day), 40, seed=1))

    async def run() -> None:
        for n, r in enumerate(rows):
            ads = [*rng.integers(1, 81, 12).tolist(), "never seen"]
            user = "nobody" if n % 10 == 0 else r["user_id"]
            context = {"device": r["device"], "slot": r["slot"]} if n % 3 else {}
            raw = {"surface": r["surface"], "user_id": user, "time_ms": r["time_ms"], "context": context}
            raw["candidates"] = [{"ad_id": a, "bid": 1.0} for a in ads]
            await service.rank(json.dumps(raw).encode(), f"r{n}")

    asyncio.run(run())
    service.close()
    records = list(read(tmp_path))
    assert len(records) == 40
    for model in tiny.models:
        own = [r for r in records if r["model"]["bundle_hash"] == model.bundle_hash]
        bundle = load_bundle(Path(model.path))
        assert len(own) > 3 and largest_difference(own, bundle, tiny.store) < 1e-5
        someone = next(r for r in own if r["user_id"] != "nobody")
        someone["time_ms"] -= 3 * 86_400_000  # another history: the replay must notice
        assert largest_difference(own, bundle, tiny.store) > 1e-3
        with pytest.raises(BundleError, match="were answered by"):
            offline_scores(records, bundle, tiny.store)


def test_scores_do_not_depend_on_the_other_candidates_or_their_order(scorers: dict[str, Scorer]) -> None:
    scorer = scorers["feed"]
    ads: list[int | str] = [*range(1, 60), "unknown", 7, 7]
    together = serve(scorer, 5, LATE_MS, ads)
    alone = np.concatenate([serve(scorer, 5, LATE_MS, [a]).p for a in ads])
    np.testing.assert_allclose(together.p, alone, rtol=0, atol=1e-6)
    turned = serve(scorer, 5, LATE_MS, ads[::-1])
    np.testing.assert_allclose(turned.p[::-1], together.p, rtol=0, atol=1e-6)
    assert together.known.tolist() == [a != "unknown" for a in ads]


def test_conversion_on_the_entire_space_never_exceeds_click(scorers: dict[str, Scorer]) -> None:
    p = serve(scorers["feed"], 5, LATE_MS, list(range(1, 81))).p
    assert (p[:, 1] < p[:, 0]).all() and (p > 0).all()


def test_unseen_users_and_ads_share_the_unknown_rows(scorers: dict[str, Scorer]) -> None:
    scorer = scorers["feed"]
    a = serve(scorer, "nobody", LATE_MS, ["x", "y", 1])
    b = serve(scorer, 10**18, LATE_MS, [10**18])
    assert not a.user_known and a.num_events == 0 and a.known.tolist() == [False, False, True]
    np.testing.assert_allclose(a.p[0], a.p[1], rtol=0, atol=1e-7)
    np.testing.assert_allclose(a.p[0], b.p[0], rtol=0, atol=1e-6)
    assert np.abs(a.p[2] - a.p[0]).max() > 1e-4
    assert np.isfinite(a.p).all()


def test_ids_as_numbers_and_as_text_are_the_same(scorers: dict[str, Scorer]) -> None:
    scorer = scorers["feed"]
    a, b = serve(scorer, 5, LATE_MS, [1, 2]), serve(scorer, "5", LATE_MS, ["1", "2"])
    np.testing.assert_array_equal(a.p, b.p)
    assert b.user_known and b.known.all()


def test_history_and_context_matter_and_absent_context_is_not_an_unknown_value(scorers: dict[str, Scorer]) -> None:
    scorer = scorers["feed"]
    base = serve(scorer, 5, LATE_MS, [1]).p
    before = serve(scorer, 5, 1_500_000_000_000, [1])
    assert before.num_events == 0 and before.user_known
    assert np.abs(before.p - base).max() > 1e-4
    known, other, new = (serve(scorer, 5, LATE_MS, [1], device=d).p for d in ("phone_high", "desktop", "toaster"))
    assert len({round(float(p[0, 0]), 7) for p in (base, known, other, new)}) == 4
    np.testing.assert_array_equal(new, serve(scorer, 5, LATE_MS, [1], device="fridge").p)
    np.testing.assert_array_equal(base, serve(scorer, 5, LATE_MS, [1], device=None).p)


def test_history_cut_counts_what_was_known_strictly_before(tiny: Tiny) -> None:
    timelines = tiny.store.timelines()
    histories = MemoryHistories(timelines)
    rng = np.random.default_rng(2)
    for user in rng.integers(0, len(tiny.store.users), 40).tolist():
        known = timelines.known_ms[timelines.offsets[user] : timelines.offsets[user + 1]].tolist()
        at = known[len(known) // 2] if known else LATE_MS
        for time_ms in (0, at - 1, at, at + 1, LATE_MS):
            assert histories.history(user, time_ms).cut == sum(1 for k in known if k < time_ms)


def test_cuts_at_serving_are_those_of_the_store(tiny: Tiny) -> None:
    histories = MemoryHistories(tiny.store.timelines())
    impressions = tiny.store.impressions()
    at = np.random.default_rng(0).permutation(len(impressions))[:300]
    got = [histories.history(int(impressions.user[i]), int(impressions.time_ms[i])).cut for i in at]
    assert got == impressions.cut[at].tolist() and max(got) > 0


def test_each_group_serves_its_surfaces_with_the_objective_of_the_spec(scorers: dict[str, Scorer]) -> None:
    assert scorers["feed"].surfaces == {"feed": "click"}
    assert scorers["messaging"].surfaces == {"messaging": "conversion"}
    assert scorers["feed"].all_surfaces == ("feed", "stories", "messaging")
    assert scorers["feed"].context.names == ("device", "slot")


def test_golden_scores_repeat(scorers: dict[str, Scorer]) -> None:
    a, b = scorers["feed"].golden(), scorers["feed"].golden()
    np.testing.assert_array_equal(a.p, b.p)
    assert a.known.tolist() == [False, True]


def test_a_bundle_of_another_store_is_refused(tiny: Tiny) -> None:
    bundle = load_bundle(Path(tiny.models[0].path))
    histories = MemoryHistories(tiny.store.timelines())
    other = replace(bundle.info, parents=replace(bundle.info.parents, data="f" * 64))
    with pytest.raises(BundleError, match=r"was made from the feature store ffff.*serve it with its own store"):
        Scorer(replace(bundle, info=other), tiny.store, histories)
    schema = replace(bundle.info.schema, tasks=bundle.info.schema.tasks[:1])
    with pytest.raises(BundleError, match="tasks"):
        Scorer(replace(bundle, info=replace(bundle.info, schema=schema)), tiny.store, histories)


def test_weights_that_do_not_fit_are_refused_by_name(tiny: Tiny) -> None:
    bundle = load_bundle(Path(tiny.models[0].path))
    histories = MemoryHistories(tiny.store.timelines())
    for change, says in (
        ({"dense.heads.head.weight": None}, r"missing dense\.heads\.head\.weight"),
        ({"dense.extra": torch.zeros(1)}, r"unexpected dense\.extra"),
        ({"tables.tables.ad_id.weight": torch.zeros(3, 8)}, r"tables\.ad_id\.weight \(needs"),
    ):
        weights = {k: v for k, v in (bundle.weights | change).items() if v is not None}
        with pytest.raises(BundleError, match=says):
            Scorer(replace(bundle, weights=weights), tiny.store, histories)


def test_a_bundle_without_calibration_of_a_task_is_refused(tiny: Tiny) -> None:
    bundle = load_bundle(Path(tiny.models[0].path))
    bare = replace(bundle.info, calibration={"click": bundle.info.calibration["click"]})
    with pytest.raises(BundleError, match=r"calibrates \['click'\], the model predicts \['click', 'conversion'\]"):
        Scorer(replace(bundle, info=bare), tiny.store, MemoryHistories(tiny.store.timelines()))


def test_a_damaged_bundle_or_store_never_loads(tiny: Tiny, tmp_path: Path) -> None:
    model = tiny.models[0]
    copy = tmp_path / "bundle"
    shutil.copytree(model.path, copy)
    weights = copy / "weights.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    with pytest.raises(BundleError, match=r"weights\.safetensors was changed or damaged"):
        load_scorers([replace(model, path=str(copy))])
    with pytest.raises(BundleError, match="it is another bundle"):
        load_scorers([replace(model, bundle_hash="0" * 64)])
    shutil.copytree(tiny.store_path, tmp_path / "store")
    victim = tmp_path / "store" / "entities" / "ads.parquet"
    raw = bytearray(victim.read_bytes())
    raw[len(raw) // 2] ^= 1
    victim.write_bytes(raw)
    with pytest.raises(StoreError, match=r"entities/ads\.parquet is corrupted"):
        load_scorers([replace(model, store_path=str(tmp_path / "store"))])


def test_a_missing_feature_store_says_where_it_was_looked_for(tmp_path: Path) -> None:
    (tmp_path / "runs" / "generated" / "store").mkdir(parents=True)
    assert find_store("generated/store", tmp_path / "runs", "m").is_dir()
    assert find_store("runs/generated/store", tmp_path / "runs", "m").is_dir()
    assert find_store(str(tmp_path / "before/generated/store"), tmp_path / "runs", "m").is_dir()
    with pytest.raises(BundleError, match=r'm: its feature store gone does not exist.*run "make pipeline" again'):
        find_store("gone", tmp_path / "runs", "m")


def test_models_of_one_store_share_it(tiny: Tiny) -> None:
    a, b = load_scorers(tiny.models[:2])
    assert a._store is b._store and a._histories is b._histories


def test_saved_twice_gives_equal_scores(tiny: Tiny, tmp_path: Path) -> None:
    """The bundle holds everything: another copy of it, loaded elsewhere, scores alike."""
    bundle = load_bundle(Path(tiny.models[0].path))
    again = save_random(tmp_path, tiny.store, bundle.info.config, "feed", bundle.info.parents)
    (copy,) = load_scorers([ServedModel(again.name, "9", again.path, again.bundle_hash, again.store_path)])
    (first,) = load_scorers(tiny.models[:1])
    np.testing.assert_array_equal(serve(copy, 5, LATE_MS, [1, 2]).p, serve(first, 5, LATE_MS, [1, 2]).p)
    assert copy.model.version == "9" and copy.model.bundle_hash == again.bundle_hash
