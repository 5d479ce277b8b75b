"""The whole loop: its time and memory on the default data, its quality on KuaiRand. `make bench NAME=loop`."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from pipelines.summary import read_summary
from tests.benchmarks.harness import Claim, Report, arguments

LIMIT_S = 3600


def run_loop(*options: str) -> dict[str, Any]:
    """Run the loop in a process of its own and an empty runs folder; returns its summary."""
    with tempfile.TemporaryDirectory(prefix="gem-loop-") as runs:
        command = [sys.executable, "-m", "pipelines", "run", "--runs", runs, *options]
        subprocess.run(command, check=True, timeout=LIMIT_S)
        return read_summary(Path(runs) / "latest")


def loop_rows(dataset: str, summary: dict[str, Any]) -> list[dict[str, Any]]:
    """One row per model and task."""
    return [
        {"dataset": dataset, "model": name, "task": task, "promoted": m["promoted"], **found}
        for name, m in summary["models"].items()
        for task, found in m["tasks"].items()
    ]


def default_claims(summary: dict[str, Any]) -> list[Claim]:
    """Cost of the default loop, and that the foundation model learns towards the Bayes limit."""
    click = summary["models"]["generated-gem"]["tasks"]["click"]
    ne, bayes = click["ne"], click["bayes_ne"]
    wait = max(s.get("data_wait_share") or 0.0 for s in summary["stages"].values())
    return [
        Claim("default_pipeline_s", summary["seconds"], 300, "<=", "s"),
        Claim("default_peak_gb", summary["peak_rss_mb"] / 1024, 8, "<=", "GB", note=summary["peak_rss_note"]),
        Claim("default_click_ne", ne["value"], 1, "<=", low=ne["low"], high=ne["high"], note=f"Bayes NE {bayes:.4f}"),
        Claim("data_wait_share", wait, 0.05, "<=", note="share of step time spent waiting for data"),
    ]


def kuairand_claims(summary: dict[str, Any]) -> list[Claim]:
    """Click AUC and calibration of the foundation model, and the worst vertical model's NE."""
    models = summary["models"]
    click = models["kuairand-gem"]["tasks"]["click"]
    vertical = {(n, t): f["ne"] for n, m in models.items() if m["kind"] == "vertical" for t, f in m["tasks"].items()}
    (name, task), worst = max(vertical.items(), key=lambda item: item[1]["value"] or 9.0)
    auc, calibration = click["auc"], click["calibration"]
    between = {"low": calibration["low"], "high": calibration["high"]}
    return [
        Claim("kuairand_click_auc", auc["value"], 0.745, low=auc["low"], high=auc["high"]),
        Claim("kuairand_calibration_low", calibration["value"], 0.95, **between),
        Claim("kuairand_calibration_high", calibration["value"], 1.05, "<=", **between),
        Claim("kuairand_worst_vertical_ne", worst["value"], 1, "<=", "", worst["low"], worst["high"], f"{name} {task}"),
    ]


def main() -> None:
    """Run both loops and write the report."""
    data_dir = arguments().data_dir
    report = Report("loop", "generated (seed 7) and KuaiRand-Pure, test day 2022-05-06")
    default = run_loop()
    report.claims += default_claims(default)
    report.rows += loop_rows("generated", default)
    if (data_dir / "kuairand").is_dir():
        real = run_loop("--dataset", "kuairand", "--data-dir", str(data_dir / "kuairand"))
        report.claims += kuairand_claims(real)
        report.rows += loop_rows("kuairand", real)
    else:
        report.claims.append(Claim("kuairand_click_auc", None, 0.745, note=f"no kuairand/ under {data_dir}"))
    report.finish()


if __name__ == "__main__":
    main()
