"""Bad input and bad storage: a clear message, the right exit code, nothing lost."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from bloomery.base.errors import RecipeError
from bloomery.checkpoint import folder as folders
from bloomery.checkpoint.load import read_checkpoint
from bloomery.config.load import load_recipe
from bloomery.data.open import open_data
from bloomery.sizing.check import load_checked_recipe
from bloomery.train.setup import prepared_run
from conftest import SMALL, Workshop, start_training, wait_for_steps, write_shard


def said(capsys: pytest.CaptureFixture[str]) -> str:
    text = capsys.readouterr().err
    assert "Traceback" not in text
    return text


def test_all_that_is_missing_or_damaged_is_named_at_once(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    index = workshop.folder / "train.idx"
    index.write_bytes(index.read_bytes()[:-7])
    lost = ("data.train=[{path: nowhere}, {path: train}]", "data.validation={v: [{path: lost}]}")
    workshop.train(*lost, "train.evaluate={every: 1 steps}", "tokenizer.path=no", code=3)
    text = said(capsys)
    for name in ("nowhere.idx", "train.idx", "lost.idx", "no/tokenizer.json"):
        assert name in text
    assert not (workshop.folder / "run" / "checkpoints").exists()


def test_what_fails_at_its_first_sample_leaves_no_checkpoint_in_the_way(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    run = workshop.train("model.vocab_size=4", "tokenizer=null", "train.for=2 steps", code=3)
    assert not list((run / "checkpoints").glob("step-*"))
    assert "below model.vocab_size" in said(capsys)
    workshop.train("tokenizer=null", "train.for=2 steps")
    assert workshop.metrics(run)[-1]["step"] == 2


def test_everything_that_cannot_be_done_is_refused_at_once(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    workshop.train("data=null", code=2)
    assert "data is missing" in said(capsys)


def test_a_recipe_for_a_cluster_is_not_started_as_one_process(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    workshop.train("launch={on: slurm, nodes: 2, gpus_per_node: 4}", "batch.global_batch_size=32", code=2)
    text = said(capsys)
    for part in ("8 ranks on slurm", "srun", "launch.on=local"):
        assert part in text


def test_an_unknown_device_is_refused(workshop: Workshop, command, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = command("train", str(workshop.recipe), "--device", "hpu")
    assert code == 2
    assert "--device is hpu" in err


def test_a_device_without_enough_memory_is_told_as_a_recipe_problem(workshop: Workshop) -> None:
    recipe = load_recipe(str(workshop.recipe)).recipe
    with (
        pytest.raises(RecipeError, match=r"ran out of memory.*micro_batch_size"),
        prepared_run(recipe, workshop.folder / "run", device=torch.device("cpu"), quiet=True),
    ):
        raise torch.OutOfMemoryError("tried to allocate")


def test_a_run_folder_below_a_file_is_refused(workshop: Workshop, capsys: pytest.CaptureFixture[str]) -> None:
    (workshop.folder / "file").write_text("")
    workshop.train(run="file/run", code=5)
    assert "--run-dir" in said(capsys)


def fill(path: Path, leave: int = 0) -> None:
    """Take all the space that is left, but for some bytes."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(b"x" * 512):
            pass
    os.truncate(path, path.stat().st_size - leave)


