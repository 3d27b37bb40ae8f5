"""`bloomery doctor [RECIPE]`: what this machine has, what is missing for which feature, and whether it can train."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from bloomery.base import exit_codes, signals
from bloomery.base.doing import doing
from bloomery.base.errors import DataError, LostRankError
from bloomery.base.ranks import started_as
from bloomery.base.storage import make_folder, open_plain, written_to
from bloomery.base.units import counted, format_bytes
from bloomery.cli.arguments import add_json, add_overrides, load, show
from bloomery.launch.doctor import (
    BAD_NODES_FILE,
    feature_facts,
    machine_facts,
    node_problems,
    run_problems,
    slowness,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", nargs="?", help="also: can this machine be a node of its training?")
    add_overrides(parser, "override fields of it")
    parser.add_argument("--run-dir", type=Path, default=Path(), help="where the run would be written; default: here")
    parser.add_argument("--node", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--host", help=argparse.SUPPRESS)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    recipe = load(args, warns=not args.node).recipe if args.recipe else None
    with doing("measuring this machine"), written_to("--run-dir"):
        facts = machine_facts(make_folder(args.run_dir))
    facts["host"] = args.host or os.environ.get("SLURMD_NODENAME") or facts["host"]  # as the scheduler knows it
    bad, wrong = (list(find(recipe, facts)) if recipe else [] for find in (node_problems, run_problems))
    if args.node and bad:
        with open(args.run_dir / BAD_NODES_FILE, "a", opener=open_plain) as file:
            file.write(f"{facts['host']}\n")
    nodes = _meet(facts) if args.node else [(facts["host"], facts["measured"])]
    for slow in slowness(facts, nodes):
        signals.say(f"warning: {slow}")
    if not args.node:
        problems = {"problems": [str(problem) for problem in [*bad, *wrong]]} if args.json else {}  # else below
        show(args, {**facts, "features": feature_facts(), **problems})
    if bad:
        raise LostRankError([*bad, *wrong])
    if wrong:
        raise DataError(wrong)
    return exit_codes.OK


def _meet(facts: dict[str, Any]) -> list[tuple[str, Any]]:
    """As one of several nodes: join the others, and say whose links are slow. On the first node, the host of each and
    what was measured there. LostRankError where one is missing."""
    own = (facts["host"], facts["measured"])
    if (started := started_as()) is None or started.size == 1:
        return [own]
    from bloomery.base.accelerator import device_of_rank, pick_device
    from bloomery.parallel.links import received_bytes_per_second, slow_links
    from bloomery.parallel.ranks import joined

    device = device_of_rank(pick_device(), started.local_rank, started.local_size)
    with joined(started, device) as ranks:
        found = ranks.gather((own, received_bytes_per_second(device)))
    if ranks.rank:
        return [own]
    nodes, speeds = ([each[i] for each in found] for i in (0, 1))
    usual = format_bytes(sorted(speeds)[len(speeds) // 2])
    print(f"{counted(len(nodes), 'node')} reach each other with {usual}/s", file=sys.stderr)
    for rank, speed in slow_links(speeds).items():
        signals.say(f"warning: {nodes[rank][0]} exchanges only {format_bytes(speed)}/s with its neighbours")
    return nodes
