"""The contract over all files of a table: types that change, columns that go, days and files that are missing."""

from __future__ import annotations

import re
import subprocess

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gem.data.ingest import contract
from gem.data.ingest.canonical import check_spec, read_impressions, resolve_files
from gem.data.ingest.sources import DataFolder, sha256
from gem.data.spec import FeatureSpec
from gem.errors import DataError, SpecError
from tests.unit.data.small_log import CONTEXT, NOON, log_table, make_spec, write

DAYS = ("2022-05-01", "2022-05-02", "2022-05-03")
SPEC = make_spec(
    context=CONTEXT,
    tables=make_spec().model_dump()["tables"] | {"log": {"files": ["log/*/*", "log/*"]}},
)


def day_table(**columns):
    base = {"len": [1.5, 2.5], "slot": ["p", "q"]}
    return log_table(**({"u": [1, 2]} | base | columns))


def put_days(folder, tables):
    for day, table in zip(DAYS, tables, strict=False):
        home = folder / "log" / f"day={day}"
        home.mkdir(parents=True, exist_ok=True)
        if table is not None:
            pq.write_table(table, home / "log.parquet")
    write(folder, pa.table({"ref": [1], "t": [NOON // 1000]}), "sales.parquet")
    write(folder, pa.table({"u": [1]}), "users.parquet")
    (folder / "ads.csv").write_text("a\n10\n")


def check(folder, spec=SPEC):
    files = resolve_files(spec, folder)
    check_spec(spec, files)
    return files


@pytest.mark.parametrize(
    ("change", "had", "now"),
    [
        ({"len": pa.array([1, 2])}, r"double \(float\)", r"int64 \(integer\)"),
        ({"y": [0.0, 1.0]}, r"int64 \(integer\)", r"double \(float\)"),
        ({"u": ["1", "2"]}, r"int64 \(integer\)", r"string \(text\)"),
        ({"slot": [["p"], ["q"]]}, r"string \(text\)", r"list<\w+: string> \(list<text>\)"),
        ({"t": pa.array([NOON, NOON], pa.timestamp("ms"))}, r"int64", r"timestamp\[ms\] \(timestamp\)"),
        ({"y": [True, False]}, r"int64 \(integer\)", r"bool \(bool\)"),
        ({"slot": pa.nulls(2)}, "string", "no type any more"),
    ],
)
def test_d12_schema_change(tmp_path, change, had, now):
    """One day with another type is refused by name with a diff; without that day everything is fine."""
    put_days(tmp_path, [day_table(), day_table(**change), day_table()])
    column = next(iter(change))
    with pytest.raises(DataError, match=rf'day={DAYS[1]}/log.parquet: column "{column}" of table "log"') as error:
        check(tmp_path)
    text = str(error.value)
    assert f"day={DAYS[0]}/log.parquet" in text and "leave its day out" in text
    for part in (had, now):
        assert re.search(part, text)
    (tmp_path / "log" / f"day={DAYS[1]}" / "log.parquet").unlink()
    assert len(check(tmp_path)["log"]) == 2


def test_d12_a_dropped_column_is_refused_and_a_new_one_is_fine(tmp_path):
    put_days(tmp_path, [day_table(), day_table().drop_columns(["slot"]), day_table(extra=[1, 2])])
    with pytest.raises(
        DataError, match=rf'day={DAYS[1]}/log.parquet: column "slot" .*had: slot in .*{DAYS[0]}.*has now: '
    ):
        check(tmp_path)
    put_days(tmp_path, [day_table(), day_table(), day_table(extra=[1, 2])])
    check(tmp_path)


def test_types_that_read_alike_and_files_without_rows(tmp_path):
    small = day_table(u=pa.array([1, 2], pa.int32()), slot=pa.array(["p", "q"]).dictionary_encode())
    nothing = day_table(slot=pa.nulls(2), len=["a", "b"]).slice(0, 0)
    put_days(tmp_path, [nothing, day_table(), small])
    check(tmp_path)
    put_days(tmp_path, [day_table(slot=pa.nulls(2))] * 3)  # null everywhere is no change
    check(tmp_path)


def test_a_column_may_be_new_from_its_day_on(tmp_path):
    since = FeatureSpec(name="slot", kind="categorical", since=DAYS[1])
    spec = SPEC.model_copy(update={"context": SPEC.context.model_copy(update={"features": [since]})})
    put_days(tmp_path, [day_table().drop_columns(["slot"]), day_table(), day_table()])
    files = check(tmp_path, spec)["log"]
    assert [read_impressions(spec, f).rows["ctx:slot"].to_pylist() for f in files[:2]] == [[None, None], ["p", "q"]]
    with pytest.raises(DataError, match=rf'day={DAYS[0]}/log.parquet: column "slot"'):
        check(tmp_path)
    put_days(tmp_path, [day_table(), day_table(), day_table().drop_columns(["slot"])])
    with pytest.raises(DataError, match=rf'day={DAYS[2]}/log.parquet: column "slot"'):
        check(tmp_path, spec)
    write(tmp_path / "log", day_table().drop_columns(["slot"]))
    (tmp_path / "log" / f"day={DAYS[2]}" / "log.parquet").unlink()
    with pytest.raises(SpecError, match=rf"`since: {DAYS[1]}` excuses only files in folders of earlier days"):
        check(tmp_path, spec)


def test_d11_a_missing_day_is_an_error_unless_allowed(tmp_path):
    put_days(tmp_path, [day_table(), None, day_table()])
    files = check(tmp_path)
    with pytest.raises(DataError, match=rf'table "log": no partition for {DAYS[1]}, between .*allow_missing_days=true'):
        contract.check_partitions(SPEC, files, allow_missing=False)
    contract.check_partitions(SPEC, files, allow_missing=True)
    write(tmp_path / "log", day_table())  # not a partitioned table any more
    contract.check_partitions(SPEC, check(tmp_path), allow_missing=False)
    (tmp_path / "log" / "log.parquet").unlink()
    put_days(tmp_path, [day_table(), day_table().slice(0, 0), day_table()])  # a day without rows is no gap
    contract.check_partitions(SPEC, check(tmp_path), allow_missing=False)


def test_d18_a_file_that_is_not_the_listed_one(tmp_path):
    put_days(tmp_path, [day_table(), day_table()])
    (tmp_path / "a b.txt").write_text("notes")
    names = [p.relative_to(tmp_path).as_posix() for p in sorted(tmp_path.rglob("*")) if p.is_file()]
    assert contract.check_sums(DataFolder(tmp_path), {}) == 0  # no list, nothing to compare
    made = subprocess.run(["sha256sum", *names], cwd=tmp_path, capture_output=True, check=True, text=True)
    (tmp_path / "SHA256SUMS").write_text(made.stdout.replace("  log/", " *./log/"))
    files = [f for found in check(tmp_path).values() for f in found]
    hashes = {f.relative: sha256(f) for f in files}
    assert contract.check_sums(DataFolder(tmp_path), hashes) == len(files) == 5
    path = tmp_path / "log" / f"day={DAYS[1]}" / "log.parquet"
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 3] ^= 64
    path.write_bytes(bytes(damaged))
    with pytest.raises(DataError, match=rf"log/day={DAYS[1]}/log.parquet: the file is not the one in SHA256SUMS"):
        contract.check_sums(DataFolder(tmp_path), hashes | {f"log/day={DAYS[1]}/log.parquet": sha256(path)})
    (tmp_path / "a b.txt").unlink()
    with pytest.raises(DataError, match=r"SHA256SUMS: 1 listed files are not there: a b.txt"):
        contract.check_sums(DataFolder(tmp_path), hashes)
    (tmp_path / "SHA256SUMS").write_text("not a sum\n")
    with pytest.raises(DataError, match=r"SHA256SUMS, line 1: not a line of sha256sum: 'not a sum'"):
        contract.check_sums(DataFolder(tmp_path), hashes)


def test_a_wrong_separator_is_suspected(tmp_path):
    put_days(tmp_path, [day_table()])
    (tmp_path / "ads.csv").write_text("a\tb\n10\t1\n")
    with pytest.raises(SpecError, match=r"separated by '\\t': set tables.ads.separator"):
        check(tmp_path)
