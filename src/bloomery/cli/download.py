"""`bloomery download MANIFEST --output DIR`: every file of a list, verified by size and checksum.
`bloomery extract SOURCES... --output DIR --chunks N`: compressed .jsonl files to N plain ones."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from bloomery.base import exit_codes
from bloomery.base.doing import doing
from bloomery.base.errors import DataError, Problem
from bloomery.base.storage import write_atomically, written_to
from bloomery.base.units import counted, format_bytes
from bloomery.cli.arguments import add_json, add_unit, share_text, show, whole_number

if TYPE_CHECKING:
    from bloomery.prepare.download import DownloadResult


def add_arguments_download(parser: argparse.ArgumentParser) -> None:
    positive, timeout = whole_number(1), "silence that ends a connection; default: 60"
    manifest_help = ".json, .jsonl or .yaml list of {url, size, sha256, path}; with --list a URL"
    parser.add_argument("manifest", metavar="MANIFEST", help=manifest_help)
    list_help = "write the manifest of a dataset of the Hub, an index page or a bucket, and download nothing"
    parser.add_argument("--list", action="store_true", help=list_help)
    parser.add_argument("--output", metavar="DIR", type=Path, required=True, help="folder; with --list the .jsonl")
    parser.add_argument("--jobs", metavar="N", type=positive, default=4, help="files at a time; default: 4")
    parser.add_argument("--retries", metavar="N", type=whole_number(0), default=8, help="after the first; default: 8")
    parser.add_argument("--timeout", metavar="SECONDS", type=positive, default=60, help=timeout)
    add_unit(parser, "to verify all files")
    add_json(parser, "summary")


def run_download(args: argparse.Namespace) -> int:
    if args.list:
        return _list(args)
    from bloomery.prepare.download import download, read_download_manifest

    wanted = read_download_manifest(args.manifest)
    options = {"jobs": args.jobs, "retries": args.retries, "timeout_seconds": args.timeout, "share": args.unit}
    result = download(wanted, args.output, **options)
    facts = asdict(result) | {"failed": len(result.failures)}
    show(args, facts, lambda _: f"{args.output}: {share_text(args.unit)}{_text(result)}")
    if result.failures:
        again = "run the command again: files that are complete stay, others resume where they stopped"
        count = f"{len(result.failures):,} of {result.files:,} files could not be downloaded"
        problems = [
            Problem(each["reason"], f"it comes from {each['url']}", "", each["path"]) for each in result.failures
        ]
        raise DataError([*problems, Problem(count, "", again, str(args.output))])
    return exit_codes.OK


def _list(args: argparse.Namespace) -> int:
    from bloomery.prepare.listing import list_files

    with doing("listing the files"):
        found = list_files(args.manifest)
    lines = [json.dumps(file.model_dump(exclude_none=True)) for file in found]
    with written_to("--output"):
        write_atomically(args.output, "\n".join(lines) + "\n")
    facts = {
        "files": len(found),
        "bytes": sum(file.size or 0 for file in found),
        "without_size": sum(file.size is None for file in found),
        "without_checksum": sum(not file.hashes for file in found),
    }

    unknown = f"; {facts['without_size']:,} without a size, {facts['without_checksum']:,} without a checksum"
    return show(
        args, facts, lambda _: f"{args.output}: {counted(len(found), 'file')}, {format_bytes(facts['bytes'])}{unknown}"
    )


def _text(result: DownloadResult) -> str:
    line = (
        f"{counted(result.files, 'file')}, {format_bytes(result.bytes)} complete ({result.downloaded:,} downloaded, "
        f"{result.already_there:,} already there), {len(result.failures):,} failed"
    )
    if result.without_checksum:
        line += f"\nwithout a checksum in the manifest, so verified by size only: {result.without_checksum:,}"
    return line


def add_arguments_extract(parser: argparse.ArgumentParser) -> None:
    endings = ".jsonl, .ndjson or .jsonlines, plain or with .gz or .zst"
    parser.add_argument("sources", metavar="SOURCE", nargs="+", help=f"files, folders, globs or URLs of {endings}")
    parser.add_argument("--output", metavar="DIR", type=Path, required=True, help="folder for the chunks")
    parser.add_argument("--chunks", metavar="N", type=whole_number(1), required=True, help="how many files to write")
    parser.add_argument("--jobs", metavar="N", type=whole_number(1), help="chunks at a time; default: one per core")
    add_unit(parser, "for the manifest")
    add_json(parser, "summary")


def run_extract(args: argparse.Namespace) -> int:
    from bloomery.prepare.extract import extract

    jobs = args.jobs or len(os.sched_getaffinity(0))
    result = extract(args.sources, args.output, chunks=args.chunks, jobs=jobs, share=args.unit)
    made = f"{args.output}: {share_text(args.unit)}{result.written:,} written, {result.already_there:,} already there"
    counts = f"{counted(result.input_files, 'file')} in, {result.chunks:,} out"
    counts += f"; {counted(result.documents, 'document')} in and out"
    where = f". Hashes and counts: {result.manifest}" if result.manifest else ""
    text = f"{made}. {counts}, {format_bytes(result.bytes)}{where}"
    return show(args, asdict(result), lambda _: text)
