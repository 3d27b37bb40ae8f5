"""`bloomery report RUN`: one self-contained HTML page."""

import argparse
from pathlib import Path

from bloomery.base import exit_codes
from bloomery.base.doing import doing
from bloomery.monitor.report import write_report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="folder of a run")
    parser.add_argument("--output", type=Path, help="where to write; default: report.html in the run folder")


def run(args: argparse.Namespace) -> int:
    with doing(f"reading {args.run}"):
        print(write_report(args.run, output=args.output))
    return exit_codes.OK
