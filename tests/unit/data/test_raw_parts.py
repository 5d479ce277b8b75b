"""Parts of raw files: together they are the file, wherever it is cut; and columns made from paths and row numbers."""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import random
import tracemalloc

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gem.data.ingest import raw
from gem.data.ingest.contract import check_columns
from gem.data.ingest.raw import Part, RawFile, header, parts, read_columns
from gem.data.ingest.spec_columns import column_uses
from gem.data.spec import TableSpec
from gem.errors import DataError, SpecError
from tests.unit.data.small_log import make_spec

CELLS = ["a", "b c", '"q"', "x\ny", '5" tv', "", "é", "l\r\nm", ",", '""', '7"x8"', "\n\n"]
ODD_LINES = ["\n", "too,few\n", '5" tv,x,a "stray" quote\n', '"ab"cd,"x",1\n', 'x,"two\nlines\n\nmore",z\n', ",,,\n"]


def table_spec(**options):
    return TableSpec(files=["*"], **options)


def cut_everywhere(table, path, columns, sizes=(1, 30, 333)):
    """The whole file, after checking that its parts of every size give the same."""
    whole = read_columns(table, path, columns)
    for size in sizes:
        cut = parts(table, path, size)
        assert all(a.end == b.start or a.rows for a, b in itertools.pairwise(cut)) and cut[0].start == 0
        got = [read_columns(table, path, columns, Part.from_dict(p.to_dict())) for p in cut]
        assert pa.concat_tables([g.table for g in got]).to_pydict() == whole.table.to_pydict()
        assert np.concatenate([g.number for g in got]).tolist() == whole.number.tolist()
        assert [line for g in got for line in g.unparsable] == whole.unparsable
    return whole


