"""Which champions are served, and how a replica loads them: by path and hash, without a registry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gem.data.store import FeatureStore
from gem.errors import BundleError, ConfigError
from gem.lineage.bundle import load_bundle
from gem.lineage.files import relocated
from gem.lineage.registry import Registry
from serving.config import ServingConfig
from serving.request_log import RequestLog
from serving.router import Router
from serving.scorer import Scorer, limit_threads
from serving.service import RankService
from serving.store import HistoryStore, MemoryHistories


@dataclass(frozen=True)
class ServedModel:
    """A registered version that a replica can load on its own; plain values, sent to every replica."""

    name: str
    version: str
    path: str  # of the bundle
    bundle_hash: str
    store_path: str  # of the feature store it reads histories and features from


def find_champions(config: ServingConfig) -> list[ServedModel]:
    """The champion vertical models of the data set, every one verified byte by byte.

    Raises ConfigError if there is none, BundleError if one is damaged, TrackingError if MLflow is away.
    """
    registry = Registry(runs=Path(config.runs))
    none = ConfigError(
        f'serving: no champion vertical model of data set "{config.dataset}" in {registry.uri}; '
        f'run "make pipeline DATASET={config.dataset}" first'
    )
    if registry.uri.startswith("sqlite:///") and not Path(registry.uri.removeprefix("sqlite:///")).exists():
        raise none
    registry.check()
    champions = [v for v in registry.champions(config.dataset).values() if v.tags.get("kind") == "vertical"]
    if not champions:
        raise none
    out = []
    for version in champions:
        path = registry.bundle_path(version)
        bundle = load_bundle(path, expected_hash=version.bundle_hash)
        store = find_store(bundle.info.parents.data_path, registry.runs, bundle.info.name)
        out.append(ServedModel(version.name, version.version, str(path), version.bundle_hash, str(store)))
    return out


def find_store(text: str, runs: Path, name: str) -> Path:
    """The feature store a bundle names, absolute; a relative path also counts from the runs folder or its parent.

    A store that was moved together with the runs folder is found in it. Raises BundleError if there is none.
    """
    tried = list(dict.fromkeys([Path(text).absolute(), runs / text, runs.parent / text]))
    for path in [*tried, relocated(text, runs).absolute()]:
        if path.is_dir():
            return path
    raise BundleError(
        f"{name}: its feature store {text} does not exist (tried {[str(p) for p in tried]} and below {runs}); "
        'serving reads user features and histories from it; run "make pipeline" again'
    )


def load_scorers(models: Sequence[ServedModel]) -> list[Scorer]:
    """Load and check every model; models of one feature store share its tables and histories."""
    stores: dict[str, tuple[FeatureStore, HistoryStore]] = {}
    scorers = []
    for m in models:
        if m.store_path not in stores:
            store = FeatureStore.open(Path(m.store_path))
            stores[m.store_path] = (store, MemoryHistories(store.timelines()))
        bundle = load_bundle(Path(m.path), expected_hash=m.bundle_hash)
        scorers.append(Scorer(bundle, *stores[m.store_path], version=m.version))
    return scorers


def load_service(config: ServingConfig, models: Sequence[ServedModel], replica: str) -> RankService:
    """Everything one replica needs, ready to answer."""
    limit_threads(config.torch_threads)
    log = RequestLog(config.folder, replica, config.max_log_bytes) if config.log_requests else None
    return RankService(Router(load_scorers(models)), config, log)
