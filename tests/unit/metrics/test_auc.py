"""AUC and gAUC against the definition: every pair of a positive and a negative row, one by one."""

import numpy as np
import pytest

from gem.errors import DataError
from gem.metrics import auc, gauc


def pair_auc(y, p):
    wins, pairs = 0.0, 0
    for yi, pi in zip(y, p, strict=True):
        for yj, pj in zip(y, p, strict=True):
            if yi == 1 and yj == 0:
                pairs += 1
                wins += 1.0 if pi > pj else 0.5 if pi == pj else 0.0
    return wins / pairs if pairs else None


def pair_gauc(user, y, p):
    total = weight = 0.0
    for u in set(user):
        rows = [i for i, v in enumerate(user) if v == u]
        value = pair_auc([y[i] for i in rows], [p[i] for i in rows])
        if value is not None:
            total += len(rows) * value
            weight += len(rows)
    return total / weight


@pytest.mark.parametrize("levels", [2, 5, 1000])  # many ties, some, almost none
def test_auc_equals_pair_count(rng, levels):
    y = (rng.random(150) < 0.3).astype(int)
    p = rng.integers(0, levels, 150) / levels
    assert auc(y, p).value == pytest.approx(pair_auc(y.tolist(), p.tolist()), abs=1e-12)


@pytest.mark.parametrize("levels", [2, 5, 1000])
def test_gauc_equals_pair_count_per_user(rng, levels):
    y = (rng.random(300) < 0.3).astype(int)
    p = rng.integers(0, levels, 300) / levels
    user = rng.integers(0, 40, 300)
    assert gauc(user, y, p).value == pytest.approx(pair_gauc(user.tolist(), y.tolist(), p.tolist()), abs=1e-12)
    names = [f"user-{u}" for u in user]  # text ids, unsorted
    assert gauc(names, y, p).value == pytest.approx(gauc(user, y, p).value, abs=1e-14)


def test_constant_predictor_has_one_half():
    y = [1, 0, 0, 1, 0]
    assert auc(y, [0.3] * 5).value == 0.5
    assert gauc([7, 7, 7, 8, 8], y, [0.3] * 5).value == 0.5


def test_perfect_and_reversed():
    y, p = np.array([0, 0, 1, 1]), np.array([0.1, 0.2, 0.3, 0.4])
    assert auc(y, p).value == 1.0
    assert auc(y, 1 - p).value == 0.0


def test_auc_of_tiny_differences_is_exact():
    p = np.nextafter(0.5, 1), 0.5  # one float64 step apart; a binned AUC would call it a tie
    assert auc([1, 0], p).value == 1.0


def test_gauc_ignores_the_level_of_a_user_and_auc_does_not():
    user, y = [0, 0, 1, 1], [0, 1, 0, 1]
    p = [0.1, 0.2, 0.8, 0.9]
    assert gauc(user, y, p).value == 1.0
    assert auc(y, p).value == 0.75


def test_users_with_one_label_do_not_count():
    with_extra = gauc([0, 0, 0, 1, 1], [0, 1, 0, 1, 1], [0.2, 0.3, 0.4, 0.1, 0.9])
    assert with_extra.value == gauc([0, 0, 0], [0, 1, 0], [0.2, 0.3, 0.4]).value == 0.5


def test_undefined_is_none_with_the_reason():
    assert "no positive" in auc([0, 0], [0.1, 0.2]).reason
    assert "no negative" in auc([1, 1], [0.1, 0.2]).reason
    assert auc([], []).reason == "no rows"
    lonely = gauc([1, 2], [0, 1], [0.1, 0.2])
    assert lonely.value is None and "none of 2 users has both labels" in lonely.reason


def test_wrong_number_of_users_is_refused():
    with pytest.raises(DataError, match="one user per label"):
        gauc([1], [0, 1], [0.1, 0.2])
