"""Trained runs of the quality benchmark: what one is, where its result is kept, and who trains it.

A finished run is two files named after its key (a hash of everything it depends on): `<key>.json`, the record, and
`<key>.npz`, the logits of the validation and of the test day. An interrupted benchmark goes on behind the last one.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import json
import multiprocessing
import os
import resource
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gem.config import ModelConfig, TrainConfig
from pipelines.provenance import ROOT
from tests.benchmarks.quality_data import TEST, VALIDATION, MergedReader, fingerprint

TRAINED_BY = (
    "platform/gem/model/*.py", "platform/gem/training/*.py", "platform/gem/transfer/distillation.py",
    "platform/gem/data/collate.py", "platform/gem/data/batch.py",
)  # fmt: skip
NOT_TRAINED_BY = ("cost.py", "calibration.py", "checkpoint.py", "__init__.py")
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
GUESS_S = 60.0  # CPU seconds of a run before any was made


class Spec(Protocol):
    """A run to be made: plain values that name it, and `make`, called in a worker process."""

    @property
    def arm(self) -> str: ...

    @property
    def dataset(self) -> str: ...

    def identity(self) -> dict[str, Any]:
        """Everything the result depends on beside the data."""
        ...

    def make(self, store: Path, folder: Path) -> tuple[dict[str, Any], dict[str, NDArray[np.float32]]]:
        """(record, logits [rows of the day, K] by day)."""
        ...


@dataclass(frozen=True)
class OurRun:
    """One of our models on the training days. `arm` is only a label: equal runs of two arms are made once."""

    arm: str
    dataset: str
    model: ModelConfig
    train: TrainConfig
    surface: str = ""  # train on this surface's rows only
    merged: bool = False  # without any trace of the surface

    def identity(self) -> dict[str, Any]:
        own = {k: v for k, v in asdict(self).items() if k != "arm"} | {"code": training_code()}
        return own | {"reader": bare_code(inspect.getsource(MergedReader))} if self.merged else own

    def make(self, store: Path, folder: Path) -> tuple[dict[str, Any], dict[str, NDArray[np.float32]]]:
        from tests.benchmarks.quality_train import train_ours

        return train_ours(self, store)


@lru_cache(maxsize=1)
def training_code() -> str:
    """Hash over the code that shapes trained weights, without comments, docstrings and layout."""
    files = sorted(p for pattern in TRAINED_BY for p in ROOT.glob(pattern) if p.name not in NOT_TRAINED_BY)
    return fingerprint([[p.name, bare_code(p.read_text(encoding="utf-8"))] for p in files])


def bare_code(source: str) -> str:
    """The syntax tree of Python source without docstrings, as text."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                node.body = node.body[1:]
    return ast.dump(tree)


@dataclass(frozen=True)
class Finished:
    """The result of a run. The test day's logits lie in the file until somebody asks for them."""

    spec: Any
    record: dict[str, Any]
    path: Path

    @cached_property
    def validation(self) -> NDArray[np.float32]:
        """Logits of the validation day, [N, K]."""
        return self._logits(VALIDATION)

    @cached_property
    def test(self) -> NDArray[np.float32]:
        """Logits of the test day, [N, K]. Only for settings that were chosen without them."""
        return self._logits(TEST)

    def _logits(self, day: str) -> NDArray[np.float32]:
        with np.load(self.path) as stored:
            return np.asarray(stored[day])


