"""The prediction log survives restarts, rotation and a cut last line."""

from __future__ import annotations

from pathlib import Path

from serving.request_log import RequestLog, read


def test_replicas_write_files_of_their_own_and_read_joins_them(tmp_path: Path) -> None:
    a, b = RequestLog(tmp_path / "log", "replica#../a", 10_000), RequestLog(tmp_path / "log", "b", 10_000)
    a.write({"n": 1})
    b.write({"n": 2})
    RequestLog(tmp_path / "log", "replica#../a", 10_000).write({"n": 3})
    assert a.path.parent == tmp_path / "log"
    assert sorted(r["n"] for r in read(tmp_path / "log")) == [1, 2, 3]


def test_size_is_bounded_by_one_rotation(tmp_path: Path) -> None:
    log = RequestLog(tmp_path, "r", 200)
    for n in range(100):
        log.write({"n": n, "text": "x" * 20})
    assert sum(p.stat().st_size for p in tmp_path.iterdir()) <= 400
    rest = [r["n"] for r in read(tmp_path)]
    assert rest == list(range(rest[0], 100)), "the newest records are kept, in order"


def test_a_cut_last_line_is_skipped(tmp_path: Path) -> None:
    log = RequestLog(tmp_path, "r", 10_000)
    log.write({"n": 1})
    log.write({"n": 2})
    log.path.write_bytes(log.path.read_bytes()[:-3])
    assert [r["n"] for r in read(tmp_path)] == [1]
