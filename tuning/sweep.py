"""A sweep: the feature store, trials on Ray Tune with ASHA, nested MLflow runs, and a verdict."""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from gem.config import RunConfig
from gem.data.store import FeatureStore
from gem.errors import ConfigError, TrainingError
from gem.lineage.registry import Registry
from pipelines.cluster import Cluster
from pipelines.console import Console, install_filters
from pipelines.data_stages import generate, needs_world, preprocess
from pipelines.loop import Loop, load_dataset
from pipelines.provenance import git_commit
from pipelines.quiet import verbose
from tuning import judgement, spaces
from tuning.judgement import TrialRecord
from tuning.ledger import RESULT, Ledger, tune_callback
from tuning.trial import TrialJob, run_trial

CONCURRENT = 2
CPUS_EACH = 1
STEP_NAME = "tune"
VERSION = 1
# Read by Tune while it runs. Ctrl-C is ours; its own logs and tables would bury the terminal; a trial that
# does not answer at the end is killed after seconds, not after ten minutes.
TUNE_ENVIRONMENT = {
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "RAY_AIR_NEW_OUTPUT": "0",  # the older output, which verbose=0 silences altogether
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
    "TUNE_FORCE_TRIAL_CLEANUP_S": "10",
}


@dataclass(frozen=True)
class SweepOptions:
    """What the command line says beside the config.

    budget_s: of the trials, without data stages. concurrent 0: two, or one on a machine with one CPU.
    users: share of the users that a trial reads. fixed: the `--set` texts that made the config.
    """

    space: str = "optimisation"
    vary: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ()
    trials: int = 6
    budget_s: float = 90.0
    concurrent: int = 0
    users: float = 0.5
    seed: int = 1


def sweep(config: RunConfig, options: SweepOptions, runs: Path) -> Path:
    """Run a sweep and print its verdict; returns result.json.

    Raises ConfigError for options that cannot work, TrainingError if no trial can be judged, and
    KeyboardInterrupt after keeping what was finished.
    """
    check_options(options)
    space = spaces.make_space(options.space, options.vary, options.fixed, config)
    settings = spaces.draw(space, config, options.trials, options.seed)
    install_filters()
    spec, data_dir = load_dataset(config)
    registry = Registry(runs=runs)
    registry.check()
    console = Console()
    with Cluster() as cluster:
        concurrent = check_cpus(options.concurrent, available_cpus(cluster))
        options = replace(options, concurrent=min(concurrent, len(settings)))
        loop = Loop(config, spec, data_dir or Path(), runs, console, cluster, registry)
        names = ["generate"] if needs_world(loop) else []
        console.stages = (*names, "preprocess", STEP_NAME)
        started = datetime.now(UTC)
        loop.parent_run = registry.start_loop(spec.name, f"{STEP_NAME} {started:%Y-%m-%d %H:%M:%S}")
        try:
            if names:
                generate(loop)
            preprocess(loop)
            ledger = _open(loop, options, space, settings, started)
            _run(loop, options, ledger)
        except BaseException as error:
            registry.end(loop.parent_run, "KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED")
            raise
        registry.end(loop.parent_run)
    return ledger.folder / RESULT


def check_options(options: SweepOptions) -> None:
    """Raise ConfigError for numbers that make no sweep."""
    if options.trials < 1:
        raise ConfigError(f"--trials {options.trials}: at least 1 is needed (the first is the recipe's own setting)")
    if not options.budget_s > 0:
        raise ConfigError(f"--budget-s {options.budget_s:g}: must be above 0 seconds")
    if not 0 < options.users <= 1:
        raise ConfigError(f"--users {options.users:g}: a share of the users, above 0 and at most 1")
    if options.concurrent < 0:
        raise ConfigError(f"--concurrent {options.concurrent}: at least 1, or 0 for what the machine bears")


