"""Scenario D17, the models' part: their figures with and without the users who may be no people."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipelines.closing import FROM_EVALUATION
from pipelines.evaluate import flagged, measure
from pipelines.report import render_report
from tests.unit.data.fault_log import DAY_MS, START_MS, build, good_shows, put
from tests.unit.pipelines.test_report import Page, make_summary, model, task

SHOWS = good_shows(tuple(range(1, 31)))


def store_with_bot(folder: Path, day: int):
    """User 77 clicks on everything, ten times a second, on one day."""
    bot = [
        {"show": 5000 + i, "u": 77, "a": 10, "tab": "feed", "t": START_MS + day * DAY_MS + i * 90, "y": 1}
        for i in range(99)
    ]
    return build(put(folder / "raw", shows=[*SHOWS, *bot]), folder / "store")[1]


def naive_auc(y: np.ndarray, p: np.ndarray) -> float:
    wins = (p[y == 1][:, None] > p[y == 0][None, :]) + 0.5 * (p[y == 1][:, None] == p[y == 0][None, :])
    return float(wins.mean())


def test_d17_metrics_with_and_without_hot_users(tmp_path: Path) -> None:
    store = store_with_bot(tmp_path, day=3)
    days = (store.split.validation_day, store.split.test_day)
    imp = store.impressions(days)
    bot = imp.user == store.users.index_of(77)
    assert flagged(store, imp).tolist() == bot.tolist() and int(bot.sum()) == 99
    p = np.random.default_rng(0).uniform(0.05, 0.6, (len(imp), 2))
    p[bot, 0] = 0.01  # a model that knows nothing of bots
    out = measure(store, imp, p, "gem", "hash")
    with_all, without = out["tasks"]["click"], out["without_hot_users"]["click"]
    use = imp.day == 1
    assert with_all["rows"] == without["rows"] + 99 == int(use.sum())
    assert with_all["auc"]["value"] == pytest.approx(naive_auc(imp.labels[use, 0], p[use, 0]))
    use &= ~bot
    assert without["auc"]["value"] == pytest.approx(naive_auc(imp.labels[use, 0], p[use, 0]))
    assert without["auc"]["value"] > with_all["auc"]["value"] + 0.2
    assert without["ne"]["value"] < with_all["ne"]["value"] and set(out["without_hot_users"]) == {"click", "conversion"}
    assert out["gate"]["tasks"]["click"]["rows"] == with_all["rows"]  # gates decide on all rows


def test_d17_nothing_is_said_where_no_hot_user_is_in_the_test_day(tmp_path: Path) -> None:
    store = store_with_bot(tmp_path, day=0)
    assert [u["user"] for u in store.manifest["hot_users"]] == ["77"]
    imp = store.impressions((store.split.validation_day, store.split.test_day))
    assert measure(store, imp, np.full((len(imp), 2), 0.3), "gem", "hash")["without_hot_users"] == {}


def test_d17_the_report_says_what_the_figures_would_be() -> None:
    assert "without_hot_users" in FROM_EVALUATION
    plain = make_summary()
    assert "no people" not in Page(render_report(plain)).text
    clean = {"click": task(0.85, rows=600)}
    found = render_report(make_summary(models={"gem": model("foundation", "gem", "feed", without_hot_users=clean)}))
    assert "gem, click: NE 0.850, AUC 0.700 (400 rows fewer)" in Page(found).text
