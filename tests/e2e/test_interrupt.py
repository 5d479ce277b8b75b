"""Ctrl-C in any stage: the command says so, leaves nothing half-made and nobody running, and goes on when run again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pipelines.stage import damaged_files, read_stage
from tests.e2e.loop_process import Command, Finished

# One command for all attempts. Training is long enough to be met in the middle; quality means nothing here.
WORDS = (
    "run", "--recipe", "tiny",
    "--set", "train.batch_impressions=32", "--set", "train.checkpoint_every_steps=2",
    "--set", "student_train.batch_impressions=64",
)  # fmt: skip
STARTS_S, ENDS_S = 240, 60

pytestmark = pytest.mark.timeout(1500)


@dataclass(frozen=True)
class Attempt:
    """One interrupted run of the command and what it left."""

    finished: Finished
    left_over: list[str]
    half_made: list[str]


@dataclass(frozen=True)
class Story:
    """All attempts in order, by the stage that was interrupted, and the last one, which was let go on."""

    runs: Path
    attempts: dict[str, Attempt]
    last: Finished


def hidden(root: Path) -> list[str]:
    """Folders of unfinished stages, and stage folders that are not what their stage.json says."""
    out = [str(p) for p in root.glob("*/.tmp-*")]
    for stage in root.glob("*/*"):
        if not stage.name.startswith(".") and stage.parent.name not in ("loops", "checkpoints"):
            described = read_stage(stage)
            out += [str(stage)] if described is None or damaged_files(stage, described) else []
    return out


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    base = tmp_path_factory.mktemp("interrupt")
    runs, root = base / "runs", base / "runs" / "generated"
    moments: dict[str, Callable[[str], bool]] = {
        "preprocess": lambda out: "reading " in out,
        "pretrain": lambda out: any(root.glob("checkpoints/pretrain-*/generated-gem/step-*")),
        "generate-knowledge": lambda out: any(root.glob("generate-knowledge/.tmp-*/part-*.parquet")),
        "distill": lambda out: any(root.glob("checkpoints/distill-*/progress.json")),
        "evaluate": lambda out: any(root.glob("evaluate/.tmp-*")),
    }
    attempts = {}
    for stage, seen in moments.items():
        temp = base / stage
        temp.mkdir()
        with Command(temp, *WORDS, "--runs", str(runs)) as command:
            command.wait_until(lambda c=command, s=seen: s(c.out), stage, STARTS_S)  # type: ignore[misc]
            command.interrupt()
            finished = command.finish(ENDS_S)
            attempts[stage] = Attempt(finished, command.left_over(), hidden(root))
    with Command(base, *WORDS, "--runs", str(runs)) as command:
        last = command.finish(STARTS_S * 2)
    yield Story(runs, attempts, last)


STAGES = ("preprocess", "pretrain", "generate-knowledge", "distill", "evaluate")


@pytest.mark.parametrize("stage", STAGES)
def test_it_says_so_and_how_to_go_on(story: Story, stage: str) -> None:
    finished = story.attempts[stage].finished
    assert finished.status == 130, finished.err
    assert finished.err == "interrupted; run the same command again to continue where it stopped\n"
    last = finished.out.rstrip().splitlines()
    assert last[-1].strip().startswith("interrupted after ")
    assert [line for line in last if line.startswith("[")][-1].endswith(f"] {stage}")
    assert not finished.noise


@pytest.mark.parametrize("stage", STAGES)
def test_nothing_half_made_is_visible_and_nobody_runs_on(story: Story, stage: str) -> None:
    attempt = story.attempts[stage]
    assert attempt.half_made == [] and attempt.left_over == []


@pytest.mark.parametrize("stage", STAGES)
def test_finished_stages_are_skipped_by_the_next_attempt(story: Story, stage: str) -> None:
    after = [*STAGES, "end"][STAGES.index(stage) + 1]
    said = story.last.out if after == "end" else story.attempts[after].finished.out
    before = story.attempts[stage].finished.out
    done = [line.split("] ")[1] for line in before.splitlines() if line.startswith("[")][:-1]
    assert done
    for name in done:
        assert f"] {name}\n      skipped: inputs unchanged" in said


def test_mlflow_knows_the_attempts_as_killed_and_the_last_as_finished(story: Story) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{story.runs / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("gem/generated")
    runs = client.search_runs([experiment.experiment_id], order_by=["attributes.start_time ASC"])
    parents = [r for r in runs if "mlflow.parentRunId" not in r.data.tags]
    assert [p.info.status for p in parents] == [*["KILLED"] * len(STAGES), "FINISHED"]
    for parent, stage in zip(parents, STAGES, strict=False):
        children = [r for r in runs if r.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
        by_stage = {c.data.tags["stage"]: c.info.status for c in children}
        assert by_stage.pop(stage) == "KILLED"
        assert set(by_stage.values()) == {"FINISHED"}


def test_the_last_attempt_finishes_and_pretraining_went_on_from_a_checkpoint(story: Story) -> None:
    assert story.last.status == 0, story.last.err
    summary: dict[str, Any] = json.loads((story.runs / "latest" / "summary.json").read_text())
    figures = summary["stages"]["pretrain"]["train"]["generated-gem"]
    assert 0 < figures["resumed_from_step"] < figures["steps"]
    assert figures["resumed_from_step"] % 2 == 0
    assert not list((story.runs / "generated" / "checkpoints").iterdir()), "checkpoints go when a stage is done"
    assert hidden(story.runs / "generated") == []
