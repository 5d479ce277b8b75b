"""What MLflow accepts: flat names, finite numbers, bounded text, one insert of a row, database or server addresses."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from gem.errors import TrackingError

MAX_TEXT = 5000  # below MLflow's limits for params (6000) and tags (8000)
MAX_DIGEST = 36
DATABASES = ("sqlite", "postgresql", "mysql", "mssql")
_UNNAMEABLE = re.compile(r"[^A-Za-z0-9_\-. /:]")
_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
T = TypeVar("T")


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings to `a.b.c` names that MLflow allows (other characters become `_`)."""
    out: dict[str, Any] = {}
    for key, value in values.items():
        name = prefix + _UNNAMEABLE.sub("_", str(key))
        if isinstance(value, Mapping):
            out.update(flatten(value, name + "."))
        else:
            out[name[:250]] = value
    return out


def split_metrics(values: Mapping[str, Any]) -> tuple[dict[str, float], list[str]]:
    """(finite metrics, names of the others). MLflow would store infinity as 1.797e308 and keep NaN."""
    good: dict[str, float] = {}
    bad: list[str] = []
    for name, value in flatten(values).items():
        number = _number(value)
        if number is None:
            bad.append(name)
        else:
            good[name] = number
    return good, bad


def text(value: Any) -> str:
    """A value as bounded text."""
    out = value if isinstance(value, str) else json.dumps(value, default=str)
    return out if len(out) <= MAX_TEXT else out[: MAX_TEXT - 3] + "..."


def pieces(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Lists of at most `size` items; MLflow limits a batch."""
    rest = list(items)
    for at in range(0, len(rest), size):
        yield rest[at : at + size]


def once_more(write: Callable[[], object]) -> None:
    """Run a write, and again if another process inserted the same row between MLflow's look and its insert."""
    try:
        write()
    except Exception as e:
        if "IntegrityError" not in str(e) and "UNIQUE constraint" not in str(e):
            raise
        write()  # the row is there now, MLflow finds it


def check_model_name(name: str) -> str:
    """Refuse names that could leave their folder or URL (paths, `..`, `%2e`, control characters)."""
    if not _MODEL_NAME.fullmatch(name) or ".." in name:
        raise TrackingError(f'model name "{name}" is not allowed; use letters, digits, ".", "_", "-" (at most 128)')
    return name


def tracking_address(uri: str, runs: Path) -> str:
    """The tracking URI to use: the given one, or SQLite in the runs folder if empty.

    Raises TrackingError for stores that MLflow no longer keeps (`file:`, plain folders) and unknown kinds.
    """
    if not uri:
        return f"sqlite:///{(runs / 'mlflow.db').absolute()}"
    scheme = uri.partition("://")[0].partition("+")[0].lower() if "://" in uri else ""
    if scheme == "sqlite":
        place = uri.partition(":///")[2]
        if not place or place == ":memory:":
            raise TrackingError(f'tracking URI "{uri}": a database in memory is lost; give sqlite:///path/to/mlflow.db')
        return f"sqlite:///{Path(place).absolute()}"
    if scheme in DATABASES or scheme in ("http", "https"):
        return uri
    raise TrackingError(
        f'tracking URI "{uri}": not usable. MLflow 3 keeps no file store; allowed are sqlite:///path/to/mlflow.db, '
        "postgresql://…, mysql://…, http(s)://server:port. Set MLFLOW_TRACKING_URI to one of them or unset it"
    )


def is_server(uri: str) -> bool:
    """True for an MLflow server (it may stand on another machine), False for a database."""
    return uri.startswith(("http://", "https://"))


def _number(value: Any) -> float | None:
    if isinstance(value, bool):
        return float(value)
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None
