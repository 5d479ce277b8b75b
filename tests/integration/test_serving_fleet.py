"""From a real registry to loaded champions, and what stops the server if one of them is not whole."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path

import pytest

from gem.errors import BundleError, ConfigError
from gem.lineage.gates import Decision
from gem.lineage.registry import Registry
from serving.__main__ import main
from serving.config import ServingConfig
from serving.example import example_request
from serving.fleet import find_champions, load_scorers, load_service
from serving.router import Router
from serving.schema import parse_request
from tests.unit.serving.tiny import Tiny, build_tiny


@pytest.fixture
def port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@pytest.fixture(autouse=True)
def _local_tracking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return build_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def promoted(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A runs folder whose registry has two of three groups as champions."""
    runs = tmp_path_factory.mktemp("promoted") / "runs"
    promote_all(tiny, runs, tiny.models[:2])
    return runs


def promote_all(tiny: Tiny, runs: Path, models: tuple[object, ...]) -> None:
    registry = Registry(runs=runs)
    registry.check()
    for m in tiny.models:
        version = registry.register(Path(m.path), m.bundle_hash, "", "generated")
        if m in models:
            registry.promote(version.name, version.version, None, Decision(True, ("test",)))


def test_a_registry_without_champions_says_the_same(tiny: Tiny, tmp_path: Path) -> None:
    promote_all(tiny, tmp_path, ())
    with pytest.raises(ConfigError, match='no champion vertical model of data set "generated"'):
        find_champions(ServingConfig(runs=str(tmp_path)))
    with pytest.raises(ConfigError, match='data set "kuairand"'):
        find_champions(ServingConfig(runs=str(tmp_path), dataset="kuairand"))


def test_champions_are_found_and_load_without_the_registry(promoted: Path, tiny: Tiny) -> None:
    config = ServingConfig(runs=str(promoted))
    models = find_champions(config)
    assert {(m.name, m.bundle_hash) for m in models} == {(m.name, m.bundle_hash) for m in tiny.models[:2]}
    service = load_service(config, models, "r")
    service.close()
    assert service.router.surfaces == ("feed", "stories") and service.router.unserved == ("messaging",)


def test_a_moved_runs_folder_is_served(tmp_path: Path) -> None:
    made = build_tiny(tmp_path / "runs" / "generated")
    promote_all(made, tmp_path / "runs", made.models[:2])
    moved = (tmp_path / "runs").rename(tmp_path / "elsewhere")
    config = ServingConfig(runs=str(moved))
    models = find_champions(config)
    assert len(models) == 2 and all(Path(p).is_relative_to(moved) for m in models for p in (m.path, m.store_path))
    load_service(config, models, "r").close()


def test_the_example_request_is_valid_and_of_known_ids(promoted: Path, tiny: Tiny) -> None:
    router = Router(load_scorers(find_champions(ServingConfig(runs=str(promoted)))))
    request = parse_request(json.dumps(example_request(router, tiny.store)).encode())
    ranker = router.route(request.surface).ranker
    user = ranker.find_user(request.user_id)
    assert user and request.time_ms and ranker.history(user, request.time_ms).cut > 0
    assert all(tiny.store.ads.index_of(c.ad_id) for c in request.candidates)


def test_a_damaged_champion_stops_the_start(
    promoted: Path, tiny: Tiny, tmp_path: Path, port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = Path(tiny.models[0].path)
    shutil.copytree(bundle, tmp_path / "kept")
    try:
        (bundle / "calibration.json").write_text("{}")
        assert main(["--runs", str(promoted), "--port", str(port)]) == 2
        assert "calibration.json was changed or damaged" in capsys.readouterr().err
        with pytest.raises(BundleError):
            find_champions(ServingConfig(runs=str(promoted)))
    finally:
        shutil.rmtree(bundle)
        shutil.copytree(tmp_path / "kept", bundle)


def test_an_unknown_tracking_server_is_a_clear_error(
    tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    assert main(["--runs", str(tmp_path), "--port", str(port)]) == 2
    assert "http://127.0.0.1:1" in capsys.readouterr().err
