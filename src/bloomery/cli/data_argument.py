"""What `inspect sample`, `step` and `order` share: the recipe's data, opened as the training opens it."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bloomery.base.errors import Problem, RecipeError
from bloomery.cli.recipe_argument import load
from bloomery.config.draft import COMMAND_LINE
from bloomery.config.recipe import DataSection, Recipe
from bloomery.sizing.plan import TrainingPlan

if TYPE_CHECKING:
    from bloomery.data.before import Before
    from bloomery.data.open import OpenData

READS = ("name", "seed", "model", "tokenizer", "data", "batch", "train")


@dataclass(frozen=True)
class InspectedRun:
    recipe: Recipe
    section: DataSection
    plan: TrainingPlan
    data: OpenData


def add_recipe_and(parser: argparse.ArgumentParser, *between: tuple[str, dict[str, Any]]) -> None:
    """RECIPE, the arguments `between`, then overrides."""
    parser.add_argument("recipe", metavar="RECIPE", help="a recipe file, or the name of a shipped recipe")
    for name, options in between:
        parser.add_argument(name, **options)
    parser.add_argument(
        "overrides", metavar="section.field=value", nargs="*", default=[], help="override fields of the recipe"
    )
    add_run_dir(parser)
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")


def add_run_dir(parser: argparse.ArgumentParser) -> None:
    text = "a run that has changed weights, batch or sequence length: go by its newest checkpoint"
    parser.add_argument("--run-dir", type=Path, help=text)


@contextmanager
def opened_run(args: argparse.Namespace) -> Iterator[InspectedRun]:
    recipe = load(args, reads=READS).recipe
    section = recipe.data
    if section is None:
        remedy = "add `data:` with `train:` to the recipe"
        raise RecipeError(Problem("the recipe has no data", remedy=remedy, place=args.recipe))
    from bloomery.data.open import open_data

    before = past_of(args.run_dir)
    plan = planned(recipe, before)
    with open_data(recipe, plan=plan, before=before if before and before.blend else None) as data:
        for warning in data.warnings:
            print(f"bloomery: warning: {warning}", file=sys.stderr)
        yield InspectedRun(recipe, section, plan, data)


def refuse(what: str, valid: str) -> RecipeError:
    """The error for a number that this training does not have."""
    return RecipeError(Problem(what, f"for this training the range is {valid}", "stay within it", COMMAND_LINE))


def refuse_numbers(option: str, wrong: list[int], valid: str) -> None:
    if wrong:
        raise refuse(f"{option} asks for {', '.join(f'{number:,}' for number in wrong)}", valid)


def whole_numbers(text: str) -> list[int]:
    """The type of an option such as `--at-samples 100,2000`."""
    parts = [part.strip().replace("_", "") for part in text.split(",")]
    if not all(re.fullmatch("-?[0-9]{1,18}", part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers such as 100,2000")
    return [int(part) for part in parts]


def print_samples(run: InspectedRun, first: int, last: int, *, as_json: bool, **facts: Any) -> None:
    """Samples first..last of the run, one after the other, however many they are."""
    from bloomery.data.inspect import read_samples
    from bloomery.data.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(run.recipe.tokenizer.path) if run.recipe.tokenizer else None
    before = "[\n" if as_json else ""
    for sample in read_samples(run.data.train, run.section.train, first, last, tokenizer=tokenizer):
        step = run.plan.batch.first_step_reaching(sample["index"] + 1)
        sample |= {"step": step, **({"skipped": True} if run.plan.is_skipped(step) else {}), **facts}
        print(before + (json.dumps(sample) if as_json else _text(sample, tokenizer)), end="")
        before = ",\n" if as_json else "\n\n"
    print("\n]" if as_json else "")


def _text(sample: dict[str, Any], tokenizer: Any) -> str:
    skipped = ", passed over by train.skip" if sample.get("skipped") else ""
    lines = [
        f"sample {sample['index']:,} (step {sample['step']:,}{skipped}): {sample['source']}, epoch {sample['epoch']}, "
        f"{len(sample['tokens']):,} tokens of {sample['shard']}.bin"
    ]
    for span in sample["documents"]:
        end = span["start"] + span["tokens"] - 1
        origin = f", from {span['origin']}" if "origin" in span else ""
        lines.append(f"  document {span['document']:,}, tokens {span['start']:,} to {end:,}{origin}")
    if sample["text"] is None:
        lines.append(f"  ids (the recipe has no tokenizer): {' '.join(map(str, sample['tokens']))}")
    else:
        lines += [f"  | {line}" for line in sample["text"].splitlines()]
    if silent := sample.get("no_loss"):
        lines.append(f"  {len(silent):,} labels carry no loss")
    for name, label in sample.get("labels", {}).items():
        lines.append(f"  {name}: {_labels(label, tokenizer)}")
    return "\n".join(lines)


def _labels(label: Any, tokenizer: Any) -> str:
    if not isinstance(label, list):
        return str(label)
    words = [(at["position"], tokenizer.decode([at["token"]]) if tokenizer else at["token"]) for at in label]
    return ", ".join(f"{position} {word!r}" for position, word in words)


def past_of(run_dir: Path | None) -> Before | None:
    """What the newest checkpoint of a run has taken; None without one."""
    if run_dir is None:
        return None
    from bloomery.checkpoint.folder import find_checkpoint, verify
    from bloomery.checkpoint.load import plan_of, read_recipe_of, read_state
    from bloomery.data.before import Before
    from bloomery.data.blend import BlendState

    folder = find_checkpoint(run_dir)
    verify(folder, tensors=False)
    recipe, state = read_recipe_of(folder), read_state(folder)
    blend = BlendState.from_json(state["blend"]) if state.get("blend") is not None else None
    return Before(recipe, plan_of(recipe, state), state["step"], state["consumed_samples"], blend)


def planned(recipe: Recipe, before: Before | None) -> TrainingPlan:
    """Counted on from a run that has changed its batch or its sequence length."""
    return TrainingPlan.of(recipe) if before is None else TrainingPlan.going_on(recipe, before.plan, before.step)
