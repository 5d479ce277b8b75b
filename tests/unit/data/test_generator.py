"""The generated world: exact reproducibility, honest probabilities, and the structure a model shall find."""

import dataclasses
import hashlib

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from gem.config import WorldConfig
from gem.data.world.ads_world import CATEGORIES, SURFACES, build_world, make_users
from gem.data.world.generator import generate
from gem.data.world.simulate import DAY_MS, FIRST_DAY_MS, ChunkState, simulate_day
from gem.errors import ConfigError, DataError
from gem.metrics import auc, normalized_entropy

SMALL = WorldConfig(num_users=300, num_ads=120, num_days=4, num_impressions=8000, num_organic_events=12_000, seed=3)


def read(folder, table):
    files = sorted(folder.glob(f"{table}*.parquet"))
    return pa.concat_tables([pq.read_table(f) for f in files])


def digests(folder):
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted(folder.iterdir())}


def rows(table, *keys):
    return table.sort_by([(k, "ascending") for k in keys]).to_pylist()


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    out = tmp_path_factory.mktemp("world")
    return out, generate(SMALL, out)


@pytest.fixture(scope="module")
def default_days():
    """The default world in memory: every day's impressions and organic events."""
    world = build_world(WorldConfig())
    state = ChunkState.start(make_users(world, np.arange(world.config.num_users)))
    return world, state.users, [simulate_day(world, state, day) for day in range(world.config.num_days)]


def column(days, part, name):
    return np.concatenate([getattr(d[part], name) for d in days])


def test_same_seed_same_bytes(small, tmp_path):
    generate(SMALL, tmp_path / "again")
    assert digests(small[0]) == digests(tmp_path / "again")


def test_another_seed_is_another_world(small, tmp_path):
    generate(dataclasses.replace(SMALL, seed=4), tmp_path / "other")
    assert read(tmp_path / "other", "impressions")["time_ms"] != read(small[0], "impressions")["time_ms"]


TINY = dataclasses.replace(SMALL, num_users=20, num_impressions=900, num_organic_events=1500)


