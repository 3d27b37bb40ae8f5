"""`bloomery import megatron -- FLAGS | --script FILE`: a Megatron command line becomes a recipe, flag by flag."""

from __future__ import annotations

import argparse
import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from bloomery.base.errors import Problem, RecipeError, mask
from bloomery.base.storage import write_atomically, written_to
from bloomery.base.units import format_count
from bloomery.cli.arguments import add_json, columns, show, warn

if TYPE_CHECKING:
    from bloomery.interop.megatron.importer import Imported


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "bloomery import megatron [--script FILE [--set NAME=VALUE]] [OPTIONS] [-- FLAGS...]"
    script_help = "launch script: its bash is executed, with a stub for every program"
    parser.add_argument("--script", metavar="FILE", type=Path, help=script_help)
    set_help = "a variable of the script, or an argument: 1=X"
    parser.add_argument("--set", metavar="NAME=VALUE", action="append", default=[], help=set_help)
    ds_config = parser.add_mutually_exclusive_group()
    ds_help = "ds_config.json; default: the one the script writes"
    ds_config.add_argument("--ds-config", metavar="FILE", type=Path, help=ds_help)
    ds_config.add_argument("--without-ds-config", action="store_true", help="import although its ds_config is not here")
    parser.add_argument("--output", metavar="FILE", type=Path, help="recipe to write; default: printed")
    parser.add_argument("--name", help="of the recipe; default: the job's name")
    add_json(parser)


def parse(parser: argparse.ArgumentParser, arguments: list[str]) -> argparse.Namespace:
    """Our own options out of a command line whose other flags are Megatron's; behind `--` all are."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    args, words = parser.parse_known_args(arguments[:at])
    args.words = [*words, *arguments[at + 1 :]]
    return args


def run(args: argparse.Namespace) -> int:
    from bloomery.interop.megatron.importer import import_megatron

    if wrong := [text for text in args.set if not re.match(r"([A-Za-z_]\w*|[1-9][0-9]?)=", text, re.ASCII)]:
        rule = "it sets a variable of the script, NAME=VALUE, or an argument of it, 1=VALUE"
        raise RecipeError([Problem(f"--set {text}", rule, "correct it") for text in wrong])
    done = import_megatron(
        args.words,
        script=args.script,
        given=dict(text.split("=", 1) for text in args.set),
        ds_config=args.ds_config,
        without_ds_config=args.without_ds_config,
        name=args.name,
    )
    if args.output is not None:
        with written_to("--output"):
            write_atomically(args.output, mask(done.yaml()))
    warn(*done.warnings)
    facts = {"recipe": done.raw, "rows": [asdict(row) for row in done.rows], "warnings": list(map(str, done.warnings))}
    return show(args, facts, lambda _: _text(done, args.output))


def _text(done: Imported, output: Path | None) -> str:
    """A table of the flags, the recipe unless it is in a file, and a line about it."""
    from bloomery.sizing.parameters import count_parameters
    from bloomery.sizing.schedule import TrainingPlan

    cells = [("flag", "value", "recipe field", "value", "")]
    for row in done.rows:
        kind = "" if row.kind in ("mapped", "default") else f"{row.kind}: "
        texts = map(mask, (row.value, row.result))
        value, result = (text if len(text) <= 44 else f"{text[:20]} ... {text[-19:]}" for text in texts)
        cells.append((row.flag or "-", value, row.field or "-", result, f"{kind}{row.remark}"))
    plan, model = TrainingPlan.of(done.recipe), done.recipe.model
    parameters = count_parameters(model).total
    unknown = [row.flag for row in done.rows_of("not understood")]
    return (
        columns(cells)
        + (f"\n\n{done.yaml()}\n" if output is None else f"\n\n{output}: ")
        + f"{done.recipe.name}, {format_count(parameters)} parameters, {plan.train_steps:,} steps, "
        + f"warm-up ends at step {plan.warmup_ends_at_step:,}"
        + (f"; not understood: {', '.join(unknown)}" if unknown else "")
    )
