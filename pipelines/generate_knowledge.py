"""Stage: one pass of the teacher over every impression, on Ray Data with model actors."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from gem import errors
from pipelines.console import Stage
from pipelines.loop import MODEL_CODE, Loop, code_key, plain
from pipelines.model_stages import bundle_path
from pipelines.stage import StageResult

if TYPE_CHECKING:
    from gem.data.store import FeatureStore

CODE = (*MODEL_CODE, "pipelines/generate_knowledge.py")
NUM_ACTORS = 2
PARTS_PER_ACTOR = 3  # enough pieces for progress and balance, few enough to keep a user's rows together


def generate_knowledge(loop: Loop) -> StageResult:
    """Write knowledge records for all days; students read those of training and validation days."""
    teacher_hash = loop.done["pretrain"].record["bundles"][loop.model_name()]
    teacher = bundle_path(loop, "pretrain", loop.model_name())

    def build(out: Path, stage: Stage) -> dict[str, Any]:
        ray = loop.cluster.ray()
        num_parts = NUM_ACTORS * PARTS_PER_ACTOR
        pieces = [{"part": i, "of": num_parts} for i in range(num_parts)]
        scored = ray.data.from_items(pieces, override_num_blocks=num_parts).map_batches(
            TeacherActor,
            fn_constructor_args=(
                str(loop.store.absolute()),
                str(teacher.absolute()),
                teacher_hash,
                str(out.absolute()),
            ),
            batch_size=1,
            num_cpus=1,
            compute=ray.data.ActorPoolStrategy(size=NUM_ACTORS),
            max_restarts=0,  # a restart needs arguments that may be gone; a lost actor fails the stage instead
        )
        total = 0
        with loop.console.progress("scoring", num_parts, "parts") as bar:
            for row in scored.iter_rows():
                if row["error"]:
                    raise getattr(errors, row["error"])(row["said"])
                total += int(row["rows"])
                bar.advance(1, f"{total:,} impressions")
        return {
            "rows_in": total, "rows_out": total, "quarantined": 0, "teacher": teacher_hash,
            "teacher_passes_per_impression": 1.0,
        }  # fmt: skip

    parts = {"teacher": teacher_hash, "model": plain(loop.config.model), "code": code_key(CODE)}
    return loop.stage("generate-knowledge", parts, build)


class TeacherActor:
    """A `Teacher` as a Ray Data actor. Our own errors travel as rows: Ray would make long text of them."""

    def __init__(self, *where: str) -> None:
        self.teacher: Teacher | errors.GemError
        try:
            self.teacher = Teacher(*where)
        except errors.GemError as error:
            self.teacher = error

    def __call__(self, piece: dict[str, Any]) -> dict[str, Any]:
        """{"rows": [n], "error": [""], "said": [""]}, or the name of the error and what it says."""
        try:
            if isinstance(self.teacher, errors.GemError):
                raise self.teacher
            return {
                "rows": [self.teacher.score(int(piece["part"][0]), int(piece["of"][0]))],
                "error": [""],
                "said": [""],
            }
        except errors.GemError as error:
            return {"rows": [0], "error": [type(error).__name__], "said": [str(error)]}


class Teacher:
    """Loads store and teacher once, scores pieces of the impressions. Raises BundleError and StoreError."""

    def __init__(self, store: str, bundle: str, bundle_hash: str, out: str) -> None:
        import torch

        from gem.data.store import FeatureStore
        from gem.lineage.bundle import load_bundle
        from gem.model.ranker import Ranker
        from gem.training.data import StoreReader
        from pipelines.quiet import install_filters

        install_filters()
        torch.set_num_threads(1)
        self.out, self.bundle_hash = Path(out), bundle_hash
        self.store: FeatureStore = FeatureStore.open(Path(store), verify=False)
        loaded = load_bundle(Path(bundle), expected_hash=bundle_hash, schema=self.store.schema)
        config = loaded.info.config.model
        self.model = Ranker(self.store.schema, config)
        loaded.load_into(self.model)
        self.reader = StoreReader(
            self.store,
            self.store.timelines(),
            self.store.impressions(self.store.days),
            config.max_history,
            align=config.align,
        )

    def score(self, part: int, of: int) -> int:
        """Score the impressions of users with `user mod of == part` into one file; returns how many."""
        import numpy as np

        from gem.training.predict import predict
        from gem.transfer.knowledge import Teacher as TeacherId
        from gem.transfer.knowledge import write_records

        imp = self.reader.impressions
        at = np.flatnonzero(imp.user % of == part)
        scores = predict(self.model, self.reader, at)
        teacher = TeacherId(self.bundle_hash, self.store.split.train_days[-1])
        path = self.out / f"part-{part:03d}.parquet"
        return write_records(
            path, self.store.schema, teacher, imp.impression_id[at], scores.logits, scores.representation
        )
