"""DatasetSpec: what the raw tables mean (contract 1). New data needs a spec file and no code."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field

from gem.errors import SpecError, suggest

TimeUnit = Literal["s", "ms", "us"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RowTime(_Strict):
    """A made time column (int64 ms UTC) for rows that stand in time order without one.

    time = midnight UTC of `start` + `day` column (0, 1, … whole days; mostly from the path) + row x `step_us`.
    `days` says which day a value of that column means where it is no number: {train: 0, test: 7}.
    """

    column: str
    start: str  # YYYY-MM-DD
    step_us: int = Field(ge=0)  # microseconds between neighbouring rows of a file
    day: str | None = None
    days: dict[str, int] = Field(default_factory=dict)


class TableSpec(_Strict):
    """Files of one raw table: glob patterns below the data folder; all of one format.

    Besides the columns in the files a table has: one per `name=value` folder of a hive-partitioned path, one per
    named group of `path_columns`, the `constants`, `row_number` and `row_time`.
    """

    files: list[str] = Field(min_length=1)
    optional: bool = False  # may be absent: event sources over it then give no events
    format: Literal["parquet", "csv"] | None = None  # by file ending if not given; .tsv and .txt are csv
    separator: str = Field(default=",", min_length=1)  # of a CSV, one or several characters
    columns: list[str] = Field(default_factory=list)  # names of the columns of a CSV without a header line
    encoding: str = "utf-8"  # of a CSV
    path_columns: str | None = None  # regular expression with named groups, searched in the path below the folder
    constants: dict[str, str | int] = Field(default_factory=dict)  # columns with one value on every row
    row_number: str | None = None  # column of int64 numbers, distinct over all files and rows of the table
    row_time: RowTime | None = None


class TimeSpec(_Strict):
    """A column of times (or durations) and the unit of its numbers."""

    column: str
    unit: TimeUnit = "ms"


class LabelSpec(_Strict):
    """A binary outcome: either a column of the impression table, or rows of a log of its own.

    With `table`, label 1 = a row with the impression's `key` exists within `window_hours`. Impressions younger
    than the window at the end of that log have no label, unless the log is `complete`: an export that was
    waited for, with every outcome of every impression.
    """

    column: str | None = None
    at_least: float | None = None  # the column is a number (a rating): 1 where it is at least this
    table: str | None = None
    key: str | None = None  # column shared by the impression table and `table`
    time: TimeSpec | None = None
    window_hours: float | None = None
    complete: bool = False
    given: str | None = None  # the label this one is conditional on


class ImpressionSpec(_Strict):
    """The log of shown ads: who saw what, where and when, and which columns are known only afterwards."""

    table: str
    user: str
    ad: str
    surface: str
    time: TimeSpec
    zone: str = "UTC"  # where a day begins
    day: str | None = None  # column with the log's own day (yyyymmdd or yyyy-mm-dd); by time and zone if absent
    id: str | None = None  # impression id; made from (user, ad, time) if absent
    duplicate_key: list[str] = Field(default_factory=list)  # rows equal in these columns are one row
    outcomes: list[str] = Field(default_factory=list)  # known only afterwards: refused as features
    true_probability: dict[str, str] = Field(default_factory=dict)  # label -> column; generated data only


class EventSource(_Strict):
    """Rows that become timeline events of one kind.

    An event without an ad of its own (a visit to a category) names `item` instead of `ad`: ad feature -> column. It
    becomes an entity on the ad side that has just these features.
    """

    kind: str
    table: str
    user: str
    ad: str | None = None
    item: dict[str, str] = Field(default_factory=dict)
    id: str | None = None  # event id: rows of a user equal in it are one event; equal in all fields if absent
    time: TimeSpec | None = None  # absent only with `list_before`
    surface: str | None = None
    flags: dict[str, str] = Field(default_factory=dict)  # flag name -> 0/1 column
    always: list[str] = Field(default_factory=list)  # flags that every event of this source carries
    action: str | None = None  # column with the name of an action
    action_flags: dict[str, str] = Field(default_factory=dict)  # action -> flag; other actions carry none
    dwell: TimeSpec | None = None  # a duration column and its unit
    available_after_ms: int = Field(default=0, ge=0)  # an event is known this long after its time
    ingested: TimeSpec | None = None  # when the row arrived: known no earlier than this
    list_before: TimeSpec | None = None  # `ad` is a list without times, all before this time, oldest first


class FeatureSpec(_Strict):
    """One input column, how it is read and how large its vocabulary may grow."""

    name: str
    column: str | None = None  # defaults to `name`
    kind: Literal["categorical", "multi", "numeric", "embedding"]
    transform: Literal["none", "log1p"] = "none"
    separator: str = ","  # multi-valued text
    min_count: int = Field(default=1, ge=1)  # rarer values share the unknown row
    max_rows: int = Field(default=1_000_000, ge=1)
    hash_rows: int | None = Field(default=None, ge=1)  # open vocabulary: values hashed to so many rows
    hashes: int = Field(default=2, ge=1, le=8)  # rows per hashed value (multi-hash)
    since: str | None = None  # YYYY-MM-DD: files of earlier days may lack the column (its values are null there)
    width: int | None = None  # embedding
    table: str | None = None  # embedding table name; share by naming the same one


class EntitySpec(_Strict):
    """Users or ads: one table with a key and its features. Ids seen fewer than `min_count` times are unknown.

    Without a table, users or ads are those of the log and have no features.
    """

    table: str | None = None
    key: str | None = None
    features: list[FeatureSpec] = Field(default_factory=list)
    min_count: int = Field(default=2, ge=1)  # of the id itself
    hash_rows: int | None = Field(default=None, ge=1)  # ids hashed instead of a vocabulary
    hashes: int = Field(default=2, ge=1, le=8)


class ContextSpec(_Strict):
    """Known at request time. `surface`, `hour` and `weekday` come for free from surface and time."""

    features: list[FeatureSpec] = Field(default_factory=list)


class SurfaceSpec(_Strict):
    """Which surfaces get a vertical model of their own and what a bid pays for."""

    min_rows: int = Field(default=2000, ge=1)  # of training impressions; smaller ones are grouped
    rest: str = "other"
    names: dict[str, str] = Field(default_factory=dict)  # raw value -> readable name
    objective: dict[str, str] = Field(default_factory=dict)  # readable name -> label; default the first


class DatasetSpec(_Strict):
    """A whole data set: tables, impressions, labels, events and features; see `spec_check` for what must agree."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$")
    about: str = ""
    licence: str = ""
    source: str = ""
    tables: dict[str, TableSpec]
    impressions: ImpressionSpec
    labels: dict[str, LabelSpec]
    events: list[EventSource] = Field(default_factory=list)
    users: EntitySpec
    ads: EntitySpec
    context: ContextSpec = Field(default_factory=ContextSpec)
    surfaces: SurfaceSpec = Field(default_factory=SurfaceSpec)


