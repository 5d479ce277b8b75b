"""The one place where known noise of Ray, TorchRec, torch, FBGEMM and MLflow is silenced.

Three doors, because the noise comes from three sides:

* environment variables, read by Ray and MLflow when they start (`quiet_environment`);
* Python warnings (`WARNING_RULES`), in this process and, through PYTHONWARNINGS, in Ray's workers;
* log records (`LOG_RULES`) of this process, and lines of worker output that Ray forwards to the driver
  (`WORKER_LINES`, by Ray's own skip list: the worker's log files keep every line).

Nothing at level ERROR or above is dropped, and lines that name an exception are never skipped or
de-duplicated. `GEM_VERBOSE=1` turns all of it off.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import warnings
from collections.abc import MutableMapping
from dataclasses import dataclass

VERBOSE_ENV = "GEM_VERBOSE"


@dataclass(frozen=True)
class LogRule:
    """Drop records of one logger below ERROR whose message contains `text`."""

    logger: str
    text: str


@dataclass(frozen=True)
class WarningRule:
    """Ignore a Python warning by the literal start of its message (no comma or colon: PYTHONWARNINGS)."""

    message: str
    category: str  # a builtin class name


# Level floors: children of these loggers say nothing a user needs below WARNING.
LEVEL_FLOORS = ("torchrec", "fbgemm_gpu", "mlflow.store", "mlflow.tracking", "mlflow.utils", "alembic")

LOG_RULES = (
    LogRule("ray._private.authentication.authentication_token_setup", "Token authentication is enabled"),
    LogRule("ray._private.worker", "Started a local Ray instance"),
    LogRule("ray._private.worker", "Calling ray.init() again"),
    LogRule("ray.data._internal.progress", "Progress bars disabled"),
    LogRule("ray.train.v2._internal.execution.controller.placement_group_cleaner", "Failed to query Ray Train"),
    LogRule("ray.train.v2.api.data_parallel_trainer", "Received SIGINT"),
    LogRule("torchrec.distributed.planner.types", "The topology was constructed directly"),
    LogRule("torchrec.distributed.planner.storage_reservations", "There is a known issue with TorchRec's dense"),
    LogRule("torchrec.distributed.utils", "caching params will be ignored"),
    LogRule("torch.fx._symbolic_trace", "is_fx_tracing will return true"),
    LogRule("torch.distributed.elastic.multiprocessing.redirects", "Redirects are currently not supported"),
    LogRule("root", "Successfully loaded: 'fbgemm_gpu"),
    LogRule("root", "Feature Gates: [("),
)

WARNING_RULES = (
    WarningRule("`broadcast_buffers` is deprecated", "FutureWarning"),
    WarningRule("HeuristicalStorageReservation is known", "FutureWarning"),
    WarningRule("`torch.distributed.reduce_scatter_tensor", "FutureWarning"),
    WarningRule("torch.distributed._reduce_scatter_base is a private function", "FutureWarning"),
    WarningRule("Please use DTensor instead and we are deprecating ShardedTensor", "FutureWarning"),
    WarningRule("torch.ao.quantization is deprecated", "DeprecationWarning"),
    WarningRule("`isinstance(treespec", "FutureWarning"),
    # Ray 2.60 deprecates `max_restarts` of Ray Data's actors, and names nothing that takes its place.
    WarningRule("`ray_remote_args` is deprecated and will be removed", "DeprecationWarning"),
)

# Deprecations inside other people's packages: nothing a user of this platform can act upon.
DEPRECATED_INSIDE = ("ray", "torchrec", "fbgemm_gpu", "torch", "mlflow", "sqlalchemy", "alembic", "tensordict")

# Regular expressions for lines of worker output. They match whole known messages, not levels.
WORKER_LINES = (
    r"Successfully loaded: 'fbgemm_gpu",
    r"\[TBE=[0-9a-f-]+\] ",
    r"Failed to query Ray Train Controller actor state",
    r"Requesting resources: \{",
    r"Attempting to start training worker group of size",
    r"Started training worker group of size \d+:",
    r"^\s*- \(ip=\S+, pid=\d+\) world_rank=",
    r"Setting up process group for: ",
    r"Reporting training result \d+: ",
    r"Collective validation initialized",
    r"The topology was constructed directly rather than via",
    r"EmbeddingPerfEstimatorFactory is creating",
    r"There is a known issue with TorchRec's dense tensor size",
    r"Total \d+ feature processor",
    r"GreedyPerfPartitioner - sort_by",
    r"^#.*#$|^#{20,}",  # the planner's statistics box
    r"caching params will be ignored",
    r"Grouped(Pooled)?EmbeddingsLookup: self\._feature_score",
    r"EBC feature score weight accumulation enabled",
    r"Validating input features\.\.\.",
    r"is_fx_tracing will return true for both",
    r"HeuristicalStorageReservation( is known to cause issues|\()",
    r"FutureWarning: `broadcast_buffers` is deprecated",
    r"self\._lookups\[i\] = DistributedDataParallel\(",
    r"has constructor arguments in the object store and max_restarts > 0",
    r"\[Gloo\] Rank \d+ is connected to",
)

# Takes precedence over the skip list in Ray: such lines are always shown, each time.
ALWAYS_SHOWN = r"Traceback \(most recent call last\)|\b[A-Za-z]*(Error|Exception)\b: |__ray_testing_never_deduplicate__"


def verbose() -> bool:
    """True when the user asked for every line (`GEM_VERBOSE=1`)."""
    return os.environ.get(VERBOSE_ENV, "") not in ("", "0", "false")


def quiet_environment(*, local: bool = True) -> dict[str, str]:
    """Environment variables that keep Ray, MLflow and the workers quiet; values the user has set win.

    local: the Ray runtime is started by this process on this machine. Then Ray Train's watch for
    preempted nodes is switched off (there is no other node, and its actor prints an alarming line).
    Must be in `os.environ` before `import ray` (see `install_filters`), and may be passed on in
    `runtime_env["env_vars"]`.
    """
    if verbose():
        return {}
    wanted = {
        "RAY_DEDUP_LOGS": "1",
        "RAY_DEDUP_LOGS_SKIP_REGEX": "|".join(f"(?:{line})" for line in WORKER_LINES),
        "RAY_DEDUP_LOGS_ALLOW_REGEX": ALWAYS_SHOWN,
        "RAY_DATA_LOG_LEVEL": "WARNING",
        # Our own console draws progress; two live displays in one terminal overwrite each other.
        "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
        "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0" if local else "1",
        "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # it shows each print() of a training function twice
        "MLFLOW_LOGGING_LEVEL": "WARNING",
        "TQDM_DISABLE": "1",
        # No calls home: they wait and complain on machines without a way out.
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    out = {name: os.environ.get(name, value) for name, value in wanted.items()}
    out["PYTHONWARNINGS"] = _python_warnings(os.environ.get("PYTHONWARNINGS", ""))
    return out


def install_filters(environ: MutableMapping[str, str] | None = None, *, local: bool = True) -> None:
    """Silence the known noise in this process and, through the environment, in what it starts.

    Call it first thing in a command, before `import ray`; in a Ray worker it may be called again at the
    start of the worker's function. Calling it twice changes nothing.
    """
    if verbose():
        return
    target = os.environ if environ is None else environ
    target.update(quiet_environment(local=local))
    _filter_warnings()
    for name in LEVEL_FLOORS:
        logger = logging.getLogger(name)
        if logger.level < logging.WARNING:
            logger.setLevel(logging.WARNING)
    for name in {rule.logger for rule in LOG_RULES}:
        logger = logging.getLogger(None if name == "root" else name)
        if not any(isinstance(f, NoiseFilter) for f in logger.filters):
            logger.addFilter(NoiseFilter(tuple(r.text for r in LOG_RULES if r.logger == name)))


class NoiseFilter(logging.Filter):
    """Drops records below ERROR that contain one of the known texts."""

    def __init__(self, texts: tuple[str, ...]) -> None:
        super().__init__()
        self._texts = texts

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.ERROR or record.exc_info:
            return True
        message = record.getMessage()
        return not any(text in message for text in self._texts)


def _filter_warnings() -> None:
    for rule in WARNING_RULES:
        category = getattr(__import__("builtins"), rule.category)
        warnings.filterwarnings("ignore", message=re.escape(rule.message), category=category)
    inside = "|".join(DEPRECATED_INSIDE)
    for deprecated in (DeprecationWarning, PendingDeprecationWarning, FutureWarning):
        warnings.filterwarnings("ignore", category=deprecated, module=rf"({inside})(\.|$)")
    # FSDP2 on CPU: harmless, about a view that the optimizer does not touch.
    warnings.filterwarnings("ignore", message=r".*\bview\b.*", category=UserWarning, module=r"torch\.distributed\.fsdp")
    if "sqlalchemy" in sys.modules:  # its own base class is no DeprecationWarning in every version
        warnings.filterwarnings("ignore", message=r".*noload.*")


def _python_warnings(current: str) -> str:
    ours = ",".join(f"ignore:{rule.message}:{rule.category}" for rule in WARNING_RULES)
    if ours in current:
        return current
    # Python lets later entries win: what the user has set stands last.
    return f"{ours},{current}" if current else ours
