"""Search spaces: what cannot be searched is refused by name, what is drawn lies inside and covers the range."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gem.config import RunConfig, apply_overrides, field_paths
from gem.errors import ConfigError
from gem.recipes import RECIPES, recipe
from tuning import spaces
from tuning.spaces import SPACES, Choice, Range

CONFIG = RunConfig()


@pytest.mark.parametrize("name", sorted(SPACES))
@pytest.mark.parametrize("which", sorted(RECIPES))
def test_shipped_spaces_fit_every_recipe(name: str, which: str) -> None:
    spaces.check_space(SPACES[name], recipe(which))


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ({}, "search space is empty"),
        ({"train.lr_dens": Range(0.1, 0.2)}, r'no path "train\.lr_dens"\. Did you mean "train\.lr_dense"\?'),
        ({"train": Choice((1,))}, 'no path "train"'),
        ({"data.num_shards": Choice((1, 2))}, r'"data\.num_shards" cannot be swept: .*Allowed: model\.arch, '),
        ({"train.num_workers": Choice((1, 2))}, r'"train\.num_workers" cannot be swept'),
        ({"train.lr_dense": Range(0.2, 0.1)}, "contradictory bounds; the first must be smaller"),
        ({"train.lr_dense": Range(0.1, 0.1)}, "contradictory bounds"),
        ({"train.lr_dense": Range(0.0, 0.1, log=True)}, "must be above 0 on a log scale"),
        ({"train.lr_dense": Range(-0.1, 0.1)}, "lower bound must be 0 or more"),
        ({"train.lr_dense": Range(0.1, math.inf)}, "bounds must be finite"),
        ({"train.lr_dense": Range(math.nan, 1.0)}, "bounds must be finite"),
        ({"model.rank": Range(1.5, 4)}, "the field holds whole numbers"),
        ({"model.rank": Choice(())}, r"model\.rank has no values"),
        ({"model.rank": Choice((4, 4))}, "names a value twice"),
        ({"model.rank": Choice((4, "many"))}, '"many" is not a int'),
    ],
)
def test_what_cannot_be_searched_is_refused(space: spaces.Space, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        spaces.check_space(space, CONFIG)


def test_a_range_over_a_switch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spaces, "SWEPT", ("transfer.",))
    with pytest.raises(ConfigError, match=r"the field holds True, not a number; give a list of values"):
        spaces.check_space({"transfer.enabled": Range(0, 1)}, CONFIG)


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("train.lr_dense=1e-4..0.01", ("train.lr_dense", Range(1e-4, 0.01))),
        (" train.lr_dense = 1e-4..0.01:log ", ("train.lr_dense", Range(1e-4, 0.01, log=True))),
        ("model.rank=4,8, 16", ("model.rank", Choice((4, 8, 16)))),
        ("model.dropout=0", ("model.dropout", Choice((0.0,)))),
    ],
)
def test_vary_is_read(text: str, want: tuple[str, spaces.Domain]) -> None:
    assert spaces.parse_vary(text, CONFIG) == want


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train.lr_dense", "expected path=low..high"),
        ("train.lr_dense=", "expected path=low..high"),
        ("train.lr_dense=a..b", 'bounds "a" and "b" must both be numbers'),
        ("train.lr_dense=..0.1", 'bounds "" and "0.1" must both be numbers'),
        ("train.lr_dense=0.1..0.2:cubic", 'the scale after the colon is "cubic"; allowed: log'),
        ("trian.lr_dense=0.1..0.2", 'Did you mean "train.lr_dense"'),
        ("model.rank=4,a", '"a" is not a int'),
    ],
)
def test_vary_that_cannot_be_read_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        spaces.parse_vary(text, CONFIG)


def test_a_path_that_is_set_is_not_swept() -> None:
    space = spaces.make_space("optimisation", [], ["train.lr_dense=0.01"], CONFIG)
    assert set(space) == set(SPACES["optimisation"]) - {"train.lr_dense"}
    every = [f"{p}=1" for p in SPACES["optimisation"]]
    with pytest.raises(ConfigError, match=r'"optimisation" is empty: --set holds every path of it \(train\.lr_dense, '):
        spaces.make_space("optimisation", [], every, CONFIG)
    with pytest.raises(ConfigError, match=r"both set .* and varied"):
        spaces.make_space("optimisation", ["train.lr_dense=1..2"], ["train.lr_dense=0.01"], CONFIG)
    with pytest.raises(ConfigError, match=r'no search space "optimization"\. Did you mean "optimisation"'):
        spaces.make_space("optimization", [], [], CONFIG)


def test_vary_replaces_the_named_space() -> None:
    assert spaces.make_space("optimisation", ["model.rank=4,8"], [], CONFIG) == {"model.rank": Choice((4, 8))}


def test_draws_begin_with_the_own_setting_differ_and_depend_on_the_seed_alone() -> None:
    space = SPACES["optimisation"]
    drawn = spaces.draw(space, CONFIG, 12, seed=3)
    own = CONFIG.train
    assert list(drawn[0]) == ["train.lr_dense", "train.lr_sparse", "train.batch_impressions"]
    assert list(drawn[0].values()) == [own.lr_dense, own.lr_sparse, own.batch_impressions]
    assert len({tuple(d.values()) for d in drawn}) == len(drawn) == 12
    assert drawn == spaces.draw(space, CONFIG, 12, seed=3)
    assert drawn != spaces.draw(space, CONFIG, 12, seed=4)
    assert spaces.draw(space, CONFIG, 1, seed=3) == drawn[:1]


def test_draws_meet_every_stratum_of_a_log_range_once() -> None:
    low, high, num = 1e-4, 1.0, 40
    drawn = spaces.draw({"train.lr_dense": Range(low, high, log=True)}, CONFIG, num + 1, seed=0)[1:]
    strata = [math.log(d["train.lr_dense"] / low) / math.log(high / low) * num for d in drawn]
    # Rounding to three digits may carry a value over the edge of its stratum, by far less than a stratum.
    assert sorted(strata) == pytest.approx([i + 0.5 for i in range(num)], abs=0.52)


def test_a_small_space_is_drawn_whole_and_not_twice() -> None:
    config = apply_overrides(CONFIG, ["model.rank=8"])
    drawn = spaces.draw({"model.rank": Choice((4, 8, 16))}, config, 10, seed=0)
    assert drawn[0] == {"model.rank": 8}
    assert sorted(d["model.rank"] for d in drawn) == [4, 8, 16]


@given(
    st.floats(1e-6, 1e3), st.floats(1.001, 1e4), st.booleans(), st.floats(0, 1, exclude_max=True)
)  # fmt: skip
def test_values_of_a_range_lie_inside_and_can_be_typed(low: float, factor: float, log: bool, u: float) -> None:
    domain = Range(low, low * factor, log)
    value = domain.at(u, whole=False)
    assert domain.low <= value <= domain.high
    assert float(str(value)) == value


@given(st.integers(1, 50), st.integers(1, 50), st.booleans())
def test_every_whole_number_of_a_range_can_be_drawn(low: int, more: int, log: bool) -> None:
    domain = Range(low, low + more, log)
    met = {domain.at(i / 5000, whole=True) for i in range(5000)}
    assert met == set(range(low, low + more + 1))


def test_drawn_settings_are_accepted_by_the_config_and_nothing_else_changes() -> None:
    for name, space in SPACES.items():
        for setting in spaces.draw(space, CONFIG, 6, seed=1):
            changed = apply_overrides(CONFIG, [f"{p}={v}" for p, v in setting.items()])
            assert {p: spaces.current(changed, p) for p in setting} == setting, name
            others = [p for p in field_paths(CONFIG) if p not in setting]
            assert all(spaces.current(changed, p) == spaces.current(CONFIG, p) for p in others)


def test_description_is_plain_json() -> None:
    assert spaces.describe({"a": Range(1, 2, log=True), "b": Choice((1, 2))}) == {
        "a": {"low": 1, "high": 2, "log": True},
        "b": {"values": [1, 2]},
    }
