"""Knowledge records: written once, read back aligned to any order; gaps and other teachers are refused."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from gem.errors import DataError
from gem.transfer.knowledge import KnowledgeRecords, Teacher, entire_space, read_records, write_records
from tests.unit.model.synthetic import make_schema

SCHEMA = make_schema()
TEACHER = Teacher("a" * 64, "2024-03-07")
IDS = np.array([5, 900, 2**53 + 1, 7, 11, 3], np.int64)
LOGITS = np.array([[0.1 * i, -0.3 * i] for i in range(6)], np.float32)
REPRESENTATION = np.arange(12, dtype=np.float32).reshape(6, 2) / 7


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two parts of one teacher."""
    for part, rows in enumerate((slice(0, 4), slice(4, 6))):
        write_records(tmp_path / f"part-{part}.parquet", SCHEMA, TEACHER, IDS[rows], LOGITS[rows], REPRESENTATION[rows])
    return tmp_path


def read(folder: Path, ids: np.ndarray, **changes: object) -> KnowledgeRecords:
    return read_records(folder, SCHEMA, ids, **({"teacher_hash": TEACHER.bundle_hash} | changes))  # type: ignore[arg-type]


def test_records_come_back_in_the_order_asked_for(folder: Path) -> None:
    order = np.array([4, 0, 2, 2, 5])
    got = read(folder, IDS[order])
    assert got.known.tolist() == [1] * 5
    np.testing.assert_array_equal(got.logits, LOGITS[order])
    for row, i in enumerate(order):
        click = 1 / (1 + math.exp(-float(LOGITS[i, 0])))
        conversion = click / (1 + math.exp(-float(LOGITS[i, 1])))
        assert got.p[row].tolist() == pytest.approx([click, conversion], rel=1e-6)


def test_a_part_says_who_wrote_it_and_keeps_the_representation(folder: Path) -> None:
    table = pq.read_table(folder / "part-1.parquet")
    assert table.schema.metadata == {b"teacher": b"a" * 64, b"trained_to_day": b"2024-03-07"}
    kept = np.array(table["representation"].to_pylist(), np.float32)
    np.testing.assert_allclose(kept, REPRESENTATION[4:], rtol=1e-3)


def test_missing_rows_are_unknown_and_too_many_are_refused(folder: Path) -> None:
    ids = np.concatenate([IDS, [1, 10**15]])
    got = read(folder, ids, min_share=0.7)
    assert got.known.tolist() == [1] * 6 + [0, 0]
    np.testing.assert_array_equal(got.logits[:6], LOGITS)
    with pytest.raises(DataError, match=r"knowledge covers 75\.0% of 8 impressions, at least 99% is needed"):
        read(folder, ids)
    assert read(folder, IDS[:0]).p.shape == (0, 2)


def test_no_record_at_all(folder: Path, tmp_path: Path) -> None:
    assert read(folder, np.array([1, 2]), min_share=0.0).known.tolist() == [0, 0]
    with pytest.raises(DataError, match=r"no knowledge records under .*generate-knowledge"):
        read(tmp_path / "elsewhere", IDS)
    for part in folder.glob("*.parquet"):
        part.unlink()
    write_records(folder / "part-0.parquet", SCHEMA, TEACHER, IDS[:0], LOGITS[:0], REPRESENTATION[:0])
    got = read(folder, IDS, min_share=0.0)
    assert got.known.tolist() == [0] * 6
    assert got.p.shape == (6, 2)
    with pytest.raises(DataError, match=r"covers 0\.0% of 6"):
        read(folder, IDS)


def test_another_teacher_is_refused_even_in_one_part(folder: Path) -> None:
    with pytest.raises(DataError, match="was written by teacher aaaaaaaaaaaa, expected bbbbbbbbbbbb"):
        read(folder, IDS, teacher_hash="b" * 64)
    write_records(folder / "part-2.parquet", SCHEMA, Teacher("c" * 64, ""), IDS[:1], LOGITS[:1], REPRESENTATION[:1])
    with pytest.raises(DataError, match=r"part-2\.parquet was written by teacher cccccccccccc"):
        read(folder, IDS)


def test_a_damaged_part_is_a_data_error_that_names_the_file(folder: Path) -> None:
    (folder / "part-1.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(DataError, match=r"part-1\.parquet"):
        read(folder, IDS)


def test_entire_space_is_below_its_condition_and_survives_extremes() -> None:
    logits = np.array([[-800, 800], [800, 800], [800, -800], [0, 0]], np.float32)
    with np.errstate(all="raise", under="ignore"):
        p = entire_space(SCHEMA, logits)
    assert p.dtype == np.float32
    np.testing.assert_allclose(p, [[0, 0], [1, 1], [1, 0], [0.5, 0.25]], atol=1e-12)
