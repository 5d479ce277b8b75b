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
    """Entry point; returns the exit status (0, 1 = a GemError was printed, 2 = found by `check`, 130 = interrupted)."""
    args = _parser().parse_args(argv)
    try:
        if args.command == "lineage":
            return _lineage(args.model, Path(args.runs))
        if args.command == "check":
            from pipelines.check.command import check

            return check(_config(args), Path(args.runs), Path(args.out) if args.out else None)
        if args.command == "cost":
            return _cost(args)
        if args.command == "forget":
            return _forget(args.users, args.dataset, Path(args.runs))
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
    check = commands.add_parser("check", parents=[common], help="what is wrong with a data set, before any training")
    check.add_argument("dataset", metavar="SPEC", help="a data set known by name, or a spec file")
    check.add_argument("--data-dir", help="folder of its raw files")
    check.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help="override a config field")
    check.add_argument("--out", help="folder of the page and findings.json (default: <runs>/<data set>/check)")
    check.set_defaults(recipe="default")
    cost = commands.add_parser("cost", parents=[common], help="what the models of a recipe cost, before any training")
    cost.add_argument("recipe", metavar="RECIPE", help=f"one of {sorted(RECIPES)}")
    data = cost.add_mutually_exclusive_group()
    data.add_argument("--dataset", help="name of a data set whose newest store below --runs is read")
    data.add_argument("--store", help="folder of a feature store")
    cost.add_argument("--world", type=int, help="number of ranks (default: num_workers of the recipe)")
    cost.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help="override a config field")
    cost.add_argument("--json", action="store_true", help="print the figures as JSON")
    forget = commands.add_parser("forget", parents=[common], help="delete users from all stores of a data set")
    forget.add_argument("users", nargs="+", metavar="USER", help="user ids as they stand in the raw data")
    forget.add_argument("--dataset", required=True, help="name of the data set")
    lineage = commands.add_parser("lineage", parents=[common], help="where a served model comes from")
    lineage.add_argument("model", help="registered name, such as generated-gem")
    return parser


def _config(args: argparse.Namespace) -> RunConfig:
    overrides = [f"data.dataset={args.dataset}"] if args.dataset else []
    overrides += [f"data.data_dir={args.data_dir}"] if args.data_dir else []
    return apply_overrides(recipe(args.recipe), [*overrides, *args.set])


def _cost(args: argparse.Namespace) -> int:
    from pipelines.cost import Request, as_json, figures, render

    config = apply_overrides(recipe(args.recipe), args.set)
    found = figures(Request(config, args.dataset or "", args.store or "", args.world, Path(args.runs)))
    print(as_json(found) if args.json else render(found))
    return 0


def _forget(users: Sequence[str], dataset: str, runs: Path) -> int:
    from pipelines.forget import forget, report

    print(report(forget(dataset, users, runs), len(set(users))))
    return 0


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
