"""`python -m pipelines cost`: the table, the JSON, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipelines.__main__ import main
from pipelines.cost import bytes_of, short

Capture = pytest.CaptureFixture[str]


def test_table_and_json_agree(capsys: Capture) -> None:
    assert main(["cost", "nano", "--world", "4"]) == 0
    table = capsys.readouterr().out
    assert main(["cost", "nano", "--world", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    teacher = found["models"]["teacher"]
    assert f"{teacher['dense_parameters']:,}" in table and "planned schema of the generated world" in table
    assert teacher["world"] == 4 and teacher["training_flops"] == pytest.approx(3 * teacher["forward_flops"])
    assert sum(teacher["parts"].values()) == pytest.approx(teacher["forward_flops"])
    need = teacher["memory"]
    assert need["total"] == sum(v for k, v in need.items() if k != "total") and bytes_of(need["total"]) in table
    assert max(map(len, table.splitlines())) <= 100


def test_xl_is_costed_without_being_built(capsys: Capture) -> None:
    assert main(["cost", "xl", "--json"]) == 0
    teacher = json.loads(capsys.readouterr().out)["models"]["teacher"]
    assert teacher["table_parameters"] > 5e11 and teacher["dense_parameters"] > 5e8
    assert teacher["world"] == 64 and teacher["fits_gb"] == 80 and teacher["least_world"] == 64


def test_overrides_and_baselines(capsys: Capture) -> None:
    assert main(["cost", "nano", "--set", "model.arch=dlrm", "--json"]) == 0
    models = json.loads(capsys.readouterr().out)["models"]
    assert (models["teacher"]["arch"], models["student"]["arch"]) == ("dlrm", "gem")
    assert models["teacher"]["parts"]["reading"] == 0


def test_what_is_refused(capsys: Capture, tmp_path: Path) -> None:
    for arguments, said in (
        (["xll"], 'no recipe "xll". Did you mean "xl"'),
        (["nano", "--world", "0"], "--world 0: allowed are 1 to"),
        (["nano", "--store", str(tmp_path)], "not a finished feature store"),
        (["nano", "--dataset", "kuairand"], 'no feature store of "kuairand"'),
        (["nano", "--set", "model.with=3"], 'no field "with"'),
    ):
        assert main(["cost", *arguments, "--runs", str(tmp_path)]) == 1
        assert said in capsys.readouterr().err


def test_numbers_are_short() -> None:
    assert [short(v) for v in (7, 1640960, 999.7e3, 5.5e11, 2e12)] == ["7", "1.64 M", "1000 k", "550 G", "2 T"]
