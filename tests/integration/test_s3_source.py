"""Raw files in an S3-compatible store (moto on this machine): found, hashed, cut, read, and every refusal explained."""

from __future__ import annotations

import hashlib
import io

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest
from moto.server import ThreadedMotoServer

from gem.data.ingest import contract, raw
from gem.data.ingest.canonical import check_spec, read_entities, read_impressions, resolve_files
from gem.data.ingest.sources import DataFolder, RawFile, open_input, sha256
from gem.errors import DataError, SpecError
from tests.unit.data.small_log import NOON, log_table, make_spec

SECRET = "not-to-be-seen-anywhere"
DAYS = ("2022-05-01", "2022-05-02")


@pytest.fixture(scope="module")
def store():
    """(options of the URI, file system to write with)"""
    patch = pytest.MonkeyPatch()
    patch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    system = pafs.S3FileSystem(
        endpoint_override=f"{host}:{port}", scheme="http", region="us-east-1", allow_bucket_creation=True
    )
    system.create_dir("raw-ads")
    yield f"?endpoint_override={host}:{port}&scheme=http&region=us-east-1", system
    server.stop()
    patch.undo()


def parquet_bytes(table, **options):
    out = io.BytesIO()
    pq.write_table(table, out, **options)
    return out.getvalue()


def put(system, key, content):
    with system.open_output_stream(f"raw-ads/{key}", compression=None) as out:
        out.write(content)


@pytest.fixture(scope="module")
def folder(store):
    options, system = store
    for i, day in enumerate(DAYS):
        times = [NOON + i * 86_400_000] * 40
        content = parquet_bytes(log_table(u=list(range(40)), t=times), row_group_size=10)
        put(system, f"a world/log/day={day}/log-é 1.parquet", content)
    put(system, "a world/sales.parquet", parquet_bytes(pa.table({"ref": [1], "t": [NOON // 1000]})))
    put(system, "a world/users.csv", b"u\n" + b"".join(b"%d\n" % i for i in range(500)))
    put(system, "a world/ads.csv.gz", pa.compress(b"a\n10\n", codec="gzip", asbytes=True))
    return f"s3://raw-ads/a world{options}"


SPEC = make_spec(
    tables={
        "log": {"files": ["log/day=*/log-*.parquet"]},
        "sales": {"files": ["**/sales.parquet"]},
        "users": {"files": ["users.csv"]},
        "ads": {"files": ["*ads.csv*"]},
    }
)


def test_files_of_a_bucket_are_found_hashed_and_read(store, folder):
    files = resolve_files(SPEC, folder)
    assert [f.relative for f in files["log"]] == [f"log/day={d}/log-é 1.parquet" for d in DAYS]
    assert {n: len(f) for n, f in files.items()} == {"log": 2, "sales": 1, "users": 1, "ads": 1}
    check_spec(SPEC, files)
    contract.check_partitions(SPEC, files, allow_missing=False)
    assert contract.check_sums(DataFolder(folder), {}) == 0
    put(store[1], "a world/SHA256SUMS", f"{'0' * 64}  users.csv\n".encode())
    with pytest.raises(DataError, match=r"users.csv: the file is not the one in SHA256SUMS"):
        contract.check_sums(DataFolder(folder), {"users.csv": sha256(files["users"][0])})
    put(store[1], "a world/SHA256SUMS", f"{sha256(files['users'][0])}  users.csv\n".encode())
    assert contract.check_sums(DataFolder(folder), {"users.csv": sha256(files["users"][0])}) == 1
    log = RawFile.from_dict(files["log"][0].to_dict())
    content = store[1].open_input_file(f"raw-ads/a world/{log.relative}").read()
    assert sha256(log) == hashlib.sha256(content).hexdigest() and log.size == len(content)
    assert read_impressions(SPEC, log).rows["user"].to_pylist() == list(range(40))
    assert read_entities(SPEC, "ad", files["ads"][0]).rows["key"].to_pylist() == [10]


def test_parts_of_files_in_a_bucket(folder):
    files = resolve_files(SPEC, folder)
    parts = raw.parts(SPEC.tables["log"], files["log"][1], 1)
    assert len(parts) > 4
    rows = [read_impressions(SPEC, files["log"][1], p).rows["user"].to_pylist() for p in parts]
    assert np.concatenate(rows).tolist() == list(range(40))
    parts = raw.parts(SPEC.tables["users"], files["users"][0], 300)
    keys = [read_entities(SPEC, "user", files["users"][0], p).rows["key"].to_pylist() for p in parts]
    assert len(parts) > 4 and np.concatenate(keys).tolist() == list(range(500))


def test_a_missing_bucket_folder_or_key_is_named(store, folder):
    options, _ = store
    with pytest.raises(SpecError, match=r"s3://no-such-ads/x: no such bucket or folder .*Check the name in DATA_DIR"):
        resolve_files(SPEC, f"s3://no-such-ads/x{options}")
    with pytest.raises(SpecError, match=r"s3://raw-ads/nothing: no such bucket or folder"):
        resolve_files(SPEC, f"s3://raw-ads/nothing{options}")
    gone = resolve_files(SPEC, folder)["users"][0].to_dict()
    gone = RawFile.from_dict(gone | {"uri": gone["uri"].replace("users", "losers")})
    for attempt in (open_input, sha256, lambda f: read_entities(SPEC, "user", f)):
        with pytest.raises(DataError, match=r"s3://raw-ads/a%20world/losers.csv: no such file"):
            attempt(gone)
    log = SPEC.tables["log"].model_copy(update={"files": ["lag/*.parquet"]})
    lacking = SPEC.model_copy(update={"tables": SPEC.tables | {"log": log}})
    with pytest.raises(SpecError, match=r'table "log": no file matches .* which holds .*ads.csv.gz, log/, sales'):
        resolve_files(lacking, folder)


def test_credentials_are_refused_and_never_shown(store, folder, monkeypatch):
    options, _ = store
    with pytest.warns(
        UserWarning, match=r"s3://raw-ads/a: the credentials in the URI are not used.*AWS_SECRET"
    ) as told:
        named = DataFolder(f"s3://me:{SECRET}@raw-ads/a{options}&secret_key={SECRET}")
    found = DataFolder(folder).find(["users.csv"])[0]
    assert SECRET not in f"{named!r} {named} {[str(w.message) for w in told]} {found!r} {found}"
    refused = OSError(f"When listing objects: AWS Error ACCESS_DENIED during ListObjectsV2 for {SECRET}")

    def refuse(*_):
        raise refused

    monkeypatch.setattr(
        "gem.data.ingest.sources._locate", lambda uri: (type("Closed", (), {"get_file_info": refuse})(), "raw")
    )
    with pytest.raises(DataError, match=r"store refused the credentials .*Set AWS_ACCESS_KEY_ID") as error:
        named.check()
    assert SECRET not in str(error.value)
