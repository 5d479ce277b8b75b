"""The context of one loop and how a stage of it runs: skip, build, log, remember."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gem.config import RunConfig
from gem.data.ingest.sources import is_uri
from gem.data.spec import DatasetSpec, load_spec
from gem.errors import ConfigError, suggest
from gem.lineage.bundle import Parents
from gem.lineage.registry import Registry
from pipelines.cluster import Cluster
from pipelines.console import Console, Progress, Stage
from pipelines.provenance import code_hash, git_commit, lock_hash
from pipelines.stage import StageResult, run_stage

DATASETS = Path(__file__).parent / "datasets"
GENERATED = "generated"
DATA_CODE = ("platform/gem/data", "platform/gem/config.py", "pipelines/preprocess.py")
MODEL_CODE = ("platform/gem/data", "platform/gem/metrics", "platform/gem/model", "platform/gem/training",
              "platform/gem/transfer", "pipelines/train_workers.py", "pipelines/model_stages.py")  # fmt: skip


@dataclass
class Loop:
    """Everything the stages share. `done` holds finished stages by name, `runs_of` their MLflow runs."""

    config: RunConfig
    spec: DatasetSpec
    data_dir: Path | str  # a folder or a URI
    runs: Path
    console: Console
    cluster: Cluster
    registry: Registry
    parent_run: str = ""
    done: dict[str, StageResult] = field(default_factory=dict)
    runs_of: dict[str, str] = field(default_factory=dict)

    @property
    def root(self) -> Path:
        """Folder of this data set's stages."""
        return self.runs / self.spec.name

    @property
    def store(self) -> Path:
        return self.done["preprocess"].path

    def model_name(self, group: str = "") -> str:
        """Registered name: of the foundation model, or of the vertical model of a surface group."""
        return f"{self.spec.name}-vm-{_slug(group)}" if group else f"{self.spec.name}-gem"

    def parents(self, store_hash: str, teacher: tuple[str, Path] | None = None) -> Parents:
        return Parents(
            data=store_hash, data_path=str(self.store.absolute()), commit=git_commit(), lock=lock_hash(),
            code=code_hash(MODEL_CODE), teacher=teacher[0] if teacher else "",
            teacher_path=str(teacher[1].absolute()) if teacher else "",
        )  # fmt: skip

    def stage(
        self, name: str, key_parts: Mapping[str, Any], build: Callable[[Path, Stage], dict[str, Any]]
    ) -> StageResult:
        """Run one stage under the console and MLflow; what it returns is remembered in `done`."""
        with self.console.stage(name) as banner:
            run_id = self.registry.start_child(self.parent_run, name) if self.parent_run else ""
            self.runs_of[name] = run_id
            with ended(self.registry, run_id):
                result = run_stage(
                    name, key_parts=key_parts, root=self.root, build=lambda out: build(out, banner),
                    on_wait=self.console.warn,
                )  # fmt: skip
            if result.skipped:
                banner.skip()
            for fact in facts(result.record):
                banner.fact(fact)
            self._log(run_id, result)
        self.done[name] = result
        return result

    def _log(self, run_id: str, result: StageResult) -> None:
        if not run_id:
            return
        numbers = {k: v for k, v in result.record.items() if isinstance(v, int | float) and not isinstance(v, bool)}
        self.registry.log_metrics(run_id, {"seconds": result.built_seconds, **numbers})
        self.registry.set_tags(
            run_id, {"stage_key": result.key, "skipped": str(result.skipped), "path": str(result.path)}
        )
        store = result if "store_hash" in result.record else self.done.get("preprocess")
        if store is not None:
            self.registry.log_inputs(run_id, self.spec.name, store.record["store_hash"], str(store.path))
        self.registry.end(run_id)


@contextmanager
def ended(registry: Registry, run_id: str) -> Iterator[None]:
    """End an MLflow run as KILLED (interrupt) or FAILED when the block raises; else it stays open."""
    try:
        yield
    except BaseException as error:
        registry.end(run_id, "KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED")
        raise


def code_key(paths: Iterable[str]) -> dict[str, str]:
    """What of the code and of the installed packages a stage depends on, for its key."""
    return {"source": code_hash(paths), "lock": lock_hash()}


def facts(record: Mapping[str, Any]) -> list[str]:
    """A few words on a stage for its closing line."""
    out = []
    if record.get("rows_out") is not None:
        out.append(f"{record['rows_out']:,} rows")
    if record.get("headline"):
        out.append(str(record["headline"]))
    return out


def progress_line(console: Console, label: str) -> Callable[[str], None]:
    """A progress callback that writes sentences."""

    def say(text: str) -> None:
        console.line(f"{label}{text}")

    return say


def load_dataset(config: RunConfig) -> tuple[DatasetSpec, Path | str | None]:
    """The spec named by the config (a name under pipelines/datasets, or a file) and the raw data folder.

    Raises ConfigError for an unknown name, or when a data folder is missing.
    """
    name = config.data.dataset
    known = {p.stem: p for p in DATASETS.glob("*.yaml")}
    path = known.get(name, Path(name))
    if name not in known and not path.is_file():
        raise ConfigError(
            f'data.dataset "{name}" is neither a spec file nor one of {sorted(known)}.{suggest(name, known)} '
            "Write a spec (pipelines/datasets/README.md) and pass its path: DATASET=path/to/spec.yaml"
        )
    spec = load_spec(path)
    if name == GENERATED and not config.data.data_dir:
        return spec, None
    if not config.data.data_dir:
        raise ConfigError(f"data set {spec.name}: say where its files are: DATA_DIR=folder (or --data-dir folder)")
    if is_uri(config.data.data_dir):
        return spec, config.data.data_dir
    folder = Path(config.data.data_dir)
    if not folder.is_dir():
        raise ConfigError(
            f"data.data_dir {folder}: no such folder; give the folder that holds the files of {spec.name}"
        )
    return spec, folder


def _slug(text: str) -> str:
    kept = "".join(c if c.isalnum() or c in "-_" else "-" for c in text.lower()).strip("-")
    return kept or "group"


def plain(value: Any) -> Any:
    """A dataclass as plain JSON values, for a stage key."""
    return dataclasses.asdict(value)


__all__ = ["Loop", "Progress", "ended", "facts", "load_dataset", "plain", "progress_line"]
