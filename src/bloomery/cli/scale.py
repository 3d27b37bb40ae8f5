"""`bloomery scale RECIPE --nodes 1,2,4`: what more nodes bring, as a table, JSON and a picture."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bloomery.base import exit_codes
from bloomery.base.bounded import read_json
from bloomery.base.errors import DataError, Problem, RecipeError
from bloomery.base.storage import make_folder, remove_tree, write_atomically
from bloomery.checkpoint.folder import CHECKPOINTS
from bloomery.cli.arguments import add_json, add_recipe_arguments, load, show, whole_number, whole_numbers
from bloomery.launch.scale import measured, overrides, picture, with_efficiency

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
    from bloomery.cli.main import main

    recipe = load(args).recipe
    if not args.nodes or 0 in args.nodes:
        raise RecipeError(
            Problem("--nodes is missing", "each is a training of its own", "give for example --nodes 1,2,4")
        )
    if (args.on or (recipe.launch and recipe.launch.on)) == "azureml":
        rule, remedy = "its runs lie in the workspace, where nothing measures them", "use another target"
        raise RecipeError(Problem("launch.on is azureml", rule, remedy))
    others = {str(path): _points(path) for path in args.compare}
    output = make_folder(args.output or Path("runs") / f"{recipe.name}-scale")
    points: list[dict[str, Any]] = []
    for nodes in sorted(set(args.nodes)):
        folder = output / f"nodes-{nodes}"
        remove_tree(folder)  # of an earlier experiment
        on = [f"launch.on={args.on}"] if args.on else []
        words = [*args.overrides, *on, *overrides(recipe, nodes, steps=args.steps, strong=args.strong)]
        with _on_standard_error():
            code = main(["launch", args.recipe, *words, "--run-dir", str(folder), "--follow"])
        if code:
            return code
        points.append(measured(folder, nodes))
        remove_tree(folder / CHECKPOINTS)  # what a training ends with; nobody needs it
    facts = {"recipe": recipe.name, "strong": args.strong, "points": with_efficiency(points)}
    write_atomically(output / _RESULT, json.dumps(facts, indent=1) + "\n")
    write_atomically(output / _PICTURE, picture({str(output): facts["points"]} | others))
    show(args, {**facts, "picture": str(output / _PICTURE)})
    return exit_codes.OK


@contextmanager
def _on_standard_error() -> Iterator[None]:
    """What the trainings print, in processes of their own as well: standard output is for the answer."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def _points(path: Path) -> list[dict[str, Any]]:
    try:
        points = read_json(path)["points"]
        return [{name: float(point[name]) for name in ("nodes", "tokens_per_second", "efficiency")} for point in points]
    except (OSError, ValueError, TypeError, KeyError) as error:
        rule = f"`bloomery scale` writes {_RESULT}"
        raise DataError(
            Problem(f"{path} is no result of a scaling experiment: {error}", rule, "name another")
        ) from error
