"""`bloomery inspect step RECIPE N`: exactly what one step trains on."""

from __future__ import annotations

import argparse
import re

from bloomery.base import exit_codes
from bloomery.cli.data_argument import add_recipe_and, opened_run, print_samples, refuse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe_and(parser, ("step", {"metavar": "N", "type": _step, "help": "the first step is 1"}))


def run(args: argparse.Namespace) -> int:
    with opened_run(args) as inspected:
        plan = inspected.plan
        if not 1 <= args.step <= plan.train_steps:
            raise refuse(f"step {args.step:,} is asked for", f"1 to {plan.train_steps:,}")
        first, end = plan.batch.consumed_after_step(args.step - 1), plan.batch.consumed_after_step(args.step)
        print_samples(inspected, first, end - 1, as_json=args.json)
    return exit_codes.OK


def _step(text: str) -> int:
    if not re.fullmatch("[0-9][0-9_]{0,17}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not the number of a step")
    return int(text)
