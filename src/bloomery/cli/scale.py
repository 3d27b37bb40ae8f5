"""`bloomery scale RECIPE --nodes 1,2,4`: what more nodes bring, as a table, JSON and a picture."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from bloomery.base import signals
from bloomery.base.bounded import read_json
from bloomery.base.errors import DataError, Problem, RecipeError
from bloomery.base.storage import make_folder, write_atomically
from bloomery.cli.arguments import add_json, add_recipe_arguments, load, show, whole_number, whole_numbers
from bloomery.plan.trials import measure, picture, with_efficiency

_RESULT, _PICTURE = "scale.json", "scale.html"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe_arguments(parser)
    parser.add_argument(
        "--nodes", type=whole_numbers, metavar="N,N,...", help="numbers of nodes; here, of as many ranks"
    )
    parser.add_argument("--on", help="where; default: launch.on of the recipe")
    parser.add_argument("--steps", type=whole_number(2), default=30, help="of each training; default: 30")
    parser.add_argument("--strong", action="store_true", help="keep the global batch; default: that of each node")
    parser.add_argument("--output", type=Path, metavar="DIR", help="default: runs/<name>-scale")
    parser.add_argument("--compare", type=Path, nargs="+", default=[], metavar="JSON", help="draw these as well")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    args.overrides += [f"launch.on={args.on}"] if args.on else []
    recipe = load(args).recipe
    if not args.nodes or 0 in args.nodes:
        raise RecipeError(
            Problem("--nodes is missing", "each is a training of its own", "give for example --nodes 1,2,4")
        )
    if recipe.launch and recipe.launch.on == "azureml":
        rule, remedy = "its runs lie in the workspace, where nothing measures them", "use another target"
        raise RecipeError(Problem("launch.on is azureml", rule, remedy))
    others = {str(path): _points(path) for path in args.compare}
    output = make_folder(args.output or Path("runs") / f"{recipe.name}-scale")
    points: list[dict[str, Any]] = []
    for nodes in sorted(set(args.nodes)):
        signals.say(f"{nodes} nodes ...")
        points.append(measure(recipe, args.recipe, args.overrides, nodes, output, steps=args.steps, strong=args.strong))
    facts = {"recipe": recipe.name, "strong": args.strong, "points": with_efficiency(points)}
    write_atomically(output / _RESULT, json.dumps(facts, indent=1) + "\n")
    write_atomically(output / _PICTURE, picture({str(output): facts["points"]} | others))
    return show(args, {**facts, "picture": str(output / _PICTURE)})


def _points(path: Path) -> list[dict[str, Any]]:
    try:
        points = read_json(path)["points"]
        return [{name: float(point[name]) for name in ("nodes", "tokens_per_second", "efficiency")} for point in points]
    except (OSError, ValueError, TypeError, KeyError) as error:
        rule = f"`bloomery scale` writes {_RESULT}"
        raise DataError(
            Problem(f"{path} is no result of a scaling experiment: {error}", rule, "name another")
        ) from error
