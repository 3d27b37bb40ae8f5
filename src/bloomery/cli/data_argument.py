"""What `inspect sample`, `step` and `order` share: the recipe's data, opened as the training opens it."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bloomery.base.errors import DataError, Problem, RecipeError
from bloomery.cli.recipe_argument import add_change, load
from bloomery.config.load import COMMAND_LINE
from bloomery.config.recipe import DataSection, Recipe
from bloomery.sizing.schedule import TrainingPlan

if TYPE_CHECKING:
    from bloomery.data.open import OpenData
    from bloomery.train.resume import ResumePoint

READS = ("name", "seed", "model", "tokenizer", "data", "batch", "train")


@dataclass(frozen=True)
class InspectedRun:
    recipe: Recipe
    section: DataSection
    plan: TrainingPlan
    data: OpenData
    past: ResumePoint | None
    """Of a run that is inspected by its checkpoint."""


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
    add_change(parser)


@contextmanager
def opened_run(args: argparse.Namespace) -> Iterator[InspectedRun]:
    recipe = load(args, reads=READS).recipe
    section = recipe.data
    if section is None:
        remedy = "add `data:` with `train:` to the recipe"
        raise RecipeError(Problem("the recipe has no data", remedy=remedy, place=args.recipe))
    from bloomery.data.open import open_data

    past = past_of(recipe, args, reads=READS)
    plan = past.plan if past else TrainingPlan.of(recipe)
    with open_data(recipe, plan=plan, cursor=past.before if past else None) as data:
        for warning in data.warnings:
            print(f"bloomery: warning: {warning}", file=sys.stderr)
        if past is not None:
            from bloomery.train.resume import check_tokenizer, checked_shards

            check_tokenizer(past, data.tokenizer_hash)
            checked_shards(past, data.shards())
        yield InspectedRun(recipe, section, plan, data, past)


def refuse(what: str, valid: str) -> RecipeError:
    """The error for a number that this training does not have."""
    return RecipeError(Problem(what, f"for this training the range is {valid}", "stay within it", COMMAND_LINE))


def refuse_numbers(option: str, wrong: list[int], valid: str) -> None:
    if wrong:
        raise refuse(f"{option} has {', '.join(f'{number:,}' for number in wrong)}", valid)


def whole_numbers(text: str) -> list[int]:
    """The type of an option such as `--at-samples 100,2000`."""
    parts = [part.strip().replace("_", "") for part in text.split(",")]
    if not all(re.fullmatch("-?[0-9]{1,18}", part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers such as 100,2000")
    return [int(part) for part in parts]


def print_samples(run: InspectedRun, first: int, last: int, *, as_json: bool, **facts: Any) -> None:
    """Samples first..last of the run, one after the other, however many they are."""
    from bloomery.data.inspect import first_position, read_samples
    from bloomery.data.tokenizer import Tokenizer

    if first < (known := first_position(run.data.train)):
        what = f"sample {first:,} lies before sample {known:,}, where sources, weights or sequence length last changed"
        rule = "a checkpoint knows the blend segment in which it was saved"
        remedy = "give a checkpoint from before that change as --run-dir, and its own recipe.yaml"
        raise DataError(Problem(what, rule, remedy))
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


def past_of(recipe: Recipe, args: argparse.Namespace, *, reads: Collection[str]) -> ResumePoint | None:
    """What the run has done by its newest checkpoint; None without a run. DataError if `bloomery train` would not go on
    from there with this recipe, as far as this command reads it."""
    if args.run_dir is None:
        if args.changes:
            what, rule = f"--change {args.changes[0]} is given without --run-dir", "it says what differs from a run"
            raise RecipeError(Problem(what, rule, "add --run-dir, or leave it out", COMMAND_LINE))
        return None
    from bloomery.checkpoint.folder import find_checkpoint
    from bloomery.checkpoint.verify import verify
    from bloomery.train.contract import check_change_names
    from bloomery.train.resume import resume_point_at

    check_change_names(args.changes)
    folder = find_checkpoint(args.run_dir)
    verify(folder, tensors=False)
    return resume_point_at(folder, recipe, changes=args.changes, reads=reads)
