"""Every way to stop: a saved checkpoint, a reason in the ledger, a documented exit code."""

from __future__ import annotations

import itertools
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bloomery.base import signals
from bloomery.base.signals import STOPS
from bloomery.cli.main import main
from bloomery.config.load import load_recipe
from bloomery.monitor.meters import IntervalMeter
from bloomery.parallel.runner import Runner
from bloomery.sizing.schedule import TrainingPlan
from bloomery.train import stop as stop_module
from bloomery.train.state import TrainState
from bloomery.train.stop import StopRules
from conftest import Workshop
from test_parallel import run_ranks


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


def stop_rules(workshop: Workshop, *overrides: str, **options: float) -> tuple[StopRules, IntervalMeter]:
    recipe = load_recipe(str(workshop.recipe), overrides).recipe
    meter = IntervalMeter()
    return StopRules(TrainingPlan.of(recipe), recipe.train, meter, control=workshop.folder, **options), meter


def test_the_deadline_keeps_room_for_an_evaluation(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    rules, meter = stop_rules(workshop, "train.exit_after=100s", "train.evaluate={every: 4 steps, steps: 1}")
    meter.evaluation_seconds = 20.0
    monkeypatch.setattr(stop_module, "job_seconds", lambda: 90.0)
    assert rules.reason(TrainState(step=1)) is None
    assert rules.reason(TrainState(step=3)) is not None


def test_the_deadline_leaves_room_for_the_slowest_step_and_the_slowest_save(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules, meter = stop_rules(workshop, "train.exit_after=100s", save_seconds_estimate=30.0)
    now = 0.0
    monkeypatch.setattr(stop_module, "job_seconds", lambda: now)
    state = TrainState(step=1)
    meter.time_step(5.0)
    meter.time_step(2.0)

    def stops_at(seconds: float) -> bool:
        nonlocal now
        now = seconds
        return rules.reason(state) is not None

    assert not stops_at(64.9)  # 64.9 + 5 + 30 < 100: the estimate counts until a save was measured
    assert stops_at(65.1)
    state.save_seconds = 3.0
    assert not stops_at(91.9)
    assert stops_at(92.1)


@pytest.fixture
def at_step(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Callable[[], object]], None]:
    """Do something while a step of a training in this process is computed."""
    acts: dict[int, Callable[[], object]] = {}
    original, steps = Runner.forward_backward, itertools.count(1)

    def forward_backward(self: Runner, *arguments: Any, **options: Any) -> Any:
        acts.get(next(steps), lambda: None)()
        return original(self, *arguments, **options)

    monkeypatch.setattr(Runner, "forward_backward", forward_backward)
    monkeypatch.setattr(stop_module, "_POLL_SECONDS", 0.0)
    return acts.__setitem__


AtStep = Callable[[int, Callable[[], object]], None]


@pytest.mark.parametrize("number", STOPS, ids=lambda number: number.name)
def test_a_signal_stops_between_two_steps_with_everything_saved(
    workshop: Workshop, at_step: AtStep, number: signal.Signals
) -> None:
    def twice() -> None:
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)  # as from a wrapper that forwards what the terminal has sent already

    at_step(3, twice)
    run = workshop.train()
    event = stop_event(run)
    assert (event["step"], event["reason"], event["text"]) == (3, "signal", f"received {number.name}")
    assert (run / "checkpoints" / "latest").read_text() == "step-00000003\n"
    assert json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 3


def test_control_files_save_and_continue_then_stop(workshop: Workshop, at_step: AtStep) -> None:
    control = workshop.folder / "run" / "control"
    at_step(3, (control / "save").touch)
    at_step(6, (control / "stop").touch)
    run = workshop.train("checkpoint.phases=[{every: 10000000 steps}]")
    assert list(control.iterdir()) == []
    assert [event["step"] for event in Workshop.events(run, "save")] == [4, 6]
    assert (stop_event(run)["step"], stop_event(run)["reason"]) == (6, "control")


def test_a_run_stops_after_its_next_checkpoint(
    workshop: Workshop, at_step: AtStep, capsys: pytest.CaptureFixture[str]
) -> None:
    run = workshop.folder / "run"
    assert main(["stop", str(run)]) == 3
    assert "is no run that has started" in capsys.readouterr().err
    at_step(3, lambda: main(["stop", str(run), "--after-save"]))
    workshop.train("checkpoint.phases=[{every: 6 steps}]")
    assert [event["step"] for event in Workshop.events(run, "save")] == [6]
    assert (stop_event(run)["step"], stop_event(run)["reason"]) == (6, "control")
    assert main(["stop", str(run), "--for-good"]) == 0
    workshop.train("train.for=8 steps", code=0)
    assert stop_event(run)["step"] == 6, "control/kill forbids the start"


def test_kill_ends_a_live_run_with_a_save_and_forbids_the_next_start(
    workshop: Workshop, at_step: AtStep, capsys: pytest.CaptureFixture[str]
) -> None:
    at_step(3, (workshop.folder / "run" / "control" / "kill").touch)
    run = workshop.train()
    assert (stop_event(run)["step"], stop_event(run)["reason"]) == (3, "control")
    before = sorted(path.name for path in run.rglob("*"))
    workshop.train()
    assert "Detected kill switch" in capsys.readouterr().out
    assert sorted(path.name for path in run.rglob("*")) == before


def test_a_later_interrupt_leaves_at_once(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "ONE_REQUEST_SECONDS", 0.0)
    rules, _ = stop_rules(workshop)
    with rules.listening():
        os.kill(os.getpid(), signal.SIGINT)
        assert rules.reason(TrainState()) is not None
        os.kill(os.getpid(), signal.SIGTERM)  # the same request
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_saves_by_the_clock(workshop: Workshop) -> None:
    often = workshop.train("checkpoint.phases=[{every: 0.001s}]", "train.for=8 steps", run="often")
    seldom = workshop.train("checkpoint.phases=[{every: 1h}]", "train.for=8 steps", run="seldom")
    first, *_, last = [event["step"] for event in workshop.events(often, "save")]
    assert first < 4
    assert last == 8
    assert [event["step"] for event in workshop.events(seldom, "save")] == [8]
    both = "checkpoint.phases=[{until: 4 steps, every: 0.001s}, {every: 4 steps}]"
    assert run_ranks(workshop, both, "train.for=8 steps", "parallel.tp=2") == 0
    assert [event["step"] for event in workshop.events(workshop.folder / "run", "save")][-2:] == [4, 8]
