"""`python -m pipelines STAGE`: run the loop up to a stage, or look at where a model comes from."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from gem.config import RunConfig, apply_overrides
from gem.errors import GemError
from gem.recipes import RECIPES, recipe

RUNNABLE = ("preprocess", "pretrain", "generate-knowledge", "distill", "evaluate", "promote")
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status (0, 1 = a GemError was printed, 130 = interrupted)."""
    args = _parser().parse_args(argv)
    try:
        if args.command == "lineage":
            return _lineage(args.model, Path(args.runs))
        from pipelines.run import run

        run(_config(args), last="promote" if args.command == "run" else args.command, runs=Path(args.runs))
    except GemError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; run the same command again to continue where it stopped", file=sys.stderr)
        return INTERRUPTED
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pipelines", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="STAGE")
    common = argparse.ArgumentParser(add_help=False)
    runs = os.environ.get("GEM_RUNS_DIR") or "runs"
    common.add_argument("--runs", default=runs, help="folder of results (default: GEM_RUNS_DIR or runs)")
    stages = argparse.ArgumentParser(add_help=False)
    stages.add_argument("--recipe", default="default", help=f"one of {sorted(RECIPES)}")
    stages.add_argument("--dataset", help="a data set known by name, or a spec file")
    stages.add_argument("--data-dir", help="folder of its raw files")
    stages.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help="override a config field")
    commands.add_parser("run", parents=[common, stages], help="the whole loop, with summary and report")
    for name in RUNNABLE:
        commands.add_parser(name, parents=[common, stages], help=f"the loop up to {name}")
    lineage = commands.add_parser("lineage", parents=[common], help="where a served model comes from")
    lineage.add_argument("model", help="registered name, such as generated-gem")
    return parser


def _config(args: argparse.Namespace) -> RunConfig:
    overrides = [f"data.dataset={args.dataset}"] if args.dataset else []
    overrides += [f"data.data_dir={args.data_dir}"] if args.data_dir else []
    return apply_overrides(recipe(args.recipe), [*overrides, *args.set])


def _lineage(model: str, runs: Path) -> int:
    from gem.lineage.registry import Registry
    from pipelines.console import install_filters
    from pipelines.lineage_view import format_chain

    install_filters()
    registry = Registry(runs=runs)
    registry.check()
    print(format_chain(registry.chain(model)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
