"""kill -9 around saves, full and read-only file systems, a zombie that comes back: nothing is lost and nothing lies."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from bloomery.base.ranks import Piece
from bloomery.base.storage import write_atomically
from bloomery.checkpoint import folder as folders
from bloomery.checkpoint.folder import Writer, take_over, tidy
from bloomery.checkpoint.load import load_pieces, read_checkpoint
from bloomery.checkpoint.retention import Retention, Tier
from bloomery.checkpoint.save import SavePlan, Saver
from bloomery.checkpoint.select import newest_good
from bloomery.config.recipe import KeepSection
from checkpoints import assert_same_tensors, chosen, held_by_all, latest_checkpoint
from conftest import Workshop, start_training, wait_for_steps

CPU = torch.device("cpu")
FORK = multiprocessing.get_context("fork")
ROWS, RANKS = 4000, 4


class Apart:
    """A rank in a process of its own, with files as a store: all of them have equal shares."""

    size = RANKS

    def __init__(self, rank: int, nonce: str, store: Path) -> None:
        self.rank, self._nonce, self._store = rank, nonce, store

    def gather(self, value: Any) -> list[Any]:
        return [value] * self.size

    def broadcast(self, value: Any) -> Any:
        return self._nonce

    def store_set(self, key: str, word: Any) -> None:
        write_atomically(self._store / key.replace("/", "-"), json.dumps(word))

    def store_take(self, key: str) -> Any:
        with suppress(FileNotFoundError):
            return json.loads((self._store / key.replace("/", "-")).read_text())


def save_for_ever(root: Path, rank: int, first_step: int, nonce: str, writer: Writer) -> None:
    share = ROWS // RANKS
    weight = torch.zeros(share, 16)

    def pieces_of(rank: int) -> dict[str, Piece]:
        return {"w": Piece(weight, (ROWS, 16), (rank * share, 0)), "step": Piece(torch.zeros(()), (), (), rank == 0)}

    pieces = pieces_of(rank)
    saver = Saver(pieces, device=CPU, ranks=Apart(rank, nonce, root.parent), timeout_seconds=0.5)  # type: ignore[arg-type]
    saver.held = held_by_all(pieces_of, RANKS)
    for step in range(first_step, first_step + 10_000):
        weight.fill_(float(step))
        pieces["step"].tensor.fill_(float(step))
        saver.stage()
        tier = Tier(writer, KeepSection(last=2))
        plan = SavePlan(tier=tier, step=step, state={"step": step}, recipe_yaml="", retention=Retention(tier))
        saver.persist(plan)
        saver.wait_staged()
        weight.fill_(-1.0)  # training goes on
        saver.wait()
        deadline = time.monotonic() + 0.5  # about in step with the others, as training would be
        while time.monotonic() < deadline and not (root / folders.step_name(step)).exists():
            time.sleep(0.001)


@pytest.mark.parametrize(("victims", "rounds"), [("all", 6), ("one", 4)])
def test_kill_9_at_random_points_leaves_a_complete_newest_checkpoint(tmp_path: Path, victims: str, rounds: int) -> None:
    chance = random.Random(RANKS + rounds)
    newest, root = 0, tmp_path / "checkpoints"
    for i in range(rounds):
        writer = take_over(root)
        arguments = [(root, rank, newest + 1, f"nonce{i}", writer) for rank in range(RANKS)]
        ranks = [FORK.Process(target=save_for_ever, args=args) for args in arguments]
        for process in ranks:
            process.start()
        deadline = time.monotonic() + 20  # every other round succeeds at least once, however slow the machine is
        while i % 2 and folders.read_latest(root) in (None, folders.step_name(newest)):
            assert time.monotonic() < deadline
        time.sleep(0.02 + 0.15 * chance.random())  # the random point, not a proof
        dying = ranks if victims == "all" else [chance.choice(ranks)]
        for process in [*dying, *ranks]:
            if process in dying or victims == "all":
                process.kill()
        if victims == "one":
            time.sleep(0.6)  # the others go on for a while, and fail to complete
            for process in ranks:
                process.kill()
        for process in ranks:
            process.join()
        said = folders.read_latest(root)
        assert said is None or (root / said / "manifest.json").is_file()  # `latest` at the instant of the crash
        choice = newest_good([root])
        assert not choice.damaged
        take_over(root)
        tidy(root, step=folders.step_of(choice.checkpoint.folder) if choice.checkpoint else 0)
        if choice.checkpoint is None:
            assert newest == 0
            continue
        step = folders.step_of(choice.checkpoint.folder)
        assert step >= newest
        newest = step
        found = torch.zeros(ROWS, 16)
        load_pieces(choice.checkpoint, {"w": Piece.whole(found)})
        assert torch.equal(found, torch.full_like(found, float(step)))
        left = {path.name for path in root.iterdir() if not path.name.startswith(".writer")} - {"latest"}
        assert left == {path.name for path in folders.complete_checkpoints(root)}
    assert newest >= rounds // 2  # saves did succeed in between


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB, which can be made read-only and full."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def attempt(saver: Saver, root: Path, step: int) -> str:
    saver.stage()
    saver.persist(SavePlan(tier=Tier(Writer(root)), step=step, state={}, recipe_yaml=""))
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
    assert "about 390.7 KiB are needed" in said.lower() or "are needed" in said.lower()
    monkeypatch.setattr(
        "bloomery.checkpoint.save.SaveJob._require_room", lambda *_: None
    )  # as where room cannot be asked
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

    def attempt_as(step: int) -> str:
        saver.stage()
        saver.persist(SavePlan(tier=Tier(writer), step=step, state={}, recipe_yaml=""))
        return str(saver.wait()[-1].error)

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
    assert len(after) == 1
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
    assert set(kept) == {min(losses, key=lambda step: losses[step]), 20}
