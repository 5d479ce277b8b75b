"""The committed dataset specs: each parses, and KuaiRand reads the real tables and the public release's layout."""

from __future__ import annotations

import copy
import re
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from gem.data.ingest.canonical import (
    check_spec,
    flag_names,
    kind_names,
    read_entities,
    read_events,
    read_impressions,
    resolve_files,
)
from gem.data.spec import (
    DatasetSpec,
    EntitySpec,
    EventSource,
    FeatureSpec,
    ImpressionSpec,
    LabelSpec,
    RowTime,
    SurfaceSpec,
    TableSpec,
    load_spec,
    parse_spec,
)
from gem.errors import SpecError
from tests.contract.dataset_rows import KUAIRAND_LOG, KUAIRAND_USER, KUAIRAND_VIDEO
from tests.contract.dataset_rows import KUAIRAND_NOON as NOON


def spec_of(root, name):
    return load_spec(root / "pipelines" / "datasets" / f"{name}.yaml")


@pytest.fixture
def release(tmp_path):
    """Three impressions, one of them twice, with the names and columns of the public release."""
    rows = [
        f"1,20,20220501,1200,{NOON},1,0,0,0,0,0,1,9000,12000,0,0,0,0,1",
        f"1,20,20220501,1200,{NOON},1,0,0,0,0,0,1,9000,12000,0,0,0,0,1",
        f"2,21,20220501,1201,{NOON + 60_000},0,1,0,0,0,0,0,0,8000,0,0,1,0,4",
    ]
    (tmp_path / "log_standard_4_22_to_5_08_pure.csv").write_text("\n".join([KUAIRAND_LOG, *rows]) + "\n")
    (tmp_path / "log_random_4_22_to_5_08_pure.csv").write_text("not read")
    user = '1,full_active,0,1,-124,514,500+,150,"[100,1k)",3,"[1,5)",799,730+,' + ",".join(
        ["1"] * 4 + ["2.0"] + [""] * 13
    )
    (tmp_path / "user_features_pure.csv").write_text(f"{KUAIRAND_USER}\n{user}\n")
    videos = ['20,7349781,NORMAL,2022-04-10,LongImport,0.0,,720.0,1280.0,9155697141,9.0,"39,2"']
    videos += ["21,7,AD,2022-04-09,Kmovie,0.0,8000.0,,,5,,"]
    (tmp_path / "video_features_basic_pure.csv").write_text("\n".join([KUAIRAND_VIDEO, *videos]) + "\n")
    return tmp_path


def test_every_committed_spec_parses_and_says_where_it_is_from(repo_root):
    paths = sorted((repo_root / "pipelines" / "datasets").glob("*.yaml"))
    assert {p.stem for p in paths} == {
        "aliexpress",
        "aliexpress-tianchi",
        "criteo-kaggle",
        "criteo-terabyte",
        "generated",
        "kuairand",
        "kuairand-1k",
        "kuairand-27k",
        "movielens",
        "movielens-1m",
        "taobaoad",
        "taobaoad-x1",
    }
    readme = (repo_root / "pipelines" / "datasets" / "README.md").read_text()
    for path in paths:
        spec = load_spec(path)
        assert spec.name == path.stem and spec.licence and spec.source and f"| `{spec.name}` |" in readme
        assert spec.name == "generated" or ("# Licence:" in (head := path.read_text()) and "# Layout:" in head)
        assert len(flag_names(spec)) <= 16 and spec.impressions.outcomes
        check_spec(spec, {})  # all that can be checked without files


def outcome_columns(spec):
    imp = spec.impressions
    columns = {*imp.outcomes, *(label.column for label in spec.labels.values() if label.column)}
    for source in spec.events:
        if source.table == imp.table:
            columns |= {*source.flags.values(), *([source.dwell.column] if source.dwell else [])}
            columns |= {source.action} if source.action else set()
    return sorted(columns)


