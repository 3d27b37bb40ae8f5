"""`bloomery extract SOURCES... --output DIR --chunks N`: compressed .jsonl files to N plain ones."""

from __future__ import annotations

import argparse
import json
import os
import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from bloomery.base import exit_codes
from bloomery.base.units import format_bytes

if TYPE_CHECKING:
    from bloomery.prepare.extract import ExtractResult


def add_arguments(parser: argparse.ArgumentParser) -> None:
    endings = ".jsonl, .ndjson or .jsonlines, plain or with .gz or .zst"
    parser.add_argument("sources", metavar="SOURCE", nargs="+", help=f"files, folders or globs of {endings}")
    parser.add_argument("--output", metavar="DIR", type=Path, required=True, help="folder for the chunks")
    parser.add_argument("--chunks", metavar="N", type=_positive, required=True, help="how many files to write")
    parser.add_argument(
        "--unit", metavar="K/N", type=_unit, default=(0, 1), help="part K, from 0, of N; for a job array"
    )
    parser.add_argument("--jobs", metavar="N", type=_positive, default=None, help="processes; default: one a core")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")


def run(args: argparse.Namespace) -> int:
    from bloomery.prepare.extract import extract

    jobs = args.jobs or len(os.sched_getaffinity(0))
    unit, units = args.unit
    result = extract(args.sources, args.output, chunks=args.chunks, unit=unit, units=units, jobs=jobs)
    print(json.dumps(asdict(result), indent=2) if args.json else _text(args, result))
    return exit_codes.OK


def _text(args: argparse.Namespace, result: ExtractResult) -> str:
    made = f"{result.written:,} written, {result.already_there:,} already there"
    if result.manifest is None:
        unit, units = args.unit
        missing = [f"{len(result.missing):,} missing chunk(s)"] if result.missing else []
        stale = [f"{', '.join(result.stale)}, whose inputs have changed since"] if result.stale else []
        others = ", ".join(f"--unit {number}/{units}" for number in result.waiting_for)
        return (
            f"{args.output}: unit {unit}/{units}: {made}; still to be made by {others}: {' and '.join(missing + stale)}"
        )
    return (
        f"{args.output}: {made}. {result.input_files:,} files in, {result.chunks:,} out; "
        f"{result.documents:,} documents in and out, {format_bytes(result.bytes)}. Hashes and counts: {result.manifest}"
    )


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text) <= 99_999:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to 99999")
    return int(text)


def _unit(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
    if not found or not int(found[1]) < int(found[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a unit such as 0/4, 1/4, 2/4 or 3/4")
    return int(found[1]), int(found[2])
