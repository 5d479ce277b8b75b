"""A few made-up rows in the layout of each public data set: file names, folders, separators, headers, odd spellings."""

from __future__ import annotations

import gzip
from pathlib import Path

KUAIRAND_NOON = 1_651_377_600_000  # 2022-05-01T12:00 in Beijing, ms
DAY_MS = 86_400_000
KUAIRAND_LOG = (
    "user_id,video_id,date,hourmin,time_ms,is_click,is_like,is_follow,is_comment,is_forward,is_hate,long_view,"
    "play_time_ms,duration_ms,profile_stay_time,comment_stay_time,is_profile_enter,is_rand,tab"
)
KUAIRAND_USER = (
    "user_id,user_active_degree,is_lowactive_period,is_live_streamer,is_video_author,follow_user_num,"
    "follow_user_num_range,fans_user_num,fans_user_num_range,friend_user_num,friend_user_num_range,register_days,"
    "register_days_range," + ",".join(f"onehot_feat{i}" for i in range(18))
)
KUAIRAND_VIDEO = (
    "video_id,author_id,video_type,upload_dt,upload_type,visible_status,video_duration,server_width,server_height,"
    "music_id,music_type,tag"
)
TAOBAO_MIDNIGHT = 1_494_000_000  # 2017-05-06T00:00 in China, s
X1 = (
    "clk,btag_his,cate_his,brand_his,userid,cms_segid,cms_group_id,final_gender_code,age_level,pvalue_level,"
    "shopping_level,occupation,new_user_class_level,adgroup_id,cate_id,campaign_id,customer,brand,price,pid,btag"
)
MOVIELENS_NOON = 1_572_609_600  # 2019-11-01T12:00Z, s


def write(path: Path, *lines: str, encoding: str = "utf-8") -> None:
    """Lines to a file, compressed if it ends in .gz."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = "".join(f"{line}\n" for line in lines).encode(encoding)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def kuairand(folder: Path, size: str) -> Path:
    """KuaiRand-1K or -27K with the folder `data`. User 1 sees 20 (clicked) on day 1, 21 on day 2, and 30 s later 22."""
    data = folder / f"KuaiRand-{size.upper()}" / "data"
    part1, part2 = ("_part1", "_part2") if size == "27k" else ("", "")
    late = KUAIRAND_NOON + DAY_MS
    write(
        data / f"log_standard_4_08_to_4_21_{size}{part1}.csv",
        KUAIRAND_LOG,
        f"1,20,20220501,1200,{KUAIRAND_NOON},1,0,0,0,0,0,1,9000,12000,0,0,0,0,1",
    )
    write(
        data / f"log_standard_4_22_to_5_08_{size}{part1}.csv",
        KUAIRAND_LOG,
        f"1,21,20220502,1200,{late},0,1,0,0,0,0,0,0,8000,0,0,1,0,4",
        f"2,20,20220503,1200,{late + DAY_MS},1,0,0,0,0,0,0,3000,12000,0,0,0,0,1",
    )
    last = f"1,22,20220502,1200,{late + 30_000},1,0,0,0,0,0,0,7500,9000,0,0,0,0,1"
    if part2:
        write(data / f"log_standard_4_22_to_5_08_{size}{part2}.csv", KUAIRAND_LOG, last)
    else:
        with (data / f"log_standard_4_22_to_5_08_{size}.csv").open("a") as f:
            f.write(last + "\n")
    write(data / f"log_random_4_22_to_5_08_{size}.csv", "not read")
    write(data / f"video_features_statistic_{size}{part1}.csv", "not read")
    user = 'full_active,0,1,-124,514,500+,150,"[100,1k)",3,"[1,5)",799,730+,' + ",".join(["1"] * 5 + [""] * 13)
    write(data / f"user_features_{size}.csv", KUAIRAND_USER, f"1,{user}", f"2,{user}")
    videos = ['20,7349781,NORMAL,2022-04-10,LongImport,0.0,,720.0,1280.0,9155697141,9.0,"39,2"']
    videos += [f"{v},7,AD,2022-04-09,Kmovie,0.0,8000.0,,,5,," for v in (21, 22)]
    write(data / f"video_features_basic_{size}.csv", KUAIRAND_VIDEO, *videos)
    return data.parent


def taobaoad(folder: Path) -> Path:
    """Tianchi's four tables. User 5 sees 11 (clicked), 30 s later 12, and 12 again at the end of day 2; 9 has no
    profile."""
    t0, day = TAOBAO_MIDNIGHT, 86_400
    write(
        folder / "raw_sample.csv",
        "user,time_stamp,adgroup_id,pid,nonclk,clk",
        f"5,{t0 + 3600},11,430548_1007,0,1",
        f"5,{t0 + 3630},12,430539_1007,1,0",
        f"5,{t0 + 2 * day - 1},12,430548_1007,1,0",
        f"9,{t0 + 2 * day},11,430548_1007,1,0",
    )
    write(
        folder / "ad_feature.csv",
        "adgroup_id,cate_id,campaign_id,customer,brand,price",
        "11,6406,83237,1,95471,170.0",
        "12,6406,83237,1,NULL,199.0",
    )
    write(
        folder / "user_profile.csv",
        "userid,cms_segid,cms_group_id,final_gender_code,age_level,pvalue_level,shopping_level,occupation,"
        "new_user_class_level ",
        "5,0,5,2,5,,3,0,3",
        "6,0,5,2,5,2,3,0,",
    )
    write(
        folder / "behavior_log.csv",
        "user,time_stamp,btag,cate,brand",
        f"5,{t0 + 3600},buy,6406,95471",
        f"5,{t0 + 100},pv,6406,95471",
        f"5,{t0 - 50 * day},cart,99,NULL",
    )
    return folder


def taobaoad_x1(folder: Path) -> Path:
    """RecZoo's table: three train rows, one test row; the second row's history is empty."""
    root = folder / "TaobaoAd_x1"
    write(
        root / "train.csv",
        X1,
        "1,1^3^1,2509^5154^5154,282452^220468^7,964127,7,2,2,2,2,3,0,2,577393,5154,374670,245459,220468,0.041481,0,1",
        "0,,,,1008890,81,10,1,4,2,3,0,4,10402,5467,22239,26425,0,0.002889,1,1",
        "0,1,5467,11,964127,7,2,2,2,2,3,0,2,10402,5467,22239,26425,0,0.002889,1,1",
    )
    write(root / "test.csv", X1, "1,4,5154,8,1008890,81,10,1,4,2,3,0,4,577393,5154,374670,245459,220468,0.041481,0,1")
    return folder


def criteo_line(label: int, integers: dict[int, str], values: dict[int, str]) -> str:
    """One line of Criteo's files; whatever is not named is missing."""
    cells = [str(label), *(integers.get(i, "") for i in range(1, 14)), *(values.get(i, "") for i in range(1, 27))]
    return "\t".join(cells)


