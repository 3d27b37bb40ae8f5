"""`bloomery inspect data RECIPE` or `SHARD_PREFIX...`: what is in the shards, and how often a training takes it.
`bloomery inspect sample RECIPE N[-M]`, `inspect step RECIPE N`: exactly what is trained there, as text.
`bloomery inspect order RECIPE`: how far the training gets in every source, and when it begins to repeat."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from typing import Any

from bloomery.base import exit_codes
from bloomery.base.errors import DataError, Problem
from bloomery.base.units import format_bytes
from bloomery.cli import arguments
from bloomery.config.load import shipped_recipes


def add_arguments_data(parser: argparse.ArgumentParser) -> None:
    what = "a recipe, with overrides section.field=value behind it; or prefixes of shards"
    parser.add_argument("data", metavar="RECIPE|SHARD", nargs="+", help=what)
    parser.add_argument("--quick", action="store_true", help="read the indices only, not the tokens")
    arguments.add_json(parser)


def run_data(args: argparse.Namespace) -> int:
    # A shard may be named by any of its files.
    prefixes = [re.sub(r"\.(bin|idx|manifest\.json)$", "", word) for word in args.data]
    word = prefixes[0]
    is_shard = os.path.isfile(f"{word}.idx") or os.path.isfile(f"{word}.bin")
    if is_shard or not (word in shipped_recipes() or word.endswith(".yaml") or os.path.isfile(word)):
        return arguments.show(args, _facts_of_shards(prefixes, quick=args.quick), _data_text)
    words = argparse.Namespace(recipe=args.data[0], overrides=args.data[1:], run_dir=None, changes=[])
    with arguments.opened_run(words) as inspected:
        from bloomery.data.inspect import recipe_facts

        end = inspected.plan.train_samples
        facts = recipe_facts(inspected.recipe, inspected.data, train_samples=end, quick=args.quick)
    return arguments.show(args, facts, _data_text)


def _facts_of_shards(prefixes: list[str], *, quick: bool) -> dict[str, Any]:
    from bloomery.data.inspect import shard_facts
    from bloomery.data.manifest import without_manifest

    problems: list[Problem] = []
    sources = []
    for prefix in prefixes:
        try:
            sources.append({"source": prefix, **shard_facts(prefix, quick=quick)})
        except DataError as error:
            problems += error.problems
    if problems:
        raise DataError(problems)
    if bare := [source["shard"] for source in sources if source["manifest"] is None]:
        print(f"bloomery: warning: {without_manifest(bare)}", file=sys.stderr)
    return {"sources": sources}


def _data_text(facts: dict[str, Any]) -> str:
    is_recipe, lines, details = "name" in facts, list[str](), list[str]()
    rows = [["source", "documents", "tokens", "size", "dtype", *["samples/epoch", "weight", "epochs"] * is_recipe]]
    if is_recipe:
        lines += [f"{facts['name']}: {facts['train_samples']:,} samples of {facts['seq_length']:,} tokens", ""]
    for row in facts["sources"]:
        name = f"{row['group']}: {row['source']}" if is_recipe else row["source"]
        cells = [name, f"{row['documents']:,}", f"{row['tokens']:,}", format_bytes(row["bytes"]), row["dtype"]]
        cells += [f"{row['samples_per_epoch']:,}"] if is_recipe else []
        cells += [f"{row['weight']:.4g}", f"{row['epochs']:.3f}"] if "weight" in row else [""] * 2 * is_recipe
        rows.append(cells)
        found = _details(row, facts.get("vocab_size"))
        details += ["", f"{name} ({row['shard']})", *(f"  {line}" for line in found)]
    return "\n".join([*lines, *_table(rows), *details])


def _table(rows: list[list[str]]) -> list[str]:
    """The first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows]
    return ["  ".join(row).rstrip() for row in aligned]


def _details(row: dict[str, Any], vocab_size: int | None) -> list[str]:
    lengths, manifest = row["document_tokens"], row["manifest"]
    lines = [f"tokens a document: mean {lengths['mean']:,.1f}, median {lengths['median']:,.1f}, max {lengths['max']:,}"]
    if used := row["vocabulary"]:
        size = vocab_size or (manifest or {}).get("vocab_size")
        of = f" of {size:,}" if size else ""
        is_known = used["eod_id"] is not None
        eod = f"(id {used['eod_id']}) {used['eod_share']:.2%} of tokens" if is_known else "not known"
        lines.append(
            f"vocabulary: {used['distinct_ids']:,}{of} ids used, the highest {used['max_id']:,}; end of document {eod}"
        )
    if manifest is None:
        return [*lines, "no manifest: tokenizer and vocabulary could not be checked"]
    made = f"by bloomery {manifest['bloomery_version']}, tokenizer {manifest['tokenizer_hash'][:12]}"
    lines.append(f"manifest: made {made}, vocabulary {manifest['vocab_size']:,}")
    for source in manifest["sources"]:
        counts = f"{source['documents']:,} documents, {source['tokens']:,} tokens"
        lines.append(f"from {source['name']}: {counts}, {format_bytes(source['bytes'])} of text")
    return lines


def _add_arguments(parser: argparse.ArgumentParser, *between: tuple[str, dict[str, Any]]) -> None:
    arguments.add_recipe_arguments(parser, *between)
    arguments.add_run_dir(parser)
    arguments.add_json(parser)


