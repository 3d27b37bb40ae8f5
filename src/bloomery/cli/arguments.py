"""Arguments that several commands share, the recipe that they name, and answers for scripts or for people."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bloomery.base import exit_codes
from bloomery.base.errors import BloomeryError, DataError, Problem, RecipeError, on_one_line
from bloomery.base.units import format_bytes
from bloomery.monitor import names

if TYPE_CHECKING:  # --help must not wait for what only a run of the command needs
    from bloomery.config.load import LoadedRecipe
    from bloomery.config.recipe import Recipe
    from bloomery.train.resume import ResumePoint

_MOST_ROWS = 16


def add_recipe_arguments(parser: argparse.ArgumentParser, *between: tuple[str, dict[str, Any]]) -> None:
    """RECIPE, the arguments `between`, then overrides."""
    parser.add_argument("recipe", metavar="RECIPE", help="a recipe file, or the name of a shipped recipe")
    for name, options in between:
        parser.add_argument(name, **options)
    add_overrides(parser)


def add_overrides(parser: argparse.ArgumentParser, what: str = "override fields of the recipe") -> None:
    parser.add_argument("overrides", metavar="section.field=value", nargs="*", default=[], help=what)


def add_json(parser: argparse.ArgumentParser, what: str = "answer") -> None:
    parser.add_argument("--json", action="store_true", help=f"print the {what} as JSON")


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", help="cpu, cuda, ...; default: this machine's accelerator")


def add_unit(parser: argparse._ActionsContainer, what_for: str) -> None:
    """For shares of one work on several machines, which see the same files."""
    text = f"do only the K-th of N shares of the work (K from 0); afterwards run once without it, {what_for}"
    parser.add_argument("--unit", type=_share, metavar="K/N", help=text)


def _share(text: str) -> tuple[int, int]:
    if (found := re.fullmatch(r"(\d{1,9})/(\d{1,9})", text)) and int(found[1]) < int(found[2]):
        return int(found[1]), int(found[2])
    raise argparse.ArgumentTypeError(f"{text} is not K/N: share K of N, the first is 0 and the last N-1")


def share_text(unit: tuple[int, int] | None) -> str:
    """Before what a share reports."""
    return "share {}/{}: ".format(*unit) if unit else ""


def show(args: argparse.Namespace, facts: dict[str, Any], text: Callable[[Any], str] | None = None) -> int:
    """Print the answer of a command, for scripts or for people."""
    print(json.dumps(facts, indent=2) if args.json else (text or as_text)(facts))
    return exit_codes.OK


def warn(*warnings: object) -> None:
    for warning in warnings:
        print(f"bloomery: warning: {warning}", file=sys.stderr)


def columns(rows: Sequence[Sequence[str]], align: Callable[[str, int], str] = str.ljust) -> str:
    """A line for each row, its cells below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(align, row, widths)).rstrip() for row in rows)


def as_text(facts: dict[str, Any]) -> str:
    """A line for each fact, called by its path in the JSON; below, a table for each list of records."""
    from bloomery.config.load import leaves

    tables = {
        name: value for name, value in facts.items() if isinstance(value, list) and isinstance([*value, 0][0], dict)
    }
    plain = leaves({name: value for name, value in facts.items() if name not in tables})
    lines = [f"{path:<38}  {_shown(path, value)}" for path, value in plain if value not in (None, [], {})]
    for name, records in tables.items():
        rest = len(records) - _MOST_ROWS
        lines += ["", f"{name}:", *_table([dict(leaves(record)) for record in records[:_MOST_ROWS]])]
        lines += [f"... and {rest:,} more, with --json"] * (rest > 0)
    return "\n".join(map(on_one_line, lines)).strip("\n")  # what a foreign file says may hold escapes of the terminal


def _table(records: list[dict[str, Any]]) -> list[str]:
    """The fields as columns, or as rows where there are more of them than records."""
    names = tuple(dict.fromkeys(name for record in records for name in record))
    rows = [names, *(tuple(_shown(name, record.get(name)) for name in names) for record in records)]
    rows = rows if len(rows) > len(rows[0]) else list(zip(*rows, strict=True))
    return columns(rows, str.rjust).splitlines()


def _shown(path: str, value: Any) -> str:
    if isinstance(value, list):
        is_range = len(value) > 2 and all(type(item) is int and item == value[0] + i for i, item in enumerate(value))
        return f"{value[0]}-{value[-1]}" if is_range else ", ".join(_shown(path, item) for item in value)
    if isinstance(value, int) and not isinstance(value, bool):
        return format_bytes(value) if "bytes" in path else f"{value:,}"
    return "-" if value is None else f"{value:.7g}" if isinstance(value, float) else str(value)


