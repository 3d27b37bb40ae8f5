"""The arguments `RECIPE [section.field=value ...]` and how every command that takes them reads them."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Collection
from typing import Any

from bloomery.base import exit_codes
from bloomery.sizing.check import CheckedRecipe, load_checked_recipe


def add_recipe_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="a recipe file, or the name of a shipped recipe")
    parser.add_argument(
        "overrides", metavar="section.field=value", nargs="*", default=[], help="override fields of the recipe"
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")


def show(args: argparse.Namespace, facts: Any, text: Callable[[Any], str]) -> int:
    """Print the answer of a command, for scripts or for people."""
    print(json.dumps(facts, indent=2) if args.json else text(facts))
    return exit_codes.OK


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
    tells: bool = True,
) -> CheckedRecipe:
    """The checked recipe. `reads`: the sections this command uses, where it is not all of them; an override of another
    is a warning, so that all commands may share one list of them. `tells`: of many
    processes only one should."""
    checked = load_checked_recipe(args.recipe, args.overrides)
    idle = [text for text in args.overrides if reads is not None and _section(text) not in reads]
    unread = [f"{text!r} changes nothing here: this command does not read {_section(text)}" for text in idle]
    for warning in [*checked.warnings, *unread] if tells else []:
        print(f"bloomery: warning: {warning}", file=sys.stderr)
    return checked


def _section(override: str) -> str:
    return override.partition("=")[0].partition(".")[0].strip()
