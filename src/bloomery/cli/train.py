"""`bloomery train RECIPE`: the main job. Starting it again goes on where it stopped."""

from __future__ import annotations

import argparse
from pathlib import Path

from bloomery.base import exit_codes
from bloomery.base.errors import Problem, RecipeError
from bloomery.cli.recipe_argument import add_recipe_arguments, load
from bloomery.config.recipe import Recipe
from bloomery.launch.local import run_local_ranks
from bloomery.parallel.environment import Started, started_as
from bloomery.sizing.layout import world_size
from bloomery.train.kill_switch import kill_switch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe_arguments(parser)
    parser.add_argument("--run-dir", type=Path, help="folder of the run; default: runs/<name>")
    parser.add_argument("--from", dest="start_from", metavar="CKPT", help="go on from this checkpoint: step-00000100")
    parser.add_argument("--device", help="cpu, cuda, ...; default: this machine's accelerator")
    parser.add_argument("--trace", type=Path, metavar="DIR", help="write the first steps' gradients and samples here")
    parser.add_argument("--trace-steps", type=int, default=2, metavar="N", help="how many steps; default: 2")
    parser.add_argument("--quiet", action="store_true", help="say only what is wrong")


def run(args: argparse.Namespace) -> int:
    started = started_as()
    recipe = _recipe(args, started)
    folder = args.run_dir or Path("runs") / recipe.name
    if switch := kill_switch(folder):
        print(f"Detected kill switch at {switch}. Exiting; remove the file to train again.")
        return exit_codes.OK
    if started is None and world_size(recipe) > 1:
        return _run_here(recipe, args)
    from bloomery.base.accelerator import device_of_rank, pick_device
    from bloomery.train.loop import train
    from bloomery.train.setup import prepared_run
    from bloomery.train.trace import TraceRequest

    device = pick_device(args.device)
    trace = TraceRequest(args.trace, args.trace_steps, args.trace_steps) if args.trace else None
    options = {"quiet": args.quiet, "start_from": args.start_from, "trace": trace}
    if started is None:
        with prepared_run(recipe, folder, device=device, **options) as (prepared, state):
            train(prepared, state)
        return exit_codes.OK
    from bloomery.parallel.ranks import joined

    device = device_of_rank(device, started.local_rank, started.local_size)
    with (
        joined(started, device) as ranks,
        prepared_run(recipe, folder, device=device, ranks=ranks, **options) as (prepared, state),
    ):
        train(prepared, state)
    return exit_codes.OK


def _recipe(args: argparse.Namespace, started: Started | None) -> Recipe:
    """The recipe, for the ranks that were really started."""
    reads = set(Recipe.model_fields) - {"prepare"}
    recipe = load(args, reads=reads).recipe
    if started is not None and started.size != world_size(recipe):
        nodes = started.size // started.local_size
        args.overrides += [f"launch.nodes={nodes}", f"launch.gpus_per_node={started.size // nodes}"]
        if recipe.launch is None and nodes > 1:
            args.overrides.append("launch.on=hosts")
        recipe = load(args, reads=reads).recipe
    return recipe


def _run_here(recipe: Recipe, args: argparse.Namespace) -> int:
    """Be the launcher of a recipe that wants several ranks and was started as one process."""
    size = world_size(recipe)
    if recipe.launch is not None and recipe.launch.on != "local":
        what = f"the recipe asks for {size} ranks on {recipe.launch.on}, and this is one process"
        remedy = (
            f"start it with srun or torchrun, or override launch.on=local launch.nodes=1 to start {size} ranks here"
        )
        raise RecipeError(Problem(what, "launch.on says who starts the ranks", remedy))
    from bloomery.cli.main import main

    return run_local_ranks(size, main, args.command_line, preload=["bloomery.train.loop", "bloomery.train.setup"])
