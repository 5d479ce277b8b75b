"""summary.json: what one loop did. Its schema, its builders, its place on disk, its table.

Written beside and renamed; `runs/latest` is swapped in one step. JSON here has no NaN and no infinity:
a metric without a value is `null` and says why.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from gem.errors import DataError

SUMMARY_NAME = "summary.json"
METRIC_NAMES = ("ne", "auc", "gauc", "calibration")
NO_REASON = "not computed"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class MetricLike(Protocol):
    """What `gem.metrics` returns: a value with its 95 % interval, or none and the reason."""

    @property
    def value(self) -> float | None: ...
    @property
    def low(self) -> float | None: ...
    @property
    def high(self) -> float | None: ...
    @property
    def reason(self) -> str: ...


class MetricSummary(_Strict):
    """A metric with its 95 % interval. `value` null means not computable, `reason` says why."""

    value: float | None = None
    low: float | None = None
    high: float | None = None
    reason: str = ""

    @field_validator("value", "low", "high", mode="before")
    @classmethod
    def _finite(cls, value: Any) -> Any:
        return None if isinstance(value, float) and not math.isfinite(value) else value

    @model_validator(mode="after")
    def _says_why(self) -> MetricSummary:
        if self.value is None and not self.reason:
            self.reason = NO_REASON
        return self


class TaskSummary(_Strict):
    """One model on one task over one set of rows. NE is over the base rate of these same rows."""

    rows: int = Field(default=0, ge=0)
    base_rate: float | None = None
    ne: MetricSummary = MetricSummary(reason=NO_REASON)
    auc: MetricSummary = MetricSummary(reason=NO_REASON)
    gauc: MetricSummary = MetricSummary(reason=NO_REASON)
    calibration: MetricSummary = MetricSummary(reason=NO_REASON)
    bayes_ne: float | None = None  # NE of the true probabilities, known for generated data only
    baseline_ne: float | None = None  # NE of a named simple model on the same rows
    baseline: str = ""

    @field_validator("base_rate", "bayes_ne", "baseline_ne", mode="before")
    @classmethod
    def _number(cls, value: Any) -> Any:
        value = value.get("value") if isinstance(value, Mapping) else value
        return None if isinstance(value, float) and not math.isfinite(value) else value


class CurvePoint(_Strict):
    """One bin of a calibration curve: mean prediction, observed rate, rows."""

    p: float
    y: float
    n: int = Field(ge=0)


class ModelSummary(_Strict):
    """A trained model: where it is, whose child it is, how good, promoted or not and why."""

    kind: Literal["foundation", "vertical"]
    bundle: str = ""
    hash: str = ""
    version: int | str | None = None
    promoted: bool = False
    reasons: list[str] = []
    parents: dict[str, Any] = {}
    tasks: dict[str, TaskSummary] = {}
    by_surface: dict[str, dict[str, TaskSummary]] = {}
    by_day: dict[str, dict[str, TaskSummary]] = {}
    calibration_curve: dict[str, list[CurvePoint]] = {}
    without_hot_users: dict[str, TaskSummary] = {}  # `tasks` without users flagged as no people; {} if none was shown
    group: str = ""
    transfer_ratio: float | None = None
    run_id: str = ""

    @field_validator("transfer_ratio", mode="before")
    @classmethod
    def _number(cls, value: Any) -> Any:
        return None if isinstance(value, float) and not math.isfinite(value) else value


class StageSummary(BaseModel):
    """One stage. Stages may add figures of their own."""

    model_config = ConfigDict(extra="allow")

    seconds: float = Field(ge=0)
    rows_in: int | None = None
    rows_out: int | None = None
    quarantined: int = 0
    skipped: bool = False
    run_id: str = ""

    @field_validator("quarantined", mode="before")
    @classmethod
    def _total(cls, value: Any) -> Any:
        return count_quarantined(value)


class MlflowSummary(_Strict):
    tracking_uri: str = ""
    parent_run_id: str = ""


class Histogram(_Strict):
    """`counts[i]` values in [edges[i], edges[i + 1])."""

    edges: list[float] = []
    counts: list[int] = []

    @model_validator(mode="after")
    def _fits(self) -> Histogram:
        if self.counts and len(self.edges) != len(self.counts) + 1:
            raise ValueError(f"{len(self.counts)} counts need {len(self.counts) + 1} edges, got {len(self.edges)}")
        return self


class Summary(_Strict):
    """The whole of summary.json."""

    dataset: str
    commit: str = ""
    started_utc: str
    seconds: float = Field(ge=0)
    peak_rss_mb: float | None = None
    peak_rss_note: str = ""
    recipe: str = ""
    config: dict[str, Any] = {}
    mlflow: MlflowSummary = MlflowSummary()
    stages: dict[str, StageSummary]
    split: dict[str, Any] = {}
    models: dict[str, ModelSummary]
    history_length_histogram: Histogram = Histogram()
    data: dict[str, Any] = {}
    next: list[str] = []
    report: str = ""


def metric(
    value: float | None, low: float | None = None, high: float | None = None, reason: str = ""
) -> dict[str, Any]:
    """The JSON of one metric; non-finite numbers become null."""
    return MetricSummary(value=value, low=low, high=high, reason=reason).model_dump()


def task_summary(
    rows: int, base_rate: float | None, metrics: Mapping[str, MetricLike], bayes_ne: float | None = None
) -> dict[str, Any]:
    """The JSON of one model on one task from `gem.metrics.evaluate`'s answer (other names are left out)."""
    found = {name: metric(m.value, m.low, m.high, m.reason) for name, m in metrics.items() if name in METRIC_NAMES}
    return TaskSummary.model_validate(
        {"rows": rows, "base_rate": base_rate, "bayes_ne": bayes_ne, **found}
    ).model_dump()


