"""kill -9 of real trainings around saves: every restart goes on from the newest complete checkpoint, to the bit.

BLOOMERY_KILL_POINTS=50 runs that many points on one and on four ranks instead of the few of every day.
"""

from __future__ import annotations

import os
import random
import shutil
import threading
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bloomery.base import exit_codes
from bloomery.checkpoint import folder as folders
from bloomery.cli.main import main
from bloomery.launch.local import run_local_ranks
from bloomery.monitor.history import read_events, read_metrics
from chaos.scene import CHANGING
from checkpoints import assert_same_tensors, latest_checkpoint
from conftest import Workshop
from forked import alone
from kill_points import KillPoint, end, train_until_killed

POINTS = int(os.environ.get("BLOOMERY_KILL_POINTS", "0"))
FOUR = ("parallel.tp=2", "launch={on: local, gpus_per_node: 4}", "batch={micro_batch_size: 2, global_batch_size: 8}")
NOBODY = KillPoint(victim=0, operation=None, all_ranks=False)


class Victims:
    """A run that is started again and again, on so many ranks."""

    def __init__(self, workshop: Workshop, size: int, *overrides: str) -> None:
        self.workshop, self.size = workshop, size
        endless = ("train.for=1000000 steps", "lr.decay=null", "checkpoint.timeout=20s")
        self._overrides = (*(FOUR if size == 4 else ()), *endless, *overrides)
        self._pids = workshop.folder / "pids"
        self.run = workshop.folder / "run"

    def start(self, *more: str, point: KillPoint = NOBODY, after_seconds: float | None = None, run: str = "run") -> int:
        """Train until it ends, by itself or not; the exit code. `after_seconds`: kill it from outside."""
        shutil.rmtree(self._pids, ignore_errors=True)
        self._pids.mkdir()
        place = ["--run-dir", str(self.workshop.folder / run), "--device", "cpu", "--quiet"]
        arguments = ["train", str(self.workshop.recipe), *self._overrides, *more, *place]
        command = partial(train_until_killed, str(self._pids), point)
        killer = threading.Thread(target=self._kill, args=(point, after_seconds))
        if after_seconds is not None:
            killer.start()
        if self.size == 1:
            code = alone(command, arguments)
        else:
            code = run_local_ranks(self.size, command, arguments)
        if after_seconds is not None:
            killer.join()
        return code

    def operations(self, rank: int) -> int:
        """How many storage operations a rank did in a start that came to its end."""
        return int((self._pids / f"{rank}.count").read_text())

    def said(self) -> str:
        return (self._pids / "said.txt").read_text()

    def _kill(self, point: KillPoint, after_seconds: float) -> None:
        deadline = time.monotonic() + 60
        while sum(path.name.isdigit() for path in self._pids.iterdir()) < self.size:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(after_seconds)  # the random point, not a proof
        end(self._pids, point)


def assert_good(run: Path, known_step: int) -> int:
    """The step of the newest complete checkpoint at the instant of a crash; all that `latest` and names promise."""
    root, fast = run / "checkpoints", run / "checkpoints-local"
    whole = folders.complete_checkpoints(root)
    said = folders.read_latest(root)
    assert said is None or root / said in whole
    assert said is not None or not whole[1:]  # only the first may be complete and not named yet
    for path in [*whole, *folders.complete_checkpoints(fast)]:
        assert main(["inspect", "checkpoint", str(path), "--verify"]) == exit_codes.OK
    newest = folders.step_of(whole[-1]) if whole else 0
    assert newest >= known_step
    return newest


def starts_of(run: Path) -> list[dict[str, Any]]:
    """As a reader of the ledger sees it: a torn last line is none."""
    ledger = run / "events.jsonl"
    return [event for event in read_events(ledger) if event["kind"] == "start"] if ledger.exists() else []


def counted_metrics(run: Path) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in asdict(record).items() if key not in CHANGING}
        for record in read_metrics(run / "metrics.jsonl")
    ]


def points(chance: random.Random, operations: dict[int, int], count: int) -> list[tuple[KillPoint, float | None]]:
    """(where, seconds if killed from outside): two of three by what the victim does; half of them take all ranks."""
    found: list[tuple[KillPoint, float | None]] = []
    for i in range(count):
        victim = chance.choice(sorted(operations))
        outside = i % 3 == 2
        operation = None if outside else chance.randint(1, operations[victim])
        together = len(operations) == 1 or i % 2 == 0
        seconds = (2.0 if len(operations) == 1 else 4.0) * chance.random()
        found.append((KillPoint(victim, operation, together), seconds if outside else None))
    return found


@pytest.mark.parametrize(("size", "few"), [(1, 2), (4, 1)])
def test_a_training_that_is_killed_at_any_point_goes_on_as_if_it_never_was(
    workshop: Workshop, size: int, few: int
) -> None:
    count = POINTS or few
    local = workshop.folder / "nvme"
    saves = "checkpoint.phases=[{every: 2 steps}]", "checkpoint.keep={last: 2}"
    victims = Victims(workshop, size, *saves, f"checkpoint.local={{path: {local}, every: 1 steps, keep: 1}}")
    assert victims.start("train.exit_after=4 steps", run="counted") == exit_codes.OK, victims.said()
    operations = {rank: victims.operations(rank) for rank in range(size)}
    known, starts = 0, 0
    for point, after_seconds in points(random.Random(17 * size + count), operations, count):
        places = [victims.run / "checkpoints", victims.run / "checkpoints-local"]
        whole = [folders.step_of(path) for place in places for path in folders.complete_checkpoints(place)]
        newest = max(whole, default=0)
        code = victims.start(point=point, after_seconds=after_seconds)
        expected = -9 if size == 1 else exit_codes.LOST_RANK
        assert code == expected, (point, code, victims.said())
        known = assert_good(victims.run, known)
        begun = starts_of(victims.run)
        for event in begun[starts:]:
            assert event["resumed_from"] == (folders.step_name(newest) if newest else None), (point, event)
        starts = len(begun)
        assert "Traceback" not in victims.said(), victims.said()
    assert victims.start("train.exit_after=3 steps") == exit_codes.OK, victims.said()
    end_step = folders.step_of(latest_checkpoint(victims.run / "checkpoints") or Path("step-0"))
    assert victims.start(f"train.exit_after={end_step} steps", run="whole") == exit_codes.OK, victims.said()
    assert_same_tensors(victims.run, workshop.folder / "whole")
    assert counted_metrics(victims.run) == counted_metrics(workshop.folder / "whole")
    for root in (victims.run / "checkpoints", victims.run / "checkpoints-local"):
        left = {path.name for path in root.iterdir() if not path.name.startswith(".writer")} - {"latest"}
        assert left == {path.name for path in folders.complete_checkpoints(root)}
    assert len(list(local.glob("run-*/*"))) <= 3  # the newest, the newest that is known to be good, one on its way
    print(f"{count} kills on {size} rank(s): {starts} starts got to training, {end_step} steps")
