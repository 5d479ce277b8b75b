"""Checks the context of a request against the spec's context features and spells its values as training does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gem.data.spec import FeatureSpec
from gem.errors import suggest
from serving.schema import Refusal
from serving.spelling import categories, category

_WANTED = {
    "categorical": "an integer, a string or null",
    "multi": "a list of integers or strings, or null",
    "numeric": "a number or null",
    "embedding": "a list of numbers or null",
}


class ContextFields:
    """The context features a model knows. A field may be called by its name or by its raw column."""

    def __init__(self, features: Sequence[FeatureSpec]) -> None:
        self.names = tuple(f.name for f in features)
        self._by_key = {key: f for f in features for key in (f.column or f.name, f.name)}

    def values(self, context: Mapping[str, object]) -> dict[str, object]:
        """Context of a request as feature name -> value; fields not sent are absent (NULL row or NaN).

        Text of ids comes out as training reads it (`spelling`): "" and "nan" are None, " 1.0" is "1".
        Raises Refusal (422) for an unknown field (nearest name), one sent twice, or a value of a wrong type.
        """
        out: dict[str, object] = {}
        problems: list[tuple[str, str]] = []
        for key, value in context.items():
            feature = self._by_key.get(key)
            field = f"context.{key}"
            if feature is None:
                allowed = list(self.names) or "none, this data set has no context features"
                problems.append((field, f"unknown field.{suggest(key, self._by_key)} Allowed: {allowed}"))
                continue
            if feature.name in out:
                problems.append((field, f'is the feature "{feature.name}", which was sent already; send it once'))
            elif not _fits(feature, value):
                problems.append((field, f"must be {_WANTED[feature.kind]}, got {type(value).__name__}"))
            else:
                value = _spelled(feature, value)
            out[feature.name] = value
        if problems:
            raise Refusal(422, "invalid_context", problems)
        return out


def _spelled(feature: FeatureSpec, value: object) -> object:
    """A value that fits its feature, in the spelling of training; numbers and vectors have only one."""
    if feature.kind == "categorical" and isinstance(value, str):
        return category(value)
    return categories(value) if feature.kind == "multi" and isinstance(value, list) else value


def _fits(feature: FeatureSpec, value: object) -> bool:
    if value is None:
        return True
    if feature.kind == "categorical":
        return isinstance(value, int | str)
    if feature.kind == "numeric":
        return isinstance(value, int | float) and not isinstance(value, bool)
    if feature.kind == "multi":
        return isinstance(value, list) and all(isinstance(v, int | str) for v in value)
    numbers = value if isinstance(value, list) and all(isinstance(v, int | float) for v in value) else None
    return numbers is not None and (feature.width is None or len(numbers) == feature.width)