@pytest.mark.parametrize(("config", "chunk_users"), [(TINY, 1), (SMALL, 77), (SMALL, 299), (SMALL, 300)])
def test_chunk_size_changes_no_row(tmp_path, config, chunk_users):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    a, b = generate(config, whole), generate(config, parts, chunk_users)
    for table, keys in (
        ("users", ["user_id"]),
        ("ads", ["ad_id"]),
        ("impressions", ["impression_id"]),
        ("conversions", ["impression_id"]),
        ("organic", ["user_id", "time_ms", "ad_id", "watched_ms"]),
    ):
        assert rows(read(whole, table), *keys) == rows(read(parts, table), *keys), table
    assert dataclasses.replace(a, files=[]) == dataclasses.replace(b, files=[])
    assert len(b.files) == 2 + 3 * config.num_days * -(-config.num_users // chunk_users)


def test_columns_and_types(small):
    names = {"i64": pa.int64(), "i8": pa.int8(), "f32": pa.float32(), "text": pa.string()}
    names |= {"texts": pa.list_(pa.string()), "vector": pa.list_(pa.float32(), 16)}
    expected = {
        "impressions": "impression_id:i64 user_id:i64 ad_id:i64 time_ms:i64 surface:text device:text slot:i64 "
        "clicked:i8 p_click:f32 p_conversion:f32",
        "conversions": "impression_id:i64 user_id:i64 ad_id:i64 time_ms:i64",
        "organic": "user_id:i64 ad_id:i64 time_ms:i64 liked:i8 shared:i8 watched_ms:i64",
        "users": "user_id:i64 age_band:text region:text device_class:text tenure_days:i64 interests:texts",
        "ads": "ad_id:i64 advertiser:text category:text format:text objective:text price:f32 "
        "creative:vector is_post:i8",
    }
    for table, columns in expected.items():
        schema = read(small[0], table).schema
        wanted = [(name, names[kind]) for name, kind in (c.split(":") for c in columns.split())]
        assert list(zip(schema.names, schema.types, strict=True)) == wanted, table


def test_report_counts_what_is_in_the_files(small):
    out, report = small
    impressions = read(out, "impressions")
    distinct = pc.count_distinct(impressions["impression_id"]).as_py()
    assert impressions.num_rows == report.impressions == distinct + report.duplicates
    assert read(out, "conversions").num_rows == report.conversions > 0
    assert read(out, "organic").num_rows == report.organic_events
    assert sorted(report.files) == sorted(f.name for f in out.iterdir())
    assert report.days == ["2026-01-05", "2026-01-06", "2026-01-07", "2026-01-08"]
    unique = impressions.group_by("impression_id").aggregate([("clicked", "max"), ("user_id", "max")])
    assert pc.sum(unique["clicked_max"]).as_py() == report.clicks
    assert unique["user_id_max"].null_count == report.null_users > 0


def test_sizes_and_dirt_are_as_configured(tmp_path):
    config = dataclasses.replace(SMALL, num_impressions=40_000, duplicate_share=0.02, null_user_share=0.01)
    report = generate(config, tmp_path / "w")
    distinct = report.impressions - report.duplicates
    assert distinct == pytest.approx(40_000, rel=0.1)
    assert report.organic_events == pytest.approx(12_000, rel=0.1)
    assert report.duplicates / distinct == pytest.approx(0.02, rel=0.2)
    assert report.null_users / distinct == pytest.approx(0.01, rel=0.2)
    clean = generate(dataclasses.replace(SMALL, duplicate_share=0.0, null_user_share=0.0), tmp_path / "c")
    assert (clean.duplicates, clean.null_users) == (0, 0)


def test_duplicates_are_exact_copies(small):
    table = read(small[0], "impressions")
    seen = {}
    for row in table.to_pylist():
        assert seen.setdefault(row["impression_id"], row) == row


def test_every_row_refers_to_a_user_and_an_ad(small):
    out, _ = small
    impressions, organic, ads = read(out, "impressions"), read(out, "organic"), read(out, "ads")
    post = dict(zip(ads["ad_id"].to_pylist(), ads["is_post"].to_pylist(), strict=True))
    assert {post[a] for a in impressions["ad_id"].to_pylist()} == {0}
    assert {post[a] for a in organic["ad_id"].to_pylist()} == {1}
    users = set(read(out, "users")["user_id"].to_pylist())
    assert set(impressions["user_id"].drop_null().to_pylist()) <= users
    assert set(organic["user_id"].to_pylist()) <= users
    assert users == set(range(1, 301)) and len(post) == 240


def test_a_file_holds_its_day(small):
    for table in ("impressions", "organic"):
        for day, name in enumerate(["2026-01-05", "2026-01-06", "2026-01-07", "2026-01-08"]):
            (file,) = small[0].glob(f"{table}-{name}-*.parquet")
            time_ms = pq.read_table(file)["time_ms"].to_numpy()
            assert ((time_ms - FIRST_DAY_MS) // DAY_MS == day).all() and len(time_ms) > 0
    assert np.datetime64(FIRST_DAY_MS, "ms") == np.datetime64("2026-01-05")


def test_conversions_follow_their_click_within_48_hours(small):
    impressions = {r["impression_id"]: r for r in read(small[0], "impressions").to_pylist()}
    delays = []
    for row in read(small[0], "conversions").to_pylist():
        shown = impressions[row["impression_id"]]
        assert shown["clicked"] == 1 and shown["ad_id"] == row["ad_id"]
        assert shown["user_id"] in (row["user_id"], None)
        delays.append(row["time_ms"] - shown["time_ms"])
    assert min(delays) > 0 and max(delays) <= 48 * 3_600_000
    assert 3 < np.mean(delays) / 3_600_000 < 14  # hours: delayed, not at once


def test_outcomes_happen_as_often_as_their_probability_says(default_days):
    _, _, days = default_days
    clicked, p_click = column(days, 0, "clicked"), column(days, 0, "p_click")
    converted, p_conversion = column(days, 0, "conversion_ms") >= 0, column(days, 0, "p_conversion")
    for outcome, p in ((clicked, p_click), (converted, p_conversion)):
        for part in np.array_split(np.argsort(p), 10):
            error = np.sqrt((p[part] * (1 - p[part])).sum())
            assert abs(outcome[part].sum() - p[part].sum()) < 4 * error  # 20 deciles: 4 sd is one in a thousand
    assert (p_conversion < p_click).all() and (p_click > 0).all() and (p_click < 1).all()


def test_the_default_world_is_a_fair_problem(default_days):
    """Rates and limits of the task; `static_logit` is all that ad, surface, age and time can tell."""
    _, _, days = default_days
    clicked, p_click = column(days, 0, "clicked"), column(days, 0, "p_click")
    surface, static = column(days, 0, "surface"), column(days, 0, "static_logit")
    assert len(clicked) == pytest.approx(150_000, rel=0.03)
    assert 0.05 < clicked.mean() < 0.12
    rates = [clicked[surface == s].mean() for s in range(len(SURFACES))]
    assert max(rates) > 1.5 * min(rates)
    assert 0.1 < (column(days, 0, "conversion_ms") >= 0).sum() / clicked.sum() < 0.2
    assert 0.77 < auc(clicked, p_click).value < 0.82
    assert 0.80 < normalized_entropy(clicked, p_click).value < 0.87
    assert auc(clicked, 1 / (1 + np.exp(-static))).value < auc(clicked, p_click).value - 0.08


def test_histories_have_a_heavy_tail(default_days):
    world, _, days = default_days
    count = sum(np.bincount(column(days, part, "row"), minlength=world.config.num_users) for part in (0, 1))
    assert count.max() > 2000 and count.max() > 15 * np.median(count)


def category_shares(world, days):
    """[U, C] share of each user's organic events, over the given days."""
    chain = column(days, 1, "row") * len(CATEGORIES) + world.items.category[column(days, 1, "item")]
    count = np.bincount(chain, minlength=world.config.num_users * len(CATEGORIES)).reshape(-1, len(CATEGORIES))
    return count, (count + 0.5) / (count + 0.5).sum(axis=1, keepdims=True)


def test_interests_drift(default_days):
    """Organic tastes of neighbouring days are more alike than those of days far apart."""
    world, _, days = default_days
    (n_0, first), (n_1, near), (n_2, far) = (category_shares(world, days[d : d + 2]) for d in (0, 2, 8))
    busy = (n_0.sum(1) > 30) & (n_1.sum(1) > 30) & (n_2.sum(1) > 30)
    assert busy.sum() > 200

    def alike(a, b):
        a, b = (np.log(x[busy]) - np.log(x[busy]).mean(axis=0) for x in (a, b))
        return np.corrcoef(a.ravel(), b.ravel())[0, 1]

    assert alike(first, near) > alike(first, far) + 0.05 > 0.1


def test_history_tells_what_static_features_cannot(default_days):
    """Counts over the days before, looked up naively, rank the clicks of the last day beyond the static part."""
    world, _, days = default_days
    num_users, past, test = world.config.num_users, days[:9], days[9][0]
    category = world.items.category[test.item]
    like = np.log(category_shares(world, past)[1][test.row, category] / world.category_weight[category])
    shown = np.bincount(column(past, 0, "row"), minlength=num_users)
    clicks = np.bincount(column(past, 0, "row"), weights=column(past, 0, "clicked"), minlength=num_users)
    rate = np.log((clicks + 2) / (shown + 20))[test.row]
    recent = np.log(category_shares(world, days[8:9])[1][test.row, category] / world.category_weight[category])

    def rank(logit):
        return auc(test.clicked, 1 / (1 + np.exp(-logit))).value

    static = rank(test.static_logit)
    with_taste = rank(test.static_logit + 0.3 * like)
    with_user = rank(test.static_logit + 0.3 * like + 0.7 * rate)
    with_recent = rank(test.static_logit + 0.1 * like + 0.3 * recent + 0.7 * rate)
    assert static + 0.01 < with_taste < with_user - 0.01
    assert with_recent > with_user  # yesterday says more than all days: tastes drift, intent is short


def test_fatigue_and_momentum_depend_on_earlier_ads_only():
    """Recomputed one impression at a time, in time order, from the earlier ones of the same user and category."""
    config = dataclasses.replace(SMALL, num_users=12, num_impressions=3000, num_organic_events=0)
    world = build_world(config)
    users = make_users(world, np.arange(12))
    state = ChunkState.start(users)
    memory = {}  # (user, category) -> [exposures, last click]
    for day in range(config.num_days):
        ads, _ = simulate_day(world, state, day)
        effect = {}
        for n in range(len(ads.id)):
            key = (int(ads.row[n]), int(world.items.category[ads.item[n]]))
            seen, last = memory.get(key, (0.0, 0))
            fatigue = (0.3, 0.4, 0.2)[ads.surface[n]]
            logit = np.log(ads.p_click[n] / (1 - ads.p_click[n]))
            rest = logit + fatigue * np.log1p(seen) - 0.7 * last - ads.static_logit[n] - users.clickiness[ads.row[n]]
            # what is left is taste and intent: the same for the same user, ad and surface, up to the burst
            effect.setdefault((key[0], int(ads.item[n]), int(ads.surface[n])), []).append(rest)
            memory[key] = (seen + 1, int(ads.clicked[n]))
        memory = {k: (seen * 0.5, last) for k, (seen, last) in memory.items()}
        jumps = np.concatenate([np.diff(sorted(v)) for v in effect.values() if len(v) > 1])
        bursts = np.array([1.3, 1.1, 1.7])
        nearest = np.minimum(np.abs(jumps), np.abs(jumps[:, None] - bursts).min(axis=1))
        assert len(jumps) > 20 and nearest.max() < 1e-9


def test_weekends_and_evenings_are_busier(default_days):
    _, _, days = default_days
    count = [len(d[0].row) for d in days]
    assert min(count[5], count[6]) > 1.1 * max(*count[:5], *count[7:])
    hour = column(days, 0, "time_ms") // 3_600_000 % 24
    assert (hour == 20).sum() > 3 * (hour == 4).sum()


def test_refuses_a_folder_with_files_and_impossible_sizes(tmp_path):
    (tmp_path / "x").write_text("")
    with pytest.raises(DataError, match="not empty"):
        generate(SMALL, tmp_path)
    for field, value in (("num_ads", 3), ("num_users", 0), ("num_days", 0), ("duplicate_share", 0.9)):
        with pytest.raises(ConfigError, match=f"world.{field}: got {value}; allowed"):
            generate(dataclasses.replace(SMALL, **{field: value}), tmp_path / field)
    with pytest.raises(ConfigError, match="chunk_users"):
        generate(SMALL, tmp_path / "new", chunk_users=0)
