"""`bloomery check RECIPE`: every problem at once, or one line with its parameters, steps and tokens."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

from bloomery.base.errors import RecipeError
from bloomery.base.units import format_count
from bloomery.cli.arguments import add_json, add_recipe_arguments, columns, load, show
from bloomery.config.load import explain, fingerprint
from bloomery.config.recipe import Recipe
from bloomery.sizing.parameters import count_parameters
from bloomery.sizing.schedule import TrainingPlan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe_arguments(parser)
    parser.add_argument("--explain", action="store_true", help="print every resolved value with where it came from")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    try:
        checked = load(args)
    except RecipeError as error:
        if args.json:
            print(json.dumps({"ok": False, "problems": [asdict(problem) for problem in error.problems]}, indent=2))
        raise
    facts = {
        "ok": True,
        "name": checked.recipe.name,
        "fingerprint": fingerprint(checked.recipe),
        "warnings": [str(warning) for warning in checked.warnings],
        "values": explain(checked),
    }
    return show(args, facts, lambda facts: _text(facts, checked.recipe, every_value=args.explain))


def _text(facts: dict[str, Any], recipe: Recipe, *, every_value: bool) -> str:
    rows = []
    for path, found in facts["values"].items() if every_value else ():
        value = found["value"]
        rows.append((path, value if isinstance(value, str) and value else json.dumps(value), found["origin"]))
    plan, parameters = TrainingPlan.of(recipe), count_parameters(recipe.model).total
    size = (
        f"{format_count(parameters)} parameters, {plan.train_steps:,} steps, {format_count(plan.train_tokens)} tokens"
    )
    return columns(rows) + "\n" * bool(rows) + f"{recipe.name}: ok. {size}, fingerprint {facts['fingerprint']}"
