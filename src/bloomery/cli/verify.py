"""`bloomery verify RECIPE --simulate-world N`. (The certificate itself is written in another branch.)"""

from __future__ import annotations

import argparse

from bloomery.cli.recipe_argument import add_recipe_arguments
from bloomery.cli.verify_simulate import add_simulate_arguments, run_simulation


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe_arguments(parser)
    add_simulate_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")


def run(args: argparse.Namespace) -> int:
    return run_simulation(args)
