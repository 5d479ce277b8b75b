"""What a sweep may vary: typed search spaces by subject, checked against the configuration before anything runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gem.config import RunConfig, apply_overrides, field_paths
from gem.errors import ConfigError, suggest

Value = int | float | bool | str
SWEPT = ("model.", "train.")  # a trial trains the foundation model on the data as they are
# How a trial runs, not what it learns; the trial sets these itself.
NOT_SWEPT = frozenset({"train.num_workers", "train.checkpoint_every_steps"})
DIGITS = 3  # significant digits of a drawn number, so that the printed flags are exactly what was tried


@dataclass(frozen=True)
class Range:
    """All numbers from low to high (both included); `log`: evenly spread in the logarithm."""

    low: float
    high: float
    log: bool = False

    def at(self, u: float, whole: bool) -> int | float:
        """The value at 0 <= u < 1 of the range, rounded to what a person would type."""
        if whole:
            low, high = int(self.low), int(self.high)
            drawn = low * ((high + 1) / low) ** u if self.log else low + (high + 1 - low) * u
            return min(int(drawn), high)
        value = self.low * (self.high / self.low) ** u if self.log else self.low + (self.high - self.low) * u
        return min(max(float(f"{value:.{DIGITS}g}"), self.low), self.high)


@dataclass(frozen=True)
class Choice:
    """One of these values."""

    values: tuple[Value, ...]

    def at(self, u: float, whole: bool) -> Value:
        """The value at 0 <= u < 1 of the list."""
        return self.values[int(u * len(self.values))]


Domain = Range | Choice
Space = dict[str, Domain]  # config path -> what it may be
SPACES: dict[str, Space] = {
    "optimisation": {
        "train.lr_dense": Range(3e-4, 1e-2, log=True),
        "train.lr_sparse": Range(0.01, 0.3, log=True),
        "train.batch_impressions": Choice((256, 512, 1024)),
    },
    "architecture": {
        "model.num_layers": Choice((1, 2, 3)),
        "model.num_fmb": Choice((4, 8, 16)),
        "model.rank": Choice((4, 8, 16)),
        "model.mlp_hidden": Choice((64, 128, 256)),
        "model.dropout": Choice((0.0, 0.1, 0.2)),
    },
    "histories": {
        "model.max_history": Choice((8, 16, 32, 64, 128, 256)),
    },
}


def space_named(name: str) -> Space:
    """The space of a subject. Raises ConfigError naming the nearest one."""
    if name not in SPACES:
        raise ConfigError(f'no search space "{name}".{suggest(name, SPACES)} Allowed: {sorted(SPACES)}')
    return SPACES[name]


def parse_vary(text: str, config: RunConfig) -> tuple[str, Domain]:
    """`path=low..high`, `path=low..high:log` or `path=a,b,c` as a config path and its domain.

    Raises ConfigError for another form, an unknown path or values of the wrong type.
    """
    path, eq, rest = (part.strip() for part in text.partition("="))
    if not eq or not rest:
        raise ConfigError(f'--vary "{text}": expected path=low..high, path=low..high:log or path=a,b,c')
    _check_path(path, config)
    if ".." not in rest:
        return path, Choice(tuple(_typed(path, v, config) for v in rest.split(",")))
    bounds, _, scale = rest.partition(":")
    if scale not in ("", "log"):
        raise ConfigError(f'--vary "{text}": the scale after the colon is "{scale}"; allowed: log, or nothing')
    low, _, high = bounds.partition("..")
    try:
        return path, Range(float(low), float(high), log=scale == "log")
    except ValueError:
        raise ConfigError(f'--vary "{text}": bounds "{low}" and "{high}" must both be numbers') from None


def make_space(name: str, vary: Sequence[str], fixed: Sequence[str], config: RunConfig) -> Space:
    """The checked space of a sweep: that of subject `name`, or exactly what `vary` says if it says anything.

    A path that `fixed` (the `--set` texts) sets is held, not swept. Raises ConfigError for anything that
    cannot be searched.
    """
    space = dict(parse_vary(v, config) for v in vary) if vary else dict(space_named(name))
    held = {f.partition("=")[0].strip() for f in fixed}
    asked = [p for p in space if p in held]
    if vary and asked:
        raise ConfigError(f"{asked[0]} is both set (--set) and varied (--vary); give only one of the two")
    space = {path: domain for path, domain in space.items() if path not in held}
    if not space:
        raise ConfigError(
            f'search space "{name}" is empty: --set holds every path of it ({", ".join(asked)}); '
            "leave one of them out, or say what to vary: --vary path=low..high"
        )
    check_space(space, config)
    return space


def check_space(space: Mapping[str, Domain], config: RunConfig) -> None:
    """Raise ConfigError for an empty space, an unknown path, contradictory bounds or values of the wrong type."""
    if not space:
        raise ConfigError("search space is empty: nothing to vary; name at least one config path")
    for path, domain in space.items():
        _check_path(path, config)
        if isinstance(domain, Range):
            _check_range(path, domain, current(config, path))
        else:
            _check_choice(path, domain, config)


def _check_path(path: str, config: RunConfig) -> None:
    known = field_paths(config)
    if path not in known:
        raise ConfigError(f'search space: the config has no path "{path}".{suggest(path, known)}')
    allowed = [p for p in known if p.startswith(SWEPT) and p not in NOT_SWEPT]
    if path not in allowed:
        raise ConfigError(
            f'search space: "{path}" cannot be swept: a trial trains the foundation model on the data as they are. '
            f"Allowed: {', '.join(allowed)}"
        )


def _check_range(path: str, domain: Range, now: Value) -> None:
    shown = f"search space: {path} from {domain.low:g} to {domain.high:g}"
    if isinstance(now, bool) or not isinstance(now, int | float):
        raise ConfigError(f"{shown}: the field holds {now!r}, not a number; give a list of values: path=a,b")
    if not (math.isfinite(domain.low) and math.isfinite(domain.high)):
        raise ConfigError(f"{shown}: bounds must be finite")
    if domain.low >= domain.high:
        raise ConfigError(f"{shown}: contradictory bounds; the first must be smaller than the second")
    if domain.low < 0 or (domain.log and domain.low <= 0):
        raise ConfigError(f"{shown}: the lower bound must be {'above 0 on a log scale' if domain.log else '0 or more'}")
    if isinstance(now, int) and not (float(domain.low).is_integer() and float(domain.high).is_integer()):
        raise ConfigError(f"{shown}: the field holds whole numbers; give whole bounds")


def _check_choice(path: str, domain: Choice, config: RunConfig) -> None:
    if not domain.values:
        raise ConfigError(f"search space: {path} has no values to choose from")
    if len(set(domain.values)) < len(domain.values):
        raise ConfigError(f"search space: {path} names a value twice: {list(domain.values)}")
    for value in domain.values:
        _typed(path, str(value), config)


def _typed(path: str, text: str, config: RunConfig) -> Value:
    return current(apply_overrides(config, [f"{path}={text.strip()}"]), path)


def current(config: RunConfig, path: str) -> Any:
    """The value at a config path."""
    node: Any = config
    for name in path.split("."):
        node = getattr(node, name)
    return node


def draw(space: Mapping[str, Domain], config: RunConfig, trials: int, seed: int) -> list[dict[str, Value]]:
    """`trials` different settings (path -> value), or all there are if the space has fewer.

    The first is the config's own, which the others must beat. The rest is a Latin hypercube: each path's
    range is cut into as many strata as there are draws and each stratum is met once (McKay et al. 1979).
    Repeated settings are replaced by independent draws.
    """
    rng = np.random.default_rng(seed)
    own = {path: current(config, path) for path in space}
    out, seen = [own], {tuple(own.values())}
    num = max(trials - 1, 0)
    columns = [(rng.permutation(num) + rng.random(num)) / max(num, 1) for _ in space]
    planned = [[float(column[i]) for column in columns] for i in range(num)]
    for tries in range(200 * trials):
        if len(out) >= trials:
            break
        u = planned[tries] if tries < num else rng.random(len(space)).tolist()
        point = {
            path: domain.at(x, isinstance(own[path], int)) for (path, domain), x in zip(space.items(), u, strict=True)
        }
        if tuple(point.values()) not in seen:
            seen.add(tuple(point.values()))
            out.append(point)
    return out


def describe(space: Mapping[str, Domain]) -> dict[str, Any]:
    """The space as plain JSON."""
    return {
        path: {"low": d.low, "high": d.high, "log": d.log} if isinstance(d, Range) else {"values": list(d.values)}
        for path, d in space.items()
    }
