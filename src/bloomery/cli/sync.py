"""`bloomery sync RUN TARGET`: carry a run's files to a hub, a bucket, a git remote or a folder."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from bloomery.base import signals
from bloomery.base.doing import doing
from bloomery.base.errors import DataError, Problem, StorageError
from bloomery.cli.arguments import add_json, show, whole_number
from bloomery.launch.sync import sync, targets


def add_arguments(parser: argparse.ArgumentParser) -> None:
    place = (
        "hf://org/name, s3://..., abfs://..., gs://..., git+URL or a folder; with {part}, one for each of four parts"
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="folder of the run")
    parser.add_argument("target", metavar="TARGET", help=place)
    parser.add_argument("--include", metavar="GLOB", action="append", default=[], help="only these files; repeatable")
    parser.add_argument(
        "--watch", metavar="SECONDS", type=whole_number(1), help="again and again, so many seconds apart"
    )
    add_json(parser, "counts")


def run(args: argparse.Namespace) -> int:
    if not args.run.is_dir():
        remedy = "give the folder of a run, usually runs/<name>"
        raise DataError(Problem(f"there is no run at {args.run}", remedy=remedy))
    while True:
        parts = targets(args.target, args.include).items()
        try:
            with doing(f"copying to {args.target}"):
                done = {target: sync(args.run, target, patterns) for target, patterns in parts}
            facts = {"targets": [{"target": target, "files": len(files)} for target, files in done.items()]}
            code = show(args, facts, partial(_text, done))
        except (DataError, StorageError) as error:  # another time the network is back, or the other sync is done
            if args.watch is None:
                raise
            signals.say(f"{error}. Next try in {args.watch} s")
        if args.watch is None:
            return code
        sys.stdout.flush()
        time.sleep(args.watch)


def _text(done: Mapping[str, Sequence[str]], _: object) -> str:
    lines = [f"{target}: {f'{len(files):,} files' if files else 'nothing new'}" for target, files in done.items()]
    return "\n".join(lines)
