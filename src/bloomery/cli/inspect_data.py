"""`bloomery inspect data RECIPE` or `SHARD_PREFIX...`: what is in the shards, and how often a training takes it."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from bloomery.base import exit_codes
from bloomery.base.errors import DataError, Problem
from bloomery.base.units import format_bytes
from bloomery.cli.arguments import add_json, opened_run
from bloomery.config.load import shipped_recipes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "data",
        metavar="RECIPE|SHARD",
        nargs="+",
        help="a recipe, with overrides section.field=value behind it; or prefixes of shards",
    )
    parser.add_argument("--quick", action="store_true", help="read the indices only, not the tokens")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    words = [_prefix(word) for word in args.data]
    facts = _of_recipe(args) if _is_recipe(words[0]) else _of_shards(words, quick=args.quick)
    print(json.dumps(facts, indent=2) if args.json else _text(facts))
    return exit_codes.OK


def _prefix(word: str) -> str:
    """A shard may be named by any of its files."""
    return next((word.removesuffix(end) for end in (".bin", ".idx", ".manifest.json") if word.endswith(end)), word)


def _is_recipe(word: str) -> bool:
    return not _is_shard(word) and (word in shipped_recipes() or word.endswith(".yaml") or os.path.isfile(word))


def _is_shard(word: str) -> bool:
    return os.path.isfile(f"{word}.idx") or os.path.isfile(f"{word}.bin")


def _of_recipe(args: argparse.Namespace) -> dict[str, Any]:
    arguments = argparse.Namespace(recipe=args.data[0], overrides=args.data[1:], run_dir=None, changes=[])
    with opened_run(arguments) as inspected:
        from bloomery.data.inspect import recipe_facts

        end = inspected.plan.train_samples
        return recipe_facts(inspected.recipe, inspected.data, train_samples=end, quick=args.quick)


def _of_shards(prefixes: list[str], *, quick: bool) -> dict[str, Any]:
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


def _text(facts: dict[str, Any]) -> str:
    sources = facts["sources"]
    lines = []
    if "name" in facts:
        lines += [f"{facts['name']}: {facts['train_samples']:,} samples of {facts['seq_length']:,} tokens", ""]
    names = [f"{row['group']}: {row['source']}" if "group" in row else row["source"] for row in sources]
    width = max(len("source"), *(len(name) for name in names))
    head = f"{'source':<{width}}  {'documents':>12}  {'tokens':>16}  {'size':>10}  dtype "
    lines.append((head + ("  samples/epoch     weight   epochs" if "name" in facts else "")).rstrip())
    for name, row in zip(names, sources, strict=True):
        line = f"{name:<{width}}  {row['documents']:>12,}  {row['tokens']:>16,}  {format_bytes(row['bytes']):>10}  "
        line += f"{row['dtype']:<6}"
        if "name" in facts:
            line += f"  {row['samples_per_epoch']:>13,}"
            line += f"  {row['weight']:>9.4g}  {row['epochs']:>7.3f}" if "weight" in row else ""
        lines.append(line.rstrip())
    for name, row in zip(names, sources, strict=True):
        lines += ["", f"{name} ({row['shard']})", *(f"  {line}" for line in _details(row, facts.get("vocab_size")))]
    return "\n".join(lines)


def _details(row: dict[str, Any], vocab_size: int | None) -> list[str]:
    lengths, manifest = row["document_tokens"], row["manifest"]
    lines = [f"tokens a document: mean {lengths['mean']:,.1f}, median {lengths['median']:,.1f}, max {lengths['max']:,}"]
    if row["sequences"] != row["documents"]:
        lines.append(f"sentences: {row['sequences']:,}")
    if documents := row.get("document_range"):
        lines.append(
            f"document indices in [{documents[0]:,}, {documents[1]:,}) total of {row['documents']:,} documents"
        )
    if used := row["vocabulary"]:
        size = vocab_size or (manifest or {}).get("vocab_size")
        of = f" of {size:,}" if size else ""
        eod = "end of document not known"
        if used["eod_id"] is not None:
            eod = f"end of document (id {used['eod_id']}) {used['eod_share']:.2%} of tokens"
        lines.append(f"vocabulary: {used['distinct_ids']:,}{of} ids used, the highest {used['max_id']:,}; {eod}")
        if bad := used.get("ids_that_are_none"):
            lines.append(f"DAMAGED: {bad:,} tokens are no ids, from {used['min_id']:,} to {used['max_id']:,}")
    if manifest is None:
        return [*lines, "no manifest: tokenizer and vocabulary could not be checked"]
    made = f"by bloomery {manifest['bloomery_version']}, tokenizer {manifest['tokenizer_hash'][:12]}"
    lines.append(f"manifest: made {made}, vocabulary {manifest['vocab_size']:,}")
    lines += [
        f"from {source['name']}: {source['documents']:,} documents, {source['tokens']:,} tokens, "
        f"{format_bytes(source['bytes'])} of text"
        for source in manifest["sources"]
    ]
    return lines
