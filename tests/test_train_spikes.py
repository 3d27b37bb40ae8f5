"""Finite divergence: seen, said, survived by the good checkpoints, and the same for every layout and after a resume."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import rank_commands
from bloomery.base.signals import FIRST_SECONDS, PULSE
from bloomery.checkpoint.folder import complete_checkpoints
from bloomery.parallel.runner import Runner
from bloomery.train import loop, recover
from bloomery.train.run import Run
from bloomery.train.spikes import RECOVERY_STEPS, SpikeWatch
from bloomery.train.state import TrainState
from checkpoints import assert_same_tensors
from conftest import Workshop
from test_parallel import TWO, run_ranks, said

LONG = (
    "train.for=36 steps",
    "lr={peak: 1e-2, schedule: constant, warmup: 4 steps}",
    "checkpoint.phases=[{every: 10 steps}]",
)


def steps_of(run: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in complete_checkpoints(run / "checkpoints")]


# ---------------------------------------------------------------- the judge


def judged(losses: list[float], norms: list[float] | None = None, watch: SpikeWatch | None = None) -> list[int]:
    """The steps that spiked."""
    watch = watch or SpikeWatch()
    found = []
    for step, (loss, norm) in enumerate(zip(losses, norms or [1.0] * len(losses), strict=True), 1):
        if watch.follow(step, loss, norm, watch.limits(6.0, 1.0), factor=6.0, chance=math.log(50_000)):
            found.append(step)
    return found


def usual(dice: random.Random, steps: int, *, noise: float = 0.05) -> list[float]:
    """A loss that falls from 11 to 3, as losses do."""
    return [3 + 8 * math.exp(-step / 40) + dice.gauss(0, noise) for step in range(steps)]


def test_usual_losses_and_norms_are_no_spikes_and_rare_ones_are() -> None:
    for seed in range(20):
        dice = random.Random(seed)
        losses = usual(dice, 1500, noise=dice.choice([0.01, 0.05, 0.3]))
        norms = [max(0.2, 8 * math.exp(-step / 30)) * math.exp(dice.gauss(0, 0.4)) for step in range(1500)]
        assert judged(losses, norms) == []
        sources = [loss + (2 if dice.random() < 0.3 else 0) for loss in losses]  # batches of another kind come again
        assert len(judged(sources, norms)) < 5
        bad = dice.randrange(400, 1400)
        losses[bad] += 4
        norms[bad + 50] *= 100
        assert judged(losses, norms) == [bad + 1, bad + 51]


@pytest.mark.parametrize("per_step", [0.001, 0.01, 0.1, 1.0])
def test_a_loss_is_caught_however_slowly_it_climbs(per_step: float) -> None:
    losses = usual(random.Random(1), 300)
    climbing = [losses[-1] + per_step * step for step in range(math.ceil(3 / per_step) + 50)]
    found = judged(losses + climbing)
    assert found
    assert climbing[found[0] - 301] < 5.5, "3 and what is half as much again, and the noise"
    assert found[-1] == len(losses + climbing), "it never becomes the new normal"


def test_a_loss_that_explodes_from_the_first_update_on_is_caught() -> None:
    assert judged([10.9, 30.0, *[355.0] * 60])[:2] == [2, 3]


def test_a_stretch_ends_after_ten_normal_steps_in_a_row() -> None:
    watch = SpikeWatch()
    judged(usual(random.Random(2), 300), watch=watch)
    for loss in [9.0, 3.0, 9.0, *[3.0] * (RECOVERY_STEPS - 1)]:
        watch.follow(301, loss, 1.0, watch.limits(6.0, 1.0), factor=6.0, chance=10.0)
    assert (watch.since, watch.steps) == (301, 2)
    watch.follow(320, 3.0, 1.0, watch.limits(6.0, 1.0), factor=6.0, chance=10.0)
    assert (watch.since, watch.steps) == (None, 0)


@pytest.mark.parametrize(("seed", "rate"), [(1, "1e-3"), (4, "2e-2")])
def test_a_usual_run_has_no_false_alarm(workshop: Workshop, seed: int, rate: str) -> None:
    run = workshop.train("train.for=100 steps", "lr.decay=100 steps", f"lr.peak={rate}", f"seed={seed}")
    assert workshop.events(run, "spike") == []


# ---------------------------------------------------------------- divergence


def test_a_diverged_run_stops_and_names_the_checkpoint_that_retention_left(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    keep = "checkpoint={phases: [{every: 10 steps}], keep: {last: 1}}"
    long = ("train.for=400 steps", keep)
    workshop.train(*long, LONG[1], "train.exit_after=30 steps")
    hot = (*long, "lr={peak: 3, schedule: constant, warmup: 4 steps}")
    capsys.readouterr()
    run = workshop.train(*hot, changes=["lr"], code=4)
    text = capsys.readouterr().err
    assert "the last good checkpoint is step-00000020" in text.lower()
    assert "--from step-00000020" in text
    assert {20, 30} <= set(steps_of(run))
    stop = workshop.events(run, "stop")[-1]
    assert (stop["reason"], stop["last_good"]) == ("diverged", "step-00000020")
    spikes = workshop.events(run, "spike")
    assert 50 <= len(spikes) <= 52
    assert stop["step"] < 100
    # Started again as it is, it says the same at once and changes nothing.
    before = steps_of(run)
    workshop.train(*hot, changes=["lr"], code=4)
    assert steps_of(run) == before
    assert workshop.events(run, "stop")[-1]["step"] == stop["step"]
    # And from the good one it resumes; then retention is what it was.
    workshop.train("train.for=40 steps", keep, LONG[1], start_from="step-00000020", changes=["lr"])
    assert workshop.losses(run)[-1] < 4
    assert steps_of(run) == [30, 40]


def test_a_training_that_ends_before_the_patience_does_has_diverged_too(workshop: Workshop) -> None:
    run = workshop.train("lr={peak: 3, schedule: constant}", "train.for=20 steps", code=4)
    assert workshop.events(run, "stop")[-1]["last_good"] is None


def test_a_checkpoint_that_no_normal_steps_follow_does_not_replace_a_proven_one(workshop: Workshop) -> None:
    """The update of step 30 ruins the model, and nobody knows when 30 is saved."""
    keep = "checkpoint={phases: [{every: 10 steps}], keep: {last: 1}}"
    workshop.train(LONG[0], LONG[1], keep, "train.exit_after=29 steps")
    run = workshop.train(
        LONG[0], "lr={peak: 100, schedule: constant}", keep, "train.stop_after_spike_steps=5", changes=["lr"], code=4
    )
    assert workshop.events(run, "stop")[-1]["last_good"] == "step-00000020"


def test_steps_without_a_number_prove_no_checkpoint(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is saved at step 30 is ruined."""
    original = loop.train_step

    def ruined(run: Run, state: TrainState) -> None:
        original(run, state)
        if state.step == 29:
            with torch.no_grad():
                for piece in run.optimizer.pieces().values():
                    piece.tensor.fill_(math.nan)

    monkeypatch.setattr(loop, "train_step", ruined)
    run = workshop.train(*LONG, "train.stop_after_nan_steps=6", code=4)
    assert workshop.events(run, "stop")[-1]["last_good"] == "step-00000020"


