"""The command itself: exit status, page, findings.json, nothing left behind."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipelines.__main__ import main
from tests.unit.pipelines import check_log


def run(folder: Path, spec: dict[str, Any], *more: str) -> int:
    path = folder / "spec.yaml"
    path.write_text(yaml.safe_dump(spec))
    return main(["check", str(path), "--runs", str(folder / "runs"), *more])


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = str(check_log.write(tmp_path / "data", check_log.tables()))
    assert run(tmp_path, check_log.spec(), "--data-dir", data) == 0
    said = capsys.readouterr().out
    page, saved = (tmp_path / "runs" / "small" / "check" / name for name in ("index.html", "findings.json"))
    assert str(page) in said and "small: 0 errors, 0 warnings" in said
    html = page.read_text()
    assert html.count("<svg") >= 6 and not re.search(r"<script|<link|https?://|src=", html)
    assert {f["level"] for f in json.loads(saved.read_text())["findings"]} <= {"OK", "HINT"}
    assert list((tmp_path / "runs").glob("check-*")) == []

    spec = check_log.spec()
    spec["labels"]["click"]["column"] = "<i>"
    assert run(tmp_path, spec, "--data-dir", data, "--out", str(tmp_path / "out")) == 2
    assert "<i>" not in (tmp_path / "out" / "index.html").read_text()
    spec["labels"]["click"]["no such key"] = 1
    assert run(tmp_path, spec, "--data-dir", data) == 2
    assert "no such key" in capsys.readouterr().out
    assert run(tmp_path, check_log.spec(), "--data-dir", str(tmp_path / "absent")) == 1
    assert "absent" in capsys.readouterr().err
