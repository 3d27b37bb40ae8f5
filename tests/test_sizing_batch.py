"""The batch ramp against published logs and against a replay that goes step by step."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from bloomery.config.recipe import BatchSection, RampupSection
from bloomery.sizing.schedule import BatchLevel, BatchPlan


def plan(global_batch: int, ramp: tuple[int, int, int] | None = None) -> BatchPlan:
    rampup = None if ramp is None else RampupSection(start=ramp[0], increment=ramp[1], samples=ramp[2])
    return BatchPlan.of(BatchSection(micro_batch_size=1, global_batch_size=global_batch, rampup=rampup))


TR1 = plan(1024, (16, 16, 5_000_000))
TR11 = plan(2048, (192, 16, 9_765_625))


def megatron_batch(consumed: int, start: int, increment: int, samples: int, full: int) -> int:
    """The rule as Megatron writes it, independent of the code under test."""
    if consumed > samples:
        return full
    per = samples / ((full - start) / increment)
    return start + int(consumed / per) * increment


def megatron_train_steps(train_samples: int, start: int, increment: int, samples: int, full: int) -> int:
    steps = consumed = 0
    while consumed <= samples:
        consumed += megatron_batch(consumed, start, increment, samples, full)
        steps += 1
    return steps + (train_samples - consumed) // full


def test_tr1_levels_start_where_the_log_says() -> None:
    by_batch = {level.global_batch: level for level in TR1.levels}
    assert len(by_batch) == 64
    assert by_batch[16] == BatchLevel(16, first_step=1, consumed_samples=0)
    assert by_batch[32] == BatchLevel(32, first_step=4962, consumed_samples=79_376)
    assert by_batch[48] == BatchLevel(48, first_step=7442, consumed_samples=158_736)
    assert by_batch[64] == BatchLevel(64, first_step=9096, consumed_samples=238_128)
    assert by_batch[80] == BatchLevel(80, first_step=10_336, consumed_samples=317_488)
    assert by_batch[96] == BatchLevel(96, first_step=11_328, consumed_samples=396_848)
    assert by_batch[1008].first_step == 23_378
    assert by_batch[1024] == BatchLevel(1024, first_step=23_457, consumed_samples=5_000_528)
    first_steps = [level.first_step for level in TR1.levels]
    assert [b - a for a, b in pairwise(first_steps)][:6] == [4961, 2480, 1654, 1240, 992, 827]


def test_tr1_consumed_samples_equal_the_chronicles() -> None:
    assert TR1.consumed_after_step(29_020) == 10_698_064
    assert TR1.consumed_after_step(33_240) == 15_019_344
    assert TR1.first_step_reaching(216_320) == 8641
    assert TR1.consumed_after_step(8641) == 216_336
    assert TR1.consumed_after_step(2000) == 32_000


def test_train_steps_equal_megatrons() -> None:
    assert TR1.train_steps_for_samples(300_000_000) == 311_541
    assert TR1.train_steps_for_samples(150_000_000) == 165_057
    assert plan(16, (2, 2, 1000)).train_steps_for_samples(10_000) == 748
    assert TR11.train_steps_for_samples(220_000_000) == 115_311


def test_training_that_ends_inside_the_ramp_keeps_megatrons_floor() -> None:
    asked = 1_000_000
    steps = TR1.train_steps_for_samples(asked)
    assert steps == megatron_train_steps(asked, 16, 16, 5_000_000, 1024) == 19_549
    assert TR1.consumed_after_step(steps) > asked


def test_without_a_ramp_everything_is_a_division() -> None:
    flat = plan(16)
    assert flat.levels == (BatchLevel(16, first_step=1, consumed_samples=0),)
    assert flat.train_steps_for_samples(1607) == 100
    assert flat.consumed_after_step(0) == 0
    assert flat.consumed_after_step(7) == 112
    assert [flat.first_step_reaching(samples) for samples in (0, 1, 16, 17)] == [0, 1, 1, 2]
    assert flat.global_batch_at(10**12) == 16


def test_a_ramp_that_does_not_grow_is_no_ramp() -> None:
    assert plan(16, (16, 4, 100)).levels == plan(16, (32, 4, 100)).levels == plan(16).levels


@pytest.mark.parametrize("seed", range(16))
def test_plan_equals_a_step_by_step_replay(seed: int) -> None:
    rng = random.Random(seed)
    increment = rng.randint(1, 20)
    start = rng.randint(1, 60)
    # Every fourth ramp is not divisible: check rules refuse it, but the arithmetic must survive it.
    full = start + increment * rng.randint(1, 30) + (rng.randint(1, increment) if seed % 4 == 0 else 0)
    samples = rng.choice([rng.randint(1, 200), rng.randint(1, 20_000), full * rng.randint(1, 50)])
    tested = plan(full, (start, increment, samples))

    levels: list[BatchLevel] = []
    reached: list[tuple[int, int]] = [(0, 0)]
    consumed, step = 0, 0
    while consumed <= samples + 5 * full:
        step += 1
        batch = megatron_batch(consumed, start, increment, samples, full)
        if not levels or levels[-1].global_batch != batch:
            levels.append(BatchLevel(batch, step, consumed))
        assert tested.global_batch_at(consumed) == tested.global_batch_at_step(step) == batch
        consumed += batch
        reached.append((step, consumed))
        assert tested.consumed_after_step(step) == consumed
    assert list(tested.levels) == levels
    for wanted in [rng.randint(0, consumed) for _ in range(50)] + [after for _, after in reached[:50]]:
        assert tested.first_step_reaching(wanted) == next(step for step, after in reached if after >= wanted)
    for wanted in (0, samples // 2, samples, samples + 1, samples * 3):
        assert tested.train_steps_for_samples(wanted) == megatron_train_steps(wanted, start, increment, samples, full)
