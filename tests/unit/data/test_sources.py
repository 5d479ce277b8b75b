"""Data folders: patterns, partition folders, hashes, and what is said when a place cannot be read."""

from __future__ import annotations

import datetime as dt
import glob
import hashlib
import json
import pickle
from pathlib import Path

import pytest

from gem.data.ingest.globs import glob_regex
from gem.data.ingest.raw import file_format, resolve_files
from gem.data.ingest.sources import DataFolder, RawFile, hive_columns, open_input, partition_day, sha256
from gem.data.spec import TableSpec
from gem.errors import DataError, SpecError
from tests.unit.data.small_log import make_spec

TREE = (
    "day=2026-01-01/x-1.parquet",
    "day=2026-01-01/y-1.parquet",
    "day=2026-01-02/x-2.parquet",
    "day=2026-01-02/deep/x-3.parquet",
    "other/x-4.parquet",
    "x-5.parquet",
    "log[1].csv",
    "log1.csv",
    ".hidden.csv",
)


@pytest.fixture
def tree(tmp_path):
    for name in TREE:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path


@pytest.mark.parametrize(
    "pattern",
    ["*.parquet", "day=*/x-*.parquet", "**/x-*.parquet", "*/*/*", "**/*.csv", "day=2026-01-0[12]/?-1.parquet",
     "log[[]1].csv", "*.csv", "day=*/**/*.parquet", "other/x-4.parquet", "[!x]*", "nothing/*", "*/deep/*.parquet"],
)  # fmt: skip
def test_patterns_find_what_the_standard_library_finds(tree, pattern):
    found = [f.relative for f in DataFolder(tree).find([pattern])]
    expected = {Path(p) for p in glob.glob(pattern, root_dir=tree, recursive=True, include_hidden=True)}
    assert found == sorted(p.as_posix() for p in expected if (tree / p).is_file())
    assert [t for t in sorted(TREE) if glob_regex(pattern).fullmatch(t)] == found


def test_a_file_of_several_patterns_is_found_once_and_uris_of_local_folders_work(tree):
    folder = DataFolder(f"file://{tree}")
    files = folder.find(["day=*/x-*.parquet", "**/x-2.parquet"])
    assert [f.relative for f in files] == ["day=2026-01-01/x-1.parquet", "day=2026-01-02/x-2.parquet"]
    assert files == DataFolder(tree).find(["day=*/x-*.parquet"]) and files[0].is_local
    assert RawFile.from_dict(json.loads(json.dumps(files[0].to_dict()))) == files[0]
    assert "day=2026-01-01/" in folder.listing() and Path(files[0]).read_text() == files[0].relative


def test_hashes_and_content(tree):
    file = DataFolder(tree).file("x-5.parquet")
    assert file is not None and file.read() == b"x-5.parquet" and DataFolder(tree).file("other") is None
    assert sha256(file) == sha256(tree / "x-5.parquet") == hashlib.sha256(b"x-5.parquet").hexdigest()
    (tree / "x-5.parquet").unlink()
    with pytest.raises(DataError, match=r"x-5.parquet: no such file"):
        open_input(file)


@pytest.mark.parametrize(
    ("folder", "day"),
    [
        ("day=2026-01-02", dt.date(2026, 1, 2)),
        ("dt=20260102", dt.date(2026, 1, 2)),
        ("year=2026/date=2026-01-02/hour=3", dt.date(2026, 1, 2)),
        ("Day=2026%2D01%2D02", dt.date(2026, 1, 2)),
        ("day=monday", None),
        ("2026-01-02", None),
        ("day=__HIVE_DEFAULT_PARTITION__", None),
    ],
)
def test_the_day_of_a_partition(folder, day):
    assert partition_day(RawFile(f"{folder}/a.csv", "/nowhere", 1, 1)) == day


def test_columns_of_folders():
    file = RawFile("log/country=fr%20x/day=2026-01-01/empty=__HIVE_DEFAULT_PARTITION__/a=b.csv", "/x", 1, 1)
    assert hive_columns(file) == {"country": "fr x", "day": "2026-01-01", "empty": None}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.parquet", "parquet"),
        ("a.CSV", "csv"),
        ("a.tsv.gz", "csv"),
        ("a.txt", "csv"),
        ("a.snappy.parquet", "parquet"),
    ],
)
def test_formats_by_ending(name, kind):
    assert file_format(TableSpec(files=["*"]), RawFile(name, f"/{name}", 1, 1)) == kind
    with pytest.raises(SpecError, match=r"cannot tell the format from the ending '.dat'"):
        file_format(TableSpec(files=["*"]), RawFile("a.dat", "/a.dat", 1, 1))


@pytest.mark.parametrize("root", ["http://host/x", "foo://bucket/x", "s3://"])
def test_uris_that_nobody_knows(root):
    with pytest.raises(SpecError, match=r"data folder .*Correct DATA_DIR"):
        resolve_files(make_spec(), root)


def test_a_uri_that_went_through_a_path_is_mended_and_errors_survive_pickling():
    assert str(DataFolder(Path("s3://bucket/a b/c"))) == "s3://bucket/a%20b/c"
    with pytest.raises(SpecError) as error:
        DataFolder("foo://x/y").check()
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)
