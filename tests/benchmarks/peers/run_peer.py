"""One run of one peer in its own environment: train and predict, or train steps against the clock.

    python -m tests.benchmarks.peers.run_peer --data DIR --arm fuxictr_din --target click --out FILE.npz [--mode speed]

`--data` is a folder of `export`. The .npz holds the JSON record under "record" (read it with `exported.read_result`):
arm, library, target, the sizes, history, seed, threads, parameters {dense, tables}, peak_rss_mb, start_rss_mb (before
any data is read), and

quality  arrays "validation" and "test": probabilities of every row of the split. seconds, cpu_seconds (of training),
         predict_seconds, figures {split: {auc, ne}}
speed    impressions_per_s, impressions_per_cpu_s over `--seconds` (or `--steps`) after `--warmup` steps, batches made
         and steps taken; step_impressions_per_s: the same without making the batches; anon_rss_mb at the end

Theirs: model, embedding layers, loss, optimizer and training step (see `fuxictr_arms`, `rechub_arms`). Ours: reading
the rows, their order (day after day, shuffled within a day) and the loop, which keeps no per-row Python lists.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tests.benchmarks.peers.batches import Batches, Sizes, in_parts, in_time_order
from tests.benchmarks.peers.exported import Exported, peak_rss_mb, quick_figures, write_result

ARMS = (
    *(f"fuxictr_{n}" for n in ("din", "dcnv2", "masknet", "finalmlp", "wukong")),
    *(f"rechub_{n}" for n in ("din", "dcnv2", "mmoe")),
)
PREDICT_ROWS = 2048


class Peer(Protocol):
    """What a model of either library offers to the loop."""

    EVERY_TASK: bool
    module: nn.Module
    optimizer: torch.optim.Optimizer

    def step(self, batch: dict[str, Tensor]) -> None: ...

    def predict_batch(self, batch: dict[str, Tensor]) -> Tensor: ...


@dataclass(frozen=True)
class Clock:
    """Wall and CPU seconds of this process."""

    wall: float
    cpu: float

    @classmethod
    def now(cls) -> Clock:
        return cls(time.perf_counter(), time.process_time())

    def since(self) -> Clock:
        now = Clock.now()
        return Clock(now.wall - self.wall, now.cpu - self.cpu)


def make_peer(arm: str, batches: Batches, sizes: Sizes) -> tuple[Peer, str]:
    """The model of an arm, and the library's name with its version."""
    arms = import_module(f"tests.benchmarks.peers.{arm.split('_')[0]}_arms")
    batches.every_task = arms.ARMS[arm].EVERY_TASK
    return arms.ARMS[arm](batches, sizes), arms.LIBRARY


def train(peer: Peer, batches: Batches, a: argparse.Namespace) -> dict[str, float]:
    """`--epochs` passes over the training days in time order; tables begin each anew if `--fresh-tables` says so."""
    peer.module.train()
    begun = {p: p.detach().clone() for p in tables_of(peer.module)} if a.fresh_tables else {}
    start = Clock.now()
    for epoch in range(a.epochs):
        if epoch:
            start_anew(begun, peer.optimizer)
        for rows in in_time_order(batches, a.batch_size, a.seed, epoch):
            peer.step(batches.take(rows))
    spent = start.since()
    return {"seconds": spent.wall, "cpu_seconds": spent.cpu}


