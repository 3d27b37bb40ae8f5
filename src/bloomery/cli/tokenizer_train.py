"""`bloomery tokenizer train`: a byte-level BPE tokenizer from raw text."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from bloomery.base import exit_codes
from bloomery.cli.arguments import whole_number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("sources", metavar="SOURCE", nargs="+", help="files, folders, globs, URLs, or python-stdlib")
    entries = whole_number(257, 1 << 24)  # from the bytes and the end of text to the most that a tokenizer may have
    parser.add_argument("--vocab-size", type=entries, required=True, help="entries, special tokens included")
    parser.add_argument("--output", required=True, help="folder for tokenizer.json")
    parser.add_argument("--text-key", default="text", help="where a .jsonl record or parquet row keeps its document")


def run(args: argparse.Namespace) -> int:
    from bloomery.prepare.read import UnitReader, plan_units
    from bloomery.prepare.sources import find_files
    from bloomery.prepare.train_tokenizer import train_tokenizer

    files = find_files(args.sources)
    empty = bad = 0

    def texts() -> Iterator[str]:
        nonlocal empty, bad
        for unit in plan_units(files):
            reader = UnitReader(unit, text_key=args.text_key, skip_bad=True)
            for block in reader.blocks():
                empty += block.texts.count("")
                yield from filter(None, block.texts)
            bad += reader.bad

    tokenizer = train_tokenizer(texts(), vocab_size=args.vocab_size, output=args.output)
    print(
        f"{args.output}: {tokenizer.vocab_size:,} entries from {len(files):,} files "
        f"({empty} empty and {bad} unreadable left out), hash {tokenizer.content_hash[:12]}"
    )
    return exit_codes.OK
