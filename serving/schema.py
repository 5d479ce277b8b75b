"""What a request may look like and what an answer looks like (pydantic at the edge).

Nothing is coerced: `true` is not 1, `"12"` is not 12, NaN and infinities are no numbers, unknown and
repeated keys are refused. Integer ids and their decimal text mean the same entity (raw logs differ).
"""

from __future__ import annotations

import json
import math
import re
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError, WithJsonSchema

from gem.errors import RequestError, suggest
from serving.config import MAX_CANDIDATES

MAX_TEXT = 256  # characters of an id or of a context value
MAX_VALUES = 256  # of one multi-valued context field
MAX_CONTEXT = 256  # context fields
MAX_ERRORS = 10  # listed in one answer
MIN_TIME_MS, MAX_TIME_MS = 946_684_800_000, 4_102_444_800_000  # years 2000 to 2100
MAX_BID = 1e12
REQUEST_ID = re.compile(r"^[A-Za-z0-9._:-]{1,128}$")


class Refusal(RequestError):
    """A request that is not answered: HTTP `status`, a `code` for machines, one line per problem.

    `problems` are (field, message); `limit` is the number that was exceeded, if one was. `status`, `code`
    and `limit` are plain arguments so that the exception survives pickling.
    """

    def __init__(self, status: int, code: str, problems: list[tuple[str, str]], limit: int | None = None) -> None:
        super().__init__(status, code, problems, limit)
        self.status, self.code, self.problems, self.limit = status, code, problems, limit

    def __str__(self) -> str:
        return f"{self.code}: " + "; ".join(f"{field}: {message}" for field, message in self.problems)


