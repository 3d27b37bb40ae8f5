"""`bloomery inspect checkpoint PATH`: what it holds, whether it is whole, how it differs from another."""

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
    from bloomery.checkpoint.inspect import Difference, Listed

_SHOWN = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", type=Path, help="a checkpoint, or a run folder for its newest")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--diff", metavar="OTHER", type=Path, help="compare with another checkpoint, tensor by tensor")
    kind.add_argument("--list", action="store_true", help="every checkpoint of the run and its state")
    parser.add_argument("--verify", action="store_true", help="read every file and compare its hash")
    parser.add_argument("--json", action="store_true", help="print the answer as JSON, all tensors included")


def run(args: argparse.Namespace) -> int:
    from bloomery.checkpoint.folder import find_checkpoint, verify
    from bloomery.checkpoint.inspect import compare_checkpoints, describe_checkpoint, list_checkpoints
    from bloomery.monitor.record import strict_json

    if args.list:
        found = list_checkpoints(args.path, check_hashes=args.verify)
        print(json.dumps([asdict(one) for one in found], indent=2) if args.json else _list_text(found))
    elif args.diff is not None:
        for path in (args.path, args.diff) if args.verify else ():
            verify(find_checkpoint(path))
        difference = compare_checkpoints(args.path, args.diff)
        answer = {"equal": difference.is_equal, **asdict(difference)}
        print(strict_json(answer, indent=2) if args.json else _diff_text(difference))
    else:
        facts = describe_checkpoint(args.path, check_hashes=args.verify)
        print(json.dumps(facts, indent=2) if args.json else _text(facts))
    return exit_codes.OK


def _text(facts: dict[str, Any]) -> str:
    layout = ", ".join(f"{name} {value}" for name, value in facts["layout"].items())
    versions = ", ".join(f"{name} {value}" for name, value in facts["versions"].items())
    lines = [
        f"{facts['folder']}: {facts['name']}, step {facts['step']:,}, {format_bytes(facts['bytes'])}"
        + (", every file is whole" if facts["verified"] else ""),
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


def _diff_text(found: Difference) -> str:
    if found.is_equal:
        return f"equal: {found.compared} tensors, bit by bit, state and recipe"
    lines = [f"{len(found.tensors)} of {found.compared} tensors differ"]
    if found.tensors:
        first = found.tensors[0]
        place = f"[{', '.join(map(str, first.first_index))}]"
        lines[0] += (
            f"; the first is {first.name}, at {place}: {first.first_values[0]:.9g} and {first.first_values[1]:.9g}"
        )
        width = max(len(one.name) for one in found.tensors[:_SHOWN])
        lines += ["", f"{'tensor':<{width}}  {'norm of a-b':>11}  {'relative':>9}  {'max abs':>9}  elements"]
        for one in found.tensors[:_SHOWN]:
            numbers = f"{one.norm:>11.3e}  {one.relative:>9.2e}  {one.largest:>9.2e}"
            lines.append(f"{one.name:<{width}}  {numbers}  {one.elements:,} of {_count(one.shape):,}")
        if len(found.tensors) > _SHOWN:
            lines.append(f"... and {len(found.tensors) - _SHOWN} more, all with --json")
    for title, names in (("only in the first", found.only_a), ("only in the second", found.only_b)):
        if names:
            lines += ["", f"{title}: {', '.join(names[:_SHOWN])}" + (" ..." if len(names) > _SHOWN else "")]
    lines += ["", *found.reshaped] if found.reshaped else []
    for title, fields in (("state", found.state), ("recipe", found.recipe)):
        lines += [""] if fields else []
        lines += [f"{title} {path}: {json.dumps(a)} and {json.dumps(b)}" for path, (a, b) in fields.items()]
    return "\n".join(lines)


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for length in shape:
        count *= length
    return count
