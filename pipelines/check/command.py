"""`python -m pipelines check`: gather, judge, show, write; the exit status says whether there are errors."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gem.config import RunConfig
from gem.data.spec import DatasetSpec
from gem.errors import GemError, SpecError
from pipelines.check.finding import ERROR, Finding
from pipelines.check.gather import Facts, gather
from pipelines.check.judge import judge
from pipelines.check.measures import Measures, measure
from pipelines.check.page import render_page
from pipelines.check.view import show
from pipelines.distribute import Distribute, in_process, on_ray_data

HAS_ERRORS = 2
IN_PROCESS_BYTES = 256 * 2**20  # larger data sets go through Ray Data


def check(config: RunConfig, runs: Path, out: Path | None = None) -> int:
    """Check the data set of the config; returns 0, or 2 if there is a finding of level ERROR.

    Writes index.html and findings.json to `out` (default: runs/<data set>/check). Raises ConfigError for an unknown
    data set or a missing folder.
    """
    from pipelines.loop import load_dataset
    from pipelines.quiet import install_filters

    install_filters()
    started = time.monotonic()
    facts, measures = None, Measures()
    try:
        spec, data_dir = load_dataset(config)
    except SpecError as e:
        name = Path(config.data.dataset).stem
        findings = [
            Finding(ERROR, "refused", config.data.dataset, str(e), "correct the spec: preprocess stops here too")
        ]
    else:
        name = spec.name
        facts = _facts(config, spec, data_dir, runs)
        measures = measure(facts)
        findings = judge(facts, measures)
    seconds = time.monotonic() - started
    made = _write(name, findings, (facts, measures), out or runs / name / "check", seconds)
    show(name, findings, facts, measures, made)
    return HAS_ERRORS if any(f.level == ERROR for f in findings) else 0


def _facts(config: RunConfig, spec: DatasetSpec, data_dir: Any, runs: Path) -> Facts:
    from pipelines.cluster import Cluster

    runs.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="check-", dir=runs)).resolve()
    try:
        if data_dir is None:
            from gem.data.world.generator import generate

            data_dir = work / "world"
            generate(config.data.world, data_dir)
        with Cluster() as cluster:
            return gather(config, spec, data_dir, work, lambda size: _way(cluster, size), int(time.time() * 1000))
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _way(cluster: Any, size: int) -> Distribute:
    if size <= IN_PROCESS_BYTES:
        return in_process

    cluster.ray()
    return on_ray_data


def _write(
    name: str, findings: list[Finding], found: tuple[Facts | None, Measures], out: Path, seconds: float
) -> list[Path]:
    facts, measures = found
    when = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        out.mkdir(parents=True, exist_ok=True)
        page, data = out / "index.html", out / "findings.json"
        page.write_text(render_page(name, findings, facts, measures, f"{when} · {seconds:.1f} s"), encoding="utf-8")
        content = {"dataset": name, "checked_utc": when, "seconds": round(seconds, 2)}
        rows = [f.to_dict() for f in findings]
        data.write_text(json.dumps({**content, "findings": rows}, indent=1, ensure_ascii=False, default=float) + "\n")
    except OSError as e:
        raise GemError(f"cannot write the check to {out}: {e}. Give another folder with --out.") from None
    return [page, data]
