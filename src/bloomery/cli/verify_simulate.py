"""`bloomery verify RECIPE --simulate-world N`: one rank of a world that is larger than the machine."""

from __future__ import annotations

import argparse
import json

from bloomery.base import exit_codes
from bloomery.base.errors import Problem, RecipeError
from bloomery.cli.recipe_argument import load
from bloomery.config.load import read_recipe
from bloomery.config.recipe import Recipe
from bloomery.sizing.layout import world_size


def add_simulate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--simulate-world", type=int, metavar="N", help="build ranks of a world of N, with nothing real but the code"
    )
    parser.add_argument("--rank", type=int, metavar="R", help="of --simulate-world; default: first, middle, last stage")


def run_simulation(args: argparse.Namespace) -> int:
    """Instead of everything else that `verify` does: the recipe need only be legal in the simulated world."""
    from bloomery.verify.simulate import check_world, simulate_world
    from bloomery.verify.simulated_table import world_json, world_table

    if args.simulate_world is None:
        rule = "it names a rank of a simulated world"
        raise RecipeError(Problem(f"--rank is {args.rank}", rule, "add --simulate-world N"))
    draft = read_recipe(args.recipe, args.overrides)
    if draft.recipe is not None:
        check_world(draft.recipe, args.simulate_world, args.rank)
        if world_size(draft.recipe) != args.simulate_world:
            args.overrides += _launched_as(draft.recipe, args.simulate_world)
    recipe = load(args).recipe
    world = simulate_world(recipe, args.simulate_world, args.rank)
    print(json.dumps(world_json(world, recipe), indent=1) if args.json else world_table(world, recipe))
    return exit_codes.OK


def _launched_as(recipe: Recipe, world: int) -> list[str]:
    """Overrides that give the recipe this many ranks, so that every rule is asked about this very world."""
    nodes = 1
    if recipe.launch is not None and recipe.launch.on != "local" and world % recipe.launch.gpus_per_node == 0:
        nodes = world // recipe.launch.gpus_per_node
    return [f"launch.nodes={nodes}", f"launch.gpus_per_node={world // nodes}"]