def stage_summary(
    seconds: float, record: Mapping[str, Any], *, skipped: bool = False, run_id: str = ""
) -> dict[str, Any]:
    """The JSON of one stage from its record (`rows_in`, `rows_out`, `quarantined`, and what it adds)."""
    own = {"seconds": seconds, "skipped": skipped, "run_id": run_id}
    return StageSummary.model_validate({**record, **own}).model_dump()


def count_quarantined(value: Any) -> Any:
    """Rows in a count or in a (nested) `{table: {reason: n}}`; None counts as 0."""
    if isinstance(value, Mapping):
        return sum(count_quarantined(v) for v in value.values())
    return 0 if value is None else value


def validate_summary(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Check against the schema, fill defaults, turn NaN into null. Raises DataError naming each field."""
    try:
        return Summary.model_validate(dict(raw)).model_dump(mode="json")
    except ValidationError as error:
        found = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:8])
        raise DataError(f"{SUMMARY_NAME}: {error.error_count()} field(s) do not fit the schema: {found}") from None


def write_summary(summary: Mapping[str, Any], loop_dir: Path) -> Path:
    """Validate and write `loop_dir/summary.json` (beside, flushed to disk, renamed). Returns its path."""
    valid = validate_summary(summary)
    try:
        text = json.dumps(_finite(valid), indent=2, allow_nan=False) + "\n"
    except TypeError as error:
        raise DataError(f"{SUMMARY_NAME}: holds a value that is no JSON: {error}") from None
    loop_dir.mkdir(parents=True, exist_ok=True)
    path = loop_dir / SUMMARY_NAME
    replace_text(path, text)
    return path


def read_summary(path: Path) -> dict[str, Any]:
    """Read a summary file, or the one in a loop folder. Raises DataError if missing or not valid."""
    file = path / SUMMARY_NAME if path.is_dir() else path
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{file}: no such file. Run `make pipeline` first.") from None
    except json.JSONDecodeError as error:
        raise DataError(f"{file}: not JSON ({error})") from None
    if not isinstance(raw, dict):
        raise DataError(f"{file}: expected a JSON object, got a {type(raw).__name__}")
    return validate_summary(raw)


def replace_text(path: Path, text: str) -> None:
    """Write a text file so that readers see the old or the new one, never a part."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)  # mkstemp makes files that only their owner reads
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def link_latest(runs_dir: Path, loop_dir: Path) -> Path:
    """Point `runs_dir/latest` at a loop folder, in one step. The link is relative: the tree may be moved."""
    link = runs_dir / "latest"
    if link.exists() and not link.is_symlink():
        raise DataError(f"{link}: is not a link. Move it away: it stands where the link to the last run goes.")
    runs_dir.mkdir(parents=True, exist_ok=True)
    beside = runs_dir / f".latest-{os.getpid()}"
    beside.unlink(missing_ok=True)
    beside.symlink_to(os.path.relpath(loop_dir.resolve(), runs_dir.resolve()))
    os.replace(beside, link)
    return link


def final_table(summary: Mapping[str, Any]) -> str:
    """The closing table as plain text, at most 100 columns wide."""
    from pipelines.table import render

    return render(validate_summary(summary))


def _finite(value: Any) -> Any:
    """NaN and infinities in free-form parts (config, extra stage figures) become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return value
