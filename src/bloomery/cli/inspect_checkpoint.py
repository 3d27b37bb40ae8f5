"""`bloomery inspect checkpoint PATH`: what it holds, whether it is whole, which others the run has."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bloomery.base import exit_codes
from bloomery.base.errors import on_one_line
from bloomery.base.units import format_bytes, format_count

if TYPE_CHECKING:
    from bloomery.checkpoint.select import Listed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", type=Path, help="a checkpoint, or a run folder for its newest")
    parser.add_argument("--list", action="store_true", help="every checkpoint of the run and its state")
    parser.add_argument("--verify", action="store_true", help="read every file and compare its hash")
    parser.add_argument("--json", action="store_true", help="print the answer as JSON, all tensors included")


def run(args: argparse.Namespace) -> int:
    from bloomery.checkpoint.select import describe_checkpoint, list_checkpoints

    if args.list:
        found = list_checkpoints(args.path, check_hashes=args.verify)
        print(json.dumps([asdict(one) for one in found], indent=2) if args.json else _list_text(found))
    else:
        facts = describe_checkpoint(args.path, check_hashes=args.verify)
        print(json.dumps(facts, indent=2) if args.json else _text(facts))
    return exit_codes.OK


def _text(facts: dict[str, Any]) -> str:
    layout = ", ".join(f"{name} {value}" for name, value in facts["layout"].items())
    versions = ", ".join(f"{name} {value}" for name, value in facts["versions"].items())
    lines = [
        f"{facts['folder']}: {facts['name']}, step {facts['step']:,}, {format_bytes(facts['bytes'])}"
        + (", all files verified" if facts["verified"] else ""),
        "",
        f"  samples      {facts['consumed_samples']:,}",
        f"  tokens       {facts['consumed_tokens']:,}",
        f"  fingerprint  {facts['fingerprint']}",
        f"  saved by     {facts['ranks']} rank(s), {layout}",
        f"  versions     format {facts['format']}, {versions}",
    ]
    if facts["time"] is not None:
        lines.append(f"  saved at     {datetime.fromtimestamp(facts['time'], UTC):%Y-%m-%d %H:%M:%S} UTC")
    if facts["validation"] is not None:
        lines.append(f"  validation   loss {facts['validation']['loss']} at step {facts['validation']['step']:,}")
    if facts["tokenizer"] is not None:
        lines.append(f"  tokenizer    {facts['tokenizer']}")
    lines.append("")
    for name, group in facts["groups"].items():
        pieces = f" in {group['pieces']:,} pieces" if group["pieces"] > group["tensors"] else ""
        lines.append(
            f"  {name:<11}  {group['tensors']:,} tensors{pieces}, {format_count(group['elements'])} elements, "
            f"{format_bytes(group['bytes'])}"
        )
    lines.append("")
    lines += [f"  {format_bytes(size):>10}  {name}" for name, size in facts["files"].items()]
    return "\n".join(map(on_one_line, lines))  # a manifest from elsewhere may hold escapes of the terminal


def _list_text(found: list[Listed]) -> str:
    width = max(len(one.name) for one in found)
    lines = [f"{'checkpoint':<{width}}  state     {'size':>10}"]
    for one in found:
        remark = one.reason or ("latest" if one.is_latest else "")
        lines.append(f"{one.name:<{width}}  {one.state:<8}  {format_bytes(one.bytes):>10}  {remark}".rstrip())
    return "\n".join(lines)
