"""Runs, registered models and promotion over MLflow 3, with our own rules above it.

Logging to runs never stops a training: what cannot be written is kept, tried again and reported
(`lost`). The registry is strict: every byte of a bundle is checked before it is registered or promoted,
because MLflow itself calls a version READY whose files do not exist. Promotion: see `promotion.py`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlparse

from gem.errors import GemError, TrackingError
from gem.lineage import tracking_values as values
from gem.lineage.bundle import BundleInfo, read_bundle
from gem.lineage.files import locked, relocated
from gem.lineage.promotion import CHAMPION, ModelVersion, Promotion

CHECK_SECONDS = 5.0
_RETRY_AFTER_S = 30.0
_NO_SUCH = ("RESOURCE_DOES_NOT_EXIST", "NOT_FOUND", "ENDPOINT_NOT_FOUND")
_FINAL = (*_NO_SUCH, "INVALID_PARAMETER_VALUE", "BAD_REQUEST", "RESOURCE_ALREADY_EXISTS", "PERMISSION_DENIED")
_HTTP = "MLFLOW_HTTP_REQUEST_"
T = TypeVar("T")


class Registry(Promotion):
    """The tracking server and model registry of one runs folder.

    tracking_uri: empty = the environment variable MLFLOW_TRACKING_URI, else SQLite in `runs`. Raises
    TrackingError for a URI that MLflow 3 does not keep (`file:`). Nothing is imported or connected yet.
    """

    def __init__(self, tracking_uri: str = "", runs: Path = Path("runs")) -> None:
        super().__init__(runs)
        self.uri = values.tracking_address(tracking_uri or os.environ.get("MLFLOW_TRACKING_URI", ""), self.runs)
        self.lost: list[str] = []  # writes that the server refused for good, as sentences
        self._waiting: list[tuple[str, Callable[[], object]]] = []
        self._down_until = 0.0
        self._client_or_none: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        return (Registry, (self.uri, self.runs))

    # ---- connection -------------------------------------------------------------------------------

    def check(self) -> None:
        """Connect once, within about 5 s; a new SQLite file gets its tables here. Raises TrackingError."""
        _import_mlflow()
        if self.uri.startswith("sqlite:"):
            self._call("open", lambda: self._client().search_experiments(max_results=1))
            return
        outcome: list[Exception | None] = []

        def probe() -> None:
            try:
                with _http_limits(3, 0):
                    self._client().search_experiments(max_results=1)
                outcome.append(None)
            except Exception as e:
                outcome.append(e)

        thread = threading.Thread(target=probe, daemon=True, name="mlflow-check")
        thread.start()
        thread.join(CHECK_SECONDS)
        if not outcome:
            raise self._error("connect", f"no answer within {CHECK_SECONDS:.0f} s")
        if outcome[0] is not None:
            raise self._error("connect", outcome[0])

    def _client(self) -> Any:
        if self._client_or_none is None:
            mlflow = _import_mlflow()
            if self.uri.startswith("sqlite:"):
                database = Path(self.uri.removeprefix("sqlite:///"))
                with locked(database.with_name(database.name + ".lock")):  # tables are made by one process only
                    self._client_or_none = mlflow.MlflowClient(self.uri, registry_uri=self.uri)
            else:
                self._client_or_none = mlflow.MlflowClient(self.uri, registry_uri=self.uri)
        return self._client_or_none

    def _error(self, what: str, why: object) -> TrackingError:
        reason = " ".join(str(why).split())[:400]
        hint = (
            "start the server, correct MLFLOW_TRACKING_URI, or unset it to use a local SQLite file"
            if values.is_server(self.uri)
            else "check that the database and its folder can be written and that `mlflow db upgrade` is not due"
        )
        return TrackingError(f"MLflow at {self.uri}: cannot {what}: {reason}. Do this: {hint}")

    def _call(self, what: str, action: Callable[[], T]) -> T:
        """Run a strict call; every failure becomes a TrackingError."""
        try:
            with _http_limits(20, 2):
                return action()
        except GemError:
            raise
        except Exception as e:
            raise self._error(what, e) from e

    def _softly(self, what: str, action: Callable[[], object]) -> None:
        """Run a call that may fail: kept for later if the server is away, `lost` if it says no."""
        self._waiting.append((what, action))
        if time.monotonic() >= self._down_until:
            self.flush()

    def flush(self) -> int:
        """Try everything that waits, in order; returns how many writes still wait."""
        while self._waiting:
            what, action = self._waiting[0]
            try:
                with _http_limits(10, 0):
                    action()
            except Exception as e:
                if getattr(e, "error_code", "") not in _FINAL and not isinstance(e, (ValueError, FileNotFoundError)):
                    self._down_until = time.monotonic() + _RETRY_AFTER_S
                    return len(self._waiting)
                self.lost.append(f"{what}: {' '.join(str(e).split())[:300]}")
            self._waiting.pop(0)
        return 0

    # ---- runs -------------------------------------------------------------------------------------

    def start_loop(self, dataset: str, name: str, tags: Mapping[str, str] | None = None) -> str:
        """Open the parent run of a loop in experiment `gem/<dataset>`; returns its run id. Raises TrackingError."""
        return self._call("start a run", lambda: self._start(self._experiment(dataset), name, tags or {}))

    def start_child(self, parent_run_id: str, stage: str, tags: Mapping[str, str] | None = None) -> str:
        """Open a nested run for a stage; every attempt gets its own. Empty (and `lost`) if the server is away."""
        made: list[str] = []

        def action() -> None:
            experiment = self._client().get_run(parent_run_id).info.experiment_id
            extra = {"mlflow.parentRunId": parent_run_id, "stage": stage, **(tags or {})}
            made.append(self._start(experiment, stage, extra))

        try:
            self._call(f"start the run of {stage}", action)
        except TrackingError as e:
            self.lost.append(str(e))
        return made[0] if made else ""

    def _start(self, experiment: str, name: str, tags: Mapping[str, str]) -> str:
        shown = {k: values.text(v) for k, v in tags.items()}
        return str(self._client().create_run(experiment, run_name=name, tags=shown).info.run_id)

    def _experiment(self, dataset: str) -> str:
        client, name = self._client(), f"gem/{dataset}"
        place = None if values.is_server(self.uri) else (self.runs / "mlartifacts" / dataset.replace("/", "_")).as_uri()
        found = client.get_experiment_by_name(name)
        if found is None:
            try:
                return str(client.create_experiment(name, artifact_location=place))
            except Exception:
                found = client.get_experiment_by_name(name)  # another process was faster
                if found is None:
                    raise
        if found.lifecycle_stage == "deleted":
            client.restore_experiment(found.experiment_id)
        return str(found.experiment_id)

    def log_params(self, run_id: str, params: Mapping[str, Any]) -> None:
        """Log a (nested) mapping as params. A second, other value of a param is `lost`, never an error."""

        def action() -> None:
            from mlflow.entities import Param

            items = [Param(k, values.text(v)) for k, v in values.flatten(params).items()]
            for piece in values.pieces(items, 100):
                self._client().log_batch(run_id, params=piece)

        if run_id:
            self._softly("log params", action)

    def log_metrics(self, run_id: str, metrics: Mapping[str, Any], step: int = 0) -> None:
        """Log a (nested) mapping of numbers. NaN, infinite and missing ones are named in the tag `not_finite`."""
        good, bad = values.split_metrics(metrics)
        now = int(time.time() * 1000)

        def action() -> None:
            from mlflow.entities import Metric, RunTag

            items = [Metric(k, v, now, step) for k, v in good.items()]
            for piece in values.pieces(items, 900):
                self._client().log_batch(run_id, metrics=piece)
            if bad:
                self._client().log_batch(run_id, tags=[RunTag("not_finite", values.text(", ".join(sorted(bad))))])

        if run_id:
            self._softly("log metrics", action)

    def log_inputs(self, run_id: str, name: str, digest: str, source: str = "", context: str = "training") -> None:
        """Record a data set as input of a run. MLflow keeps 36 characters of a digest; the tag `data_hash` all."""

        def action() -> None:
            from mlflow.entities import Dataset, DatasetInput, InputTag

            data = Dataset(name[:500], digest[: values.MAX_DIGEST], "local", source or name)
            tags = [InputTag("mlflow.data.context", context), InputTag("data_hash", digest)]
            values.once_more(lambda: self._client().log_inputs(run_id, [DatasetInput(data, tags)]))

        if run_id:
            self._softly("log inputs", action)

    def log_artifact(self, run_id: str, file: Path, folder: str = "") -> None:
        """Copy a file to the run's artifacts."""
        if run_id:
            self._softly("log artifact", lambda: self._client().log_artifact(run_id, str(file), folder or None))

    def set_tags(self, run_id: str, tags: Mapping[str, Any]) -> None:
        """Set tags of a run."""

        def action() -> None:
            from mlflow.entities import RunTag

            items = [RunTag(k, values.text(v)) for k, v in tags.items()]
            for piece in values.pieces(items, 100):
                self._client().log_batch(run_id, tags=piece)

        if run_id:
            self._softly("set tags", action)

    def end(self, run_id: str, status: str = "FINISHED") -> None:
        """Close a run: FINISHED, FAILED or KILLED."""
        if run_id:
            self._softly("end a run", lambda: self._client().set_terminated(run_id, status))

    # ---- models -----------------------------------------------------------------------------------

    def register(
        self, bundle: Path, bundle_hash: str, run_id: str, dataset: str, tags: Mapping[str, str] | None = None
    ) -> ModelVersion:
        """Register a bundle under its own name; the same bundle at the same place keeps its version.

        Raises BundleError if the bundle is not exactly `bundle_hash`, TrackingError if MLflow refuses.
        """
        info, got = read_bundle(bundle, expected_hash=bundle_hash)
        name = values.check_model_name(info.name)
        told = {**_lineage_tags(info, got), "dataset": dataset, "run_id": run_id, "bundle_path": str(bundle.absolute())}
        told |= {k: values.text(v) for k, v in (tags or {}).items()}

        def action() -> Any:
            client = self._client()
            try:
                client.create_registered_model(name)
            except Exception as e:
                if getattr(e, "error_code", "") != "RESOURCE_ALREADY_EXISTS":
                    raise
            source = bundle.absolute().as_uri()
            if values.is_server(self.uri):  # a server takes no paths of another machine
                source = f"runs:/{run_id}/bundles/{name}"
                client.log_artifacts(run_id, str(bundle), f"bundles/{name}")
            return client.create_model_version(name, source, run_id=run_id or None, tags=told)

        with locked(self.runs / "register.lock"):  # look and make as one step: two loops may bring the same bundle
            for known in self.versions(name):
                place = relocated(known.tags.get("bundle_path", ""), self.runs)
                if known.bundle_hash == got and place == bundle.absolute():
                    return known
            return _version(self._call(f"register {name}", action))

    def versions(self, name: str) -> list[ModelVersion]:
        """All versions of a model, oldest first (empty if there is none)."""
        query = f"name='{values.check_model_name(name)}'"
        found = self._call("list versions", lambda: self._client().search_model_versions(query))
        return sorted((_version(v) for v in found), key=lambda v: int(v.version))

    def version(self, name: str, version: str) -> ModelVersion:
        """One version by number, or by alias if `version` is not a number. Raises TrackingError if there is none."""
        values.check_model_name(name)
        found = self._find(name, str(version))
        if found is None:
            raise TrackingError(f'model "{name}" has no version or alias "{version}" in {self.uri}')
        return found

    def champion(self, name: str) -> ModelVersion | None:
        """The version that the alias `champion` names, or None."""
        return self._find(values.check_model_name(name), CHAMPION)

    def champions(self, dataset: str = "") -> dict[str, ModelVersion]:
        """Model name -> champion, of all models (of one data set if given)."""

        def names() -> list[str]:
            out, token = [], None
            while True:
                page = self._client().search_registered_models(max_results=1000, page_token=token)
                out += [m.name for m in page if CHAMPION in m.aliases]
                token = page.token
                if not token:
                    return out

        found = {name: self.champion(name) for name in self._call("list models", names)}
        return {n: v for n, v in sorted(found.items()) if v and dataset in ("", v.tags.get("dataset"))}

    def _find(self, name: str, version: str) -> ModelVersion | None:
        def action() -> Any:
            try:
                if version.isdecimal():
                    return self._client().get_model_version(name, version)
                return self._client().get_model_version_by_alias(name, version)
            except Exception as e:
                if getattr(e, "error_code", "") in _NO_SUCH or ("alias" in str(e) and "not found" in str(e)):
                    return None
                raise

        found = self._call(f"read {name}", action)
        return None if found is None else _version(found)

    def bundle_path(self, version: ModelVersion) -> Path:
        """Folder of a version's bundle on this machine, downloaded from a server if need be. Not yet verified."""
        here = [Path(version.tags["bundle_path"])] if version.tags.get("bundle_path") else []
        parsed = urlparse(version.source)
        if parsed.scheme in ("", "file"):  # it may have been moved together with the runs folder
            here.append(Path(unquote(parsed.path)))
            here += [relocated(str(path), self.runs) for path in here]
        for path in here:
            if path.is_dir():
                return path
        if parsed.scheme in ("", "file"):
            raise TrackingError(
                f"{version.name} version {version.version}: its bundle {version.source} does not exist; "
                "restore the folder or register the model again"
            )
        return self._download(version)

    def _download(self, version: ModelVersion) -> Path:
        def action() -> str:
            from mlflow.artifacts import download_artifacts

            place = self.runs / "downloads" / version.bundle_hash[:16]
            place.mkdir(parents=True, exist_ok=True)
            return str(download_artifacts(version.source, dst_path=str(place), tracking_uri=self.uri))

        return Path(self._call(f"download {version.source}", action))

    def _set_alias(self, name: str, version: str) -> None:
        if version:
            self._call("set the alias", lambda: self._client().set_registered_model_alias(name, CHAMPION, version))
        else:
            self._call("remove the alias", lambda: self._client().delete_registered_model_alias(name, CHAMPION))

    def _with_hash(self, bundle_hash: str) -> list[ModelVersion]:
        query = f"tags.bundle_hash = '{bundle_hash}'"
        found = self._call("find the version", lambda: self._client().search_model_versions(query))
        return [_version(v) for v in found]


