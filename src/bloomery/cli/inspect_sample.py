"""`bloomery inspect sample RECIPE N[-M]`: exactly what is trained at some positions of the run."""

from __future__ import annotations

import argparse
import re

from bloomery.base import exit_codes
from bloomery.cli.data_argument import add_recipe_and, opened_run, print_samples, refuse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "position in the run, from 0, as consumed_samples counts; or a range, both ends included"
    add_recipe_and(parser, ("samples", {"metavar": "N[-M]", "type": _range, "help": text}))


def run(args: argparse.Namespace) -> int:
    first, last = args.samples
    with opened_run(args) as inspected:
        end = inspected.plan.train_samples
        if last >= end:
            raise refuse(f"sample {last:,} is asked for", f"0 to {end - 1:,}")
        print_samples(inspected, first, last, as_json=args.json)
    return exit_codes.OK


def _range(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"([0-9][0-9_]{0,17})(?:-([0-9][0-9_]{0,17}))?", text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is not a position such as 0, or a range such as 16-31")
    first, last = (int((number or found[1]).replace("_", "")) for number in found.groups())
    if last < first:
        raise argparse.ArgumentTypeError(f"the range {text!r} ends before it begins")
    return first, last
