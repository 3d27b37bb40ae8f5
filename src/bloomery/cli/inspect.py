"""`bloomery inspect checkpoint PATH`: what it holds, whether it is whole, which others the run has.
`bloomery inspect data RECIPE` or `SHARD_PREFIX...`: what is in the shards, and how often a training takes it.
`bloomery inspect sample RECIPE N[-M]`, `inspect step RECIPE N`: exactly what is trained there, as text.
`bloomery inspect order RECIPE`: how far the training gets in every source, and how often it repeats."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bloomery.base import exit_codes
from bloomery.base.errors import DataError, Problem, RecipeError
from bloomery.base.units import format_bytes
from bloomery.cli import arguments
from bloomery.config.load import shipped_recipes

if TYPE_CHECKING:  # --help must not wait for what only a run of the command needs
    from bloomery.checkpoint.inspect import Listed
    from bloomery.config.recipe import Recipe
    from bloomery.data.open import OpenData
    from bloomery.sizing.schedule import TrainingPlan


_READS = ("name", "seed", "model", "tokenizer", "data", "batch", "train")


@contextmanager
def opened_run(args: argparse.Namespace) -> Iterator[tuple[Recipe, TrainingPlan, OpenData]]:
    """A run's data, opened as training opens it."""
    recipe = arguments.load(args, reads=_READS).recipe
    if recipe.data is None:
        remedy = "add `data:` with `train:` to the recipe"
        raise RecipeError(Problem("the recipe has no data", remedy=remedy, place=args.recipe))
    from bloomery.data.epochs import counted
    from bloomery.data.open import open_data
    from bloomery.sizing.schedule import TrainingPlan
    from bloomery.train.resume import checked_shards

    recipe = counted(recipe)
    past = arguments.past_of(recipe, args, reads=_READS)
    plan = past.plan if past else TrainingPlan.of(recipe)
    with open_data(recipe, plan=plan, cursor=past.before if past else None) as data:
        for warning in data.warnings:
            print(f"bloomery: warning: {warning}", file=sys.stderr)
        if past is not None:
            checked_shards(past, data)
        yield recipe, plan, data


def add_arguments_data(parser: argparse.ArgumentParser) -> None:
    what = "a recipe, with overrides section.field=value behind it; or prefixes of shards"
    parser.add_argument("data", metavar="RECIPE|SHARD", nargs="+", help=what)
    parser.add_argument("--quick", action="store_true", help="read the indices only, not the tokens")
    arguments.add_json(parser)


def run_data(args: argparse.Namespace) -> int:
    # A shard may be named by any of its files.
    prefixes = [re.sub(r"\.(bin|idx|manifest\.json)$", "", word) for word in args.data]
    word = prefixes[0]
    if word.endswith((".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")):
        rule = "this command takes a recipe, or prefixes of shards"
        raise DataError(Problem(f"{word} is text", rule, "make a shard of it with `bloomery prepare`"))
    is_shard = os.path.isfile(f"{word}.idx") or os.path.isfile(f"{word}.bin")
    if is_shard or not (word in shipped_recipes() or word.endswith(".yaml") or os.path.isfile(word)):
        return arguments.show(args, _facts_of_shards(prefixes, quick=args.quick), _data_text)
    words = argparse.Namespace(recipe=args.data[0], overrides=args.data[1:], run_dir=None)
    with opened_run(words) as (recipe, plan, data):
        from bloomery.data.inspect import recipe_facts

        facts = recipe_facts(recipe, data, train_samples=plan.train_samples, quick=args.quick)
    return arguments.show(args, facts, _data_text)


def _facts_of_shards(prefixes: list[str], *, quick: bool) -> dict[str, Any]:
    from bloomery.data.inspect import shard_facts
    from bloomery.data.manifest import without_manifest

    sources = [{"source": prefix, **shard_facts(prefix, quick=quick)} for prefix in prefixes]
    if bare := [source["shard"] for source in sources if source["manifest"] is None]:
        print(f"bloomery: warning: {without_manifest(bare)}", file=sys.stderr)
    return {"sources": sources}


def _data_text(facts: dict[str, Any]) -> str:
    """A manifest without what the shard itself says, and with the first digits of its hash."""
    sources = []
    for source in facts["sources"]:
        if (manifest := source["manifest"]) is not None:
            manifest = {
                "bloomery_version": manifest["bloomery_version"],
                "tokenizer_hash": manifest["tokenizer_hash"][:12],
                "vocab_size": manifest["vocab_size"],
                "tokens_from": {each["name"]: each["tokens"] for each in manifest["sources"]},
            }
        sources.append({**source, "manifest": manifest})
    return arguments.as_text({**facts, "sources": sources})


def _add_arguments(parser: argparse.ArgumentParser, *between: tuple[str, dict[str, Any]]) -> None:
    arguments.add_recipe_arguments(parser, *between)
    arguments.add_run_dir(parser)
    arguments.add_json(parser)


def add_arguments_sample(parser: argparse.ArgumentParser) -> None:
    text = "position in the run, from 0, as consumed_samples counts; or a range, both ends included"
    _add_arguments(parser, ("samples", {"metavar": "N[-M]", "type": _range, "help": text}))


