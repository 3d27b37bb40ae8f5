"""The arguments `RECIPE [section.field=value ...]` and how every command that takes them reads them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection

from bloomery.base.errors import Problem, RecipeError
from bloomery.sizing.check import CheckedRecipe, load_checked_recipe


def add_recipe_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="a recipe file, or the name of a shipped recipe")
    parser.add_argument("overrides", metavar="section.field=value", nargs="*", help="override fields of the recipe")


def load(args: argparse.Namespace, *, reads: Collection[str] | None = None) -> CheckedRecipe:
    """The checked recipe. `reads`: the sections this command uses; overriding any other is an error, not silence."""
    ignored = [text for text in args.overrides if reads is not None and text.split("=")[0].split(".")[0] not in reads]
    if ignored:
        problems = [
            Problem(
                f"{text!r} would change nothing",
                f"this command reads only {', '.join(sorted(reads or ()))}",
                "remove the override",
                "command line",
            )
            for text in ignored
            if "=" in text
        ]
        if problems:
            raise RecipeError(problems)
    checked = load_checked_recipe(args.recipe, args.overrides)
    for warning in checked.warnings:
        print(f"bloomery: warning: {warning}", file=sys.stderr)
    return checked