# ---------------------------------------------------------------- one bad step


LAYOUTS = {"dp2": ("parallel.zero=1",), "pp2": ("parallel.pp=2",)}
SPIKE = 26
"""The step whose loss and gradients are planted. Steps 10, 20 and 30 are saved, and five normal ones follow 20."""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_skip_a_spike_or_go_back_together(workshop: Workshop, layout: str) -> None:
    """A skipped update equals one skipped for its NaN, and a rewind a run with train.skip, bit for bit."""

    def trained(run: str, factor: float, *overrides: str) -> Path:
        command = partial(rank_commands.with_spikes, [SPIKE], factor)
        assert run_ranks(workshop, *LONG, *TWO, *LAYOUTS[layout], *overrides, run=run, command=command) == 0, said(
            workshop
        )
        return workshop.folder / run

    rewound = trained("rewound", 1e3, "train.on_spike=rewind")
    (event,) = workshop.events(rewound, "rewind")
    assert (event["to"], event["passed_over"]) == ("step-00000020", [21, SPIKE + 1])
    assert_same_tensors(rewound, trained("passed", 1.0, "train.skip=['21-27 steps']"))
    if layout == "dp2":
        skipped = trained("skipped", 1e3, "train.on_spike=skip_update", "monitor.drift={every: 1 steps}")
        assert [event["step"] for event in workshop.events(skipped, "spike")] == [SPIKE]
        assert [event["step"] for event in workshop.events(skipped, "skipped_update")] == [SPIKE]
        assert_same_tensors(skipped, trained("nan", math.nan))


