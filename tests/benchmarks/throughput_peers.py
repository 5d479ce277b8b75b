"""FuxiCTR's side of the throughput benchmark: the same rows exported, and a run in the peers' own environment.

A peer's step is: slice its rows' codes and histories out of mapped arrays, then its own `train_step`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

from tests.benchmarks.peers.environment import run_module
from tests.benchmarks.peers.export import Options, export
from tests.benchmarks.peers.exported import read_result
from tests.benchmarks.throughput_log import Log

DIM = 32  # width of an embedding, ours and theirs


class Asked(Protocol):
    """What a peer needs to know of a setting."""

    @property
    def arm(self) -> str: ...
    @property
    def history(self) -> int: ...
    @property
    def threads(self) -> int: ...


@dataclass
class Peers:
    """Runs of peers on a log of which `per_user` impressions a user are taken.

    sequence_fields: fields of an ad that an event carries. One (the ad's id) is the least a DIN can read, and the
    cheapest; ours reads all fields of an event's ad, and kind, flags, surface and dwell time.
    """

    log: Path
    folder: Path
    per_user: int
    sequence_fields: int = 1
    exported: dict[int, Path] = field(default_factory=dict)

    def run(self, s: Asked, batch: int, seconds: float) -> dict[str, Any]:
        """Training steps of one arm in a fresh process; RuntimeError if it fails."""
        out = self.folder / "peer.npz"
        given = {
            "data": self._data(s.history), "arm": s.arm, "out": out, "mode": "speed", "batch-size": batch,
            "threads": s.threads, "seconds": seconds, "dim": DIM,
        }  # fmt: skip
        run_module("run_peer", [text for k, v in given.items() for text in (f"--{k}", str(v))], s.threads)
        found = read_result(out)[1]
        same = ("impressions_per_s", "impressions_per_cpu_s", "steps", "parameters", "library")
        return {
            **{n: found[n] for n in same},
            "wall_s": found["seconds"],
            "cpu_s": found["cpu_seconds"],
            "imports_mb": found["start_rss_mb"],
            "peak_mb": found["peak_rss_mb"],
        }

    def _data(self, history: int) -> Path:
        """The export of the log with histories of this length, written when it is first asked for."""
        if history not in self.exported:
            log, folder = Log.open(self.log, self.per_user), self.folder / f"export-{history}"
            options = Options(history=history, rates=False, sequence_fields=self.sequence_fields)
            export(_as_store(log), folder, options)  # type: ignore[arg-type]
            self.exported[history] = folder
        return self.exported[history]


def _as_store(log: Log) -> SimpleNamespace:
    """The store with the impressions that are trained on, as `export` reads it."""
    store = log.store
    return SimpleNamespace(
        schema=store.schema, hash=store.hash, path=store.path, manifest=store.manifest, users=store.users,
        ads=store.ads, timelines=store.timelines, impressions=lambda: log.impressions,
    )  # fmt: skip
