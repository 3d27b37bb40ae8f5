"""Seconds from the start of `bloomery train` to its `start` event and its first finished step.

    python benchmarks/first_step.py --output first_step.json

Three starts in turn: with an empty compile cache, with the cache that this has left, and resumed from its checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bloomery.monitor import names
from bloomery.monitor.history import readable_lines
from bloomery.plan.trials import random_data, short_training


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt-1.3b")
    parser.add_argument("--override", action="append", default=[], help="of the recipe")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    rows = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, "-m", "bloomery", "train", args.model, *random_data(folder / "random")]
        command += [*args.override, *short_training(100), "train.exit_after=2 steps", "monitor.log_every=1 steps"]
        command += ["--quiet", "--run-dir"]
        for start, run in (("cold", "first"), ("warm", "second"), ("resumed", "second")):
            rows[start] = seconds([*command, str(folder / run)], folder)
            print(start, json.dumps(rows[start]), flush=True)
    if args.output:
        args.output.write_text(json.dumps(rows, indent=1))


def seconds(command: list[str], folder: Path) -> dict[str, float]:
    began = time.time()
    subprocess.run(command, check=True, env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled")})
    ended, run = time.time(), Path(command[-1])
    start = list(readable_lines(run / names.EVENTS_FILE, kind=str, time=float))
    last = [each["time"] for each in start if each["kind"] == names.Event.START][-1]
    steps = [each["time"] for each in readable_lines(run / names.METRICS_FILE, time=float) if each["time"] > last]
    found = {"start_event": last - began, "first_step": steps[0] - began, "second_step": steps[1] - began}
    return {name: round(each, 2) for name, each in (found | {"end": ended - began}).items()}


if __name__ == "__main__":
    main()
