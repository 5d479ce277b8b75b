"""One tiny world for all serving tests of a run."""

from __future__ import annotations

import pytest

from tests.unit.serving.tiny import Tiny, build_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return build_tiny(tmp_path_factory.mktemp("tiny"))
