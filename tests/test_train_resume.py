"""A run that was stopped and resumed is the run that was never stopped, bit by bit."""

# ruff: noqa: E501  (tables of cases, one a line)

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bloomery.cli.main import main
from bloomery.config.load import fingerprint
from bloomery.sizing.check import load_checked_recipe
from checkpoints import assert_same_tensors, forge
from conftest import Workshop

TIMING = re.compile(r"(elapsed time per iteration \(s\)|samples per second|TFLOPs): [^|]*\|")


def log_lines(run: Path) -> list[str]:
    lines = (run / "logs" / "main_log.txt").read_text().splitlines()
    return [TIMING.sub("", line) for line in lines if line.startswith(" iteration")]


@pytest.mark.parametrize(
    ("stop_at", "overrides"),
    [
        (10, []),
        (7, ["monitor.log_every=5 steps"]),
        (7, ["model.dropout=0.2"]),
        (9, ["batch.rampup={start: 4, increment: 4, samples: 40}", "train.for=150 samples"]),
        (10, ["precision=bf16"]),
        (10, ["precision=fp16", "loss_scale={initial: 1048576, window: 4 steps}"]),
        (5, ["model.family=bloom", "parallel.recompute=full"]),
        (5, ["model.family=qwen3", "model.head_dim=32", "parallel.recompute=selective"]),
        (6, ["train.skip=['5-8 steps']"]),
    ],
    ids=["plain", "mid-interval", "dropout", "ramp", "bf16", "fp16", "bloom-recompute", "qwen3-selective", "skip"],
)
def test_stop_and_resume_equals_one_unbroken_run(workshop: Workshop, stop_at: int, overrides: list[str]) -> None:
    whole = workshop.train(*overrides, run="whole")
    workshop.train(*overrides, f"train.exit_after={stop_at} steps", run="halves")
    halves = workshop.train(*overrides, run="halves")
    assert workshop.events(halves, "start")[1]["resumed_from"] == f"step-{stop_at:08d}"
    assert log_lines(halves) == log_lines(whole)
    assert len(log_lines(whole)) > 3
    assert_same_tensors(whole, halves)


def test_a_finished_run_started_again_changes_nothing(workshop: Workshop) -> None:
    settings = ("train.for=3 steps", "data.validation={v: [{path: valid}]}", "train.evaluate={every: 2 steps}")
    settings += ("lr.warmup=1 steps",)
    run = workshop.train(*settings)
    before = (run / "metrics.jsonl").read_bytes()
    workshop.train(*settings)
    assert (run / "metrics.jsonl").read_bytes() == before
    assert [event["reason"] for event in workshop.events(run, "stop")] == ["finished", "finished"]


def test_a_longer_training_goes_on_from_a_finished_one(workshop: Workshop) -> None:
    workshop.train("train.for=3 steps", run="a")
    longer = workshop.train("train.for=6 steps", run="a")
    assert_same_tensors(longer, workshop.train("train.for=6 steps", run="b"))


DAMAGES = ["missing", "short", "changed"]


def test_a_resumed_run_saves_checkpoints_that_the_next_start_can_read(workshop: Workshop) -> None:
    """Between two validations: what a manifest says of the last one comes from the checkpoint before."""
    settings = ("data.validation={v: [{path: valid}]}", "train.evaluate={every: 3 steps}", "lr.warmup=1 steps")
    for steps in (4, 1, 1):
        run = workshop.train("train.for=9 steps", *settings, f"train.exit_after={steps} steps")
    assert [event["resumed_from"] for event in workshop.events(run, "start")][2] == "step-00000005"