def test_no_outcome_of_any_spec_can_be_read_as_a_feature(repo_root):
    tried = 0
    for path in sorted((repo_root / "pipelines" / "datasets").glob("*.yaml")):
        raw = load_spec(path).model_dump(mode="json")
        sides = ["context", *(s for s in ("users", "ads") if raw[s]["table"] == raw["impressions"]["table"])]
        for column in outcome_columns(load_spec(path)):
            for side in sides:
                spied = copy.deepcopy(raw)
                spied[side]["features"].append({"name": "spy", "column": column, "kind": "numeric"})
                with pytest.raises(SpecError, match=f'features.spy: column "{column}" is an outcome'):
                    check_spec(parse_spec(spied), {})
                tried += 1
    assert tried >= 45


def test_every_field_of_a_spec_stands_in_the_reference(repo_root):
    text = (repo_root / "pipelines" / "datasets" / "README.md").read_text().split("## Reference")[1]
    models = [
        DatasetSpec,
        TableSpec,
        RowTime,
        ImpressionSpec,
        LabelSpec,
        EventSource,
        FeatureSpec,
        EntitySpec,
        SurfaceSpec,
    ]
    missing = {
        f"{m.__name__}.{name}" for m in models for name in m.model_fields if not re.search(rf"[`.]{name}\b", text)
    }
    assert not missing


def test_the_example_of_the_readme_is_a_working_spec(repo_root, tmp_path):
    import yaml

    text = (repo_root / "pipelines" / "datasets" / "README.md").read_text()
    spec = parse_spec(yaml.safe_load(re.findall(r"```yaml\n(.*?)```", text, re.S)[0]))
    (tmp_path / "log.csv").write_text(f"user,item,ts,place,clicked\nann,b1,{NOON // 1000},home,1\n")
    (tmp_path / "people.csv").write_text("user,country\nann,fr\n")
    pq.write_table(pa.table({"item": ["b1"], "brand": ["x"], "price": [3]}), tmp_path / "items.parquet")
    files = resolve_files(spec, tmp_path)
    check_spec(spec, files)
    rows = read_impressions(spec, files["log"][0]).rows.to_pydict()
    assert (rows["user"], rows["time_ms"], rows["label:click"]) == (["ann"], [NOON], [1])


def test_kuairand_reads_the_layout_of_the_release(repo_root, release):
    spec = spec_of(repo_root, "kuairand")
    files = resolve_files(spec, release)
    check_spec(spec, files)
    assert files["history"] == [] and [f.relative for f in files["log"]] == ["log_standard_4_22_to_5_08_pure.csv"]
    rows = read_impressions(spec, files["log"][0]).rows.to_pydict()
    assert rows["user"] == [1, 1, 2] and rows["surface"] == ["1", "1", "4"]
    assert rows["label:click"] == [1, 1, 0] and rows["label:conversion"] == [1, 1, 0]
    assert rows["ctx:duration_ms"] == [12000.0, 12000.0, 8000.0]
    assert rows["dup"][0] == rows["dup"][1] != rows["dup"][2]
    events = read_events(spec, 0, files["log"][0]).rows.to_pydict()
    bit = {name: 1 << i for i, name in enumerate(flag_names(spec))}
    assert events["flags"] == [bit["click"] | bit["long_view"]] * 2 + [bit["like"] | bit["profile_enter"]]
    assert events["dwell"] == [5, 5, 1]  # 9 s lies in [8, 16): 2 + 3; 0 s lies below one second
    videos = read_entities(spec, "ad", files["videos"][0]).rows.to_pydict()
    assert videos["tag"] == [["39", "2"], None] and videos["video_duration"] == [None, 8000.0]
    assert videos["music_id"] == ["9155697141", "5"] and videos["upload_dt"][0] == "2022-04-10"
    users = read_entities(spec, "user", files["users"][0]).rows.to_pydict()
    assert users["onehot_feat4"] == ["2"] and users["fans_user_num_range"] == ["[100,1k)"]