def add_arguments_sample(parser: argparse.ArgumentParser) -> None:
    text = "position in the run, from 0, as consumed_samples counts; or a range, both ends included"
    _add_arguments(parser, ("samples", {"metavar": "N[-M]", "type": _range, "help": text}))


def add_arguments_step(parser: argparse.ArgumentParser) -> None:
    _add_arguments(parser, ("step", {"metavar": "N", "type": _range, "help": "the first step is 1"}))


def add_arguments_order(parser: argparse.ArgumentParser) -> None:
    _add_arguments(parser)
    what = "how far each source is at these positions"
    parser.add_argument("--at-samples", metavar="A,B", type=arguments.whole_numbers, default=[], help=what)


def _range(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"([0-9][0-9_]{0,17})(?:-([0-9][0-9_]{0,17}))?", text)
    first, last = (int((number or found[1]).replace("_", "")) for number in found.groups()) if found else (1, 0)
    if last < first:
        raise argparse.ArgumentTypeError(f"{text!r} is not a position such as 0, or a range such as 16-31")
    return first, last


def run_sample(args: argparse.Namespace) -> int:
    first, last = args.samples
    with arguments.opened_run(args) as inspected:
        end = inspected.plan.train_samples
        if last >= end:
            raise arguments.refuse(f"there is no sample {last:,}", f"0 to {end - 1:,}")
        return _print_samples(inspected, first, last, as_json=args.json)


def run_step(args: argparse.Namespace) -> int:
    with arguments.opened_run(args) as inspected:
        plan, (first_step, last_step) = inspected.plan, args.step
        if not 1 <= first_step <= last_step <= plan.train_steps:
            raise arguments.refuse(f"there is no step {last_step:,}", f"1 to {plan.train_steps:,}")
        first, end = plan.batch.consumed_after_step(first_step - 1), plan.batch.consumed_after_step(last_step)
        return _print_samples(inspected, first, end - 1, as_json=args.json)


def _print_samples(run: arguments.InspectedRun, first: int, last: int, *, as_json: bool) -> int:
    """Samples first..last of the run, one after the other, however many they are."""
    from bloomery.data.inspect import first_position, read_samples

    if first < (known := first_position(run.data.train)):
        what = f"sample {first:,} lies before sample {known:,}, where sources, weights or sequence length last changed"
        rule = "a checkpoint records the blend segment in which it was saved"
        remedy = "give a checkpoint from before that change as --run-dir, and its own recipe.yaml"
        raise DataError(Problem(what, rule, remedy))
    before = "[\n" if as_json else ""
    for sample in read_samples(run.data, first, last):
        step = run.plan.batch.first_step_reaching(sample["index"] + 1)
        sample |= {"step": step, **({"skipped": True} if run.plan.is_skipped(step) else {})}
        print(before + (json.dumps(sample) if as_json else _sample_text(sample, run.data.tokenizer)), end="")
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
        origin = f", from {span['origin']}" if "origin" in span else ""
        lines.append(f"  document {span['document']:,}, tokens {span['start']:,} to {end:,}{origin}")
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
    with arguments.opened_run(args) as inspected:
        from bloomery.data.inspect import first_position, order_facts

        end, first = inspected.plan.train_samples, first_position(inspected.data.train)
        arguments.refuse_numbers(
            "--at-samples", [n for n in args.at_samples if not first <= n <= end], f"{first:,} to {end:,}"
        )
        facts = order_facts(inspected.recipe, inspected.data.train, train_samples=end, at_samples=args.at_samples)
    return arguments.show(args, facts, _order_text)


def _order_text(facts: dict[str, Any]) -> str:
    lines = [f"{facts['name']}: order {facts['order']}, seed {facts['seed']}, {facts['train_samples']:,} samples", ""]
    if facts["first_sample"]:
        lines.insert(1, f"the weights hold from sample {facts['first_sample']:,} on")
    rows = [["source", "samples/epoch", "weight", "achieved", "taken", "epochs", "repeats from", "documents", "shard"]]
    for source in facts["sources"]:
        repeat = "never" if source["epochs"] <= 1 else "earlier" if facts["order"] == "timeless" else "mixed"
        if source["first_repeat_at"] is not None:
            repeat = f"{source['first_repeat_at']:,}"
        cells = [source["source"], f"{source['samples_per_epoch']:,}", f"{source['weight']:.6g}"]
        cells += [f"{source['achieved']:.6g}", f"{source['samples_taken']:,}", f"{source['epochs']:.3f}", repeat]
        first, last = source["document_range"]
        rows.append([*cells, f"[{first:,}, {last:,})", source["shard"]])
    lines += _table(rows)
    for number, at in enumerate(facts["sources"][0]["at"]):
        rows = [["source", "taken", "epochs", "epoch", "sample"]]
        for source in facts["sources"]:
            here = source["at"][number]
            place = [str(here["epoch"]), f"{here['sample_of_epoch']:,}"] if here["epoch"] is not None else ["", ""]
            rows.append([source["source"], f"{here['samples_taken']:,}", f"{here['epochs']:.3f}", *place])
        lines += ["", f"before sample {at['samples']:,}:", *_table(rows)]
    return "\n".join(lines)