def add_arguments_step(parser: argparse.ArgumentParser) -> None:
    _add_arguments(parser, ("step", {"metavar": "N", "type": _range, "help": "the first step is 1"}))


add_arguments_order = _add_arguments


def _range(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"([0-9][0-9_]{0,17})(?:-([0-9][0-9_]{0,17}))?", text)
    first, last = (int((number or found[1]).replace("_", "")) for number in found.groups()) if found else (1, 0)
    if last < first:
        raise argparse.ArgumentTypeError(f"{text!r} is not a position such as 0, or a range such as 16-31")
    return first, last


def run_sample(args: argparse.Namespace) -> int:
    first, last = args.samples
    with opened_run(args) as (_, plan, data):
        arguments.check_range("there is no sample", [last], 0, plan.train_samples - 1)
        return _print_samples(plan, data, first, last, as_json=args.json)


def run_step(args: argparse.Namespace) -> int:
    first_step, last_step = args.step
    with opened_run(args) as (_, plan, data):
        arguments.check_range("there is no step", sorted({*args.step}), 1, plan.train_steps)
        first, end = plan.batch.consumed_after_step(first_step - 1), plan.batch.consumed_after_step(last_step)
        return _print_samples(plan, data, first, end - 1, as_json=args.json)


def _print_samples(plan: TrainingPlan, data: OpenData, first: int, last: int, *, as_json: bool) -> int:
    """Samples first..last of the run, one after the other, however many they are."""
    from bloomery.data.inspect import first_position, read_samples

    if first < (known := first_position(data.train)):
        what = f"sample {first:,} lies before sample {known:,}, where sources, weights or sequence length last changed"
        rule = "a checkpoint records the blend segment in which it was saved"
        remedy = "give a checkpoint from before that change as --run-dir, and its own recipe.yaml"
        raise DataError(Problem(what, rule, remedy))
    before = "[\n" if as_json else ""
    for sample in read_samples(data, first, last):
        step = plan.batch.first_step_reaching(sample["index"] + 1)
        sample |= {"step": step, **({"skipped": True} if plan.is_skipped(step) else {})}
        print(before + (json.dumps(sample) if as_json else _sample_text(sample, data.tokenizer)), end="")
        before = ",\n" if as_json else "\n\n"
    print("\n]" if as_json else "")
    return exit_codes.OK


def _sample_text(sample: dict[str, Any], tokenizer: Any) -> str:
    skipped = ", skipped by train.skip" if sample.get("skipped") else ""
    lines = [
        f"sample {sample['index']:,} (step {sample['step']:,}{skipped}): {sample['source']}, epoch {sample['epoch']}, "
        f"{len(sample['tokens']):,} tokens of {sample['shard']}.bin"
    ]
    for span in sample["documents"]:
        end = span["start"] + span["tokens"] - 1
        lines.append(f"  document {span['document']:,}, tokens {span['start']:,} to {end:,}")
    if sample["text"] is None:
        lines.append(f"  ids (the recipe has no tokenizer): {' '.join(map(str, sample['tokens']))}")
    else:
        lines += [f"  | {line}" for line in sample["text"].splitlines()]
    if silent := sample.get("no_loss"):
        lines.append(f"  {len(silent):,} labels carry no loss")
    for name, label in sample.get("labels", {}).items():
        if isinstance(label, list):
            words = [(at["position"], tokenizer.decode([at["token"]])) for at in label]
            label = ", ".join(f"{position} {word!r}" for position, word in words)
        lines.append(f"  {name}: {label}")
    return "\n".join(lines)


def run_order(args: argparse.Namespace) -> int:
    from bloomery.data.inspect import order_facts

    with opened_run(args) as (recipe, plan, data):
        facts = order_facts(recipe, data.train, train_samples=plan.train_samples)
    return arguments.show(args, facts)


def add_arguments_checkpoint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", type=Path, help="a checkpoint, or a run folder for its newest")
    parser.add_argument("--list", action="store_true", help="every checkpoint of the run and its state")
    parser.add_argument("--verify", action="store_true", help="read every file and compare its hash")
    parser.add_argument("--json", action="store_true", help="print the answer as JSON, all tensors included")


def run_checkpoint(args: argparse.Namespace) -> int:
    from bloomery.checkpoint.inspect import describe_checkpoint, list_checkpoints

    if args.list:
        found = list_checkpoints(args.path, check_hashes=args.verify)
        print(json.dumps([asdict(one) for one in found], indent=2) if args.json else _list_text(found))
        return exit_codes.OK
    return arguments.show(args, describe_checkpoint(args.path, check_hashes=args.verify), _checkpoint_text)


def _checkpoint_text(facts: dict[str, Any]) -> str:
    """Without the tensors and the state of training."""
    from bloomery.monitor.sinks import iso_time

    shown = {name: value for name, value in facts.items() if name not in ("tensors", "state")}
    saved_at = None if facts["time"] is None else iso_time(facts["time"])
    files = [{"file": name, "bytes": size} for name, size in facts["files"].items()]
    return arguments.as_text(shown | {"time": saved_at, "files": files})


def _list_text(found: list[Listed]) -> str:
    rows = [("checkpoint", "state", "size", "")]
    for one in found:
        rows.append((one.name, one.state, format_bytes(one.bytes), one.reason or ("latest" if one.is_latest else "")))
    return arguments.columns(rows)
