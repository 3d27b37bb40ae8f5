"""`bloomery watch RUN`: what a run is doing, live; `--pulse`: once, into its log, with alerts."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from bloomery.base import exit_codes, signals
from bloomery.base.errors import DataError, Problem
from bloomery.base.storage import append_line, writing
from bloomery.cli.arguments import add_json, show
from bloomery.config.load import load_recipe
from bloomery.config.recipe import AlertsSection
from bloomery.launch.notify import notify
from bloomery.launch.watch import Status, new_alerts, pulse, status_of
from bloomery.monitor import names

_SECONDS = 2.0
_CLEAR = "\x1b[H\x1b[J"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="folder of the run")
    parser.add_argument("--pulse", action="store_true", help="append a line to its log and send new alerts, for cron")
    add_json(parser, "status")


def run(args: argparse.Namespace) -> int:
    status, alerts = _look(args.run)
    if args.pulse:
        with writing(args.run):
            append_line(args.run / names.TEXT_LOG_FILE, pulse(status))
        for failure in notify(new_alerts(args.run, status.alerts), f"bloomery: {status.name}", alerts):
            signals.say(f"an alert could not be sent by {failure}")
    if args.json or args.pulse or not sys.stdout.isatty():
        return show(args, status.facts(), lambda _: pulse(status) if args.pulse else "\n".join(status.lines()))
    while True:
        print(_CLEAR + "\n".join(status.lines()), flush=True)
        if status.job.state == "finished":
            return exit_codes.OK
        time.sleep(_SECONDS)
        status, alerts = _look(args.run)


def _look(run: Path) -> tuple[Status, AlertsSection]:
    recipes = [path for path in (run / "launch" / names.RECIPE_FILE, run / names.RECIPE_FILE) if path.exists()]
    if not recipes:
        rule = f"a run folder holds {names.RECIPE_FILE}, or launch/{names.RECIPE_FILE}"
        raise DataError(Problem(f"{run} is not a run", rule, "give the folder of a run, usually runs/<name>"))
    recipe = load_recipe(str(recipes[0]), is_saved=True).recipe
    alerts = recipe.monitor.alerts or AlertsSection()
    return status_of(run, recipe.name, alerts), alerts
