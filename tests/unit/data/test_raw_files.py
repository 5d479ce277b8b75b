"""Raw files: found, refused when damaged, and read alike from CSV and Parquet."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gem.data.ingest.canonical import (
    read_impressions,
    resolve_files,
)
from gem.errors import DataError, SpecError
from tests.unit.data.small_log import CONTEXT, NOON, log_table, make_spec, reasons, write


def test_csv_lines_and_cells_that_do_not_parse(tmp_path):
    lines = ["u,a,tab,t,y,ref,len,slot"]
    lines += [f"{i},10,x,{NOON},1,{i},2.5,1" for i in range(5)]
    lines += ["8,10,x", "9,10,x,soon,1,9,1,1", f"10,10,x,{NOON},maybe,9,1,1", f"11,10,x,{NOON},1,9,long,1"]
    (tmp_path / "log.csv").write_text("\n".join(lines) + "\n")
    got = read_impressions(make_spec(context=CONTEXT), tmp_path / "log.csv")
    assert got.rows["user"].to_pylist() == [0, 1, 2, 3, 4]
    assert sorted(reasons(got)) == ["bad_label", "unparsable", "unparsable", "unparsable"]
    originals = [json.loads(r) for r in got.quarantined["row"].to_pylist()]
    assert {"line": "8,10,x"} in originals and originals[0]["t"] == "soon"
    assert got.raw_rows == 9 == got.rows.num_rows + got.quarantined.num_rows


def test_csv_and_parquet_of_the_same_rows_read_alike(tmp_path):
    table = log_table(u=[1, 2, 3], y=[0, 1, None], len=[1.5, None, -2e-3], slot=[1.0, None, 2.0], tab=["ü", None, "x"])
    header = "u,a,tab,t,y,ref,len,slot"
    body = [f"1,10,ü,{NOON},0,0,1.5,1.0", f"2,10,,{NOON},1,1,,", f"3,10,x,{NOON},,2,-2e-3,2"]
    (tmp_path / "log.csv").write_text("\ufeff" + "\r\n".join([header, *body]), encoding="utf-8")
    spec = make_spec(context=CONTEXT)
    parquet, csv = read_impressions(spec, write(tmp_path, table)), read_impressions(spec, tmp_path / "log.csv")
    assert parquet.rows.to_pydict() == csv.rows.to_pydict()
    assert parquet.rows.schema == csv.rows.schema


def test_files_without_rows(tmp_path):
    write(tmp_path, log_table().slice(0, 0))
    (tmp_path / "log.csv").write_text("u,a,tab,t,y,ref\n")
    for name in ("log.parquet", "log.csv"):
        got = read_impressions(make_spec(), tmp_path / name)
        assert got.raw_rows == got.rows.num_rows == got.quarantined.num_rows == 0
        assert got.rows.schema.field("time_ms").type == pa.int64()


def all_tables(tmp_path):
    write(tmp_path, log_table(), "log-b.parquet")
    write(tmp_path, log_table(), "log-a.parquet")
    write(tmp_path, pa.table({"ref": [1], "t": [NOON // 1000]}), "sales.parquet")
    write(tmp_path, pa.table({"u": [1]}), "users.parquet")
    (tmp_path / "ads.csv").write_text("a\n10\n")


def test_resolve_files_sorts_and_skips_an_optional_table(tmp_path):
    all_tables(tmp_path)
    files = resolve_files(make_spec(), tmp_path)
    assert [p.name for p in files["log"]] == ["log-a.parquet", "log-b.parquet"]
    assert files["posts"] == []


def test_missing_table_names_pattern_and_folder(tmp_path):
    all_tables(tmp_path)
    (tmp_path / "sales.parquet").rename(tmp_path / "sale.parquet")
    with pytest.raises(SpecError, match=r'table "sales": no file matches .*sales\*\.parquet.* holds .*sale\.parquet'):
        resolve_files(make_spec(), tmp_path)
    with pytest.raises(SpecError, match="no such folder"):
        resolve_files(make_spec(), tmp_path / "nowhere")


def test_an_empty_or_truncated_file_is_named(tmp_path):
    all_tables(tmp_path)
    whole = (tmp_path / "log-b.parquet").read_bytes()
    (tmp_path / "log-b.parquet").write_bytes(b"")
    with pytest.raises(DataError, match=r"log-b\.parquet: the file is empty \(0 bytes\)"):
        resolve_files(make_spec(), tmp_path)
    (tmp_path / "log-b.parquet").write_bytes(whole[:-20])
    with pytest.raises(DataError, match=r"log-b\.parquet: truncated or no Parquet file"):
        resolve_files(make_spec(), tmp_path)


def test_a_flipped_byte_under_a_checksum_is_refused(tmp_path):
    path = tmp_path / "log.parquet"
    table = log_table(u=list(range(1000)))
    pq.write_table(table, path, write_page_checksum=True, compression="none", use_dictionary=False)
    data = bytearray(path.read_bytes())
    data[data.find((500).to_bytes(8, "little"))] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(DataError, match=r"log\.parquet: damaged or not readable"):
        read_impressions(make_spec(), path)


def test_bytes_that_are_no_utf8_are_refused(tmp_path):
    (tmp_path / "log.csv").write_bytes(f"u,a,tab,t,y,ref\n1,10,\xfc,{NOON},0,1\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"log\.csv: damaged or not readable.*UTF8"):
        read_impressions(make_spec(), tmp_path / "log.csv")


@pytest.mark.parametrize(("separator", "shown"), [("::", "'::'"), (";", "';'"), ("\t", r"'\\t'")])
def test_a_header_with_another_separator_is_named(tmp_path, separator, shown):
    (tmp_path / "log.csv").write_text(separator.join("uatyr") + "\n" + separator.join("12345") + "\n")
    with pytest.raises(SpecError, match=f'no column "u".*Is the separator right.*the header has {shown}'):
        read_impressions(make_spec(), tmp_path / "log.csv")


@pytest.mark.parametrize("separator", [",", "::"])
def test_lines_that_all_have_another_width_than_the_spec_says(tmp_path, separator):
    names = ["u", "a", "tab", "t", "y", "ref"]
    spec = make_spec(
        tables=dict(
            make_spec().model_dump()["tables"], log={"files": ["log*"], "columns": names, "separator": separator}
        )
    )
    (tmp_path / "log.csv").write_text("1;10;x;5;1;7\n" * 3)
    with pytest.raises(DataError, match=f"expected 6 .*found 1 with the separator '{separator}'.*Separated by ';'"):
        read_impressions(spec, tmp_path / "log.csv")