def test_a_read_only_run_folder_is_refused(
    workshop: Workshop, small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    workshop.train(run="disk/run", code=5)
    text = said(capsys)
    assert "Read-only" in text
    assert "--run-dir" in text


def test_a_disk_that_fills_up_with_checkpoints_keeps_the_older_ones(
    workshop: Workshop, small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = workshop.train("train.for=16 steps", "checkpoint.phases=[{every: 2 steps}]", run="disk/run", code=5)
    text = said(capsys)
    assert "the checkpoint of step 16 could not be written" in text
    assert "older checkpoints are untouched" in text
    assert len(workshop.events(run, "save_failed")) >= 2  # it continued after the first
    assert [record["step"] for record in workshop.metrics(run)] == list(range(1, 17))
    newest = (run / "checkpoints" / "latest").read_text().strip()
    read_checkpoint(run / "checkpoints" / newest)
    assert not list((run / "checkpoints").glob(".step*"))  # no debris
    subprocess.run(["mount", "-o", "remount,size=8m", small_disk], check=True)
    workshop.train("train.for=16 steps", run="disk/run")
    assert (run / "checkpoints" / "latest").read_text() == "step-00000016\n"


def test_a_tighter_keep_makes_room_on_a_full_disk(workshop: Workshop, small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,size=8m", small_disk], check=True)
    run = workshop.train("train.exit_after=4 steps", "checkpoint.phases=[{every: 2 steps}]", run="disk/run")
    fill(small_disk / "filler", leave=100_000)
    workshop.train("train.exit_after=2 steps", run="disk/run", code=5)  # nothing says that one of them may go
    assert len(folders.complete_checkpoints(run / "checkpoints")) == 2
    workshop.train("train.exit_after=2 steps", "checkpoint.keep={last: 1}", run="disk/run")
    assert workshop.events(run, "save")[-1]["removed"] == ["step-00000002"], "4 is the next to be proven"
    kept = [path.name for path in folders.complete_checkpoints(run / "checkpoints")]
    assert kept == ["step-00000004", "step-00000006"]


def test_a_disk_that_is_full_under_a_live_run_loses_no_record(
    workshop: Workshop, small_disk: Path, tmp_path: Path
) -> None:
    rescue = tmp_path / "rescue"
    rescue.mkdir()
    run = small_disk / "run"
    process = start_training(workshop, run, TMPDIR=str(rescue))
    wait_for_steps(run, 3, process)
    fill(small_disk / "filler")
    full_at = (run / "metrics.jsonl").read_bytes().count(b"\n")
    assert process.stdout is not None
    assert any("Training continues" in line for line in process.stdout)  # read until it says so
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 5, (out, err)
    assert "could not be written: No space left" in err or "disk full" in err  # the checkpoint
    assert "Nothing is lost" in err  # the records
    assert "Traceback" not in err
    rescued = b"".join(path.read_bytes() for path in rescue.glob("*metrics.jsonl"))
    steps = [json.loads(line)["step"] for line in ((run / "metrics.jsonl").read_bytes() + rescued).splitlines()]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) > full_at


def test_plain_megatron_shards_are_accepted_with_a_warning(workshop: Workshop) -> None:
    run = workshop.train("train.for=4 steps")
    assert "no manifest of" in (run / "logs" / "main_log.txt").read_text()


def test_a_recipe_without_data_says_so(tmp_path: Path, command) -> None:
    recipe = {key: value for key, value in SMALL.items() if key != "data"}
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe))
    code, _, err = command("train", str(tmp_path / "r.yaml"), "--run-dir", str(tmp_path / "run"))
    assert code == 2
    assert "data is missing" in err


def test_validation_uses_every_sample_of_a_small_group_whatever_the_batch(workshop: Workshop) -> None:
    write_shard(workshop.folder / "tiny", documents=1)
    few = (
        "data.validation={few: [{path: tiny}]}",
        "train.evaluate={every: 20 steps}",
        "lr={peak: 1e-9, schedule: constant}",
    )
    losses = []
    for size in (1, 2, 4):
        folder = workshop.train(*few, f"batch={{micro_batch_size: {size}, global_batch_size: 8}}", run=f"run-{size}")
        losses += [record["losses"]["lm loss"] for record in workshop.metrics(folder, "validation")]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)


def test_a_group_is_evaluated_by_weight_over_as_many_samples_as_it_has(workshop: Workshop) -> None:
    """So a source that is small for its weight comes again, as docs/training.md says."""
    write_shard(workshop.folder / "tiny", documents=2)
    group = "data.validation={v: [{path: tiny, weight: 9}, {path: valid}]}"
    settings = (group, "train.evaluate={every: 2 steps, steps: 1000}", "train.for=2 steps")
    (record,) = workshop.metrics(workshop.train(*settings), "validation")
    with open_data(load_checked_recipe(str(workshop.recipe), settings).recipe) as data:
        stream = data.validation["v"]
        tiny, valid = (source.num_samples for source in stream.sources)
        assert record["batches"] == -(-(tiny + valid) // SMALL["batch"]["micro_batch_size"])
        owners, ordinals = stream.blend.locate(np.arange(tiny + valid))
    assert (owners == 0).mean() == pytest.approx(0.9, abs=0.02)
    assert ordinals[owners == 0].max() > tiny


def test_checkpoints_that_cannot_be_deleted_are_a_warning(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuses(folder: Path, staging_dir: Path) -> None:
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr(folders, "remove", refuses)
    run = workshop.train("train.for=4 steps", "checkpoint={phases: [{every: 1 steps}], keep: {last: 1}}")
    assert "older checkpoints could not be deleted" in capsys.readouterr().out
    assert workshop.events(run, "retention_failed")
    assert len(folders.complete_checkpoints(run / "checkpoints")) == 4
