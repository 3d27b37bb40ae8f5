"""`bloomery extract SOURCES... --output DIR --chunks N`: compressed .jsonl files to N plain ones."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path

from bloomery.base import exit_codes
from bloomery.base.units import format_bytes
from bloomery.cli.download import whole_number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    endings = ".jsonl, .ndjson or .jsonlines, plain or with .gz or .zst"
    parser.add_argument("sources", metavar="SOURCE", nargs="+", help=f"files, folders, globs or URLs of {endings}")
    parser.add_argument("--output", metavar="DIR", type=Path, required=True, help="folder for the chunks")
    parser.add_argument("--chunks", metavar="N", type=whole_number(1), required=True, help="how many files to write")
    parser.add_argument("--jobs", metavar="N", type=whole_number(1), help="chunks at a time; default: one per core")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")


def run(args: argparse.Namespace) -> int:
    from bloomery.prepare.extract import extract

    jobs = args.jobs or len(os.sched_getaffinity(0))
    result = extract(args.sources, args.output, chunks=args.chunks, jobs=jobs)
    if args.json:
        print(json.dumps(asdict(result), indent=2))
    else:
        made = f"{args.output}: {result.written:,} written, {result.already_there:,} already there"
        counts = f"{result.input_files:,} files in, {result.chunks:,} out; {result.documents:,} documents in and out"
        print(f"{made}. {counts}, {format_bytes(result.bytes)}. Hashes and counts: {result.manifest}")
    return exit_codes.OK