CRITEO = (
    criteo_line(0, {1: "1", 2: "-1"}, {1: "68fd1e64", 2: "80e26c9b", 26: "5e000000"}),
    criteo_line(1, {1: "3"}, {1: "68fd1e64", 3: "68fd1e64"}),
    criteo_line(0, {2: "65535"}, {1: "05db9164"}),
    criteo_line(1, {}, {}),
)


def criteo_kaggle(folder: Path) -> Path:
    """train.txt with four lines, and a test.txt that has no label."""
    write(folder / "train.txt", *CRITEO)
    write(folder / "test.txt", "1\t1")
    return folder


def criteo_terabyte(folder: Path) -> Path:
    """Days 0, 2 (compressed) and 10."""
    write(folder / "day_0", *CRITEO[:2])
    write(folder / "day_2.gz", CRITEO[2])
    write(folder / "day_10", CRITEO[3])
    return folder


def aliexpress(folder: Path) -> Path:
    """MTReclib's tables of two countries."""
    names = ["search_id", *(f"categorical_{i}" for i in range(1, 17)), *(f"numerical_{i}" for i in range(1, 64))]
    header = ",".join([*names, "click", "conversion"])

    def row(search: int, first: int, click: int, conversion: int) -> str:
        return ",".join([str(search), str(first), *["3"] * 15, "0.5", *["0.0"] * 62, str(click), str(conversion)])

    write(folder / "AliExpress_NL" / "train.csv", header, row(7, 4, 0, 0), row(7, 5, 1, 0), row(8, 4, 1, 1))
    write(folder / "AliExpress_NL" / "test.csv", header, row(1, 9, 0, 0))
    write(folder / "AliExpress_ES" / "train.csv", header, row(7, 5, 0, 0))
    write(folder / "AliExpress_ES" / "test.csv", header, row(2, 4, 1, 0))
    return folder


def aliexpress_tianchi(folder: Path) -> Path:
    """Tianchi's tables of one country, without header; the label is the last column of a product: 0, 1 or 2."""

    def item(page: int, label: int) -> str:
        return ",".join([str(page), *["1"] * 47, str(label)])

    def page(key: int, second: int) -> str:
        return ",".join([str(key), str(second), *["2"] * 31])

    write(folder / "nl_item_train.csv", item(70, 0), item(70, 1), item(80, 2))
    write(folder / "nl_item_test.csv", item(90, 1))
    write(folder / "nl_user_train.csv", page(70, 4), page(80, 5))
    write(folder / "nl_user_test.csv", page(90, 4))
    return folder


def movielens(folder: Path) -> Path:
    """ml-32m: user 1 rates 11 (4.5), then 12 and 13 in one second of day 2; one rating of 1999."""
    root, t0, day = folder / "ml-32m", MOVIELENS_NOON, 86_400
    write(
        root / "ratings.csv",
        "userId,movieId,rating,timestamp",
        f"1,11,4.5,{t0}",
        f"1,12,4.0,{t0 + day}",
        f"1,13,3.5,{t0 + day}",
        f"2,11,5.0,{t0 + 2 * day}",
        "2,12,1.0,930000000",
    )
    write(root / "tags.csv", "userId,movieId,tag,timestamp", f'1,11,"funny, smart ""classic""",{t0 + 60}')
    movies = ['11,"American President, The (1995)",Comedy|Drama|Romance', "12,Solo (1996),(no genres listed)"]
    write(root / "movies.csv", "movieId,title,genres", *movies, "13,Cité (1995),Drama")
    write(root / "links.csv", "movieId,imdbId,tmdbId")
    return folder


def movielens_1m(folder: Path) -> Path:
    """ml-1m: user 1 rates 1193 and a day later 914; user 2 the day after."""
    root, t0, day = folder / "ml-1m", 978_300_760, 86_400
    write(root / "ratings.dat", f"1::1193::5::{t0}", f"1::914::3::{t0 + day}", f"2::914::4::{t0 + 2 * day}")
    write(root / "users.dat", "1::F::1::10::48067", "2::M::56::16::98107-2117")
    movies = ("1193::One Flew Over the Cuckoo's Nest (1975)::Drama", "914::Misérables, Les (1995)::Drama|Musical")
    write(root / "movies.dat", *movies, encoding="iso-8859-1")
    return folder
