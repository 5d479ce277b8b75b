"""The audit log: whole lines, never lost, and what can be rolled back to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gem.errors import TrackingError
from gem.lineage.audit import AuditEntry, AuditLog, champions_before


def change(old: str, new: str, action: str = "promote", name: str = "gem") -> AuditEntry:
    return AuditEntry(name, old, new, "h" * 64, ("because",), action, who="me@here", utc="2030-01-01T00:00:00")


def test_lines_are_json_in_order_with_who_and_when(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "runs" / "audit.jsonl")
    assert log.read() == []
    log.append(change("", "1"))
    log.append(AuditEntry("gem-feed", "", "1", "x", ("a", "b")))
    raw = [json.loads(line) for line in log.path.read_text().splitlines()]
    assert [r["name"] for r in raw] == ["gem", "gem-feed"]
    assert raw[1]["who"] and raw[1]["utc"].endswith("+00:00") and raw[1]["reasons"] == ["a", "b"]
    assert log.read("gem") == [change("", "1")] and log.damaged() == []


def test_a_torn_line_costs_only_itself(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "audit.jsonl")
    log.append(change("", "1"))
    with log.path.open("a") as f:
        f.write('{"name": "gem", "from_ver')
    log.append(change("1", "2"))
    assert [e.to_version for e in log.read()] == ["1", "2"]
    assert log.damaged() == [2]


def test_unwritable_log_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TrackingError, match="cannot append"):
        AuditLog(tmp_path / "file" / "audit.jsonl").append(change("", "1"))


@pytest.mark.parametrize(
    ("changes", "before"),
    [
        ([], []),
        ([("", "1")], []),
        ([("", "1"), ("1", "2"), ("2", "3")], ["1", "2"]),
        ([("", "1"), ("1", "2"), ("2", "3"), ("3", "2", "rollback")], ["1"]),
        ([("", "1"), ("1", "2"), ("2", "1", "rollback")], []),
        ([("", "1"), ("1", "2"), ("2", "1", "rollback"), ("1", "3")], ["1"]),
        ([("", "1"), ("1", "5", "observed"), ("5", "6")], ["1", "5"]),
    ],
)
def test_what_can_be_rolled_back_to(changes: list[tuple[str, ...]], before: list[str]) -> None:
    assert champions_before([change(*c) for c in changes]) == before
