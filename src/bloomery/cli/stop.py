"""`bloomery stop RUN`: ask a training to save and stop, by its control files; any colleague who may write there can."""

from __future__ import annotations

import argparse
import os
from contextlib import suppress
from pathlib import Path

from bloomery.base import exit_codes
from bloomery.base.errors import DataError, Problem
from bloomery.base.storage import open_plain, writing


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="folder of the run")
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--after-save", action="store_true", help="once its next scheduled checkpoint is begun")
    either.add_argument(
        "--for-good", action="store_true", help="and forbid the next start until control/kill is removed"
    )


def run(args: argparse.Namespace) -> int:
    control = args.run / "control"
    if not control.is_dir():
        rule = "a training makes control/ in its run folder when it starts"
        raise DataError(Problem(f"{args.run} is no run that has started", rule, "give its folder, usually runs/<name>"))
    name = "stop-after-save" if args.after_save else "kill" if args.for_good else "stop"
    with writing(control / name), suppress(FileExistsError):  # somebody else's, who has asked already
        os.close(open_plain(control / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
    print(f"{args.run}: asked to stop{' after its next checkpoint' if args.after_save else ''}")
    return exit_codes.OK
