"""`bloomery extract SOURCES... --output DIR --chunks N`: compressed .jsonl files to N plain ones."""

from __future__ import annotations

import argparse
import json
import os
import re
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
    parser.add_argument(
        "--unit", metavar="K/N", type=_unit, default=(0, 1), help="part K, from 0, of N: for job arrays"
    )
    parser.add_argument("--jobs", metavar="N", type=whole_number(1), help="chunks at a time; default: one per core")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")


def run(args: argparse.Namespace) -> int:
    from bloomery.prepare.extract import extract

    unit, units = args.unit
    jobs = args.jobs or len(os.sched_getaffinity(0))
    result = extract(args.sources, args.output, chunks=args.chunks, unit=unit, units=units, jobs=jobs)
    made = f"{args.output}: {result.written:,} written, {result.already_there:,} already there"
    if args.json:
        print(json.dumps(asdict(result), indent=2))
    elif result.manifest:
        counts = f"{result.input_files:,} files in, {result.chunks:,} out; {result.documents:,} documents in and out"
        print(f"{made}. {counts}, {format_bytes(result.bytes)}. Hashes and counts: {result.manifest}")
    else:
        left = [f"{len(result.missing):,} missing chunk(s)"] if result.missing else []
        left += [f"{', '.join(result.stale)}, whose inputs have changed since"] if result.stale else []
        others = ", ".join(f"--unit {number}/{units}" for number in result.waiting_for)
        print(f"{made} by unit {unit}/{units}; still to be made by {others}: {' and '.join(left)}")
    return exit_codes.OK


def _unit(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
    if not found or not int(found[1]) < int(found[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a unit such as 0/4, 1/4, 2/4 or 3/4")
    return int(found[1]), int(found[2])