def _version(raw: Any) -> ModelVersion:
    return ModelVersion(raw.name, str(raw.version), raw.source or "", raw.run_id or "", dict(raw.tags or {}))


def _lineage_tags(info: BundleInfo, bundle_hash: str) -> dict[str, str]:
    return {
        "bundle_hash": bundle_hash,
        "kind": info.kind,
        "group": info.group,
        "data_hash": info.parents.data,
        "teacher_hash": info.parents.teacher,
        "commit": info.parents.commit,
        "schema_hash": info.schema.hash,
    }


def _import_mlflow() -> Any:
    """Import MLflow without its noise and without telemetry; takes 1 to 4 s the first time."""
    import logging
    import warnings

    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "ERROR")
    for module in ("mlflow", "alembic", "sqlalchemy"):
        warnings.filterwarnings("ignore", module=module)
    import mlflow

    for logger in ("mlflow", "alembic", "sqlalchemy", "urllib3"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    return mlflow


@contextmanager
def _http_limits(timeout_s: int, retries: int) -> Iterator[None]:
    """MLflow waits 120 s and tries 8 times by default; bound that unless the user has set it."""
    wanted = {_HTTP + "TIMEOUT": str(timeout_s), _HTTP + "MAX_RETRIES": str(retries)}
    mine = {k: v for k, v in wanted.items() if k not in os.environ}
    os.environ.update(mine)
    try:
        yield
    finally:
        for key in mine:
            os.environ.pop(key, None)
