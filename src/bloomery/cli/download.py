"""`bloomery download MANIFEST --output DIR`: every file of a list, proven by size and checksum."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from bloomery.base import exit_codes
from bloomery.base.errors import DataError, Problem
from bloomery.base.units import format_bytes

if TYPE_CHECKING:
    from bloomery.prepare.download import DownloadResult

_SECONDS_BETWEEN_LINES = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("manifest", metavar="MANIFEST", help=".json, .jsonl or .yaml list of {url, size, sha256, path}")
    parser.add_argument("--output", metavar="DIR", type=Path, required=True, help="folder for the files")
    parser.add_argument("--jobs", metavar="N", type=_positive, default=4, help="files at a time; default: 4")
    parser.add_argument("--retries", metavar="N", type=_whole, default=8, help="attempts after the first; default: 8")
    parser.add_argument(
        "--timeout", metavar="SECONDS", type=_positive, default=60, help="silence that ends a connection; default: 60"
    )
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")


def run(args: argparse.Namespace) -> int:
    from bloomery.prepare.download import download, read_download_manifest
    from bloomery.prepare.fetch import Patience

    wanted = read_download_manifest(args.manifest)
    patience = Patience(retries=args.retries, timeout_seconds=args.timeout)
    result = download(wanted, args.output, jobs=args.jobs, patience=patience, progress=_progress())
    print(json.dumps(_facts(result), indent=2) if args.json else _text(args.output, result))
    if result.failures:
        again = "run the command again: files that are complete stay, others go on where they stopped"
        count = f"{len(result.failures):,} of {result.files:,} files could not be downloaded"
        problems = [
            Problem(failed.reason, f"it comes from {failed.url}", "", failed.path) for failed in result.failures
        ]
        raise DataError([*problems, Problem(count, "", again, str(args.output))])
    return exit_codes.OK


def _facts(result: DownloadResult) -> dict[str, object]:
    """The JSON: a public contract. `failed` is a number, `failures` says which files and why."""
    facts = asdict(result)
    return {**facts, "failed": len(result.failures), "failures": facts.pop("failures")}


def _text(output: Path, result: DownloadResult) -> str:
    line = (
        f"{output}: {result.files:,} files, {format_bytes(result.bytes)} complete ({result.downloaded:,} downloaded, "
        f"{result.already_there:,} already there), {len(result.failures):,} failed"
    )
    if result.without_checksum:
        line += f"\nwithout a checksum in the manifest, so proven by size only: {result.without_checksum:,}"
    return line


def _progress() -> Callable[[DownloadResult], None]:
    begun = last = time.monotonic()

    def tell(result: DownloadResult) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _SECONDS_BETWEEN_LINES:
            last = now
            done = result.downloaded + result.already_there
            speed = format_bytes(result.bytes / (now - begun))
            print(
                f"{done:,} of {result.files:,} files, {format_bytes(result.bytes)}, {speed}/s, "
                f"{len(result.failures):,} failed",
                file=sys.stderr,
            )

    return tell


def _positive(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= 100_000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _whole(text: str) -> int:
    return 0 if text == "0" else _positive(text)
