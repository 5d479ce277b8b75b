"""Counter random numbers: independent of batching, uniform, normal, and streams that do not copy each other."""

import numpy as np

from gem.data.world.counter_random import CounterRandom


def test_a_draw_does_not_depend_on_its_batch():
    r = CounterRandom(7)
    whole = r.uniform("x", np.arange(1000), 3)
    assert (np.concatenate([r.uniform("x", np.arange(a, a + 10), 3) for a in range(0, 1000, 10)]) == whole).all()
    assert r.normal("x", np.arange(4)[:, None], np.arange(3)).shape == (4, 3)


def test_splitmix_reference_values():
    """First outputs of splitmix64 seeded with 0, from the published reference implementation."""
    from gem.data.world.counter_random import _GOLDEN, _mix

    state = _GOLDEN * np.arange(1, 4, dtype=np.uint64)
    assert [int(w) for w in _mix(state)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_uniform_fills_the_interval_evenly():
    x = CounterRandom(1).uniform("u", np.arange(100_000))
    assert 0 < x.min() < x.max() < 1
    counts = np.histogram(x, bins=50, range=(0, 1))[0]
    assert ((counts - 2000) ** 2 / 2000).sum() < 90  # chi-square, 49 degrees of freedom, p about 0.0003


def test_normal_has_the_right_moments():
    x = CounterRandom(2).normal("n", np.arange(200_000))
    assert abs(x.mean()) < 0.01 and abs(x.std() - 1) < 0.01
    assert abs((x**3).mean()) < 0.03 and abs((x**4).mean() - 3) < 0.08


def test_streams_seeds_and_keys_are_uncorrelated():
    k = np.arange(50_000)
    a = CounterRandom(1).uniform("a", k, 5)
    others = [
        CounterRandom(1).uniform("b", k, 5),
        CounterRandom(2).uniform("a", k, 5),
        CounterRandom(1).uniform("a", k, 6),
        CounterRandom(1).uniform("a", 5, k),
        np.roll(a, 1),
    ]
    for b in others:
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.02
    assert len({int(w) for i in range(100) for w in CounterRandom(0).words("w", i, np.arange(100))}) == 10_000


def test_below_is_within_its_limit_and_hits_every_value():
    x = CounterRandom(3).below(np.array([1, 5])[:, None], "b", np.arange(2)[:, None], np.arange(2000))
    assert set(x[0].tolist()) == {0} and set(x[1].tolist()) == {0, 1, 2, 3, 4}
