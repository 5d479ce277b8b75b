"""The report: well-formed, self-contained, escaped, and honest about what is missing."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from gem.errors import DataError
from pipelines.report import render_report, write_report
from pipelines.report.lineage import graph_of, narrow_svg, wide_svg
from pipelines.summary import metric, validate_summary

VOID = {"meta", "br", "img", "link", "input", "hr"}


class Page(HTMLParser):
    """Checks that tags nest, collects ids, tags, attributes and text."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == [], f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-1:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


def task(ne: float, **fields: Any) -> dict[str, Any]:
    values = {"ne": metric(ne, ne - 0.01, ne + 0.01), "auc": metric(0.7), "gauc": metric(0.6), "calibration": metric(1)}
    return {"rows": 1000, "base_rate": 0.05, "bayes_ne": 0.8, **values, **fields}


def model(kind: str, name: str, surface: str, **fields: Any) -> dict[str, Any]:
    base = {
        "kind": kind, "hash": f"hash-of-{name}", "version": 2, "promoted": True, "reasons": ["NE below 1"],
        "parents": {"data": "store-hash", "teacher": "" if kind == "foundation" else "hash-of-gem"},
        "tasks": {"click": task(0.9), "conversion": task(0.95)},
        "by_surface": {surface: {"click": task(0.91)}},
        "by_day": {"2026-01-01": {"click": {"ne": metric(0.9)}}, "2026-01-02": {"click": {"ne": metric(0.92)}}},
        "calibration_curve": {"click": [{"p": 0.01, "y": 0.012, "n": 10}, {"p": 0.1, "y": 0.09, "n": 10}]},
    }  # fmt: skip
    return {**base, **fields}


def make_summary(**fields: Any) -> dict[str, Any]:
    base = {
        "dataset": "generated", "commit": "c" * 40, "started_utc": "2026-11-30T16:00:00Z", "seconds": 221.0,
        "stages": {"preprocess": {"seconds": 3, "rows_in": 10, "rows_out": 9}, "pretrain": {"seconds": 9}},
        "models": {"gem": model("foundation", "gem", "feed"), "gem-feed": model("vertical", "feed", "feed")},
        "history_length_histogram": {"edges": [0, 1, 2, 4], "counts": [3, 4, 5]},
        "data": {"duplicates": 1240, "quarantined": {"events": {"null user id": 12}},
                 "vocab": {"ad_id": {"rows": 99, "unknown_rate": 0.031}}},
        "split": {"test_day": "2026-01-10"}, "config": {"model": {"dim": 32}}, "next": ["make serve"],
    }  # fmt: skip
    return {**base, **fields}


@pytest.fixture(scope="module")
def page() -> str:
    return render_report(make_summary())


def test_page_is_well_formed_and_says_the_verdict_first(page: str) -> None:
    parsed = Page(page)
    assert parsed.text.index("All 2 models passed their gates") < parsed.text.index("Models")
    for part in ("Models", "Pictures", "Stages", "Lineage", "Data health", "Next", "Configuration", "How to read this"):
        assert part in parsed.texts
    assert "The base rate is the one of the very rows evaluated" in parsed.text
    for figure in ("1,240 dropped", "null user id", "3.10 %", "make serve", "0.890–0.910"):
        assert figure in parsed.text


def test_page_needs_nothing_from_outside(page: str) -> None:
    parsed = Page(page)
    assert "http://" not in page and "https://" not in page and "@import" not in page
    assert not {"script", "link", "img", "iframe", "object", "embed"} & set(parsed.tags)
    for tag, name, value in parsed.attributes:
        if name in ("src", "href"):
            assert value.startswith("#"), (tag, name, value)
        assert not name.startswith("on"), (tag, name)
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", page))


def test_ids_are_unique_and_references_resolve(page: str) -> None:
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids)) > 0
    references = re.findall(r'href="#([^"]+)"', page) + re.findall(r"url\(#([^)]+)\)", page)
    assert references and set(references) <= set(ids)


def test_pictures_follow_the_theme(page: str) -> None:
    """Black or white left over from matplotlib would vanish in one of the two themes."""
    svgs = re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)
    assert len(svgs) >= 6
    for svg in svgs:
        assert not re.search(r"#[0-9a-f]{6}\b", svg), re.search(r".{60}#[0-9a-f]{6}\b", svg)
    defined = set(re.findall(r"(--[a-z0-9-]+):", page))
    assert set(re.findall(r"var\((--[a-z0-9-]+)\)", page)) <= defined


EVIL = '</style><script>alert("x")</script>&\'<img src=x onerror=alert(1)> $\\frac{1}{0}$'


