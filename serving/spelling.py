"""Values of a request spelled as training spells them: the readers of raw columns, applied to plain values.

Training reads categories through `category_text` and ids through `to_ids`. A request that says " mobile"
or "1.0" means the row that training made of these texts, and "" or "nan" mean no value.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from gem.data.ingest.columns import category_text, text
from gem.data.keys import KeyIndex
from gem.data.store import EntityTable

Value = int | str


def category(value: Value | None) -> Value | None:
    """A categorical value; None for text that means "no value"."""
    return _spelled([value], whole=True)[0] if isinstance(value, str) else value


def categories(values: Sequence[Value]) -> list[Value]:
    """The items of a multi-valued feature; items that mean "no value" are dropped, as in training."""
    return [v for v in _spelled(values, whole=True) if v is not None]


def entity_keys(table: EntityTable | KeyIndex, ids: Sequence[Value]) -> list[Value | None]:
    """Ids of a request as the keys of `table` are spelled, [N] -> [N]; None for text that means "no id".

    Where every key is a whole number, "7.0" is 7, as in a column that went through a float; else it is a text.
    """
    return _spelled(ids, whole=pa.types.is_integer(table.keys.type))


def _spelled(values: Sequence[Value | None], whole: bool) -> list[Value | None]:
    """Texts among `values` in the spelling of training; `whole`: also whole floats without their fraction."""
    at = [i for i, v in enumerate(values) if isinstance(v, str)]
    out = list(values)
    if at:
        words = pa.array([values[i] for i in at], pa.string())
        clean = category_text(words) if whole else text(words)
        for i, word in zip(at, clean.to_pylist(), strict=True):
            out[i] = word
    return out