def load_spec(path: Path) -> DatasetSpec:
    """Read and validate one spec file; SpecError names the field and what is allowed."""
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as e:
        raise SpecError(f"cannot read the dataset spec {path}: {e}") from None
    return parse_spec(raw)


def parse_spec(raw: object) -> DatasetSpec:
    """Validate a decoded spec. Raises SpecError that names each wrong field, and the nearest one for a misspelt key."""
    from pydantic import ValidationError

    try:
        return DatasetSpec.model_validate(raw)
    except ValidationError as e:
        lines = "; ".join(_describe(i["loc"], i["type"], i["msg"]) for i in e.errors())
        raise SpecError(f"dataset spec: {lines}") from None


def _describe(loc: tuple[int | str, ...], kind: str, message: str) -> str:
    where = ".".join(map(str, loc))
    if kind != "extra_forbidden":
        return f"{where}: {message}"
    allowed = _fields_at(loc[:-1])
    return f"{where}: no such field.{suggest(str(loc[-1]), allowed)} Allowed: {', '.join(allowed)}"


def _fields_at(loc: tuple[int | str, ...]) -> list[str]:
    """Names of the fields of the model at a place in a spec."""
    kind: Any = DatasetSpec
    for step in loc:
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            kind = kind.model_fields[str(step)].annotation
            if type(None) in get_args(kind):  # `X | None`
                kind = next(k for k in get_args(kind) if k is not type(None))
        else:  # the values of a list or a dict
            kind = get_args(kind)[-1]
    return sorted(kind.model_fields)