def test_everything_from_outside_is_escaped() -> None:
    raw = make_summary(
        dataset=EVIL, commit=EVIL, started_utc=EVIL, recipe=EVIL, next=[EVIL], split={EVIL: EVIL}, config={EVIL: EVIL},
        stages={EVIL: {"seconds": 1, "run_id": EVIL}}, mlflow={"tracking_uri": EVIL, "parent_run_id": EVIL},
        data={"duplicates": EVIL, "quarantined": {EVIL: {EVIL: 1}},
              "vocab": {EVIL: {"rows": EVIL, "unknown_rate": EVIL}}},
    )  # fmt: skip
    evil = model("vertical", EVIL, EVIL, hash=EVIL, group=EVIL, reasons=[EVIL], version=EVIL, run_id=EVIL)
    evil["parents"] = {"data": EVIL, "teacher": EVIL, "commit": EVIL}
    evil["tasks"] = {EVIL: task(0.9, auc=metric(None, reason=EVIL), baseline_ne=0.9, bayes_ne=None, baseline=EVIL)}
    evil["by_surface"] = {EVIL: {EVIL: task(0.9)}}
    evil["by_day"] = {EVIL: {EVIL: task(0.9)}}
    evil["calibration_curve"] = {EVIL: [{"p": 0.1, "y": 0.1, "n": 1}]}
    raw["models"] = {EVIL: evil, "gem": model("foundation", "gem", EVIL), "_hidden": model("vertical", "h", "x")}
    text = render_report(raw)
    parsed = Page(text)
    assert not {"script", "img"} & set(parsed.tags)
    assert [a for a in parsed.attributes if a[1].startswith("on")] == []
    assert text.count("</style>") >= 1 and "</style><script>" not in text
    assert parsed.text.count('alert("x")') > 5


def test_missing_metrics_say_why() -> None:
    empty = {"rows": 0, "ne": metric(None, reason="no rows"), "auc": metric(None, reason="only one class in 12 rows")}
    bare = model("foundation", "gem", "feed", tasks={"click": empty}, by_day={}, calibration_curve={}, promoted=False)
    bare |= {"reasons": [], "by_surface": {"feed": {"click": empty}}, "version": None}
    text = Page(render_report(make_summary(models={"gem": bare}))).text
    for reason in ("no rows", "only one class in 12 rows", "not computed", "no reason was recorded"):
        assert reason in text
    assert "No model was promoted; whatever was serving before goes on serving." in text
    assert "by day" not in text and "NE of click by surface" not in text  # nothing to draw, so no empty picture
    assert "nan" not in text.lower().split()


def test_an_empty_summary_still_gives_a_page() -> None:
    text = Page(render_report({"dataset": "d", "started_utc": "t", "seconds": 0, "stages": {}, "models": {}})).text
    assert "No model was trained." in text and "Pictures" not in text


def test_many_models_and_extreme_values() -> None:
    models = {"gem": model("foundation", "gem", "feed")}
    for i in range(12):
        models[f"vm-{i}-" + "long" * 30] = model("vertical", f"v{i}", f"surface {i}" * 9, promoted=i % 2 == 0)
    models["gem"]["calibration_curve"]["click"] = [{"p": 0.0, "y": 0.0, "n": 5}, {"p": 1e-9, "y": 1.0, "n": 1}]
    models["gem"]["by_surface"]["feed"]["click"] = task(40.0, bayes_ne=None)
    text = Page(render_report(make_summary(models=models))).text
    assert "7 of 13 models passed their gates and were promoted." in text


def test_summary_is_not_changed_and_a_wrong_one_is_refused(tmp_path: Path) -> None:
    raw = make_summary()
    before = copy.deepcopy(raw)
    path = write_report(raw, tmp_path / "deep" / "report.html")
    assert raw == before and path.read_text(encoding="utf-8") == render_report(raw)  # and the same each time
    with pytest.raises(DataError, match=r"summary\.json"):
        write_report({"dataset": "x"}, tmp_path / "no.html")
    assert not (tmp_path / "no.html").exists()


def test_lineage_edges_follow_the_hashes() -> None:
    models = {
        "gem": model("foundation", "gem", "feed"),
        "child": model("vertical", "child", "feed"),
        "older": model("vertical", "older", "feed", parents={"data": "store-hash", "teacher": "hash-of-last-week"}),
        "alone": model("vertical", "alone", "feed", parents={"data": "store-hash"}, promoted=False),
    }
    graph = graph_of(validate_summary(make_summary(models=models)))
    assert set(graph.edges) == {
        ("data", "store"), ("store", "gem"), ("gem", "child"), ("store", "alone"),
        ("store", "teacher:hash-of-last-week"), ("teacher:hash-of-last-week", "older"),
        ("child", "deploy:child"), ("older", "deploy:older"), ("alone", "deploy:alone"),
    }  # fmt: skip
    states = {node.key: node.lines[0] for node in graph.column(4)}
    assert states["deploy:child"] == "champion · version 2" and states["deploy:alone"] == "not promoted"
    assert wide_svg(graph).count("<rect") == len(graph.nodes) == 10
    assert narrow_svg(graph).count("<rect") == 7  # deployments are written into their models' boxes


def test_importing_the_report_does_not_import_matplotlib() -> None:
    code = (
        "import sys, pipelines.report, pipelines.console; sys.exit('matplotlib' in sys.modules or 'ray' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}, check=False)
    assert done.returncode == 0
