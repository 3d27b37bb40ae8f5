"""`bloomery inspect checkpoint PATH`: what it holds, whether it is whole, which others the run has."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bloomery.base import exit_codes
from bloomery.base.units import format_bytes
from bloomery.cli.arguments import as_text, columns, show

if TYPE_CHECKING:
    from bloomery.checkpoint.inspect import Listed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", type=Path, help="a checkpoint, or a run folder for its newest")
    parser.add_argument("--list", action="store_true", help="every checkpoint of the run and its state")
    parser.add_argument("--verify", action="store_true", help="read every file and compare its hash")
    parser.add_argument("--json", action="store_true", help="print the answer as JSON, all tensors included")


def run(args: argparse.Namespace) -> int:
    from bloomery.checkpoint.inspect import describe_checkpoint, list_checkpoints

    if args.list:
        found = list_checkpoints(args.path, check_hashes=args.verify)
        print(json.dumps([asdict(one) for one in found], indent=2) if args.json else _list_text(found))
        return exit_codes.OK
    return show(args, describe_checkpoint(args.path, check_hashes=args.verify), _text)


def _text(facts: dict[str, Any]) -> str:
    """Without the tensors and the state of training."""
    from bloomery.monitor.sinks import iso_time

    shown = {name: value for name, value in facts.items() if name not in ("tensors", "state")}
    saved_at = None if facts["time"] is None else iso_time(facts["time"])
    files = [{"file": name, "bytes": size} for name, size in facts["files"].items()]
    return as_text(shown | {"time": saved_at, "files": files})


def _list_text(found: list[Listed]) -> str:
    rows = [("checkpoint", "state", "size", "")]
    for one in found:
        rows.append((one.name, one.state, format_bytes(one.bytes), one.reason or ("latest" if one.is_latest else "")))
    return columns(rows)
