"""Encoders that grow from window to window, against a plain dict that hands out rows; and their files."""

from __future__ import annotations

import pickle
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gem.data.encoding import VOCABULARIES, Encoder
from gem.data.fitting import EntityCounts, Moments, TrainCounts, fit_encoder, grow_encoder
from gem.data.hashed_vocabulary import HashedVocabulary
from gem.data.schema import NUM_RESERVED, OOV
from gem.data.spec import DatasetSpec, SurfaceSpec, parse_spec
from gem.data.surfaces import group_surfaces
from gem.data.vocabulary import Vocabulary, count_values, merge_counts
from gem.errors import StoreError
from tests.unit.data.test_encoding import counts, make
from tests.unit.data.toy_log import SPEC

MIN_COUNT, MAX_ROWS, MIN_ROWS = 3, NUM_RESERVED + 5, 6
DEVICE = {"name": "device", "kind": "categorical", "min_count": MIN_COUNT, "max_rows": MAX_ROWS}
SMALL: dict[str, Any] = SPEC | {
    "users": {"table": "people", "key": "person", "min_count": 2, "features": []},
    "ads": {"table": "items", "key": "item", "features": []},
    "context": {"features": [DEVICE]},
    "surfaces": {"min_rows": MIN_ROWS, "names": {"1": "feed"}},
}
# one window: what its impressions say (device, user, surface), and whether its files hold numbers or text
WINDOW = st.tuples(
    st.lists(st.tuples(st.integers(-3, 9), st.integers(1, 5), st.integers(0, 3)), min_size=1, max_size=14),
    st.booleans(),
)


class Rows:
    """The oracle: a value gets the next row when its total reaches `least`, the more frequent first."""

    def __init__(self, least: int, room: int) -> None:
        self.least, self.room = least, room
        self.row: dict[str, int] = {}
        self.total: Counter[str] = Counter()

    def window(self, values: list[int]) -> bool:
        self.total.update(map(str, values))
        ready = [v for v, n in self.total.items() if n >= self.least and v not in self.row]
        ready = sorted(ready, key=lambda v: (-self.total[v], v))[: self.room - len(self.row)]
        self.row |= {v: NUM_RESERVED + len(self.row) + i for i, v in enumerate(ready)}
        return bool(ready)


def column(values: list[int], as_text: bool) -> pa.Array:
    return pa.array(map(str, values), pa.string()) if as_text else pa.array(values, pa.int64())


def totals(before: TrainCounts | None, rows: list[tuple[int, int, int]], as_text: bool) -> TrainCounts:
    """Counts over all windows so far, as preprocess keeps them."""
    devices, users, surfaces = (count_values(column(list(c), as_text)) for c in zip(*rows, strict=True))
    if before is not None:
        devices = merge_counts([before.context["device"], devices])
        surfaces = merge_counts([before.surfaces, surfaces])
        old = pa.table({"value": before.user.table["key"].cast(pa.string()), "count": before.user.seen})
        users = merge_counts([old, users])
    key = users["value"] if as_text else users["value"].cast(pa.int64())
    seen = users["count"].to_numpy()
    nobody = EntityCounts(pa.table({"key": pa.array([], pa.int64())}), np.zeros(0, np.int64), np.zeros(0, np.int64))
    return TrainCounts(EntityCounts(pa.table({"key": key}), seen, seen), nobody, surfaces, {"device": devices})


@settings(max_examples=60, deadline=None)
@given(st.lists(WINDOW, min_size=1, max_size=5))
def test_every_value_keeps_its_row_over_all_windows(windows: list[tuple[list[tuple[int, int, int]], bool]]) -> None:
    spec = parse_spec(SMALL)
    oracles = {"device": Rows(MIN_COUNT, MAX_ROWS - NUM_RESERVED), "user_id": Rows(2, 99), "surface": Rows(1, 99)}
    before: TrainCounts | None = None
    encoder: Encoder | None = None
    for number, (rows, as_text) in enumerate(windows):
        before = totals(before, rows, as_text)
        grown = grow_encoder(spec, encoder, before) if encoder else fit_encoder(spec, before)
        columns = dict(zip(oracles, map(list, zip(*rows, strict=True)), strict=True))
        added = [oracle.window(columns[name]) for name, oracle in oracles.items()]
        version = grown.vocabulary_version - (encoder.vocabulary_version if encoder else 0)
        assert version == (any(added) and number > 0)
        for name in ("device", "user_id"):
            want = [oracles[name].row.get(str(v), OOV) for v in range(-3, 10)]
            assert grown.vocabularies[name].rows == NUM_RESERVED + len(oracles[name].row)
            for text in (False, True):
                assert grown.vocabularies[name].lookup(column(list(range(-3, 10)), text)).tolist() == want
        assert grown.schema.tables()["device"] <= MAX_ROWS
        surfaces = oracles["surface"]
        assert [grown.surface_code(v) for v in surfaces.row] == list(surfaces.row.values())
        if encoder is not None:
            old = encoder.schema.surface_groups
            assert grown.schema.surface_groups[: len(old)] == old
        for value, n in surfaces.total.items():
            group = grown.schema.surface_groups[grown.schema.group_of_surface[surfaces.row[value]]]
            name = "feed" if value == "1" else value
            assert group == (name if n >= MIN_ROWS else "other")
        assert grow_encoder(spec, grown, before) is grown
        encoder = grown


