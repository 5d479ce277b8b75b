"""A log that arrives in windows gives the store that it gives at once, and both are what a naive reading says."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from gem.data.build import sanity, store_write
from gem.data.store import FeatureStore
from tests.unit.data.window_log import Log, build, make_log, oracle, read_back, write_window


@pytest.mark.parametrize("seed", range(3))
def test_windows_equal_the_store_built_at_once_and_the_naive_reading(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sanity, "MAX_CONFLICT_SHARE", 0.1)
    log = make_log(seed)
    parent = None
    for window in range(log.windows):
        write_window(tmp_path / "raw", log, window, seed)
        out = tmp_path / f"store-{window}"
        build(log, tmp_path / "raw", out, parent)
        impressions, lines = oracle(log.until(window), log)
        seen, told = read_back(out)
        assert seen == impressions
        assert {u: sorted(events) for u, events in told.items()} == lines
        assert all([e[:2] for e in events] == [e[:2] for e in lines[u]] for u, events in told.items())
        parent = out
    build(log, tmp_path / "raw", tmp_path / "once")
    assert read_back(tmp_path / "once") == (seen, told)  # ties in the same order too
    assert _entities(tmp_path / "once", log) == _entities(out, log)


def _entities(folder: Path, log: Log) -> dict[str, object]:
    """Descriptions by key and the values of vocabularies: what does not depend on how rows are numbered.

    What is counted on a training day or not may depend on which of two copies came first: those are left out.
    """
    out: dict[str, object] = {}
    for name in (store_write.RAW_USERS, store_write.RAW_ADS):
        out[name] = {row["key"]: row for row in pq.read_table(folder / name).to_pylist()}
    found = FeatureStore.open(folder, verify=False).encoder.vocabularies
    return out | {n: sorted({f"{n} {value}" for value in v.to_list()} - log.twofold) for n, v in found.items()}
