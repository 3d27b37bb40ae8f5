"""Going back to an earlier checkpoint, two processes in one folder, and what a failing run leaves behind."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bloomery.checkpoint import folder as folders
from bloomery.checkpoint.save import Saver
from bloomery.cli.main import main
from bloomery.data.shards import ShardWriter
from bloomery.monitor.gather import read_run
from bloomery.monitor.history import read_metrics
from bloomery.parallel.runner import Runner
from bloomery.train.state import PendingStep
from checkpoints import assert_same_tensors, tensors_of
from conftest import VOCAB, Workshop, start_training, wait_for_steps

SAVES = "checkpoint.phases=[{every: 2 steps}]"
EVERY_FIVE = "checkpoint.phases=[{every: 5 steps}]"


def checkpoints(run) -> list[str]:  # type: ignore[no-untyped-def]
    return sorted(path.name for path in (run / "checkpoints").glob("step-*"))


def test_going_back_leaves_the_old_branch_aside_and_saves_the_new_one(workshop: Workshop) -> None:
    run = workshop.train(EVERY_FIVE)
    old = tensors_of(run)
    workshop.train(EVERY_FIVE, "train.skip=['11-13 steps']", run="run", start_from="10")
    assert checkpoints(run) == ["step-00000005", "step-00000010", "step-00000015", "step-00000020"]
    assert sorted(path.name for path in (run / "checkpoints" / "retired").iterdir()) == [
        "step-00000015",
        "step-00000020",
    ]
    assert (run / "checkpoints" / "latest").read_text() == "step-00000020\n"
    new = tensors_of(run)
    assert any(not np.array_equal(old[name], new[name]) for name in old)
    assert_same_tensors(run, workshop.train(EVERY_FIVE, "train.skip=['11-13 steps']", run="fresh"))
    assert [record.job for record in read_metrics(run / "metrics.jsonl")][10:] == [2] * 7
    logged = [record["step"] for record in workshop.metrics(run)]
    assert logged == [*range(1, 11), *range(14, 21)], "who plots the file as it is sees no zigzag"
    aside = [json.loads(line) for line in (run / "metrics-abandoned.jsonl").read_text().splitlines()]
    assert [(record["step"], record["job"]) for record in aside] == [(step, 1) for step in range(11, 21)]
    assert read_run(run).abandoned[1][0].points[:, 0].tolist() == [*range(11, 21)], "reports still know what was lost"


def test_retention_after_going_back_keeps_what_was_just_saved(workshop: Workshop) -> None:
    workshop.train(EVERY_FIVE)
    keep = "checkpoint={phases: [{every: 4 steps}], keep: {last: 1}}"
    run = workshop.train(keep, "train.exit_after=3 steps", start_from="step-00000010")
    assert (run / "checkpoints" / "latest").read_text() == "step-00000013\n"
    assert "step-00000013" in checkpoints(run)


def test_two_trainings_in_one_folder_are_refused(workshop: Workshop, capsys: pytest.CaptureFixture[str]) -> None:
    run = workshop.folder / "run"
    process = start_training(workshop, run)
    wait_for_steps(run, 3, process)
    workshop.train(code=5)
    assert f"is in use by process {process.pid}" in capsys.readouterr().err
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 0


def test_a_signal_with_nobody_left_to_read_still_saves(workshop: Workshop) -> None:
    run = workshop.folder / "run"
    process = start_training(workshop, run, PYTHONUNBUFFERED="1")  # with a pipe for its standard error
    assert isinstance(process, subprocess.Popen)
    assert process.stderr is not None
    process.stderr.close()
    wait_for_steps(run, 3, process)
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=60)
    assert workshop.events(run, "stop")[-1]["reason"] == "signal"
    assert (run / "checkpoints" / "latest").is_file()


def test_bad_data_in_mid_run_saves_what_was_learned(workshop: Workshop, capsys: pytest.CaptureFixture[str]) -> None:
    with ShardWriter(str(workshop.folder / "bad"), "uint16") as writer:
        for i in range(120):
            writer.append(np.full(50, 5 if i != 77 else VOCAB + 3))
    run = workshop.train("data.train=[{path: bad}]", "train.for=60 steps", code=3)
    stop = workshop.events(run, "stop")[-1]
    assert stop["reason"] == "error"
    assert stop["step"] > 0
    assert (run / "checkpoints" / "latest").read_text() == f"step-{stop['step']:08d}\n"
    said = capsys.readouterr().err
    for words in ("bad.bin", f"token id {VOCAB + 3}", "document 77"):
        assert words in said


def test_debris_of_killed_saves_is_swept(workshop: Workshop) -> None:
    run = workshop.train("train.for=5 steps")
    (staging_dir,) = (run / "checkpoints").glob(".writer-*")
    for place, name in ((run / "checkpoints", ".step-00000004.tmp"), (staging_dir, ".step-00000003.tmp")):
        (place / name).mkdir()
        (place / name / "x").write_text("half")
    workshop.train("train.for=6 steps")
    assert checkpoints(run) == ["step-00000005", "step-00000006"]
    assert workshop.events(run, "debris_removed")[-1]["folders"] == [".step-00000003.tmp", ".step-00000004.tmp"]
    assert not staging_dir.exists()


def test_debris_can_be_kept_for_the_curious(workshop: Workshop) -> None:
    run = workshop.train("train.for=5 steps")
    for _ in range(2):
        (run / "checkpoints" / ".step-00000003.tmp").mkdir()
        workshop.train("train.for=6 steps", "checkpoint.debris=keep")
    kept = sorted(path.name for path in (run / "checkpoints" / "debris").iterdir())
    assert kept == [".step-00000003.tmp", ".step-00000003.tmp.2"]


def test_a_checkpoint_that_lost_its_manifest_is_damaged_and_never_deleted(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    run = workshop.train("train.for=10 steps", EVERY_FIVE)
    (run / "checkpoints" / "step-00000010" / "manifest.json").unlink()
    workshop.train("train.for=12 steps", EVERY_FIVE)
    assert "manifest.json is missing" in capsys.readouterr().out
    assert workshop.events(run, "start")[-1]["resumed_from"] == "step-00000005"
    assert workshop.events(run, "damaged")[-1]["folder"] == "step-00000010"
    assert (run / "checkpoints" / "damaged-step-00000010" / "state.json").is_file()
    older = run / "checkpoints" / "step-00000005" / "manifest.json"
    older.unlink()
    workshop.train("train.for=13 steps", EVERY_FIVE)
    assert workshop.events(run, "damaged")[-1]["folder"] == "step-00000005"
    for path in (run / "checkpoints").glob("step-*/manifest.json"):
        path.unlink()
    workshop.train("train.for=14 steps", EVERY_FIVE, code=3)  # not from the beginning
    assert "no checkpoint of this run can be used" in capsys.readouterr().err
    assert (run / "checkpoints" / "step-00000013" / "state.json").is_file()


def test_the_fast_place_is_gone_on_from_when_the_recipe_no_longer_has_it(workshop: Workshop) -> None:
    local = (
        f"checkpoint={{phases: [{{every: 100 steps}}], local: {{path: {workshop.folder / 'nvme'}, every: 1 steps}}}}"
    )
    process = start_training(workshop, workshop.folder / "run", local)
    wait_for_steps(workshop.folder / "run", 4, process)
    process.kill()
    process.communicate()
    newest = folders.complete_checkpoints(workshop.folder / "run" / "checkpoints-local")[-1].name
    run = workshop.train("train.for=1000000 steps", "lr.decay=null", "train.exit_after=1 steps")
    assert workshop.events(run, "start")[-1]["resumed_from"] == newest


@pytest.mark.parametrize("name", ["²", "", "step-00000099", "99"])
def test_a_checkpoint_that_is_not_there_is_named_and_the_others_are(
    workshop: Workshop, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    run = workshop.train("train.for=5 steps")
    assert main(["train", str(workshop.recipe), "--run-dir", str(run), "--device", "cpu", "--from", name]) == 3
    assert "there are: step-00000005" in capsys.readouterr().err.lower()


def test_a_branch_begins_with_the_full_state_of_another_run(workshop: Workshop) -> None:
    whole = workshop.train("train.for=8 steps", SAVES, run="whole")
    before = tree(whole)
    for wanted, stop in ((f"{whole}@4", 2), (str(whole / "checkpoints/step-00000004"), 9)):
        # The same command twice: the second time, the branch has a checkpoint of its own.
        command = ("train.for=8 steps", SAVES, f"train.exit_after={stop} steps")
        run = workshop.train(*command, run=f"branch-{stop}", start_from=wanted)
        assert workshop.events(run, "start")[0]["ancestor"] == str(whole / "checkpoints/step-00000004")
        workshop.train(*command, run=f"branch-{stop}", start_from=wanted)
        assert workshop.losses(run) == workshop.losses(whole)[4:]
        assert_same_tensors(run, whole)
    first, second = workshop.events(workshop.folder / "branch-2", "start")
    assert (first["resumed_from"], second["resumed_from"], second["ancestor"]) == (
        "step-00000004",
        "step-00000006",
        None,
    )
    assert main(["report", str(workshop.folder / "branch-2")]) == 0
    assert str(whole / "checkpoints/step-00000004") in (workshop.folder / "branch-2/report.html").read_text()
    assert tree(whole) == before


def test_a_branch_of_a_run_that_has_no_such_step_lists_those_it_has(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = workshop.train("train.for=4 steps", SAVES, run="whole")
    workshop.train("train.for=8 steps", run="branch", start_from=f"{whole}@3", code=3)
    assert "There are: step-00000002, step-00000004" in capsys.readouterr().err
    workshop.train("train.for=8 steps", "lr.peak=1", run="branch", start_from=f"{whole}@2", code=3)
    assert "--change lr.peak" in capsys.readouterr().err


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_checkpoint_may_be_named_by_its_path(workshop: Workshop) -> None:
    run = workshop.train("train.for=10 steps", EVERY_FIVE)
    workshop.train("train.for=12 steps", start_from=str(run / "checkpoints" / "step-00000005"))
    assert workshop.events(run, "start")[-1]["resumed_from"] == "step-00000005"


def test_a_training_without_standard_output_trains(workshop: Workshop) -> None:
    words = [sys.executable, "-m", "bloomery", "train", str(workshop.recipe), "train.for=5 steps", "--device", "cpu"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(["sh", "-c", 'exec "$@" >&-', "sh", *words], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (workshop.folder / "runs" / "small" / "checkpoints" / "latest").is_file()


def test_a_save_does_not_wait_for_its_step(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device would be idle, and an idle stream starts again only behind the copies."""
    calls: list[str] = []
    for owner, name in ((Saver, "stage"), (Saver, "persist"), (Runner, "forward_backward"), (PendingStep, "read")):
        original = getattr(owner, name)

        def noted(*args: Any, original: Any = original, name: str = name, **named: Any) -> Any:
            calls.append(name)
            return original(*args, **named)

        monkeypatch.setattr(owner, name, noted)
    workshop.train("train.for=3 steps", "checkpoint.phases=[{every: 2 steps}]", "train.evaluate=null")
    second = ["forward_backward", "read", "stage"]
    third = ["forward_backward", "read", "persist"]
    assert calls == ["forward_backward", *second, *third, "read", "stage", "persist"]


def test_a_picture_is_written_although_the_next_step_fails(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    original, calls = Runner.forward_backward, itertools.count(1)

    def runs_out(self: Runner, *arguments: Any, **options: Any) -> Any:
        if next(calls) == 6:
            raise RuntimeError("a broken device")
        return original(self, *arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Runner, "forward_backward", runs_out)
        with pytest.raises(RuntimeError, match="a broken device"):
            workshop.train(EVERY_FIVE)
    assert checkpoints(workshop.folder / "run") == ["step-00000005"]
    assert_same_tensors(workshop.train(EVERY_FIVE), workshop.train(EVERY_FIVE, run="whole"))