def add_run_dir(parser: argparse.ArgumentParser) -> None:
    text = "a run whose weights, batch or sequence length have changed: use its newest checkpoint"
    parser.add_argument("--run-dir", type=Path, help=text)


def whole_number(least: int, most: int = 99_999) -> Callable[[str], int]:
    """The type of an option."""

    def number(text: str) -> int:
        if not least <= (found := int(text)) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer from {least} to {most}")
        return found

    return number


def number_to(most: float, *, zero: bool = True) -> Callable[[str], float]:
    """The type of an option."""

    def number(text: str) -> float:
        try:
            found = float(text)
        except ValueError:
            found = float("nan")
        if not 0 <= found <= most or not (zero or found):
            least = "of at least 0" if zero else "greater than 0"
            limit = f" and at most {most}" * (most < sys.float_info.max)
            raise argparse.ArgumentTypeError(f"{text!r} must be a number {least}{limit}")
        return found

    return number


positive = number_to(sys.float_info.max, zero=False)


def whole_numbers(text: str) -> list[int]:
    """The type of an option such as `--at-samples 100,2000`."""
    return [whole_number(0, 10**18)(part) for part in text.split(",")]


def load(args: argparse.Namespace, *, reads: Collection[str] | None = None, warns: bool = True) -> LoadedRecipe:
    """The checked recipe, for where the run at `args.run_dir` stands. `reads`: the sections this command uses, where it
    is not all of them; an override of another is a warning, so that all commands may share one list of them. `warns`:
    only one of many processes should."""
    from bloomery.sizing.check import load_checked_recipe

    checked = load_checked_recipe(args.recipe, args.overrides, done=partial(done_samples, args))
    idle = [text for text in args.overrides if reads is not None and _section(text) not in reads]
    idle = [text for text in idle if not _is_needed(args, text)]
    unread = [f"{text!r} has no effect: this command does not read {_section(text)}" for text in idle]
    if warns:
        warn(*checked.warnings, *unread)
    return checked


def _is_needed(args: argparse.Namespace, override: str) -> bool:
    """Whether the recipe is refused without it."""
    from bloomery.sizing.check import load_checked_recipe

    others = [each for each in args.overrides if each != override]
    try:
        load_checked_recipe(args.recipe, others, done=partial(done_samples, args))
    except BloomeryError:
        return True
    return False


def run_folder(args: argparse.Namespace, recipe: Recipe) -> Path:
    return args.run_dir or Path("runs") / recipe.name


def recipe_of_run(run: Path, *launched: str) -> str:
    """DataError if the folder is none of a run. `launched`: looked for before it."""
    for name in (*launched, names.RECIPE_FILE):
        if (run / name).is_file():
            return str(run / name)
    rule = f"a run folder holds {names.RECIPE_FILE}"
    raise DataError(Problem(f"{run} is not a run", rule, "give the folder of a run, usually runs/<name>"))


def done_samples(args: argparse.Namespace, recipe: Recipe) -> int:
    """That the newest checkpoint of the run has consumed; 0 without one."""
    if not hasattr(args, "run_dir"):
        return 0
    from bloomery.base.bounded import read_json
    from bloomery.checkpoint.folder import STATE, find_checkpoint

    try:
        return int(read_json(find_checkpoint(run_folder(args, recipe)) / STATE)["consumed_samples"])
    except (BloomeryError, OSError, ValueError, TypeError, KeyError):
        return 0


def _section(override: str) -> str:
    return override.partition("=")[0].partition(".")[0].strip()


def past_of(recipe: Recipe, args: argparse.Namespace, *, reads: Collection[str]) -> ResumePoint | None:
    """What the run has done by its newest checkpoint; None without a run. DataError if `bloomery train` could not
    resume there with this recipe, as far as this command reads it, whatever --change it is given."""
    if args.run_dir is None:
        return None
    from bloomery.checkpoint.folder import find_checkpoint
    from bloomery.checkpoint.load import read_checkpoint
    from bloomery.train.resume import resume_point_at

    checkpoint = read_checkpoint(find_checkpoint(args.run_dir), tensors=False)
    return resume_point_at(checkpoint, recipe, changes=[*reads], reads=reads)


def check_range(what: str, numbers: list[int], first: int, last: int) -> None:
    """RecipeError for numbers that this training does not have."""
    if wrong := [f"{number:,}" for number in numbers if not first <= number <= last]:
        rule = f"for this training the range is {first:,} to {last:,}"
        raise RecipeError(Problem(f"{what} {', '.join(wrong)}", rule, "stay within it", "command line"))