def do_damage(folder: Path, damage: str) -> Path:
    tensors = next(folder.glob("*.safetensors"))
    if damage == "missing":
        tensors.unlink()
    elif damage == "short":
        tensors.write_bytes(tensors.read_bytes()[:-10])
    else:
        content = bytearray(tensors.read_bytes())
        content[len(content) // 2] ^= 1
        tensors.write_bytes(content)
    return tensors


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_put_aside_and_the_one_before_is_used(
    workshop: Workshop, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    every_two = "checkpoint.phases=[{every: 2 steps}]"
    run = workshop.train("train.for=6 steps", "train.exit_after=4 steps", every_two)
    tensors = do_damage(run / "checkpoints" / "step-00000004", damage)
    workshop.train("train.for=6 steps", start_from="4", code=3)
    said = capsys.readouterr().err
    assert tensors.name in said
    assert "--list" in said
    assert "Traceback" not in said
    workshop.train("train.for=6 steps", every_two)
    assert workshop.events(run, "start")[1]["resumed_from"] == "step-00000002"
    event = workshop.events(run, "damaged")[-1]
    assert event["folder"] == "step-00000004"
    assert "tensors-00000.safetensors" in event["reasons"][0]
    said = capsys.readouterr().out
    assert "step-00000004 is damaged (tensors-00000.safetensors" in said
    names = sorted(path.name for path in (run / "checkpoints").iterdir() if not path.name.startswith("."))
    assert names == ["damaged-step-00000004", "latest", "step-00000002", "step-00000004", "step-00000006"]
    assert_same_tensors(run, workshop.train("train.for=6 steps", run="whole"))


def state_with(folder: Path, **changes: Any) -> str:
    return json.dumps(json.loads((folder / "state.json").read_text()) | changes)


FORGED: dict[str, Callable[[Path], object]] = {
    "an empty state": lambda folder: forge(folder, "state.json", "{}"),
    "samples that no plan has": lambda folder: forge(folder, "state.json", state_with(folder, consumed_samples=10**17)),
    "a count below zero": lambda folder: forge(folder, "state.json", state_with(folder, held_samples=-8)),
    "an absurd blend": lambda folder: forge(folder, "state.json", state_with(folder, blend={"first_sample": [], "weights": 1})),
    "a field of another version": lambda folder: forge(folder, "state.json", state_with(folder, pending={})),
    "a loss with a name of two lines": lambda folder: forge(folder, "state.json", state_with(folder, interval={"losses": {"a\nb": 1.0}, "steps": 1, "seconds": 1.0})),
    "a save that took for ever": lambda folder: forge(folder, "state.json", state_with(folder, save_seconds=1e300)),
    "a deep recipe": lambda folder: forge(folder, "recipe.yaml", "[" * 100_000),
    "a recipe that is none": lambda folder: forge(folder, "recipe.yaml", "model: 7"),
    "an empty manifest": lambda folder: (folder / "manifest.json").write_text(""),
    "an endless manifest": lambda folder: ((folder / "manifest.json").unlink(), (folder / "manifest.json").symlink_to("/dev/zero")),
}  # fmt: skip


@pytest.mark.parametrize("forgery", FORGED)
def test_a_forged_checkpoint_counts_as_damaged_and_the_one_before_is_used(
    workshop: Workshop, capsys: pytest.CaptureFixture[str], forgery: str
) -> None:
    every_two = "checkpoint.phases=[{every: 2 steps}]"
    run = workshop.train("train.for=6 steps", "train.exit_after=4 steps", every_two)
    FORGED[forgery](run / "checkpoints" / "step-00000004")
    (run / "checkpoints" / ".writer").write_text("[" * 100_000)
    workshop.train("train.for=6 steps", every_two, start_from="4", code=3)
    workshop.train("train.for=5 steps", every_two)
    assert workshop.events(run, "start")[1]["resumed_from"] == "step-00000002"
    assert workshop.events(run, "damaged")[-1]["folder"] == "step-00000004"
    assert "Traceback" not in capsys.readouterr().err


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_from_the_beginning(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    run = workshop.train("train.for=4 steps", "checkpoint.phases=[{every: 2 steps}]")
    for folder in (run / "checkpoints").glob("step-*"):
        do_damage(folder, "changed")
    for _ in range(2):  # the second start says the same
        workshop.train("train.for=6 steps", code=3)
        said = capsys.readouterr().err
        assert "no checkpoint of this run can be used" in said
        assert "step-00000002" in said
        assert "step-00000004" in said


@pytest.mark.parametrize("content", ["step-00000099\n", "", "\0\0\0", None, "step-00000002\n"])
def test_latest_that_points_nowhere_or_back_is_mended(workshop: Workshop, content: str | None) -> None:
    every_two = "checkpoint.phases=[{every: 2 steps}]"
    run = workshop.train("train.for=6 steps", "train.exit_after=4 steps", every_two)
    latest = run / "checkpoints" / "latest"
    latest.unlink()
    if content is not None:
        latest.write_text(content)
    workshop.train("train.for=6 steps", every_two, "train.exit_after=1 steps")
    assert workshop.events(run, "start")[1]["resumed_from"] == "step-00000004"
    assert workshop.events(run, "latest_mended")[-1]["said"] == (content or "").strip("\0\n")
    assert latest.read_text() == "step-00000005\n"


def test_checkpoints_follow_the_phases_and_the_newest_and_the_marked_ones_are_kept(workshop: Workshop) -> None:
    phases = "checkpoint.phases=[{until: 4 steps, every: 2 steps}, {until: 10 steps, every: 3 steps}, {every: 8 steps}]"
    run = workshop.train("train.for=17 steps", phases, "checkpoint.keep={last: 2, every: 3 steps}")
    assert [event["step"] for event in workshop.events(run, "save")] == [2, 4, 6, 9, 10, 16, 17]
    kept = [int(path.name.removeprefix("step-")) for path in sorted((run / "checkpoints").glob("step-*"))]
    assert kept == [6, 9, 10, 16, 17], "10 is the newest that later steps have proven"


def test_after_its_ramp_a_run_may_have_more_replicas_than_the_first_levels_could_feed(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    ramp = ["batch={micro_batch_size: 1, global_batch_size: 4, rampup: {start: 1, increment: 1, samples: 6}}"]
    two, whole = "launch={gpus_per_node: 2}", workshop.train(*ramp, "train.for=14 steps", run="whole")
    check = ["check", str(workshop.recipe), *ramp, two, "--run-dir", "run"]
    assert main(check) == 2, "a new run would have to do the first levels"
    workshop.train(*ramp, two, code=2)
    run = workshop.train(*ramp, "train.for=14 steps", "train.exit_after=2 steps")
    workshop.train(*ramp, two, code=2)
    assert "data-parallel replicas, not 3" in capsys.readouterr().err, "the levels before it are done"
    workshop.train(*ramp, "train.for=14 steps", "train.exit_after=6 steps")
    assert main(check) == 0
    workshop.train(*ramp, two, "train.for=14 steps")
    assert [event["ranks"] for event in workshop.events(run, "start")] == [1, 1, 2]
    assert workshop.losses(run) == pytest.approx(workshop.losses(whole), abs=1e-5)


def test_the_precision_fits_the_device_and_a_slow_one_is_said(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    run = workshop.train("precision=auto", "train.exit_after=1 steps")
    assert workshop.events(run, "start")[0]["precision"] == "fp32"
    assert "\nprecision: fp32\n" in (run / "recipe.yaml").read_text()
    slow = workshop.train("precision=bf16", "train.exit_after=1 steps", run="slow")
    said = re.findall(r"matrix products in bf16 take ([\d.]+) times as long as in fp32", capsys.readouterr().out)
    flags = Path("/proc/cpuinfo").read_text()
    if "amx_bf16" not in flags and "avx512_bf16" not in flags:  # such a CPU is fast
        assert float(said[0]) > 1.2
    workshop.train("precision=auto", run=slow.name, code=3)
    assert "precision is fp32 but the checkpoint has bf16" in capsys.readouterr().err
    auto, named = (load_checked_recipe(str(workshop.recipe), [f"precision={each}"]).recipe for each in ("auto", "bf16"))
    assert fingerprint(auto) == fingerprint(named)
