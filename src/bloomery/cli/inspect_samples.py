"""`bloomery inspect sample RECIPE N[-M]`, `inspect step RECIPE N`: exactly what is trained there, as text.
`bloomery inspect order RECIPE`: how far the training gets in every source, and when it begins to repeat."""

from __future__ import annotations

import argparse
import json
import re
from typing import Any

from bloomery.base import exit_codes
from bloomery.base.errors import DataError, Problem
from bloomery.cli.arguments import (
    InspectedRun,
    add_json,
    add_recipe_arguments,
    add_run_dir,
    opened_run,
    refuse,
    refuse_numbers,
    show,
    whole_number,
    whole_numbers,
)


def add_arguments_sample(parser: argparse.ArgumentParser) -> None:
    text = "position in the run, from 0, as consumed_samples counts; or a range, both ends included"
    add_recipe_arguments(parser, ("samples", {"metavar": "N[-M]", "type": _range, "help": text}))
    add_run_dir(parser)
    add_json(parser)


def run_sample(args: argparse.Namespace) -> int:
    first, last = args.samples
    with opened_run(args) as inspected:
        end = inspected.plan.train_samples
        if last >= end:
            raise refuse(f"there is no sample {last:,}", f"0 to {end - 1:,}")
        _print_samples(inspected, first, last, as_json=args.json)
    return exit_codes.OK


def _range(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"([0-9][0-9_]{0,17})(?:-([0-9][0-9_]{0,17}))?", text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is not a position such as 0, or a range such as 16-31")
    first, last = (int((number or found[1]).replace("_", "")) for number in found.groups())
    if last < first:
        raise argparse.ArgumentTypeError(f"the range {text!r} ends before it begins")
    return first, last


def add_arguments_step(parser: argparse.ArgumentParser) -> None:
    add_recipe_arguments(
        parser, ("step", {"metavar": "N", "type": whole_number(0, 10**18), "help": "the first step is 1"})
    )
    add_run_dir(parser)
    add_json(parser)


def run_step(args: argparse.Namespace) -> int:
    with opened_run(args) as inspected:
        plan = inspected.plan
        if not 1 <= args.step <= plan.train_steps:
            raise refuse(f"there is no step {args.step:,}", f"1 to {plan.train_steps:,}")
        first, end = plan.batch.consumed_after_step(args.step - 1), plan.batch.consumed_after_step(args.step)
        _print_samples(inspected, first, end - 1, as_json=args.json)
    return exit_codes.OK


def add_arguments_order(parser: argparse.ArgumentParser) -> None:
    add_recipe_arguments(parser)
    text = "how far each source is at these positions"
    parser.add_argument("--at-samples", metavar="A,B", type=whole_numbers, default=[], help=text)
    add_run_dir(parser)
    add_json(parser)


def run_order(args: argparse.Namespace) -> int:
    with opened_run(args) as inspected:
        from bloomery.data.inspect import first_position, order_facts

        end, first = inspected.plan.train_samples, first_position(inspected.data.train)
        refuse_numbers("--at-samples", [n for n in args.at_samples if not first <= n <= end], f"{first:,} to {end:,}")
        facts = order_facts(inspected.recipe, inspected.data.train, train_samples=end, at_samples=args.at_samples)
    return show(args, facts, _order_text)


def _order_text(facts: dict[str, Any]) -> str:
    lines = [f"{facts['name']}: order {facts['order']}, seed {facts['seed']}, {facts['train_samples']:,} samples", ""]
    if facts["first_sample"]:
        lines.insert(1, f"the weights hold from sample {facts['first_sample']:,} on")
    width = max(len("source"), *(len(source["source"]) for source in facts["sources"]))
    lines.append(f"{'source':<{width}}  samples/epoch       weight     achieved         taken    epochs  repeats from")
    for source in facts["sources"]:
        repeat = "never" if source["epochs"] <= 1 else "earlier" if facts["order"] == "timeless" else "mixed"
        if source["first_repeat_at"] is not None:
            repeat = f"{source['first_repeat_at']:,}"
        lines.append(
            f"{source['source']:<{width}}  {source['samples_per_epoch']:>13,}  {source['weight']:>11.6g}  "
            f"{source['achieved']:>11.6g}  {source['samples_taken']:>12,}  {source['epochs']:>8.3f}  {repeat:>12}"
        )
    for source in facts["sources"]:
        first, last = source["document_range"]
        lines.append(f"{source['source']}: documents in [{first:,}, {last:,}) of {source['shard']}")
    for number, at in enumerate(facts["sources"][0]["at"]):
        lines += ["", f"before sample {at['samples']:,}:"]
        for source in facts["sources"]:
            here = source["at"][number]
            standing = f"{here['epochs']:.3f} epochs, of those that are shuffled together"
            if here["epoch"] is not None:
                standing = (
                    f"epoch {here['epoch']}, sample {here['sample_of_epoch']:,} of {source['samples_per_epoch']:,}"
                )
            lines.append(f"  {source['source']:<{width}}  {here['samples_taken']:,} taken: {standing}")
    return "\n".join(lines)


def _print_samples(run: InspectedRun, first: int, last: int, *, as_json: bool, **facts: Any) -> None:
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
        print(before + (json.dumps(sample) if as_json else _sample_text(sample, tokenizer)), end="")
        before = ",\n" if as_json else "\n\n"
    print("\n]" if as_json else "")


def _sample_text(sample: dict[str, Any], tokenizer: Any) -> str:
    skipped = ", skipped by train.skip" if sample.get("skipped") else ""
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
