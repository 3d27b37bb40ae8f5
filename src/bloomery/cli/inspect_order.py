"""`bloomery inspect order RECIPE`: how far the training gets in every source, and when it begins to repeat."""

from __future__ import annotations

import argparse
import json
from typing import Any

from bloomery.base import exit_codes
from bloomery.cli.data_argument import add_recipe_and, opened_run, refuse_numbers, whole_numbers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe_and(parser)
    parser.add_argument(
        "--at-samples",
        metavar="A,B",
        type=whole_numbers,
        default=[],
        help="where every source stands at these positions",
    )


def run(args: argparse.Namespace) -> int:
    with opened_run(args) as inspected:
        from bloomery.data.inspect import first_position, order_facts

        end, first = inspected.plan.train_samples, first_position(inspected.data.train)
        refuse_numbers("--at-samples", [n for n in args.at_samples if not first <= n <= end], f"{first:,} to {end:,}")
        facts = order_facts(inspected.recipe, inspected.data.train, train_samples=end, at_samples=args.at_samples)
    print(json.dumps(facts, indent=2) if args.json else _text(facts))
    return exit_codes.OK


def _text(facts: dict[str, Any]) -> str:
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
