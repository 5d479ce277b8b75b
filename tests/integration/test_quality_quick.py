"""The quality benchmark on a tiny made world: all of its machinery, none of its figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks import harness, quality

SECTIONS = "arms,scaling,generated,surfaces"


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> dict[str, Any]:
    monkeypatch.setattr(harness, "OUT", folder)
    quality.main([*options, "--folder", str(folder / "kept")])
    (path,) = folder.glob("*.json")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def test_quick_run_measures_every_claim_and_is_not_made_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--quick", "--seeds", "2", "--trials", "2", "--workers", "1", "--sections", SECTIONS, "--peers", "")
    found = run(tmp_path, monkeypatch, *options)
    claims = {c["id"]: c for c in found["claims"]}
    assert set(claims) == {
        "auc_over_gbdt", "ne_gain_over_best_peer", "ne_gain_over_best_peer_long_view", "compute_multiplier_vs_dlrm",
        "compute_multiplier_vs_din", "bayes_excess_vs_din", "worst_surface_vs_single", "calibration_click_low",
        "calibration_click_high", "calibration_long_view_low", "calibration_long_view_high",
    }  # fmt: skip
    assert [i for i, c in claims.items() if c["value"] is None] == ["auc_over_gbdt"]  # no peer was asked for
    assert not [r for r in found["rows"] if r["section"] == "failed"]

    arms = [r for r in found["rows"] if r["section"] == "arms" and r["task"] == "click"]
    assert [r["arm"] for r in arms] == ["gem", "lr", "dlrm", "dcnv2", "din", "wukong"]
    assert all(r["flops_per_impression"] > 0 and r["parameters_tables"] > 0 and len(r["seeds"]) == 2 for r in arms)
    tried = [r for r in found["rows"] if r["section"] == "arms: trials"]
    assert len(tried) == 12 and all("auc" not in r and "ne" not in r for r in tried)  # validation only
    assert "seed noise floor of gem" in capsys.readouterr().out.split("test day, 2 seeds")[0]

    again = run(tmp_path, monkeypatch, *options)
    assert "tuning: 0 runs to make" in capsys.readouterr().out
    assert again["claims"] == found["claims"]


def test_without_the_data_the_claims_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run(tmp_path, monkeypatch, "--sections", "arms,scaling,surfaces", "--data-dir", str(tmp_path))
    assert len(found["claims"]) == 6
    assert all(c["value"] is None and not c["met"] and "no kuairand/" in c["note"] for c in found["claims"])
