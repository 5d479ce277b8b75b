"""Random numbers as a pure function of (seed, stream, keys): no state, so no order and no chunk size matters.

A draw for (user 17, day 3, event 5) is the same whoever asks for it, in whatever batch. The mixer is
splitmix64's finaliser (Steele et al. 2014), applied once per key.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Words = NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_A = np.uint64(0xBF58476D1CE4E5B9)
_MIX_B = np.uint64(0x94D049BB133111EB)


class CounterRandom:
    """Draws keyed by a seed. `stream` names what is drawn; two streams are independent.

    Keys are non-negative integers or integer arrays; they broadcast, and the draws have their shape (scalars
    give one draw, shape [1]).
    """

    def __init__(self, seed: int) -> None:
        self._seed = np.array([seed % 2**64], dtype=np.uint64)

    def words(self, stream: str, *keys: ArrayLike) -> Words:
        """64 random bits per key tuple."""
        state = _mix(self._seed + _GOLDEN)
        for byte in stream.encode():
            state = _mix(state ^ np.uint64(byte))
        out = state
        for key in keys:
            out = _mix(out + _GOLDEN * (np.atleast_1d(key).astype(np.uint64) + np.uint64(1)))
        return out

    def uniform(self, stream: str, *keys: ArrayLike) -> Floats:
        """Uniform in the open interval (0, 1)."""
        return _unit(self.words(stream, *keys))

    def normal(self, stream: str, *keys: ArrayLike) -> Floats:
        """Standard normal (Box-Muller)."""
        first = self.words(stream, *keys)
        angle = _unit(_mix(first ^ _GOLDEN))
        return np.asarray(np.sqrt(-2.0 * np.log(_unit(first))) * np.cos(2.0 * np.pi * angle), dtype=np.float64)

    def below(self, limit: ArrayLike, stream: str, *keys: ArrayLike) -> NDArray[np.int64]:
        """Uniform integers in [0, limit)."""
        return np.asarray(np.floor(self.uniform(stream, *keys) * np.asarray(limit)), dtype=np.int64)


def _mix(x: Words) -> Words:
    x = (x ^ (x >> np.uint64(30))) * _MIX_A
    x = (x ^ (x >> np.uint64(27))) * _MIX_B
    return np.asarray(x ^ (x >> np.uint64(31)), dtype=np.uint64)


def _unit(words: Words) -> Floats:
    return ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
