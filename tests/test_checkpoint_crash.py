"""Full and read-only disks, a mount that vanishes, a zombie that comes back: nothing is lost and nothing lies."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch

from bloomery.base.ranks import Piece
from bloomery.checkpoint import folder as folders
from bloomery.checkpoint.folder import Writer, take_over
from bloomery.checkpoint.load import read_checkpoint
from bloomery.checkpoint.retention import Tier
from bloomery.checkpoint.save import SaveJob, SavePlan, Saver
from checkpoints import assert_same_tensors, chosen, latest_checkpoint
from conftest import Workshop, start_training, wait_for_steps

CPU = torch.device("cpu")


def attempt(saver: Saver, root: Path, step: int, writer: Writer | None = None) -> str:
    saver.stage()
    saver.persist(SavePlan(tier=Tier(writer or Writer(root)), step=step, state={}, recipe_yaml=""))
    return str(saver.wait()[-1].error)


def test_a_full_disk_is_known_before_the_first_byte_and_ends_when_there_is_room(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = {"w": Piece.whole(torch.ones(100_000))}
    saver = Saver(pieces, device=CPU)
    root = small_disk / "checkpoints"
    assert attempt(saver, root, 1) == "None"
    assert attempt(saver, root, 2) == "None"
    said = attempt(saver, root, 3)
    assert "the checkpoint of step 3 could not be written: disk full" in said
    assert "KiB are needed" in said
    monkeypatch.setattr(SaveJob, "_require_room", lambda *_: None)  # as where room cannot be asked
    said = attempt(saver, root, 3)
    assert "No space left on device (ENOSPC)" in said  # the reservation
    assert {path.name for path in root.iterdir()} == {"latest", "step-00000001", "step-00000002"}
    read_checkpoint(root / "step-00000002")
    subprocess.run(["mount", "-o", "remount,size=8m", small_disk], check=True)
    assert attempt(saver, root, 3) == "None"


def test_a_disk_that_turns_read_only_fails_the_save_and_keeps_the_older(small_disk: Path) -> None:
    pieces = {"w": Piece.whole(torch.ones(100))}
    saver = Saver(pieces, device=CPU)
    assert attempt(saver, small_disk / "c", 1) == "None"
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    assert "Read-only file system (EROFS)" in attempt(saver, small_disk / "c", 2)
    assert chosen([small_disk / "c"]) == small_disk / "c" / "step-00000001"
    subprocess.run(["mount", "-o", "remount,rw", small_disk], check=True)
    assert attempt(saver, small_disk / "c", 2) == "None"


def test_a_mount_that_vanishes_is_not_written_beneath(small_disk: Path) -> None:
    writer = take_over(small_disk / "c")
    saver = Saver({"w": Piece.whole(torch.ones(4))}, device=CPU)
    attempt_as = partial(attempt, saver, small_disk / "c", writer=writer)
    assert attempt_as(1) == "None"
    beneath = small_disk.with_name("moved")
    beneath.mkdir()
    subprocess.run(["mount", "--move", small_disk, beneath], check=True)
    try:
        assert "is it mounted?" in attempt_as(2)
        assert list(small_disk.iterdir()) == []
    finally:
        subprocess.run(["mount", "--move", beneath, small_disk], check=True)
    assert attempt_as(3) == "None"


def test_a_writer_file_that_is_a_folder_is_named(workshop: Workshop, capsys: pytest.CaptureFixture[str]) -> None:
    (workshop.folder / "run" / "checkpoints" / ".writer").mkdir(parents=True)
    workshop.train("train.for=2 steps", code=5)
    assert "cannot read" in (err := capsys.readouterr().err)
    assert "checkpoints/.writer" in err


def test_a_zombie_training_is_stopped_by_a_newer_start(workshop: Workshop) -> None:
    run = workshop.folder / "run"
    every = "checkpoint={phases: [{every: 1 steps}], keep: {last: 1}}"
    process = start_training(workshop, run, every)
    wait_for_steps(run, 3, process)
    os.kill(process.pid, signal.SIGSTOP)  # thought dead
    with suppress(FileNotFoundError):
        (run / ".lock").unlink()  # as on another node whose file system has no locks
    before = {path.name for path in folders.complete_checkpoints(run / "checkpoints")}
    workshop.train("train.for=1000000 steps", "lr.decay=null", every, "train.exit_after=3 steps")
    after = {path.name for path in folders.complete_checkpoints(run / "checkpoints")}
    assert after != before
    os.kill(process.pid, signal.SIGCONT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 5
    assert "has taken over" in err
    assert "Traceback" not in err
    assert {path.name for path in folders.complete_checkpoints(run / "checkpoints")} == after
    assert folders.read_latest(run / "checkpoints") in after


def test_a_faster_place_is_saved_to_more_often_and_gone_on_from(workshop: Workshop) -> None:
    local = workshop.folder / "nvme"
    tiers = f"checkpoint={{phases: [{{every: 6 steps}}], local: {{path: {local}, every: 2 steps, keep: 2}}}}"
    run = workshop.folder / "run"
    process = start_training(workshop, run, tiers)
    wait_for_steps(run, 9, process)
    process.kill()
    process.communicate()
    fast = [folders.step_of(path) for path in folders.complete_checkpoints(run / "checkpoints-local")]
    assert fast[-1] >= 4  # a save waits for the one before: 4 was whole when 6 began
    assert len(fast) <= 3  # two, and one that the kill kept from being deleted
    assert all(step % 2 == 0 and step % 6 for step in fast)
    same = ("train.for=1000000 steps", "lr.decay=null", tiers)
    workshop.train(*same, "train.exit_after=1 steps")
    resumed = workshop.events(run, "start")[-1]["resumed_from"]
    durable = [folders.step_of(path) for path in folders.complete_checkpoints(run / "checkpoints")][:-1]
    assert resumed == folders.step_name(max(fast + durable))
    assert {event["tier"] for event in workshop.events(run, "save")} == {"durable", "local"}
    end = folders.step_of(latest_checkpoint(run / "checkpoints") or Path("step-0"))
    assert_same_tensors(run, workshop.train(*same, f"train.exit_after={end} steps", run="whole"))


def test_auto_saves_as_often_as_failures_make_it_worth_and_says_why(workshop: Workshop) -> None:
    auto = "checkpoint={phases: [{every: auto}], failure_every: 10s}"
    run = workshop.train("train.for=60 steps", "lr.decay=60 steps", auto)
    chosen = workshop.events(run, "cadence")
    assert chosen
    assert "Young/Daly" in chosen[0]["reasoning"]
    assert "a failure every 10s" in (run / "logs" / "main_log.txt").read_text()
    saved = [event["step"] for event in workshop.events(run, "save")]
    assert saved[:2] == [20, 40]
    again = workshop.train("train.for=70 steps", "lr.decay=60 steps", auto)  # what was decided outlives the job
    assert latest_checkpoint(again / "checkpoints") == again / "checkpoints" / "step-00000070"


def test_the_best_checkpoint_by_validation_is_kept(workshop: Workshop) -> None:
    keep = "checkpoint={phases: [{every: 2 steps}], keep: {last: 1, best: 1}}"
    settings = ("data.validation={v: [{path: valid}]}", "train.evaluate={every: 4 steps}")
    run = workshop.train("train.for=20 steps", "lr={peak: 1e-2, schedule: constant}", keep, *settings)
    losses = {record["step"]: record["losses"]["lm loss"] for record in workshop.metrics(run, "validation")}
    kept = [folders.step_of(path) for path in folders.complete_checkpoints(run / "checkpoints")]
    assert {min(losses, key=lambda step: losses[step]), 20} <= set(kept)
    assert len(kept) <= 3, "the best, the last, and one that is proven"
