"""`bloomery train RECIPE`: the main job. Starting it again goes on where it stopped."""

from __future__ import annotations

import argparse
from pathlib import Path

from bloomery.base import exit_codes
from bloomery.cli.recipe_argument import add_recipe_arguments, load
from bloomery.config.recipe import Recipe
from bloomery.train.kill_switch import kill_switch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe_arguments(parser)
    parser.add_argument("--run-dir", type=Path, help="folder of the run; default: runs/<name>")
    parser.add_argument("--from", dest="start_from", metavar="CKPT", help="go on from this checkpoint: step-00000100")
    parser.add_argument("--device", help="cpu, cuda, ...; default: this machine's accelerator")
    parser.add_argument("--quiet", action="store_true", help="say only what is wrong")


def run(args: argparse.Namespace) -> int:
    recipe = load(args, reads=set(Recipe.model_fields) - {"prepare"}).recipe
    folder = args.run_dir or Path("runs") / recipe.name
    if switch := kill_switch(folder):
        print(f"Detected kill switch at {switch}. Exiting; remove the file to train again.")
        return exit_codes.OK
    from bloomery.train.loop import train
    from bloomery.train.setup import prepared_run

    with prepared_run(recipe, folder, device=args.device, quiet=args.quiet, start_from=args.start_from) as (
        prepared,
        state,
    ):
        train(prepared, state)
    return exit_codes.OK
