"""`bloomery tokenizer train`: a byte-level BPE tokenizer from raw text."""

from __future__ import annotations

import argparse

from bloomery.base import exit_codes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("sources", metavar="SOURCE", nargs="+", help="files, folders, globs, or python-stdlib")
    parser.add_argument("--vocab-size", type=int, required=True, help="entries, special tokens included")
    parser.add_argument("--output", required=True, help="folder for tokenizer.json")


def run(args: argparse.Namespace) -> int:
    from bloomery.prepare.sources import ReadCounts, iter_documents
    from bloomery.prepare.train_tokenizer import train_tokenizer

    counts = ReadCounts()
    texts = (document.text for source in args.sources for document in iter_documents(source, counts))
    tokenizer = train_tokenizer(texts, vocab_size=args.vocab_size, output=args.output)
    print(
        f"{args.output}: {tokenizer.vocab_size:,} entries from {counts.files:,} files "
        f"({counts.empty} empty and {counts.undecodable} unreadable left out), hash {tokenizer.content_hash[:12]}"
    )
    return exit_codes.OK