@pytest.mark.parametrize("seed", range(6))
def test_csv_parts_are_cut_outside_quotes(tmp_path, seed):
    rng = random.Random(seed)
    text, rows = io.StringIO(), []
    quoting = rng.choice([csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
    writer = csv.writer(text, lineterminator=rng.choice(["\n", "\r\n"]), quoting=quoting)
    writer.writerow(["a", "b", "c"])
    for _ in range(rng.randrange(5, 40)):
        rows.append([rng.choice(CELLS) for _ in range(3)])
        writer.writerow(rows[-1])
    (tmp_path / "log.csv").write_bytes(text.getvalue().encode())
    whole = cut_everywhere(table_spec(), tmp_path / "log.csv", ["a", "b", "c"])
    assert [list(r.values()) for r in whole.table.to_pylist()] == rows  # as the csv module wrote them


@pytest.mark.parametrize("seed", range(6))
def test_csv_parts_with_stray_quotes_and_broken_lines(tmp_path, seed):
    rng = random.Random(seed)
    lines = [rng.choice([*ODD_LINES, "1,2,3\n", "4,5,6\r\n"]) for _ in range(30)]
    text = "a,b,c\n" + "".join(lines) + rng.choice(["", "7,8,9", "\n\n\n"])
    (tmp_path / "log.csv").write_bytes(text.encode())
    whole = cut_everywhere(table_spec(), tmp_path / "log.csv", ["c", "a"])
    assert len(whole.unparsable) == lines.count("too,few\n") + lines.count(",,,\n")
    assert whole.table.num_rows == sum(lines.count(x) for x in [*ODD_LINES[2:5], "1,2,3\n", "4,5,6\r\n"]) + text.count(
        "7,8"
    )


@pytest.mark.parametrize("with_header", [True, False])
@pytest.mark.parametrize("separator", ["::", "\t"])
def test_separators_and_encodings(tmp_path, separator, with_header):
    rows = [[str(i), "Amélie" if i % 3 else "", str(10 * i)] for i in range(20)]
    body = "".join(separator.join(r) + "\n" for r in rows) + (f"x{separator}y\n" * 2)
    head = separator.join("abc") + "\n" if with_header else ""
    (tmp_path / "log.dat").write_bytes((head + body).encode("latin-1"))
    named = {} if with_header else {"columns": list("abc")}
    table = table_spec(separator=separator, encoding="latin-1", format="csv", **named)
    whole = cut_everywhere(table, tmp_path / "log.dat", ["c", "b"])
    assert whole.table.to_pydict() == {"c": [r[2] for r in rows], "b": [r[1] for r in rows]}
    assert header(table, tmp_path / "log.dat") == ["a", "b", "c"] and len(whole.unparsable) == 2


def test_compressed_text_is_one_part_and_not_too_large(tmp_path):
    (tmp_path / "log.tsv.gz").write_bytes(gzip.compress(b"a\tb\n" + b"1\t2\n" * 500))
    table = table_spec(separator="\t")
    assert len(parts(table, tmp_path / "log.tsv.gz", 10)) == 1
    assert cut_everywhere(table, tmp_path / "log.tsv.gz", ["b"]).table["b"].to_pylist() == ["2"] * 500
    with pytest.raises(DataError, match=r"day_0.gz: 15.0 GB of compressed text .* decompress it first"):
        parts(table_spec(format="csv"), RawFile("day_0.gz", "/data/day_0.gz", 15 * 10**9, 0))


@pytest.mark.parametrize(("rows", "group"), [(0, 1), (1, 1), (1000, 100), (1000, 1000), (101, 50)])
def test_parquet_parts(tmp_path, rows, group):
    table = pa.table({"i": np.arange(rows), "s": [str(i) for i in range(rows)]})
    with pq.ParquetWriter(tmp_path / "log.parquet", table.schema) as writer:
        for at in range(0, rows, group):
            writer.write_table(table.slice(at, group))
            writer.write_table(table.slice(0, 0))  # an empty row group
    whole = cut_everywhere(table_spec(), tmp_path / "log.parquet", ["s", "i"], (1000, 5000, 10**9))
    assert whole.table.to_pydict() == table.select(["s", "i"]).to_pydict()
    if rows == 1000:
        assert len(parts(table_spec(), tmp_path / "log.parquet", 2000)) > 5


def test_a_file_of_a_header_and_a_file_of_one_row(tmp_path):
    for text, rows in (("a,b", 0), ("a,b\n", 0), ("a,b\n1,2", 1)):
        (tmp_path / "log.csv").write_text(text)
        assert cut_everywhere(table_spec(), tmp_path / "log.csv", ["b"]).table.num_rows == rows


def test_reading_a_part_takes_memory_for_that_part(tmp_path):
    line = b"12345678,abcdefgh,1651406400000\n"
    (tmp_path / "log.csv").write_bytes(b"u,a,t\n" + line * 400_000)  # 12.8 MB
    table, size = table_spec(), 1 << 20
    tracemalloc.start()
    cut = parts(table, tmp_path / "log.csv", size)
    python_peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    pool = pa.system_memory_pool()
    old = pa.default_memory_pool()
    pa.set_memory_pool(pool)
    try:
        before, rows = pool.max_memory(), 0
        for part in cut:
            rows += read_columns(table, tmp_path / "log.csv", ["u"], part).table.num_rows
    finally:
        pa.set_memory_pool(old)
    assert rows == 400_000 and len(cut) >= 11 and max(p.end - p.start for p in cut) < 2 * size
    assert python_peak < 12 * size
    assert pool.max_memory() <= max(before, 30 * size)


def test_an_unclosed_quote_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("gem.data.ingest.csv_cuts.MAX_RECORD", 1000)
    (tmp_path / "log.csv").write_bytes(b'a,b\n1,2\n"open,2\n' + b"1,2\n" * 2000)
    with pytest.raises(DataError, match=r"after byte 8: a quote is opened there and not closed"):
        parts(table_spec(), tmp_path / "log.csv", 500)


def test_columns_of_paths_constants_and_rows(tmp_path):
    folder = tmp_path / "country=fr" / "day=2026-01-02"
    folder.mkdir(parents=True)
    (folder / "part-7.csv").write_text("a,b\n" + "1,2\n" * 5)
    table = table_spec(
        path_columns=r"part-(?P<number>[0-9]+)", constants={"site": "x", "one": 1}, row_number="row",
        row_time={"column": "t", "start": "2026-01-01", "step_us": 500_500, "day": "number"},
    )  # fmt: skip
    assert header(table, folder / "part-7.csv") == ["a", "b", "country", "day", "number", "site", "one", "row", "t"]
    got = cut_everywhere(table, folder / "part-7.csv", ["country", "number", "one", "row", "t"], (1, 9)).table
    assert got["country"].to_pylist() == ["fr"] * 5 and got["number"].to_pylist() == ["7"] * 5
    assert got["one"].type == pa.int64()
    start = int(np.datetime64("2026-01-08T00:00", "ms").astype(np.int64))
    assert got["t"].to_pylist() == [start, start + 500, start + 1001, start + 1501, start + 2002]
    rows = got["row"].to_pylist()
    assert [r & (2**30 - 1) for r in rows] == [0, 1, 2, 3, 4] and len({r >> 30 for r in rows}) == 1
    other = RawFile.of(folder / "part-7.csv")
    moved = read_columns(table, RawFile("b/" + other.relative, other.uri, 1, 1), ["row"]).table["row"].to_pylist()
    assert not set(rows) & set(moved) and min(rows + moved) >= 0


def test_days_of_row_time_may_have_names(tmp_path):
    for name in ("train", "test", "extra"):
        (tmp_path / f"{name}.csv").write_text("a\n1\n1\n")
    made = {"column": "t", "start": "1970-01-02", "step_us": 1000, "day": "part", "days": {"train": 0, "test": 7}}
    table = table_spec(path_columns="(?P<part>[a-z]+).csv", row_time=made)
    assert read_columns(table, tmp_path / "train.csv", ["t"]).table["t"].to_pylist() == [86_400_000, 86_400_001]
    assert read_columns(table, tmp_path / "test.csv", ["t"]).table["t"].to_pylist()[0] == 8 * 86_400_000
    with pytest.raises(DataError, match=r"no day for 'extra'; row_time.days has \['test', 'train'\]"):
        read_columns(table, tmp_path / "extra.csv", ["t"])
    with pytest.raises(DataError, match=r"does not match path_columns"):
        read_columns(table_spec(path_columns="(?P<x>[0-9])"), tmp_path / "test.csv", ["x"])


def test_a_column_of_the_file_wins_over_the_folder_but_not_over_the_spec(tmp_path):
    (tmp_path / "u=7").mkdir()
    path = tmp_path / "u=7" / "log.csv"
    path.write_text("u,a,tab,t,y,ref\n1,2,x,1651406400000,0,1\n")
    assert read_columns(table_spec(), path, ["u"]).table["u"].to_pylist() == ["1"]
    spec = make_spec()
    spec.tables["log"].constants["tab"] = "y"
    assert any(use.column == "tab" for use in column_uses(spec))
    with pytest.raises(SpecError, match=r'tables.log.constants.tab: .* has a column "tab" of its own'):
        check_columns(spec, {"log": [RawFile.of(path)]})


def test_wrong_rows_of_a_part_keep_their_whole_line(tmp_path):
    (tmp_path / "log.csv").write_text("a,b\n" + "".join(f"{i},x{i}\n" for i in range(100)))
    part = parts(table_spec(), tmp_path / "log.csv", 100)[3]
    rows = read_columns(table_spec(), tmp_path / "log.csv", ["a"], part)
    bad = raw.quarantine(table_spec(), tmp_path / "log.csv", {2: "null_user"}, rows, part)
    at = int(rows.number[2])
    assert bad["row"].to_pylist() == [f'{{"a": "{at}", "b": "x{at}"}}'] and at > 20
