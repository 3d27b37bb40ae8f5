"""`bloomery check RECIPE`: every problem at once, or one line with its parameters, steps and tokens."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from bloomery.base import exit_codes
from bloomery.base.errors import RecipeError
from bloomery.base.units import format_count
from bloomery.cli.arguments import add_json, add_recipe_arguments, load
from bloomery.config.load import explain, fingerprint
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
    values = explain(checked)
    plan = TrainingPlan.of(checked.recipe)
    parameters = count_parameters(checked.recipe.model, vocab_size=checked.recipe.model.vocab_size).total
    if args.json:
        answer = {
            "ok": True,
            "name": checked.recipe.name,
            "fingerprint": fingerprint(checked.recipe),
            "warnings": [str(warning) for warning in checked.warnings],
            "values": values,
        }
        print(json.dumps(answer, indent=2))
        return exit_codes.OK
    if args.explain:
        for path, found in values.items():
            value = found["value"]
            shown = value if isinstance(value, str) and value else json.dumps(value)
            print(f"{path:<{max(map(len, values))}}  {shown:<24}  {found['origin']}")
    print(
        f"{checked.recipe.name}: ok. {format_count(parameters)} parameters, {plan.train_steps:,} steps, "
        f"{format_count(plan.train_tokens)} tokens, fingerprint {fingerprint(checked.recipe)}"
    )
    return exit_codes.OK
