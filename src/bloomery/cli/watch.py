"""`bloomery watch RUN`: what a run is doing, live; `--pulse`: once, into its log, with alerts.
`bloomery watch install RUN`: that every hour or day, by a Slurm job that submits itself again.
`bloomery stop RUN`: ask a training to save and stop, by its control files; any colleague who may write there can.
`bloomery sync RUN TARGET`: carry its files to a hub, a bucket, a git remote or a folder."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from bloomery.base import exit_codes, signals
from bloomery.base.doing import doing
from bloomery.base.errors import DataError, Problem, RecipeError, StorageError
from bloomery.base.storage import append_line, open_plain, reason, writing
from bloomery.base.units import counted, parse_duration
from bloomery.cli.arguments import add_json, recipe_of_run, show, whole_number
from bloomery.config.load import load_recipe
from bloomery.config.recipe import AlertsSection, Recipe
from bloomery.launch import cron
from bloomery.launch.job import training_job
from bloomery.launch.watch import Status, forget_alerts, new_alerts, notify, pulse, status_of
from bloomery.monitor import names

_SECONDS = 2.0
_CLEAR = "\x1b[H\x1b[J"


def add_arguments_watch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="folder of the run")
    parser.add_argument("--pulse", action="store_true", help="append a line to its log and send new alerts, for cron")
    add_json(parser, "status")


def run_watch(args: argparse.Namespace) -> int:
    status, alerts = _look(args.run)
    if args.pulse:
        _tell(args.run, status, alerts)
    if args.json or args.pulse or not sys.stdout.isatty():
        return show(args, status.facts(), lambda _: pulse(status) if args.pulse else "\n".join(status.lines()))
    while True:
        print(_CLEAR + "\n".join(status.lines()), flush=True)
        if status.job.state == "finished":
            return exit_codes.OK
        time.sleep(_SECONDS)
        status, alerts = _look(args.run)


def _tell(run: Path, status: Status, alerts: AlertsSection) -> None:
    """The people first: the disk of the run may be what is wrong."""
    new = new_alerts(run, status.alerts)
    is_untold, failures = notify([status.alerts[kind] for kind in new], f"bloomery: {status.name}", alerts)
    for failure in failures:
        signals.say(f"an alert could not be sent by {failure}")
    if is_untold:
        forget_alerts(run, new)
    log = run / names.TEXT_LOG_FILE
    try:
        append_line(log, pulse(status))
    except OSError as error:
        signals.say(f"warning: {log} could not be written: {reason(error)}")


def add_arguments_install(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="folder of the run")
    parser.add_argument("--on", choices=("slurm",), default="slurm", help="the scheduler")
    often = parser.add_mutually_exclusive_group()
    often.add_argument("--hourly", dest="every", action="store_const", const="1h", default="1h", help="the default")
    often.add_argument("--daily", dest="every", action="store_const", const="24h", help="every 24 hours")
    often.add_argument("--every", metavar="TIME", help="such as 30m")
    parser.add_argument("--sync", metavar="TARGET", help="also `bloomery sync RUN TARGET`")


def run_install(args: argparse.Namespace) -> int:
    recipe = _recipe(args.run)
    name = {"1h": "hourly", "24h": "daily"}.get(args.every, args.every)
    try:
        every = parse_duration(args.every)
    except ValueError as error:
        raise RecipeError(
            Problem(f"--every is {args.every!r}", str(error), "write 30m, 1h or 24h", "command line")
        ) from error
    job_id = cron.install(training_job(recipe, args.run), name, every, args.sync)
    print(f"submitted Slurm job {job_id}; its scripts are in {args.run}/launch/cron-{name}: add your own as *.sh")
    return exit_codes.OK


def _look(run: Path) -> tuple[Status, AlertsSection]:
    recipe = _recipe(run)
    alerts = recipe.monitor.alerts or AlertsSection()
    return status_of(run, recipe.name, alerts), alerts


def _recipe(run: Path) -> Recipe:
    return load_recipe(recipe_of_run(run, f"launch/{names.RECIPE_FILE}"), is_saved=True).recipe


def add_arguments_stop(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="folder of the run")
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--after-save", action="store_true", help="once its next scheduled checkpoint is begun")
    either.add_argument(
        "--for-good", action="store_true", help="and forbid the next start until control/kill is removed"
    )


def run_stop(args: argparse.Namespace) -> int:
    control = args.run / "control"
    if not control.is_dir():
        rule = "a training makes control/ in its run folder when it starts"
        raise DataError(Problem(f"{args.run} is no run that has started", rule, "give its folder, usually runs/<name>"))
    name = "stop-after-save" if args.after_save else "kill" if args.for_good else "stop"
    with writing(control / name), suppress(FileExistsError):  # somebody else's, who has asked already
        os.close(open_plain(control / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
    print(f"{args.run}: asked to stop{' after its next checkpoint' if args.after_save else ''}")
    return exit_codes.OK


def add_arguments_sync(parser: argparse.ArgumentParser) -> None:
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


def run_sync(args: argparse.Namespace) -> int:
    from bloomery.launch.sync import sync, targets

    if not args.run.is_dir():
        remedy = "give the folder of a run, usually runs/<name>"
        raise DataError(Problem(f"there is no run at {args.run}", remedy=remedy))
    while True:
        parts = targets(args.target, args.include).items()
        try:
            with doing(f"copying to {args.target}"):
                done = {target: sync(args.run, target, patterns) for target, patterns in parts}
            facts = {"targets": [{"target": target, "files": len(files)} for target, files in done.items()]}
            code = show(args, facts, partial(_sync_text, done))
        except (DataError, StorageError) as error:  # another time the network is back, or the other sync is done
            if args.watch is None:
                raise
            signals.say(f"{error}. Next try in {args.watch} s")
        if args.watch is None:
            return code
        sys.stdout.flush()
        time.sleep(args.watch)


def _sync_text(done: Mapping[str, Sequence[str]], _: object) -> str:
    lines = [f"{target}: {counted(len(files), 'file') if files else 'nothing new'}" for target, files in done.items()]
    return "\n".join(lines)