def test_kuairand_also_finds_the_folder_above_data(repo_root, release, tmp_path):
    (tmp_path / "KuaiRand-Pure").mkdir()
    data = tmp_path / "KuaiRand-Pure" / "data"
    data.mkdir()
    for path in release.glob("*.csv"):
        shutil.move(path, data / path.name)
    check_spec(spec := spec_of(repo_root, "kuairand"), resolve_files(spec, data.parent))


def test_kuairand_names_a_column_that_is_missing(repo_root, release):
    path = release / "log_standard_4_22_to_5_08_pure.csv"
    path.write_text(path.read_text().replace("long_view", "longview"))
    spec = spec_of(repo_root, "kuairand")
    with pytest.raises(SpecError, match=r'no column "long_view". Did you mean "longview"\?'):
        check_spec(spec, resolve_files(spec, release))


def test_kuairand_reads_the_real_tables(repo_root, kuairand_dir):
    spec = spec_of(repo_root, "kuairand")
    files = resolve_files(spec, kuairand_dir)
    check_spec(spec, files)
    got = read_impressions(spec, files["log"][0])
    raw = pq.read_table(files["log"][0].uri)
    assert got.raw_rows == got.rows.num_rows == raw.num_rows == 198_895 and got.quarantined.num_rows == 0
    # against the raw columns, grouped by Arrow's own join of the three key columns
    distinct = raw.group_by(["user_id", "video_id", "time_ms"]).aggregate([]).num_rows
    assert pc.count_distinct(got.rows["dup"]).as_py() == distinct
    assert 0.020 < 1 - distinct / raw.num_rows < 0.032  # the README says about 2.6 %
    kept = np.unique(got.rows["dup"].to_numpy(), return_index=True)[1]  # the first of equal rows
    assert (raw[spec.impressions.day].to_numpy()[kept] == 20220506).sum() == 13_561  # as the README of the data says
    assert pc.sum(got.rows["label:click"]).as_py() == pc.sum(raw["is_click"]).as_py()
    events = read_events(spec, 0, files["log"][0]).rows
    assert events["dup"].equals(got.rows["dup"])
    likes = np.asarray(events["flags"]) >> flag_names(spec).index("like") & 1
    np.testing.assert_array_equal(likes, np.asarray(raw["is_like"]))


def test_kuairand_history_is_never_later_than_the_users_own_log(repo_root, kuairand_dir):
    spec = spec_of(repo_root, "kuairand")
    files = resolve_files(spec, kuairand_dir)
    raw = pq.read_table(files["history"][0].uri)
    log = pq.read_table(files["log"][0].uri, columns=["user_id", "time_ms"])
    first = dict(zip(*log.group_by("user_id").aggregate([("time_ms", "min")]).to_pydict().values(), strict=True))
    for source, column in ((1, "watch_seq"), (2, "like_seq"), (3, "long_watch_seq")):
        rows = read_events(spec, source, files["history"][0]).rows
        assert kind_names(spec)[source] == spec.events[source].kind
        assert rows["ad"].to_pylist() == pc.list_flatten(raw[column]).to_pylist()
        last = dict(zip(*rows.group_by("user").aggregate([("time_ms", "max")]).to_pydict().values(), strict=True))
        # three users' last watch is their first logged impression, at the same ms: a cut is strictly before, so unseen
        assert all(last[u] <= first[u] for u in last.keys() & first.keys())
        assert sum(last[u] == first[u] for u in last.keys() & first.keys()) <= 3


def test_kuairand_entities_cover_the_real_log(repo_root, kuairand_dir):
    spec = spec_of(repo_root, "kuairand")
    files = resolve_files(spec, kuairand_dir)
    rows = read_impressions(spec, files["log"][0]).rows
    for side, table, size in (("user", "users", 27_285), ("ad", "videos", 7_583)):
        got = read_entities(spec, side, files[table][0])
        assert got.rows.num_rows == size and got.quarantined.num_rows == 0
        assert pc.all(pc.is_in(rows[side], got.rows["key"].combine_chunks())).as_py()