@pytest.fixture
def planting(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Multiply losses and gradients of some steps in this process, until the test ends."""
    original = Runner.forward_backward

    def plant(*steps: int, in_loss: bool = True) -> None:
        monkeypatch.setattr(Runner, "forward_backward", original)
        rank_commands.plant_spikes(steps, 1e3, in_loss=in_loss)

    monkeypatch.setattr(Runner, "forward_backward", original)
    return plant


@pytest.mark.parametrize("action", ["warn", "skip_update", "rewind"])
def test_a_run_stopped_around_a_spike_goes_on_as_one_that_was_not(
    workshop: Workshop, planting: Callable[..., None], action: str
) -> None:
    keep = "checkpoint.keep={last: 1}"
    planting(SPIKE)
    whole = workshop.train(*LONG, keep, f"train.on_spike={action}", run="whole")
    for stop in (SPIKE - 1, SPIKE, SPIKE + 1) if action == "rewind" else (SPIKE,):
        name = f"stopped-{stop}"
        workshop.train(*LONG, keep, f"train.on_spike={action}", f"train.exit_after={stop} steps", run=name)
        stopped = workshop.train(*LONG, keep, f"train.on_spike={action}", run=name)
        assert_same_tensors(whole, stopped)
        ends = [(run / "checkpoints/step-00000036/state.json").read_text() for run in (whole, stopped)]
        watches = [json.loads(text)["spikes"] for text in ends]
        assert watches[0] == watches[1]
        good = 30 if action == "rewind" else 20
        assert steps_of(stopped) == [good, 36], "what was saved in the stretch does not stay"
    assert [event["step"] for event in workshop.events(whole, "spike")] == [SPIKE]
    if action == "rewind":
        planting()
        assert_same_tensors(whole, workshop.train(*LONG, "train.skip=['21-27 steps']", run="passed"))


def test_no_checkpoint_is_deleted_in_a_stretch_of_spikes(workshop: Workshop, planting: Callable[..., None]) -> None:
    planting(*range(SPIKE, 38))
    run = workshop.train("train.for=55 steps", *LONG[1:], "checkpoint.keep={last: 1}", "train.exit_after=45 steps")
    manifests = {
        step: json.loads((run / f"checkpoints/step-{step:08d}/manifest.json").read_text()) for step in steps_of(run)
    }
    assert {step: said["suspicious"] for step, said in manifests.items()} == {
        10: False,
        20: False,
        30: True,
        40: True,
        45: True,
    }
    again = ("train.for=55 steps", *LONG[1:], "checkpoint.keep={last: 1}")
    workshop.train(*again, "train.exit_after=5 steps")
    assert [event["step"] for event in workshop.events(run, "spike_over")] == [47]
    assert steps_of(run) == [20, 50], "50 is not yet proven, and the suspicious ones are gone"
    workshop.train(*again)
    assert steps_of(run) == [50, 55]


def test_a_stretch_of_bad_data_is_passed_over_by_several_rewinds(
    workshop: Workshop, planting: Callable[..., None]
) -> None:
    planting(*range(SPIKE, SPIKE + 4))
    run = workshop.train(*LONG, "train.on_spike=rewind", "checkpoint.keep={last: 1}")
    assert [event["passed_over"] for event in workshop.events(run, "rewind")] == [[21, 27], [21, 29]]
    planting()
    assert_same_tensors(run, workshop.train(*LONG, "train.skip=['21-29 steps']", run="passed"))


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_rewind_takes_back_what_was_counted_and_scaled_since(
    workshop: Workshop, planting: Callable[..., None], precision: str
) -> None:
    """As if those steps had been left out: also the mean loss of an interval, and what a later start reads."""
    settings = (*LONG, f"precision={precision}", "train.on_spike=rewind", "monitor.log_every=10 steps")
    settings += ("loss_scale={initial: 256, window: 4 steps, hysteresis: 1}",) if precision == "fp16" else ()
    planting(SPIKE)
    rank_commands.plant_spikes([24], math.nan, in_loss=precision == "fp32")
    rewound = workshop.train(*settings, run="rewound")
    assert workshop.events(rewound, "rewind")[0]["passed_over"] == [21, 27]
    planting()
    passed = workshop.train(*settings, "train.skip=['21-27 steps']", run="passed")
    counts = ("step", "consumed_samples", "held_samples", "skipped_updates", "nan_steps", "nan_steps_in_a_row")
    states = [json.loads((run / "checkpoints/step-00000036/state.json").read_text()) for run in (rewound, passed)]
    for name in (*counts, "loss_scale"):
        assert states[0][name] == states[1][name], name
    found = [{each["step"]: each["losses"] for each in workshop.metrics(run)} for run in (rewound, passed)]
    assert found[0] == found[0] | found[1]


def test_a_damaged_good_checkpoint_is_said_and_the_one_before_it_is_used(
    workshop: Workshop, planting: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    planting(SPIKE)
    original = recover.rewind

    def rewind(run: Run, state: TrainState) -> None:
        path = run.durable.root / "step-00000020/tensors-00000.safetensors"
        path.write_bytes(path.read_bytes()[:-1])
        original(run, state)

    monkeypatch.setattr(recover, "rewind", rewind)
    run = workshop.train(*LONG, "train.on_spike=rewind")
    assert [event["to"] for event in workshop.events(run, "rewind")] == ["step-00000010"]
    (event,) = workshop.events(run, "damaged")
    assert (event["folder"], len(event["reasons"])) == ("step-00000020", 1)
    assert "step-00000020 is damaged (tensors-00000.safetensors has" in (run / "logs/main_log.txt").read_text()


def test_reading_the_good_checkpoint_is_no_hang(
    workshop: Workshop, planting: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    patience, original = [], recover.load_pieces

    def load(*words: Any, **options: Any) -> None:
        patience.append((PULSE.excused, PULSE.limit))
        original(*words, **options)

    monkeypatch.setattr(recover, "load_pieces", load)
    planting(SPIKE)
    workshop.train(*LONG, "train.on_spike=rewind")
    assert patience == [(True, FIRST_SECONDS)]
    assert not PULSE.excused


def test_rewinds_that_do_not_help_come_to_an_end(
    workshop: Workshop, planting: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    planting(*range(SPIKE, 200))
    run = workshop.train(*LONG[1:], "train.for=100 steps", "train.on_spike=rewind", code=4)
    assert len(workshop.events(run, "rewind")) == 10
    assert workshop.events(run, "stop")[-1]["last_good"] == "step-00000020"
    assert "10 rewinds in a row did not help" in capsys.readouterr().err


def test_without_a_good_checkpoint_a_rewind_is_said_to_be_impossible(
    workshop: Workshop, planting: Callable[..., None]
) -> None:
    planting(SPIKE)
    run = workshop.train(*LONG, "checkpoint.phases=[{every: 100 steps}]", "train.on_spike=rewind")
    assert workshop.metrics(run)[-1]["step"] == 36
    assert "there is no good checkpoint to go back to" in (run / "logs/main_log.txt").read_text()


def test_an_fp16_overflow_is_no_spike_and_a_spike_no_overflow(
    workshop: Workshop, planting: Callable[..., None]
) -> None:
    planting(SPIKE)
    run = workshop.train(
        *LONG, "train.for=28 steps", "precision=fp16", "loss_scale.initial=1024", "train.on_spike=skip_update"
    )
    assert [event["step"] for event in workshop.events(run, "skipped_update")] == [SPIKE]
    assert {record["loss_scale"] for record in workshop.metrics(run)} == {1024.0}


def test_a_gradient_norm_alone_is_a_spike_too(workshop: Workshop, planting: Callable[..., None]) -> None:
    planting(12, 67, in_loss=False)  # the first one comes while nobody knows what is normal
    run = workshop.train("train.for=68 steps", *LONG[1:], "train.on_spike=skip_update")
    assert [event["step"] for event in workshop.events(run, "skipped_update")] == [67]
