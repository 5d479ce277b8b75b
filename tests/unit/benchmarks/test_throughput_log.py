"""The throughput benchmark: its log, what peers get of it, and how its claims are made."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gem.config import ModelConfig
from gem.data.schema import NUM_RESERVED
from tests.benchmarks.peers.exported import Exported
from tests.benchmarks.throughput import OURS, PEER_DIN, Found, Setting, claims
from tests.benchmarks.throughput_log import Log, LogSize, write_log
from tests.benchmarks.throughput_peers import Peers

SIZE = LogSize(users=12, ads=50, longest=20, shown=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("throughput") / "log"
    write_log(out, SIZE)
    return out


@pytest.mark.parametrize("per_user", [1, 3])
def test_every_impression_reads_a_full_history(folder: Path, per_user: int) -> None:
    log = Log.open(folder, per_user)
    batch = log.reader(ModelConfig(max_history=16)).batch(np.arange(len(log.impressions)))
    assert len(batch) == SIZE.users * per_user and len(batch.users) == SIZE.users
    assert (np.minimum(log.impressions.cut, 16) == 16).all()
    assert int(batch.cut.min()) >= 16
    for u, start in enumerate(batch.timeline.offsets[:-1].tolist()):
        times = batch.timeline.time_ms[start : int(batch.timeline.offsets[u + 1])]
        for i in np.flatnonzero(batch.user_of.numpy() == u):
            # Exactly the events before the impression lie before its cut.
            assert int((times < batch.time_ms[i]).sum()) == int(batch.cut[i])


def test_peers_get_the_same_histories(folder: Path, tmp_path: Path) -> None:
    log = Log.open(folder, 2)
    data = Exported.open(Peers(folder, tmp_path, per_user=2)._data(8))
    ids, history = data.array("ids"), data.array("hist_ad_id")
    assert [f["name"] for f in data.meta["fields"]] == list(log.store.schema.table_of())
    assert {f["name"]: f["rows"] for f in data.meta["fields"]} == log.store.schema.tables()
    timelines = log.store.timelines()
    for n, user in enumerate(log.impressions.user):
        end = timelines.offsets[user] + log.impressions.cut[n]
        wanted = [int(a) + NUM_RESERVED for a in timelines.ad[end - 8 : end]]
        assert history[n].tolist() == wanted
        assert ids[n, 0] == user + NUM_RESERVED


def test_a_log_refuses_more_impressions_than_it_holds(folder: Path) -> None:
    with pytest.raises(ValueError, match="per_user: got 5, this log allows 1 to 4"):
        Log.open(folder, 5)


def row(s: Setting, turn: int, speed: float, memory: float) -> dict[str, object]:
    figures = {"impressions_per_s": speed, "impressions_per_cpu_s": speed, "peak_mb": memory, "imports_mb": 100.0}
    figures["above_imports_mb"] = memory - 100.0
    return {"arm": s.arm, "history": s.history, "threads": 1, "per_user": 8, "turn": turn, **figures}


def test_claims_are_medians_with_the_extremes_of_turns() -> None:
    ours, din = Setting(OURS, 200), Setting(PEER_DIN, 200)
    rows = [row(ours, t, v, 500) for t, v in enumerate((60.0, 50.0, 40.0))]
    rows += [row(din, t, v, 1000) for t, v in enumerate((10.0, 10.0, 5.0))]
    speed, memory, cost = claims(Found(rows), (200,))
    assert (speed.id, speed.value, speed.low, speed.high, speed.met) == ("speed_vs_din_200", 5.0, 5.0, 8.0, True)
    assert (memory.id, memory.value, memory.met) == ("memory_vs_din_200", 400 / 900, True)
    assert "peak 500 against 1,000 MB (0.50x), of which imports 100 and 100" in memory.note
    assert (cost.id, cost.value, cost.met) == ("history_1000_vs_100_cost", None, False)


def test_a_failed_arm_leaves_its_reason() -> None:
    rows = [row(Setting(OURS, 50), 0, 10.0, 1.0), {"arm": PEER_DIN, "history": 50, "error": "no such library"}]
    speed = claims(Found(rows), (50,))[0]
    assert speed.value is None and "fuxictr_din: no such library" in speed.note