def _show(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def _kind(value: object) -> str:
    names: dict[type, str] = {bool: "a boolean", type(None): "null", float: "a number", dict: "an object"}
    names |= {list: "an array", str: "a string", int: "an integer"}
    return names.get(type(value), type(value).__name__)


def _key(value: object) -> int | str:
    if type(value) is int:
        if not -(2**63) <= value < 2**63:
            raise ValueError("must fit in 64 bits")
        return value
    if type(value) is str:
        return _text(value)
    raise ValueError(f"must be an integer or a string, got {_kind(value)}")


def _text(value: str) -> str:
    if not 1 <= len(value) <= MAX_TEXT:
        raise ValueError(f"must have 1 to {MAX_TEXT} characters, got {len(value)}")
    if any("\ud800" <= c <= "\udfff" for c in value):
        raise ValueError("must be valid Unicode, got half of a surrogate pair")
    return value


def _context_value(value: object) -> object:
    if isinstance(value, list):
        if len(value) > MAX_VALUES:
            raise ValueError(f"must have at most {MAX_VALUES} values, got {len(value)}")
        return [_scalar(v) for v in value]
    return value if value is None or isinstance(value, bool) else _scalar(value)


def _scalar(value: object) -> int | float | str:
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError("must be a finite number")
        return value
    return "" if value == "" else _key(value)


def _time(value: object) -> int | None:
    if value is None:
        return None
    if type(value) is not int:
        raise ValueError(f"must be an integer (milliseconds since 1970, UTC) or null, got {_kind(value)}")
    if not MIN_TIME_MS <= value <= MAX_TIME_MS:
        hint = "; this looks like seconds, multiply by 1000" if MIN_TIME_MS <= value * 1000 <= MAX_TIME_MS else ""
        raise ValueError(f"must be milliseconds between the years 2000 and 2100, got {_show(value)}{hint}")
    return value


_ID_SCHEMA = {"anyOf": [{"type": "integer"}, {"type": "string", "minLength": 1, "maxLength": MAX_TEXT}]}
EntityKey = Annotated[int | str, PlainValidator(_key), WithJsonSchema(_ID_SCHEMA)]
ContextValue = Annotated[object, PlainValidator(_context_value), WithJsonSchema({})]
TimeMs = Annotated[int | None, PlainValidator(_time), WithJsonSchema({"type": ["integer", "null"]})]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class Candidate(_Strict):
    """One ad that may be shown and what its advertiser bids for the surface's objective."""

    ad_id: EntityKey
    bid: float = Field(ge=0, le=MAX_BID)


class RankRequest(_Strict):
    """Rank these candidates for this user on this surface."""

    surface: str = Field(min_length=1, max_length=MAX_TEXT)
    user_id: EntityKey
    context: dict[str, ContextValue] = Field(default_factory=dict, max_length=MAX_CONTEXT)
    time_ms: TimeMs = Field(default=None, description="when the ad would be shown, ms UTC; null = now")
    candidates: list[Candidate] = Field(min_length=1, json_schema_extra={"maxItems": MAX_CANDIDATES})
    request_id: str | None = Field(default=None, pattern=REQUEST_ID.pattern, description="else X-Request-ID, else made")


class ModelRef(BaseModel):
    """Which bundle answered, and the feature store it was trained on and reads histories from."""

    name: str
    version: str
    bundle_hash: str
    store_hash: str


class RankedAd(BaseModel):
    """One candidate, scored. Every task of the model also appears as `p_<task>`."""

    model_config = ConfigDict(extra="allow")

    ad_id: int | str
    p_click: float | None = None
    p_conversion: float | None = None
    expected_value: float | None = Field(description="bid x probability of the surface's objective")
    rank: int = Field(description="1 = show first")
    known: bool = Field(description="false: scored by the row of the unknown ad")
    index: int = Field(description="position in the request, from 0")


class RankResponse(BaseModel):
    """The candidates by expected value, highest first; ties keep the order of the request."""

    request_id: str
    model: ModelRef
    surface: str
    objective: str
    user_known: bool
    time_ms: int
    ranked: list[RankedAd]
    flags: list[str]


class Problem(BaseModel):
    field: str
    message: str


class ErrorResponse(BaseModel):
    """Every refusal has this form."""

    error: str
    request_id: str | None
    detail: list[Problem]
    limit: int | None = None


def parse_request(body: bytes, max_candidates: int = MAX_CANDIDATES) -> RankRequest:
    """Bytes of a request body -> RankRequest. Raises Refusal (422) naming each bad field."""
    raw = _decode(body)
    candidates = raw.get("candidates")
    if isinstance(candidates, list) and len(candidates) > max_candidates:
        message = f"got {len(candidates)}, allowed at most {max_candidates} in one request; send fewer"
        raise Refusal(422, "too_many_candidates", [("candidates", message)], max_candidates)
    try:
        return RankRequest.model_validate(raw)
    except ValidationError as e:
        problems = [_problem(item) for item in e.errors(include_url=False)[:MAX_ERRORS]]
        raise Refusal(422, "invalid_request", problems) from None


def _decode(body: bytes) -> dict[str, Any]:
    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(items)
        if len(out) != len(items):
            seen: set[str] = set()
            twice = next(k for k, _ in items if k in seen or seen.add(k))  # type: ignore[func-returns-value]
            raise Refusal(422, "duplicate_key", [(twice[:MAX_TEXT], "this key appears more than once; send it once")])
        return out

    try:  # NaN and infinities are let through here: the field they stand in refuses them by name
        raw = json.loads(body.decode("utf-8"), object_pairs_hook=pairs)
    except RecursionError:
        raise Refusal(422, "malformed_json", [("body", "is nested too deeply")]) from None
    except UnicodeDecodeError as e:
        raise Refusal(422, "malformed_json", [("body", f"is not UTF-8 at byte {e.start}")]) from None
    except ValueError as e:
        raise Refusal(422, "malformed_json", [("body", f"is not JSON: {str(e)[:200]}")]) from None
    if not isinstance(raw, dict):
        raise Refusal(422, "invalid_request", [("body", f"must be a JSON object, got {_kind(raw)}")])
    return raw


def _problem(item: Any) -> tuple[str, str]:
    field = ".".join(str(part)[:MAX_TEXT] for part in item["loc"]) or "body"
    kind, value = item["type"], item["input"]
    last = str(item["loc"][-1]) if item["loc"] else ""
    if kind == "missing":
        return field, "is required"
    if kind == "extra_forbidden":
        model = Candidate if item["loc"][0] == "candidates" else RankRequest
        allowed = list(model.model_fields)
        return field, f"unknown field.{suggest(last[:MAX_TEXT], allowed)} Allowed: {allowed}"
    if field == "candidates" and kind == "too_short":
        return field, "must name at least one ad, got an empty list"
    if kind == "value_error":
        return field, str(item["ctx"]["error"])
    return field, f"{item['msg']}, got {_show(value)} ({_kind(value)})"