def check_cpus(concurrent: int, have: float) -> int:
    """How many trials run at once; 0 asks for the default. Raises ConfigError for more than the CPUs bear."""
    chosen = concurrent or max(min(CONCURRENT, int(have // CPUS_EACH)), 1)
    if chosen * CPUS_EACH > have:
        raise ConfigError(
            f"--concurrent {chosen}: {chosen} trials need {chosen * CPUS_EACH} CPUs ({CPUS_EACH} each), "
            f"there are {have:g}; give at most {int(have // CPUS_EACH)}"
        )
    return chosen


def available_cpus(cluster: Cluster) -> float:
    """CPUs of the cluster that is joined, or of this machine if a runtime of our own will be started."""
    import ray

    if ray.is_initialized() or os.environ.get("RAY_ADDRESS"):
        return float(cluster.ray().cluster_resources().get("CPU", 0))
    return float(os.cpu_count() or 1)  # our own runtime may declare more than there are


def _open(loop: Loop, options: SweepOptions, space: spaces.Space, settings: Sequence[Any], started: datetime) -> Ledger:
    """Make the sweep's folder and book; tell MLflow what is swept."""
    folder = (loop.root / "tuning" / started.strftime("%Y%m%dT%H%M%S.%fZ")).absolute()
    folder.mkdir(parents=True)
    store = FeatureStore.open(loop.store)
    head = {
        "version": VERSION, "dataset": loop.spec.name, "recipe": loop.config.recipe, "commit": git_commit(),
        "started_utc": started.isoformat(timespec="seconds"), "store": str(loop.store.absolute()),
        "store_hash": store.hash, "validation_day": store.split.validation_day, "metric": "ne",
        "task": store.schema.tasks[0].name, "space": spaces.describe(space), "config": loop.config.to_dict(),
        "set": list(options.fixed), "users": options.users, "seed": options.seed, "budget_s": options.budget_s,
        "concurrent": options.concurrent, "interrupted": False, "seconds": 0.0,
        "mlflow": {"tracking_uri": loop.registry.uri, "parent_run_id": loop.parent_run},
    }  # fmt: skip
    loop.registry.log_params(loop.parent_run, {k: head[k] for k in ("recipe", "users", "seed", "budget_s", "space")})
    loop.registry.set_tags(loop.parent_run, {"commit": head["commit"], "kind": STEP_NAME})
    loop.registry.log_inputs(loop.parent_run, loop.spec.name, store.hash, str(loop.store), "tuning")
    trials = [TrialRecord(i, setting) for i, setting in enumerate(settings)]
    return Ledger(folder, trials, head, loop.registry, loop.parent_run, loop.console)


def _run(loop: Loop, options: SweepOptions, ledger: Ledger) -> None:
    """The trials, then the verdict; what was finished is kept whatever happens."""
    clock = time.monotonic()
    interrupted: KeyboardInterrupt | None = None
    with loop.console.stage(STEP_NAME, f"{len(ledger.trials)} trials, {options.concurrent} at once") as banner:
        if len(ledger.trials) < options.trials:
            loop.console.warn(f"the space has only {len(ledger.trials)} different settings; each is tried once")
        try:
            fit(loop, options, ledger)
        except KeyboardInterrupt as error:
            interrupted = error
        ledger.head |= {"interrupted": interrupted is not None, "seconds": round(time.monotonic() - clock, 2)}
        ledger.finish(judgement.INTERRUPTED if interrupted else judgement.OUT_OF_TIME)
        counts = {t.status: sum(x.status == t.status for x in ledger.trials) for t in ledger.trials}
        banner.fact(", ".join(f"{n} {status}" for status, n in counts.items()))
    _close(loop, options, ledger)
    if interrupted:
        done = sum(t.status in (judgement.FINISHED, judgement.STOPPED) for t in ledger.trials)
        loop.console.warn(f"interrupted: {done} of {len(ledger.trials)} trials had ended and are kept")
        raise interrupted
    if judgement.best_trial(ledger.trials) is None:
        raise TrainingError(judgement.why_no_winner(ledger.trials, options.budget_s))


def fit(loop: Loop, options: SweepOptions, ledger: Ledger) -> None:
    """Run the trials on Ray Tune; what they report goes to the ledger. Failed trials are not fatal."""
    loop.cluster.ray()
    from ray import tune

    settings = [t.setting for t in ledger.trials]
    working = ledger.folder / "ray"
    scratch = working / "scratch"
    scratch.mkdir(parents=True)
    job = TrialJob(
        str(loop.store.absolute()), loop.config.to_dict(), settings, options.users, options.seed, str(scratch)
    )
    brake = Brake(options.budget_s)
    with (
        _quiet_tune(),
        _interrupts(brake, loop.console),
        loop.console.progress("trials", len(settings), "trials") as progress,
    ):
        ledger.progress = progress
        tuner = tune.Tuner(
            tune.with_resources(partial(run_trial, job=job), {"CPU": CPUS_EACH}),
            param_space={"number": tune.grid_search(list(range(len(settings))))},
            tune_config=tune.TuneConfig(
                metric="ne",
                mode="min",
                scheduler=tune_scheduler(),
                max_concurrent_trials=options.concurrent,  # without it Tune may start more than can be placed
                reuse_actors=True,  # a worker pays for importing torch once
            ),
            run_config=tune.RunConfig(
                name="sweep",
                storage_path=str(working),
                verbose=0,
                callbacks=[tune_callback(ledger)],
                stop=tune_stopper(brake),
            ),
        )
        try:
            tuner.fit()
        finally:
            ledger.progress = None
            shutil.rmtree(working, ignore_errors=True)
    if brake.pulled:
        raise KeyboardInterrupt


class Brake:
    """Stops a sweep: after its budget (counted from the first question), or when pulled."""

    def __init__(self, budget_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.pulled = False
        self._budget_s, self._clock = budget_s, clock
        self._end_s: float | None = None

    def stops(self) -> bool:
        """True once all trials must end."""
        now_s = self._clock()
        self._end_s = now_s + self._budget_s if self._end_s is None else self._end_s
        return self.pulled or now_s >= self._end_s


def tune_scheduler() -> Any:
    """ASHA over the share of the data (Li et al., 1810.05934), which never stops the recipe's own setting."""
    from ray.tune.schedulers import ASHAScheduler, TrialScheduler

    class Asha(ASHAScheduler):
        """The others are measured against trial 0, so it must come to the end; its reports count as any other's."""

        def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
            decision: str = super().on_trial_result(tune_controller, trial, result)
            unfinished = result.get("percent", 100) < 100
            own = trial.config["number"] == judgement.OWN
            return TrialScheduler.CONTINUE if own and unfinished else decision

    return Asha(time_attr="percent", max_t=100, grace_period=100 // judgement.PARTS, reduction_factor=2)


def tune_stopper(brake: Brake) -> Any:
    """The brake as a Ray Tune stopper, which is asked several times a second."""
    from ray.tune import Stopper
    from ray.tune.stopper import NoopStopper

    class BrakeStopper(Stopper):
        """Ends all trials together. Tune pickles it with its own state; the brake stays here."""

        def __reduce__(self) -> Any:
            return (NoopStopper, ())

        def __call__(self, trial_id: str, result: Any) -> bool:
            return False

        def stop_all(self) -> bool:
            return brake.stops()

    return BrakeStopper()


@contextmanager
def _interrupts(brake: Brake, console: Console) -> Iterator[None]:
    """Ctrl-C pulls the brake, so that Tune frees what the trials hold on a cluster; a second one leaves at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)

    def pull(signum: int, frame: Any) -> None:
        signal.signal(signal.SIGINT, before)
        brake.pulled = True
        console.line("stopping the trials; Ctrl-C again to leave at once")

    signal.signal(signal.SIGINT, pull)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _quiet_tune() -> Iterator[None]:
    """Our settings in the environment that Tune reads, and no log of it: failures are told by the ledger."""
    before = {name: os.environ.get(name) for name in TUNE_ENVIRONMENT}
    os.environ.update(TUNE_ENVIRONMENT)
    logger = logging.getLogger("ray.tune")
    level = logger.level
    if not verbose():
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _close(loop: Loop, options: SweepOptions, ledger: Ledger) -> None:
    """Print table, verdict and the command to go on with; log the same to MLflow."""
    winner = judgement.best_trial(ledger.trials)
    path = ledger.folder / RESULT
    figures = {"ne": judgement.judged_ne(winner), "seconds": ledger.head["seconds"]}
    loop.registry.log_metrics(loop.parent_run, {k: v for k, v in figures.items() if v is not None})
    loop.registry.set_tags(loop.parent_run, {"best": " ".join(judgement.flags(ledger.trials))})
    loop.registry.log_artifact(loop.parent_run, path)
    for lost in loop.registry.lost:
        loop.console.warn(lost)
    say = partial(loop.console.line, indent=False)
    say()
    say(judgement.table(ledger.trials))
    say()
    if winner:
        for sentence in judgement.verdict(ledger.trials):
            say(sentence)
        for line in commands(loop.config, options.fixed, judgement.flags(ledger.trials)):
            say(line)
    say(f"result   {path}")


def commands(config: RunConfig, fixed: Sequence[str], found: Sequence[str]) -> list[str]:
    """The same command twice, ready to paste: with `--set` flags and for make; empty if there is nothing to set."""
    if not found:
        return []
    data = {"--dataset": config.data.dataset, "--data-dir": config.data.data_dir, "--recipe": config.recipe}
    usual = {"--dataset": RunConfig().data.dataset, "--data-dir": "", "--recipe": RunConfig().recipe}
    given = {k: v for k, v in data.items() if v != usual[k]}
    sets = [s for s in fixed if not s.startswith(("data.dataset=", "data.data_dir="))] + list(found)
    plain = [f"{k} {shlex.quote(v)}" for k, v in given.items()] + [f"--set {shlex.quote(s)}" for s in sets]
    made = [f"{k[2:].upper().replace('-', '_')}={shlex.quote(v)}" for k, v in given.items()]
    return [
        "  " + " ".join(["python -m pipelines run", *plain]),
        "  " + " ".join(["make pipeline", *made, f'SET="{" ".join(sets)}"']),
    ]
