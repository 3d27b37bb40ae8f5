"""Every way to stop: a saved checkpoint, a reason in the ledger, a documented exit code."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from bloomery.base import signals
from bloomery.base.signals import STOPS
from bloomery.base.units import Duration
from bloomery.config.load import load_recipe
from bloomery.sizing.schedule import TrainingPlan
from bloomery.train import stop as stop_module
from bloomery.train.state import TrainState
from bloomery.train.stop import StopRules
from conftest import Workshop, start_training, wait_for_steps


def stop_event(run: Path) -> dict[str, object]:
    return Workshop.events(run, "stop")[-1]


@pytest.mark.parametrize(
    ("override", "step", "reason"),
    [
        ("train.for=6 steps", 6, "finished"),
        ("train.for=50 samples", 6, "finished"),
        ("train.for=900 tokens", 7, "finished"),
        ("train.exit_after=3 steps", 3, "exit_after"),
        ("train.exit_after=30 samples", 4, "exit_after"),
        ("train.exit_after=300 tokens", 3, "exit_after"),
        ("train.exit_after=1s", 0, "deadline"),
    ],
)
def test_amounts_and_the_clock_stop_a_run(workshop: Workshop, override: str, step: int, reason: str) -> None:
    run = workshop.train(override)
    event = stop_event(run)
    assert (event["step"], event["reason"], event["finished"]) == (step, reason, reason == "finished")
    assert (run / "checkpoints" / "latest").read_text() == f"step-{step:08d}\n"


def test_the_length_of_a_job_is_counted_from_its_own_start(workshop: Workshop) -> None:
    for expected in (4, 8, 12):
        assert stop_event(workshop.train("train.exit_after=4 steps"))["step"] == expected


def test_the_deadline_leaves_room_for_the_slowest_step_and_the_slowest_save(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = TrainingPlan.of(load_recipe(str(workshop.recipe)).recipe)  # type: ignore[arg-type]
    rules = StopRules(plan, exit_after=Duration(100.0), control=workshop.folder, save_seconds_estimate=30.0)
    now = 0.0
    monkeypatch.setattr(stop_module, "job_seconds", lambda: now)
    state = TrainState(step=1)
    rules.time_step(5.0)
    rules.time_step(2.0)

    def stops_at(seconds: float) -> bool:
        nonlocal now
        now = seconds
        return rules.reason(state) is not None

    assert not stops_at(64.9)  # 64.9 + 5 + 30 < 100: the estimate counts until a save was measured
    assert stops_at(65.1)
    state.save_seconds = 3.0
    assert not stops_at(91.9)
    assert stops_at(92.1)


@pytest.mark.parametrize("number", STOPS, ids=lambda number: number.name)
def test_a_signal_stops_between_two_steps_with_everything_saved(workshop: Workshop, number: signal.Signals) -> None:
    run = workshop.folder / "run"
    process = start_training(workshop, run)
    wait_for_steps(run, 3, process)
    process.send_signal(number)
    process.send_signal(number)  # as from a wrapper that passes on what the terminal has sent already
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, (out, err)
    event = stop_event(run)
    assert (event["reason"], event["text"]) == ("signal", f"received {number.name}")
    assert (run / "checkpoints" / "latest").read_text() == f"step-{event['step']:08d}\n"
    assert json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step"] == event["step"]


def test_control_files_save_and_go_on_then_stop(workshop: Workshop) -> None:
    run = workshop.folder / "run"
    process = start_training(workshop, run, "checkpoint.phases=[{every: 10000000 steps}]")
    wait_for_steps(run, 3, process)
    (run / "control" / "save").touch()
    deadline = time.monotonic() + 60
    while not (run / "checkpoints" / "latest").is_file() and time.monotonic() < deadline:
        time.sleep(0.02)
    saved = int((run / "checkpoints" / "latest").read_text().removeprefix("step-"))
    assert not (run / "control" / "save").exists()
    wait_for_steps(run, saved + 2, process)
    (run / "control" / "stop").touch()
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert stop_event(run)["reason"] == "control"
    assert not (run / "control" / "stop").exists()
    assert len(Workshop.events(run, "save")) == 2


def test_kill_ends_a_live_run_with_a_save_and_forbids_the_next_start(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    run = workshop.folder / "run"
    process = start_training(workshop, run)
    wait_for_steps(run, 3, process)
    (run / "control" / "kill").touch()
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert stop_event(run)["reason"] == "control"
    before = sorted(path.name for path in run.rglob("*"))
    workshop.train()
    assert "Detected kill switch" in capsys.readouterr().out
    assert sorted(path.name for path in run.rglob("*")) == before


def test_kill_present_at_start_builds_nothing(workshop: Workshop) -> None:
    control = workshop.folder / "run" / "control"
    control.mkdir(parents=True)
    (control / "kill").touch()
    run = workshop.train()
    assert sorted(str(path.relative_to(run)) for path in run.rglob("*")) == ["control", "control/kill"]


def test_a_later_interrupt_leaves_at_once(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "ONE_REQUEST_SECONDS", 0.0)
    plan = TrainingPlan.of(load_recipe(str(workshop.recipe)).recipe)  # type: ignore[arg-type]
    rules = StopRules(plan, exit_after=None, control=workshop.folder, save_seconds_estimate=0.0)
    with rules.listening():
        os.kill(os.getpid(), signal.SIGINT)
        assert rules.reason(TrainState()) is not None
        os.kill(os.getpid(), signal.SIGTERM)  # the same request
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