@dataclass
class Workshop:
    """Makes runs, `workers` at a time in processes of one thread each, and keeps their results in `folder`.

    stores: data set -> path and content hash of its store. A run that fails is reported in `failed` (label -> reason)
    and makes no one else fail; it is tried again the next time.
    """

    folder: Path
    stores: dict[str, tuple[Path, str]]
    workers: int = 2
    say: Callable[[str], None] = print
    failed: dict[str, str] = field(default_factory=dict)
    pool: ProcessPoolExecutor | None = None  # started with the first run; its processes keep their stores open

    def key(self, spec: Spec) -> str:
        """Name of the run's files."""
        return fingerprint({**spec.identity(), "data": self.stores[spec.dataset][1]})

    def find(self, spec: Spec) -> Finished | None:
        """The finished run, or None."""
        file = self.folder / f"{self.key(spec)}.json"
        if not file.is_file():
            return None
        return Finished(spec, json.loads(file.read_text(encoding="utf-8")), file.with_suffix(".npz"))

    def missing(self, specs: Iterable[Spec]) -> dict[str, Spec]:
        """Key -> run, of those that are not finished, each once."""
        return {key: spec for spec in specs for key in [self.key(spec)] if self.find(spec) is None}

    def expected_s(self, specs: Iterable[Spec]) -> float:
        """Seconds until these are made, by the CPU time of finished runs of the same arm, or else of all."""
        spent: dict[str, list[float]] = {}
        for file in self.folder.glob("*.json"):
            record = json.loads(file.read_text(encoding="utf-8"))
            spent.setdefault(record["arm"], []).append(record["cpu_s"])
        others = float(np.mean([x for known in spent.values() for x in known])) if spent else GUESS_S
        each = [float(np.mean(spent.get(s.arm, [others]))) for s in self.missing(specs).values()]
        return sum(each) / self.workers

    def make(self, specs: Sequence[Spec], what: str) -> None:
        """Make all runs that are missing."""
        self.folder.mkdir(parents=True, exist_ok=True)
        todo = self.missing(specs)
        have = len({self.key(s) for s in specs}) - len(todo)
        minutes = self.expected_s(specs) / 60
        self.say(f"{what}: {len(todo)} runs to make, {have} there already; about {minutes:.0f} min")
        if not todo:
            return
        start = time.perf_counter()
        with one_thread():
            if self.pool is None:
                self.pool = ProcessPoolExecutor(self.workers, mp_context=multiprocessing.get_context("spawn"))
            futures = {
                self.pool.submit(make_one, spec, self.stores[spec.dataset][0], self.folder, key): spec
                for key, spec in todo.items()
            }
            for count, future in enumerate(as_completed(futures), 1):
                said = self._note(futures[future], future.result())
                left = (time.perf_counter() - start) / count * (len(todo) - count) / 60
                self.say(f"  [{count}/{len(todo)}] {said}; {left:.0f} min left")

    def close(self) -> None:
        """End the processes; runs that were not begun are dropped."""
        if self.pool is not None:
            self.pool.shutdown(cancel_futures=True)
            self.pool = None

    def _note(self, spec: Spec, result: dict[str, Any]) -> str:
        if "error" in result:
            self.failed[label(spec)] = result["error"]
            return f"{label(spec)} FAILED: {result['error']}"
        return f"{label(spec)}: {result['cpu_s']:.0f} CPU s"

    def results(self, specs: Iterable[Spec]) -> list[Finished]:
        """The finished ones among these, in order."""
        return [found for found in map(self.find, specs) if found is not None]


def label(spec: Spec) -> str:
    """What the progress lines call a run."""
    seed = getattr(getattr(spec, "train", spec), "seed", "")
    return " ".join(p for p in (spec.dataset, spec.arm, getattr(spec, "surface", ""), f"seed {seed}") if p)


def make_one(spec: Spec, store: Path, folder: Path, key: str) -> dict[str, Any]:
    """Make one run in this process and write its files; returns {cpu_s}, or {error}."""
    start, wall = cpu_s(), time.perf_counter()
    try:
        record, logits = spec.make(store, folder)
        check_logits(logits)
    except Exception as e:
        (folder / f"{key}.failed").write_text(traceback.format_exc(), encoding="utf-8")
        last = (str(e).splitlines() or [""])[-1]  # of a command, the end of its output
        return {"error": f"{type(e).__name__}: {last[:200]} (all of it in {key}.failed)"}
    (folder / f"{key}.failed").unlink(missing_ok=True)
    used = {"cpu_s": cpu_s() - start, "wall_s": time.perf_counter() - wall}
    record = {"arm": spec.arm, "spec": spec.identity(), **used, **record}
    beside = folder / f".{key}.{os.getpid()}.npz"
    np.savez_compressed(beside, **logits)  # type: ignore[arg-type]
    beside.replace(folder / f"{key}.npz")
    text = folder / f".{key}.{os.getpid()}.json"
    text.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    text.replace(folder / f"{key}.json")
    return {"cpu_s": record["cpu_s"]}


def check_logits(logits: dict[str, NDArray[np.float32]]) -> None:
    """Refuse a run that diverged, rather than measure it."""
    for day, values in logits.items():
        if not np.isfinite(values).all():
            raise ValueError(f"{int((~np.isfinite(values)).sum())} logits of the {day} day are not finite")


def cpu_s() -> float:
    """CPU seconds of this process, all threads, and of its ended children."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Processes started inside compute with one thread each."""
    before = {n: os.environ.get(n) for n in THREADS}
    os.environ.update(dict.fromkeys(THREADS, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ.update({} if value is None else {name: value})