def test_what_the_first_fit_measured_stays() -> None:
    spec, old = parse_spec(SPEC), make(num_days=20)
    users = pa.table({"key": ["1", "2", "3"], "town": ["z", "b", "c"], "age": [1.0, 2.0, 3.0]})
    later: dict[str, Any] = {
        "user": EntityCounts(users, np.array([9, 9, 9]), np.array([9, 9, 9])),
        "ad": EntityCounts(pa.table({"key": [8, 9], "tags": [["w"], ["x"]]}), np.array([1, 9]), np.array([1, 9])),
        "surfaces": counts(**{"9": 500, "2": 70, "1": 100, "7": 80}),
        "context": {"device": counts(new=3, ios=9, tv=1)},
        "moments": {"slot": Moments(100.0, 50.0, 1.0)},
    }
    grown = grow_encoder(spec, old, TrainCounts(**later, num_days=100))
    assert grown.features == old.features and grown.weekday is False and grown.vocabulary_version == 1
    values = {n: v.to_list() for n, v in grown.vocabularies.items() if isinstance(v, Vocabulary)}
    assert values["user_id"] == ["2", "1", "3"] and values["town"] == ["b", "a", "c", "z"]
    assert values["ad_id"] == ["8", "9"] and values["tags"] == ["x", "y", "w"]
    assert values["device"] == ["ios", "tv", "new"]
    assert grown.surface_values == ("1", "2", "7", "9")
    assert grown.schema.surface_groups == ("feed", "stories", "other", "9", "7")
    assert grown.schema.group_of_surface == (2, 2, 2, 0, 1, 4, 3)


def test_groups_of_surfaces_stay_even_where_their_rows_went_away() -> None:
    spec = SurfaceSpec(min_rows=10)
    _, groups, of = group_surfaces(spec, ["a", "b", "c"], {"a": 3, "b": 50, "c": 20}, old=["a", "b"])
    assert groups == ("a", "b", "c") and of == (0, 0, 0, 0, 1, 2)
    assert group_surfaces(spec, ["a", "d"], {"a": 30, "d": 1}, old=["a"])[1:] == (("a", "other"), (1, 1, 1, 0, 1))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"context": {"features": []}}, r"context features differ from the store's \(\['device'\]\)"),
        ({"context": {"features": [DEVICE | {"table": "x"}]}}, "context features differ"),
        ({"context": {"features": [DEVICE | {"hash_rows": 9}]}}, 'embedding table "device" is another'),
        ({"users": SMALL["users"] | {"hash_rows": 9}}, 'embedding table "user_id" is another'),
    ],
)
def test_another_spec_needs_another_fit(change: dict[str, Any], said: str) -> None:
    before = totals(None, [(1, 1, 1)] * 4, False)
    old = fit_encoder(parse_spec(SMALL), before)
    with pytest.raises(StoreError, match=said):
        grow_encoder(parse_spec(SMALL | change), old, before)


def test_saved_and_loaded_encoders_are_equal(tmp_path: Path) -> None:
    encoder = replace(make(hashed_spec()), vocabulary_version=4)
    written = encoder.save(tmp_path)
    assert set(written) == {"encoder.json", VOCABULARIES} and written[VOCABULARIES]["rows"] > 0
    for other in (Encoder.load(tmp_path), Encoder.from_json(encoder.to_json()), pickle.loads(pickle.dumps(encoder))):
        assert other == encoder and other.vocabulary_version == 4
    with pytest.raises(StoreError, match=r"stand in vocabularies\.parquet; read it with Encoder\.load"):
        Encoder.from_json((tmp_path / "encoder.json").read_text(encoding="utf-8"))
    make().save(tmp_path / "other")
    (tmp_path / "other" / VOCABULARIES).replace(tmp_path / VOCABULARIES)
    with pytest.raises(StoreError, match=r"are of two stores: .*'device': \(2, 0\)"):
        Encoder.load(tmp_path)
    (tmp_path / VOCABULARIES).write_bytes(b"PAR1")
    with pytest.raises(StoreError, match="cannot read the encoder"):
        Encoder.load(tmp_path)


def test_encoders_without_any_value_can_be_saved(tmp_path: Path) -> None:
    open_only = {name: HashedVocabulary(9, 2) for name in ("device", "user_id")}
    for number, vocabularies in enumerate((open_only, {"device": Vocabulary([]), "town": Vocabulary(["a"])}, {})):
        encoder = replace(make(), vocabularies=vocabularies)
        encoder.save(tmp_path / str(number))
        assert Encoder.load(tmp_path / str(number)) == encoder


def hashed_spec() -> DatasetSpec:
    features = [{"name": "device", "kind": "categorical", "hash_rows": 50}, {"name": "slot", "kind": "numeric"}]
    return parse_spec(SPEC | {"context": {"features": features}})


def test_a_million_values_load_in_a_second(tmp_path: Path) -> None:
    encoder = make()
    million = Vocabulary(pa.array(np.arange(10**6) * 7919).cast(pa.string()))
    encoder = replace(encoder, vocabularies={**encoder.vocabularies, "user_id": million})
    encoder.save(tmp_path)
    seconds = []
    for _ in range(2):
        start = time.process_time()
        other = Encoder.load(tmp_path)
        seconds.append(time.process_time() - start)
    assert min(seconds) < 1.0 and (tmp_path / "encoder.json").stat().st_size < 10_000
    million.lookup(pa.array(np.arange(5000)))
    assert other == encoder and len(pickle.dumps(encoder)) < 20 * 10**6
