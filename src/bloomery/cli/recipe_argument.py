"""The arguments `RECIPE [section.field=value ...]` and how every command that takes them reads them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection
from typing import Any

from bloomery.base.errors import Problem, RecipeError
from bloomery.config.draft import COMMAND_LINE
from bloomery.sizing.check import CheckedRecipe, load_checked_recipe


def add_recipe_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="a recipe file, or the name of a shipped recipe")
    parser.add_argument(
        "overrides", metavar="section.field=value", nargs="*", default=[], help="override fields of the recipe"
    )


def add_change(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--change",
        dest="changes",
        metavar="FIELD",
        action="append",
        default=[],
        help="this field or section may differ from the checkpoint; repeatable",
    )


def load(
    args: argparse.Namespace,
    *,
    reads: Collection[str] | None = None,
    first: Callable[[dict[str, Any]], None] | None = None,
) -> CheckedRecipe:
    """The checked recipe. `reads`: the sections this command uses, where it is not all of them; overriding any other is
    an error, not silence. `first`: see config/load.py."""
    if reads is not None and args.overrides:
        _refuse_what_is_not_read(args.overrides, reads)
    checked = load_checked_recipe(args.recipe, args.overrides, first=first)
    for warning in checked.warnings:
        print(f"bloomery: warning: {warning}", file=sys.stderr)
    return checked


def _refuse_what_is_not_read(overrides: list[str], reads: Collection[str]) -> None:
    from bloomery.config.recipe import Recipe

    problems = [
        Problem(
            f"{text!r} would change nothing",
            f"this command reads only {', '.join(sorted(reads))}",
            "remove the override",
            COMMAND_LINE,
        )
        for text in overrides
        if _section(text) in Recipe.model_fields and _section(text) not in reads
    ]
    if problems:
        raise RecipeError(problems)


def _section(override: str) -> str:
    return override.partition("=")[0].partition(".")[0].strip()
