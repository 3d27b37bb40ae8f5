"""Learning rate, save schedule and conversions of amounts, on the published runs."""

from __future__ import annotations

import pytest

from bloomery.config.load import load_recipe
from bloomery.config.recipe import Recipe
from bloomery.sizing.schedule import LrPlan, TrainingPlan


def recipe(name: str, *overrides: str) -> Recipe:
    return load_recipe(name, list(overrides)).recipe


def plan(name: str, *overrides: str) -> TrainingPlan:
    return TrainingPlan.of(recipe(name, *overrides))


TR1_LR = LrPlan(1e-4, 1e-5, "cosine", warmup_samples=216_320, decay_samples=126_953_125)
TR11_LR = LrPlan(6e-5, 6e-6, "cosine", warmup_samples=183_105, decay_samples=200_000_000)


@pytest.mark.parametrize(
    ("lr", "samples", "logged"),
    [
        (TR1_LR, 108_160, "5.000E-05"),
        (TR1_LR, 216_320, "1.000E-04"),
        (TR1_LR, 63_584_722, "5.500E-05"),
        (TR1_LR, 126_953_125, "1.000E-05"),
        (TR11_LR, 59_312, "1.944E-05"),
        (TR11_LR, 9_841_584, "5.969E-05"),
        (TR11_LR, 177_929_136, "7.609E-06"),
    ],
)
def test_lr_equals_the_published_log_line(lr: LrPlan, samples: int, logged: str) -> None:
    assert f"{lr.at(samples):.3E}" == logged


def test_linear_constant_and_wsd_schedules() -> None:
    linear = LrPlan(1.0, 0.2, "linear", warmup_samples=100, decay_samples=300)
    assert [linear.at(n) for n in (0, 50, 100, 200, 300, 301)] == pytest.approx([0, 0.5, 1.0, 0.6, 0.2, 0.2])
    constant = LrPlan(1.0, 0.2, "constant", warmup_samples=100, decay_samples=300)
    assert [constant.at(n) for n in (50, 100, 10_000)] == [0.5, 1.0, 1.0]
    wsd = LrPlan(1.0, 0.2, "wsd", warmup_samples=100, decay_samples=1000, cooldown_samples=200)
    assert [wsd.at(n) for n in (50, 101, 800, 900, 1000, 2000)] == pytest.approx([0.5, 1.0, 1.0, 0.6, 0.2, 0.2])
    assert [LrPlan(1.0, 0.2, "wsd", 0, 1000).at(n) for n in (1, 999, 1000)] == [1.0, 1.0, 0.2]


def test_without_warmup_the_first_step_has_the_peak() -> None:
    azure = plan("bloom-azure-20b")
    assert azure.warmup_ends_at_step == 0
    assert f"{azure.lr_at_step(9):.3E}" == "6.000E-05"


def test_tr1_plan_has_the_numbers_of_the_log() -> None:
    tr1 = plan("tr1-13b")
    assert tr1.train_steps == 311_541
    assert tr1.train_samples == tr1.batch.consumed_after_step(311_541) <= 300_000_000
    assert tr1.asked_samples == 300_000_000
    assert tr1.train_tokens == tr1.train_samples * 2048
    assert tr1.warmup_ends_at_step == 8641
    assert tr1.lr == TR1_LR
    assert tr1.lr_at_step(8640) == pytest.approx(1e-4 * 216_288 / 216_320)


def test_bloom_plan_replays_a_published_log_line() -> None:
    bloom = plan("bloom-176b")
    assert bloom.lr == TR11_LR
    assert bloom.batch.consumed_after_step(12_695) == 9_841_584
    assert bloom.batch.global_batch_at_step(12_695) == 2048
    assert f"{bloom.lr_at_step(12_695):.3E}" == "5.969E-05"
    assert 341e9 < bloom.train_tokens <= 366e9
    assert plan("bloom-176b", "train.for=220_000_000 samples").train_steps == 115_311


def test_amounts_convert_with_the_ramp() -> None:
    in_steps = plan("tr1-13b", "train.for=5000 steps", "lr.warmup=2000 steps", "lr.decay=4962 steps")
    assert in_steps.train_steps == 5000
    assert in_steps.lr.warmup_samples == 32_000
    assert in_steps.lr.decay_samples == 79_376 + 32
    in_tokens = plan("tr1-13b", "train.for=614.4B tokens", "lr.warmup=375M tokens", "lr.decay=260B tokens")
    assert in_tokens.train_steps == 311_541
    assert in_tokens.lr.warmup_samples == 183_105
    assert in_tokens.lr.decay_samples == 126_953_125


def test_the_decay_ends_with_the_training_unless_it_is_given() -> None:
    tr1 = plan("tr1-13b", "lr.decay=null")
    assert tr1.lr.decay_samples == tr1.train_samples
    assert tr1.lr_at_step(tr1.train_steps) == 1e-5


def test_a_cooldown_in_steps_is_counted_back_from_the_end() -> None:
    overrides = ("lr.schedule=wsd", "lr.decay=null", "train.for=30_000 steps")
    assert plan("tr1-13b", *overrides, "lr.cooldown=100 steps").lr.cooldown_samples == 100 * 1024
    assert plan("tr1-13b", *overrides, "lr.cooldown=5000 samples").lr.cooldown_samples == 5000


def test_tr1_saves_in_three_phases() -> None:
    tr1 = plan("tr1-13b")
    steps = tr1.save_steps()
    assert steps[:10] == list(range(10, 101, 10))
    assert steps[10:60] == list(range(108, 991, 18))
    assert steps[60:63] == [1000, 1500, 3000]
    assert steps[-1] == 310_500
    assert [len(phase.steps(train_steps=tr1.train_steps)) for phase in tr1.save_phases] == [10, 51, 207]
    assert [step for step in range(1, 5000) if tr1.is_save_step(step)] == [step for step in steps if step < 5000]


@pytest.mark.parametrize("train_steps", [5, 100, 105, 1000, 1600])
def test_save_steps_stay_within_a_short_training(train_steps: int) -> None:
    short = plan("tr1-13b", f"train.for={train_steps} steps")
    assert short.save_steps() == [step for step in range(1, train_steps + 1) if short.is_save_step(step)]


def test_skip_ranges_include_both_ends() -> None:
    skipping = plan("quickstart", "train.skip=['10-12 steps', '20-20 steps']")
    assert [step for step in range(1, 30) if skipping.is_skipped(step)] == [10, 11, 12, 20]