def tables_of(module: nn.Module) -> list[nn.Parameter]:
    """Embeddings of codes, shared ones once."""
    found = {id(p): p for m in module.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    return list(found.values())


def start_anew(begun: dict[nn.Parameter, Tensor], optimizer: torch.optim.Optimizer) -> None:
    """The parameters as they began, and nothing of them left in the optimizer (MEDA, arXiv 2305.19531)."""
    for parameter, value in begun.items():
        with torch.no_grad():
            parameter.copy_(value)
        optimizer.state.pop(parameter, None)


def predict(peer: Peer, batches: Batches, split: slice) -> NDArray[np.float32]:
    """Probabilities of every row of a split."""
    peer.module.eval()
    with torch.no_grad():
        parts = [peer.predict_batch(batches.take(rows)).numpy() for rows in in_parts(split, PREDICT_ROWS)]
    return np.concatenate(parts) if parts else np.zeros(0, np.float32)


def quality(peer: Peer, batches: Batches, a: argparse.Namespace) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Train, predict both later days; (probabilities, record)."""
    record: dict[str, Any] = dict(train(peer, batches, a))
    start = Clock.now()
    found = {s: predict(peer, batches, batches.data.split(s)) for s in ("validation", "test")}
    record["predict_seconds"] = start.since().wall
    return found, record | {"figures": quick_figures(batches.data, a.target, found)}


def speed(peer: Peer, batches: Batches, a: argparse.Namespace) -> dict[str, Any]:
    """Training steps on whole batches for `--seconds`, or `--steps` of them; both after the warm-up."""
    peer.module.train()
    rows = (r for r in _forever(batches, a) if len(r) == a.batch_size)
    for at in itertools.islice(rows, a.warmup):
        peer.step(batches.take(at))
    steps, in_steps = 0, 0.0
    start = Clock.now()
    while steps < a.steps if a.steps else start.since().wall < a.seconds:
        batch = batches.take(next(rows))
        before = time.perf_counter()
        peer.step(batch)
        in_steps += time.perf_counter() - before
        steps += 1
    spent, done = start.since(), steps * a.batch_size
    return {
        "steps": steps,
        "seconds": spent.wall,
        "cpu_seconds": spent.cpu,
        "impressions_per_s": done / spent.wall,
        "impressions_per_cpu_s": done / spent.cpu,
        "step_impressions_per_s": done / in_steps,
        "anon_rss_mb": _status_mb("RssAnon"),
    }


def _forever(batches: Batches, a: argparse.Namespace) -> Iterator[NDArray[np.int64]]:
    if len(batches.known("train")) < a.batch_size:
        raise ValueError(f"--batch-size {a.batch_size}: the export has {len(batches.known('train'))} training rows")
    for epoch in itertools.count():
        yield from in_time_order(batches, a.batch_size, a.seed, epoch)


def _status_mb(name: str) -> float:
    """A line of this process's memory status, MB; NaN where the system has none."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return float("nan")
    return next((int(n.split()[1]) * 1024 / 1e6 for n in lines if n.startswith(f"{name}:")), float("nan"))


def num_parameters(module: nn.Module) -> dict[str, int]:
    """{'dense': ..., 'tables': ...}; tables are embeddings of codes, shared ones counted once."""
    tables = sum(p.numel() for p in tables_of(module))
    return {"dense": sum(p.numel() for p in module.parameters()) - tables, "tables": tables}


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--arm", choices=ARMS, required=True)
    parser.add_argument("--target", default="click")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--mode", choices=("quality", "speed"), default="quality")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--fresh-tables", type=int, choices=(0, 1), default=1, help="in every pass but the first")
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--history", type=int, default=0, help="newest events read; 0: all that were exported")
    parser.add_argument("--sequences", type=int, default=0, help="fields of a history; 0: all that were exported")
    parser.add_argument("--dim", type=int, default=Sizes.dim)
    parser.add_argument("--hidden", default=",".join(map(str, Sizes.hidden)))
    parser.add_argument("--layers", type=int, default=Sizes.layers)
    parser.add_argument("--dropout", type=float, default=Sizes.dropout)
    parser.add_argument("--lr", type=float, default=Sizes.lr)
    parser.add_argument("--l2", type=float, default=Sizes.l2)
    parser.add_argument("--seconds", type=float, default=10.0, help="speed: how long to measure")
    parser.add_argument("--steps", type=int, default=0, help="speed: steps to measure instead of seconds")
    parser.add_argument("--warmup", type=int, default=3, help="speed: steps before")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    a = arguments(argv)
    logging.disable(logging.INFO)
    torch.set_num_threads(a.threads)
    torch.manual_seed(a.seed)
    np.random.seed(a.seed)
    hidden = tuple(int(w) for w in a.hidden.split(","))
    sizes = Sizes(a.dim, hidden, a.layers, a.dropout, a.lr, a.l2)
    import_module(f"tests.benchmarks.peers.{a.arm.split('_')[0]}_arms")
    start_rss = peak_rss_mb()
    batches = Batches(Exported.open(a.data), a.target, a.history, a.sequences)
    peer, library = make_peer(a.arm, batches, sizes)
    arrays: dict[str, NDArray[Any]] = {}
    if a.mode == "quality":
        arrays, found = quality(peer, batches, a)
    else:
        found = speed(peer, batches, a)
    about = {n: getattr(a, n) for n in ("arm", "target", "mode", "seed", "threads", "epochs", "batch_size")}
    memory = {"start_rss_mb": start_rss, "peak_rss_mb": peak_rss_mb()}
    record = {**about, "library": library, **asdict(sizes), "history": batches.length, **found, **memory}
    write_result(a.out, arrays, record | {"parameters": num_parameters(peer.module)})


if __name__ == "__main__":
    main()
