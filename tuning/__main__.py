"""`python -m tuning sweep`: try cheap variants of a recipe and print the best as `--set` flags."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from gem.config import RunConfig, apply_overrides
from gem.errors import GemError
from gem.recipes import RECIPES, recipe
from tuning.spaces import SPACES
from tuning.sweep import SweepOptions

INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status (0, 1 = a GemError was printed, 130 = interrupted)."""
    args = _parser().parse_args(argv)
    try:
        from tuning.sweep import sweep

        sweep(_config(args), _options(args), Path(args.runs))
    except GemError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    return 0


def _parser() -> argparse.ArgumentParser:
    usual = SweepOptions()
    parser = argparse.ArgumentParser(prog="python -m tuning", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    sweep = commands.add_parser("sweep", help="trials with early stopping, best setting at the end")
    sweep.add_argument("--recipe", default="default", help=f"one of {sorted(RECIPES)}")
    sweep.add_argument("--dataset", help="a data set known by name, or a spec file")
    sweep.add_argument("--data-dir", help="folder of its raw files")
    sweep.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help="hold a config field")
    sweep.add_argument("--space", default=usual.space, help=f"one of {sorted(SPACES)} (default: {usual.space})")
    sweep.add_argument(
        "--vary", action="append", default=[], metavar="PATH=DOMAIN",
        help="instead of --space: path=low..high, path=low..high:log or path=a,b,c; may be repeated",
    )  # fmt: skip
    sweep.add_argument("--trials", type=int, default=usual.trials, help=f"settings to try (default: {usual.trials})")
    sweep.add_argument(
        "--budget-s", type=float, default=usual.budget_s, metavar="S",
        help=f"seconds for all trials together, data stages not counted (default: {usual.budget_s:g})",
    )  # fmt: skip
    sweep.add_argument("--concurrent", type=int, default=0, help="trials at once, one CPU each (default: 2 if it can)")
    sweep.add_argument("--users", type=float, default=usual.users, help=f"share of users read (default: {usual.users})")
    sweep.add_argument("--seed", type=int, default=usual.seed, help="of the drawn settings and users")
    sweep.add_argument("--runs", default="runs", help="folder of results (default: runs)")
    return parser


def _options(args: argparse.Namespace) -> SweepOptions:
    return SweepOptions(
        space=args.space, vary=tuple(args.vary), fixed=tuple(args.set), trials=args.trials, budget_s=args.budget_s,
        concurrent=args.concurrent, users=args.users, seed=args.seed,
    )  # fmt: skip


def _config(args: argparse.Namespace) -> RunConfig:
    overrides = [f"data.dataset={args.dataset}"] if args.dataset else []
    overrides += [f"data.data_dir={args.data_dir}"] if args.data_dir else []
    return apply_overrides(recipe(args.recipe), [*overrides, *args.set])


if __name__ == "__main__":
    sys.exit(main())
