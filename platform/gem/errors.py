"""The exception tree. Every message says what is wrong, what was got, what is allowed, what to do.

All classes take one plain string, so that they survive pickling across Ray processes.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class GemError(Exception):
    """Base of every error a user of the platform can cause or must handle."""


class ConfigError(GemError):
    """A run configuration or an override (`--set a.b=c`) that cannot be used."""


class SpecError(GemError):
    """A dataset specification that contradicts itself or the files it describes."""


class DataError(GemError):
    """Rows, files or partitions that break the data contract."""


class StoreError(DataError):
    """A feature store on disk that is missing, incomplete or does not match its manifest."""


class JaggedError(DataError):
    """A jagged tensor whose offsets, lengths or ids are impossible."""


class BundleError(GemError):
    """A model bundle that is missing, corrupted or does not fit what it is asked to serve."""


class GateError(GemError):
    """A promotion that was asked for but that the gates refuse."""


class TrackingError(GemError):
    """The tracking server or registry cannot be reached or refuses a write."""


class TrainingError(GemError):
    """Training cannot start or go on (resources, non-finite loss, broken checkpoint)."""


class JobError(GemError):
    """A job that cannot be submitted to a cluster: address, token, upload or time."""


class RequestError(GemError):
    """A scoring request that cannot be answered."""


def suggest(name: str, allowed: Iterable[str]) -> str:
    """Return `' Did you mean "x"?'` for the nearest allowed name, or an empty string."""
    options = sorted(set(allowed))
    near = difflib.get_close_matches(name, options, n=1, cutoff=0.6)
    return f' Did you mean "{near[0]}"?' if near else ""
