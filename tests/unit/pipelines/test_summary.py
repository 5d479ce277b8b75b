"""summary.json: schema, safe writing, the latest link, the closing table."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gem.errors import DataError
from pipelines.summary import (
    count_quarantined,
    final_table,
    link_latest,
    metric,
    read_summary,
    stage_summary,
    task_summary,
    validate_summary,
    write_summary,
)

NAN = float("nan")


@dataclass
class Metric:
    value: float | None
    low: float | None = None
    high: float | None = None
    reason: str = ""


def model(kind: str = "foundation", **fields: Any) -> dict[str, Any]:
    metrics = {
        "ne": Metric(0.912, 0.901, 0.923),
        "auc": Metric(0.745, 0.74, 0.75),
        "gauc": Metric(None, reason="no user has both labels"),
        "calibration": Metric(1.012, 1.0, 1.02),
        "ne_of_something_else": Metric(0.1),
    }
    tasks = {"click": task_summary(15234, 0.07, metrics, bayes_ne=0.871)}
    return {"kind": kind, "tasks": tasks, "promoted": True, "version": 3, "reasons": ["NE is below 1"], **fields}


def summary(**fields: Any) -> dict[str, Any]:
    stages = {
        "preprocess": stage_summary(31.2, {"rows_in": 553211, "rows_out": 551000, "quarantined": {"e": {"x": 7}}})
    }
    base = {"dataset": "generated", "started_utc": "2026-11-30T16:00:00Z", "seconds": 221.4, "stages": stages}
    return {**base, "models": {"gem": model()}, "next": ["make serve"], "peak_rss_mb": 5321.0, **fields}


def test_metric_without_a_value_says_why() -> None:
    assert metric(NAN) == {"value": None, "low": None, "high": None, "reason": "not computed"}
    assert metric(None, reason="single class")["reason"] == "single class"
    assert metric(0.9, 0.8, float("inf"))["high"] is None


def test_task_summary_takes_the_four_metrics() -> None:
    task = model()["tasks"]["click"]
    assert task["ne"] == {"value": 0.912, "low": 0.901, "high": 0.923, "reason": ""}
    assert task["gauc"]["reason"] == "no user has both labels"
    assert set(task) == {
        "rows", "base_rate", "ne", "auc", "gauc", "calibration", "bayes_ne", "baseline_ne", "baseline",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("value", "total"), [(None, 0), (5, 5), ({}, 0), ({"a": {"x": 1, "y": 2}, "b": {"x": 4}}, 7), ({"x": 3}, 3)]
)
def test_count_quarantined(value: object, total: int) -> None:
    assert count_quarantined(value) == total


def test_write_and_read_back(tmp_path: Path) -> None:
    loop = tmp_path / "runs" / "generated" / "loops" / "one"
    raw = summary(config={"lr": NAN}, models={"gem": model(by_day={"2026-01-01": {"click": {"ne": metric(0.9)}}})})
    path = write_summary(raw, loop)
    assert path == loop / "summary.json"
    assert [p.name for p in loop.iterdir()] == ["summary.json"]  # nothing left beside it
    assert path.stat().st_mode & 0o777 == 0o644
    plain = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} in JSON"))
    assert plain["config"]["lr"] is None
    assert plain["stages"]["preprocess"]["quarantined"] == 7
    assert plain["models"]["gem"]["by_day"]["2026-01-01"]["click"]["auc"]["reason"] == "not computed"
    assert read_summary(loop) == read_summary(path) == plain
    assert validate_summary(plain) == plain  # a validated summary is a fixed point


def test_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_summary(summary(), tmp_path)
    before = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_summary(summary(seconds=1.0), tmp_path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seconds": -1}, "seconds: Input should be greater"),
        ({"sconds": 1}, "sconds: Extra inputs are not permitted"),
        ({"models": {"gem": model(kind="teacher")}}, "models.gem.kind"),
        ({"models": {"gem": model(tasks={"click": {"rows": -3}})}}, "models.gem.tasks.click.rows"),
        ({"history_length_histogram": {"edges": [0, 1], "counts": [1, 2]}}, "2 counts need 3 edges, got 2"),
        ({"data": {"store": Path("x")}}, ""),
    ],
)
def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    if not message:
        assert write_summary(summary(**change), tmp_path).exists()  # a path is written as text
        return
    with pytest.raises(DataError) as caught:
        write_summary(summary(**change), tmp_path)
    assert message in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_read_summary_of_nothing_and_of_rubbish(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no such file\. Run `make pipeline` first"):
        read_summary(tmp_path)
    (tmp_path / "summary.json").write_text('{"dataset": ')
    with pytest.raises(DataError, match="not JSON"):
        read_summary(tmp_path)
    (tmp_path / "summary.json").write_text("[1]")
    with pytest.raises(DataError, match="expected a JSON object, got a list"):
        read_summary(tmp_path)


def test_latest_link_is_relative_and_moves(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for name in ("one", "two"):
        loop = runs / "generated" / "loops" / name
        loop.mkdir(parents=True)
        link = link_latest(runs, loop)
        assert link.resolve() == loop and not os.path.isabs(os.readlink(link))
    assert sorted(p.name for p in runs.iterdir()) == ["generated", "latest"]
    runs.rename(tmp_path / "moved")
    assert (tmp_path / "moved" / "latest").resolve().name == "two"


def test_latest_that_is_a_folder_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "latest").mkdir()
    with pytest.raises(DataError, match=r"is not a link\. Move it away"):
        link_latest(tmp_path, tmp_path / "loop")


def test_table_holds_what_a_person_asks_for() -> None:
    second = model("vertical", promoted=False, version=None, reasons=["calibration 1.31 is above 1.10"])
    second["tasks"]["click"] |= {"bayes_ne": None, "ne": metric(None, reason="no rows")}
    text = final_table(summary(models={"gem": model(), "gem-feed": second}, report="runs/latest/report.html"))
    lines = text.splitlines()
    assert lines[0] == "generated · 3 min 41 s in all · peak memory 5.2 GB"
    words = [" ".join(line.split()) for line in lines]
    assert "preprocess 31.2 553,211 551,000 7" in words
    assert "gem click 15,234 0.912 [0.901, 0.923] 0.745 - 1.012 0.871 Bayes" in words
    assert "gem-feed click 15,234 - 0.745 - 1.012 1 base rate" in words
    assert "NOT promoted  gem-feed" in lines and "  · calibration 1.31 is above 1.10" in lines
    assert lines[-4:] == ["next", "  make serve", "", "report   runs/latest/report.html"]


def test_table_fits_a_hundred_columns_whatever_the_names() -> None:
    long = "a-name\nwith-a-line-break-" + "x" * 200
    extreme = model("vertical", reasons=["because " * 60, "y" * 300], version=10**30)
    extreme["tasks"] = {long: task_summary(10**12, 0.5, {"ne": Metric(123456.789, -5.0, 1e9)}, bayes_ne=0.5)}
    raw = summary(dataset=long, models={long: extreme}, stages={long: {"seconds": 1e7, "rows_in": 10**15}})
    text = final_table(raw)
    assert max(len(line) for line in text.splitlines()) <= 100
    assert final_table(summary(models={}, stages={}, next=[]))  # nothing to show is no failure
