"""`bloomery tokenizer train`: a byte-level BPE tokenizer from raw text.
`bloomery prepare RECIPE`: the shards that the recipe's `prepare:` section describes."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from bloomery.base import exit_codes, signals
from bloomery.base.doing import Doing, doing
from bloomery.base.errors import Problem, RecipeError, mask, on_one_line
from bloomery.base.units import counted, format_bytes, format_count, format_seconds
from bloomery.cli.arguments import add_json, add_recipe_arguments, add_unit, load, show, warn, whole_number

if TYPE_CHECKING:
    from bloomery.data.manifest import ShardManifest
    from bloomery.prepare.run import Preparation, Progress


def add_arguments_train(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("sources", metavar="SOURCE", nargs="+", help="files, folders, globs, URLs, or python-stdlib")
    entries = whole_number(257, 1 << 24)  # from the bytes and the end of text to the most that a tokenizer may have
    kinds = "bpe (default) is byte-level BPE; characters and bytes are for toys"
    parser.add_argument("--kind", choices=("bpe", "characters", "bytes"), default="bpe", help=kinds)
    parser.add_argument("--vocab-size", type=entries, help="entries of bpe, which requires it; special tokens included")
    few = "let bpe have fewer entries where the texts give no more"
    parser.add_argument("--allow-fewer", action="store_true", help=few)
    parser.add_argument("--output", required=True, help="folder for tokenizer.json")
    parser.add_argument("--text-key", default="text", help="where a .jsonl record or parquet row keeps its document")
    add_json(parser)


def run_train(args: argparse.Namespace) -> int:
    from bloomery.prepare.read import UnitReader, plan_units
    from bloomery.prepare.sources import find_files, not_lines
    from bloomery.prepare.train_tokenizer import train_tokenizer

    if (args.vocab_size is None) == (args.kind == "bpe"):
        is_missing = args.vocab_size is None
        what, remedy = ("is missing", "give it, such as 32000") if is_missing else (f"is {args.vocab_size}", "leave it")
        rule = "bpe needs it; characters and bytes have a size of their own"
        raise RecipeError(Problem(f"--vocab-size {what}", rule, remedy, "command line"))
    files = find_files(args.sources)
    warn(*not_lines(files))
    empty = bad = 0

    def texts() -> Iterator[str]:
        nonlocal empty, bad
        work.what = "training the tokenizer: reading the text"
        for unit in work.over(plan_units(files), sum(file.size for file in files), lambda unit: unit.input_bytes):
            reader = UnitReader(unit, text_key=args.text_key, skip_bad=True)
            for block in reader.blocks():
                empty += block.texts.count("")
                yield from filter(None, block.texts)
            bad += reader.bad
        work.what, work.share = "training the tokenizer: finding its entries", None

    with doing("training the tokenizer") as work:
        how = {"vocab_size": args.vocab_size, "kind": args.kind, "allow_fewer": args.allow_fewer}
        tokenizer = train_tokenizer(texts(), output=args.output, **how)
    text = (
        f"{args.output}: {tokenizer.vocab_size:,} entries from {counted(len(files), 'file')} "
        f"({empty} empty and {bad} unreadable left out), hash {tokenizer.content_hash[:12]}"
    )
    facts = {"folder": args.output, "vocab_size": tokenizer.vocab_size, "files": len(files), "empty": empty}
    return show(args, facts | {"unreadable": bad, "hash": tokenizer.content_hash}, lambda _: text)


def add_arguments_prepare(parser: argparse.ArgumentParser) -> None:
    add_recipe_arguments(parser)
    parser.add_argument(
        "--workers", type=whole_number(1), metavar="N", help="processes; default: one for each processor"
    )
    either = parser.add_mutually_exclusive_group()
    add_unit(either, "to merge")
    either.add_argument("--estimate", action="store_true", help="tokens, bytes and time, from a sample; writes nothing")
    either.add_argument("--verify", action="store_true", help="read the sources again and compare them with the shards")
    add_json(parser, "manifests")


def run_prepare(args: argparse.Namespace) -> int:
    recipe = load(args, reads=("name", "seed", "tokenizer", "prepare")).recipe
    if not recipe.prepare:
        remedy = "add `prepare:` with an `output` and its `sources`"
        raise RecipeError(Problem("the recipe has nothing to prepare", remedy=remedy, place=args.recipe))
    workers = args.workers or len(os.sched_getaffinity(0))
    from bloomery.data.tokenizer import Tokenizer
    from bloomery.prepare.run import plan_all
    from bloomery.prepare.verify import verify

    assert recipe.tokenizer is not None  # a rule of sizing/check.py
    tokenizer = Tokenizer.load(recipe.tokenizer.path)
    manifests: dict[str, Any] = {}
    plans = plan_all(recipe.prepare, tokenizer=tokenizer, seed=recipe.seed, workers=workers)
    if args.estimate:
        return _estimate(args, plans)
    for preparation in plans:
        output, manifest, notes = preparation.output, None, list[str]()
        with doing(f"{output}: comparing with the sources") as work:
            progress = _progress(output, work)
            if args.verify:
                manifest, how = verify(preparation, progress), "agrees with its sources"
            else:
                result = preparation.run(args.unit, progress)
                manifest, notes = result.manifest, result.notes
                how = "is up to date" if result.reused else "written"
        for note in notes:
            signals.say(mask(on_one_line(f"{output}: {note}")))
        manifests[output] = manifest and asdict(manifest)
        if not args.json:
            print(_line(output, how, manifest) if manifest else "{}: share {}/{} is done".format(output, *args.unit))
    if args.json:
        print(json.dumps(manifests, indent=2))
    return exit_codes.OK


def _estimate(args: argparse.Namespace, plans: list[Preparation]) -> int:
    found = {preparation.output: preparation.estimate() for preparation in plans}

    def text(_: object) -> str:
        return "\n".join(
            f"{output}: {format_count(each.tokens)} tokens{_bound(each.error)}, {format_bytes(each.shard_bytes)}, "
            f"{format_seconds(each.seconds)} with {each.workers} workers and the merge besides; "
            f"{each.tokens_per_gb:,.0f} tokens per GB of input, {each.bytes_per_token:.3g} bytes a token; "
            f"from {each.samples} samples, {format_bytes(each.sampled_bytes)} of {format_bytes(each.input_bytes)}"
            for output, each in found.items()
        )

    return show(args, {output: asdict(each) for output, each in found.items()}, text)


def _bound(error: float | None) -> str:
    return " (no bound from a single sample)" if error is None else f" (± {error:.1%})" if error else ""


def _line(output: str, how: str, manifest: ShardManifest) -> str:
    size = format_bytes(sum(source.bytes for source in manifest.sources))
    counts = {**manifest.dropped}
    usual = f"{counts.pop('empty')} empty and {counts.pop('bad')} unreadable documents left out"
    others = "".join(f", {count:,} {reason}" for reason, count in counts.items() if count)
    return (
        f"{output}: {how}. {counted(manifest.documents, 'document')}, {size}, {format_count(manifest.tokens)} tokens "
        f"({usual}{others})"
    )


def _progress(output: str, work: Doing) -> Callable[[Progress], None]:
    started = time.monotonic()

    def report(progress: Progress) -> None:
        seconds = time.monotonic() - started
        done = progress.input_bytes + progress.reused_bytes
        rate = progress.input_bytes / seconds
        left = format_seconds((progress.total_input_bytes - done) / rate) if rate else "?"
        work.what = f"{output}: " + ("merging" if progress.merged else f"{rate / 1e6:.1f} MB/s, {left} left")
        work.share = progress.merged or min(done / max(progress.total_input_bytes, 1), 1.0)

    return report
