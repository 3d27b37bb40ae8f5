"""`bloomery report RUN...`: one self-contained HTML page, about one run or several side by side."""

import argparse
import sys
from pathlib import Path

from bloomery.base import exit_codes
from bloomery.base.doing import doing
from bloomery.cli.arguments import add_json
from bloomery.monitor.record import strict_json
from bloomery.monitor.report import read_runs, recipe_differences, write_csv, write_report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN", type=Path, nargs="+", help="folder of a run; several are compared")
    where = "where to write; default: report.html in the run folder, or here for several runs"
    parser.add_argument("--output", type=Path, help=where)
    parser.add_argument("--csv", action="store_true", help="print every record as a row, instead")
    add_json(parser, "facts")


def run(args: argparse.Namespace) -> int:
    with doing(f"reading {', '.join(map(str, args.runs))}"):
        if args.csv:
            write_csv(args.runs, sys.stdout)
        elif args.json:
            runs = read_runs(args.runs)
            facts = {"runs": [each.facts() for each in runs], "recipe_differences": recipe_differences(runs)}
            print(strict_json(facts, indent=2))
        else:
            print(write_report(*args.runs, output=args.output))
    return exit_codes.OK
