"""The whole training in numbers: batch ramp, learning rate, every amount as samples and steps; when to save, which
checkpoints to keep, and how many that makes."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import Any, Self, TypeVar

from bloomery.base.errors import Problem, RecipeError
from bloomery.base.units import Amount, Duration, Epochs, format_seconds
from bloomery.config.recipe import BatchSection, KeepSection, PhaseSection, Recipe, Schedule


@dataclass(frozen=True)
class BatchLevel:
    """Steps with one global batch size."""

    global_batch: int
    first_step: int
    """Steps count from 1."""
    consumed_samples: int
    """Before `first_step`."""


@dataclass(frozen=True)
class Stretch(BatchLevel):
    """Steps of the past, which also had one sequence length."""

    consumed_tokens: int
    """Before `first_step`."""
    seq_length: int


Level = TypeVar("Level", bound=BatchLevel)


def _begun(levels: Sequence[Level], count: int, unit: str) -> Level:
    """The last level that has begun after so many steps, samples or tokens."""
    return levels[bisect_right(levels, count, key=attrgetter(unit)) - 1]


@dataclass(frozen=True)
class History:
    """Empty for a run that has never changed either. Kept in the checkpoint."""

    steps: int = 0
    """Steps done when the present batch and sequence length took over; samples and tokens of these steps follow."""
    samples: int = 0
    tokens: int = 0
    stretches: tuple[Stretch, ...] = ()
    """Of these steps, in order."""

    def tokens_at(self, consumed_samples: int, *, seq_length: int) -> int:
        """Tokens in the first samples of the run; `seq_length` is the present one."""
        if consumed_samples >= self.samples:
            return self.tokens + (consumed_samples - self.samples) * seq_length
        stretch = _begun(self.stretches, consumed_samples, "consumed_samples")
        return stretch.consumed_tokens + (consumed_samples - stretch.consumed_samples) * stretch.seq_length

    def samples_at(self, consumed_tokens: int, *, seq_length: int) -> int:
        """Whole samples in the first tokens of the run; `seq_length` is the present one."""
        if consumed_tokens >= self.tokens:
            return self.samples + (consumed_tokens - self.tokens) // seq_length
        stretch = _begun(self.stretches, consumed_tokens, "consumed_tokens")
        return stretch.consumed_samples + (consumed_tokens - stretch.consumed_tokens) // stretch.seq_length


NO_HISTORY = History()
"""Of a run that has never changed its batch or its sequence length."""


@dataclass(frozen=True)
class BatchPlan:
    """Converts between steps and samples. A ramp that starts at or above the full batch counts as no ramp.

    The history is fixed; the other fields apply from its end on."""

    global_batch_size: int
    ramp_start: int
    ramp_increment: int
    ramp_samples: int
    """0: no ramp. Counted from the start of the run, like all samples."""
    history: History = NO_HISTORY

    @classmethod
    def of(cls, batch: BatchSection, history: History = NO_HISTORY) -> Self:
        full, ramp = batch.global_batch_size, batch.rampup
        if ramp is None or ramp.start >= full:
            return cls(full, ramp_start=full, ramp_increment=1, ramp_samples=0, history=history)
        return cls(full, ramp.start, ramp.increment, ramp.samples, history)

    def global_batch_at(self, consumed_samples: int) -> int:
        """Batch of the step that starts when this many samples have been consumed."""
        if consumed_samples < self.history.samples:
            return _begun(self.levels, consumed_samples, "consumed_samples").global_batch
        if not self.ramp_samples or consumed_samples > self.ramp_samples:
            return self.global_batch_size
        # Megatron divides floats; integer arithmetic would move some level boundaries by a step.
        increments = (self.global_batch_size - self.ramp_start) / self.ramp_increment
        samples_per_increment = self.ramp_samples / increments
        return self.ramp_start + int(consumed_samples / samples_per_increment) * self.ramp_increment

    @cached_property
    def levels(self) -> tuple[BatchLevel, ...]:
        """Batch sizes that really occur, in order; a large batch can jump over a level. The last one never ends."""
        done = self.history
        levels = [BatchLevel(self.global_batch_at(done.samples), done.steps + 1, done.samples)]
        while levels[-1].global_batch != self.global_batch_size:
            levels.append(self._level_after(levels[-1]))
        return (*done.stretches, *levels)

    def samples_in(self, amount: Amount, *, seq_length: int) -> int:
        """Samples consumed at this point, counted from the start of training; a partial sequence is dropped."""
        match amount.unit:
            case "steps":
                return self.consumed_after_step(amount.count)
            case "samples":
                return amount.count
            case "tokens":
                return self.history.samples_at(amount.count, seq_length=seq_length)
            case "documents":
                raise AssertionError("no length of a training")

    def global_batch_at_step(self, step: int) -> int:
        """Batch of this step; steps count from 1."""
        return _begun(self.levels, step, "first_step").global_batch

    def consumed_after_step(self, step: int) -> int:
        """Samples consumed when this step has ended; 0 after step 0."""
        if step <= 0:
            return 0
        level = _begun(self.levels, step, "first_step")
        return level.consumed_samples + (step - level.first_step + 1) * level.global_batch

    def first_step_reaching(self, samples: int) -> int:
        """Smallest step after which at least this many samples have been consumed; 0 for none."""
        if samples <= 0:
            return 0
        level = _begun(self.levels, samples - 1, "consumed_samples")
        return level.first_step - 1 + -(-(samples - level.consumed_samples) // level.global_batch)

    def train_steps_for_samples(self, samples: int) -> int:
        """Steps of a training of this many samples, as Megatron counts them: the last partial batch is dropped.

        Where the training would end inside the ramp, Megatron takes one step off the whole ramp for every full batch
        that it exceeds, so the run consumes more samples than configured. We keep its length.
        """
        if samples < self.history.samples:
            level = _begun(self.levels, samples, "consumed_samples")
            return level.first_step - 1 + (samples - level.consumed_samples) // level.global_batch
        ramp_steps = self.history.steps
        if self.ramp_samples:
            ramp_steps = max(ramp_steps, self.first_step_reaching(self.ramp_samples + 1))
        return ramp_steps + (samples - self.consumed_after_step(ramp_steps)) // self.global_batch_size

    def _level_after(self, level: BatchLevel) -> BatchLevel:
        """The batch never falls as samples grow, float rounding included, so steps can be bisected for."""
        batch, samples = level.global_batch, level.consumed_samples
        candidates = range(1, (self.ramp_samples - samples) // batch + 1)
        steps = 1 + bisect_right(candidates, batch, key=lambda steps: self.global_batch_at(samples + steps * batch))
        samples += steps * batch
        return BatchLevel(self.global_batch_at(samples), level.first_step + steps, samples)


@dataclass(frozen=True)
class LrPlan:
    """Linear warm-up from zero, then a schedule that ends at `decay_samples`; afterwards exactly `min`."""

    peak: float
    min: float
    schedule: Schedule
    warmup_samples: int
    decay_samples: int
    """Counted from the start of training, warm-up included. A constant schedule ignores it."""
    cooldown_samples: int = 0
    """Length of the final decay (wsd only), which ends at `decay_samples`."""

    def at(self, samples: int) -> float:
        """The rate of an update that brings the consumed samples to this number: also what the log prints."""
        if self.warmup_samples > 0 and samples <= self.warmup_samples:
            return self.peak * samples / self.warmup_samples
        if self.schedule == "constant":
            return self.peak
        if samples >= self.decay_samples:
            return self.min
        if self.schedule == "wsd":
            left = (self.decay_samples - samples) / self.cooldown_samples if self.cooldown_samples > 0 else 1.0
            share = min(1.0, left)
        else:
            done = (samples - self.warmup_samples) / (self.decay_samples - self.warmup_samples)
            share = 1.0 - done if self.schedule == "linear" else 0.5 * (math.cos(math.pi * done) + 1.0)
        return self.min + share * (self.peak - self.min)


@dataclass(frozen=True)
class SavePhase:
    """A stretch of steps with one saving interval."""

    first_step: int
    last_step: int | None
    """None: the phase has no end of its own."""
    every_steps: int | None
    """None: `auto`, decided while training from what saving costs; or by the clock."""
    every_seconds: float | None = None

    def covers(self, step: int) -> bool:
        return self.first_step <= step and (self.last_step is None or step <= self.last_step)

    def saves_at(self, step: int) -> bool:
        return self.covers(step) and (step == self.last_step or step % (self.every_steps or math.inf) == 0)

    def steps(self, *, train_steps: int) -> list[int]:
        """The saving steps within a training of `train_steps`, ascending: absolute multiples of the interval, whatever
        the phase's first step, and the phase's own end."""
        last, every = min(train_steps, self.last_step or train_steps), self.every_steps
        multiples = range(-(-self.first_step // every) * every, last + 1, every) if every else range(0)
        return [*multiples, *([last] if last == self.last_step and last not in multiples else [])]


def resolve_phases(phases: list[PhaseSection]) -> tuple[SavePhase, ...]:
    """Each phase starts on the step after the previous one's `until`."""
    last_steps = [phase.until.count if phase.until else None for phase in phases]
    steps = [phase.every.count if isinstance(phase.every, Amount) else None for phase in phases]
    seconds = [phase.every.seconds if isinstance(phase.every, Duration) else None for phase in phases]
    return tuple(map(SavePhase, [1, *(last + 1 for last in last_steps if last)], last_steps, steps, seconds))


@dataclass(frozen=True)
class TrainingPlan:
    """Pure arithmetic on a recipe; steps count from 1, and nothing here depends on the layout."""

    train_steps: int
    train_samples: int
    """Samples consumed after the last step."""
    asked_samples: int
    """`train.for` in samples; whole steps make `train_samples` differ from it."""
    seq_length: int
    batch: BatchPlan
    lr: LrPlan
    warmup_ends_at_step: int
    """First step that has consumed the whole warm-up; 0 without one."""
    save_phases: tuple[SavePhase, ...]
    skip_ranges: tuple[tuple[int, int], ...]
    """First and last step of each range whose data is skipped, both included."""

    @classmethod
    def of(cls, recipe: Recipe, history: History = NO_HISTORY) -> Self:
        """`history`: of a run that has changed its batch or its sequence length on the way."""
        batch, seq_length, lr = BatchPlan.of(recipe.batch, history), recipe.model.seq_length, recipe.lr
        length = recipe.train.for_
        if isinstance(length, Epochs):
            rule, remedy = "they are counted when the data is opened", "give train.for as `inspect schedule` counts it"
            raise RecipeError(Problem(f"train.for is {length}", rule, remedy))
        asked_samples = batch.samples_in(length, seq_length=seq_length)
        train_steps = length.count if length.unit == "steps" else batch.train_steps_for_samples(asked_samples)
        train_samples = batch.consumed_after_step(train_steps)
        warmup_samples = batch.samples_in(lr.warmup, seq_length=seq_length)
        decay_samples = batch.samples_in(lr.decay, seq_length=seq_length) if lr.decay is not None else train_samples
        cooldown_samples = _cooldown_samples(lr.cooldown, decay_samples, batch=batch, seq_length=seq_length)
        return cls(
            train_steps=train_steps,
            train_samples=train_samples,
            asked_samples=asked_samples,
            seq_length=seq_length,
            batch=batch,
            lr=LrPlan(lr.peak, lr.min, lr.schedule, warmup_samples, decay_samples, cooldown_samples),
            warmup_ends_at_step=batch.first_step_reaching(warmup_samples),
            save_phases=resolve_phases(recipe.checkpoint.phases),
            skip_ranges=tuple(skip_range(text) for text in recipe.train.skip),
        )

    @classmethod
    def resumed(cls, recipe: Recipe, then: TrainingPlan, step: int) -> Self:
        """The plan of a run that has done `step` steps as `then` planned them. They stay counted as they were."""
        batch, seq_length = BatchPlan.of(recipe.batch), recipe.model.seq_length
        same = replace(batch, history=then.history) == then.batch and seq_length == then.seq_length
        return cls.of(recipe, then.history if same else then._history_at(step))

    @property
    def history(self) -> History:
        return self.batch.history

    @property
    def train_tokens(self) -> int:
        """Tokens consumed after the last step."""
        return self.tokens_at(self.train_samples)

    def tokens_at(self, consumed_samples: int) -> int:
        """Tokens in the first samples of the run."""
        return self.history.tokens_at(consumed_samples, seq_length=self.seq_length)

    def lr_at_step(self, step: int) -> float:
        """The rate that the update of this step uses: that of the samples consumed once the step has ended."""
        return self.lr.at(self.batch.consumed_after_step(step))

    def is_save_step(self, step: int) -> bool:
        """Whether the schedule saves after this step; a run also saves when it stops."""
        return any(phase.saves_at(step) for phase in self.save_phases)

    def decides_saves_at(self, step: int) -> bool:
        """Whether this step is in a phase of `every: auto`."""
        return any(each.every_steps is each.every_seconds is None and each.covers(step) for each in self.save_phases)

    def seconds_between_saves_at(self, step: int) -> float:
        """Infinite where the clock does not decide."""
        return next((each.every_seconds or math.inf for each in self.save_phases if each.covers(step)), math.inf)

    def save_steps(self) -> list[int]:
        """All steps of the training after which the schedule saves."""
        return [step for phase in self.save_phases for step in phase.steps(train_steps=self.train_steps)]

    def is_skipped(self, step: int) -> bool:
        """Whether this step's data is skipped: it counts as consumed, and no update is made."""
        return any(first <= step <= last for first, last in self.skip_ranges)

    def _history_at(self, step: int) -> History:
        """What has been after this step."""
        samples = self.batch.consumed_after_step(step)
        stretches = [
            Stretch(**asdict(level), consumed_tokens=self.tokens_at(level.consumed_samples), seq_length=self.seq_length)
            for level in self.batch.levels
            if self.history.steps < level.first_step <= step
        ]
        return History(step, samples, self.tokens_at(samples), (*self.history.stretches, *stretches))


def _cooldown_samples(cooldown: Amount | None, decay_samples: int, *, batch: BatchPlan, seq_length: int) -> int:
    """A cooldown is a length that ends at `decay_samples`, so its steps have the batch size of that place."""
    if cooldown is None:
        return 0
    if cooldown.unit == "samples":
        return cooldown.count
    if cooldown.unit == "tokens":
        past, length = batch.history, cooldown.count // seq_length
        if length <= decay_samples - past.samples or not past.stretches:
            return length
        begins_after = past.tokens_at(decay_samples, seq_length=seq_length) - cooldown.count  # in the past
        return decay_samples - past.samples_at(max(0, begins_after), seq_length=seq_length)
    begins_after_step = batch.first_step_reaching(decay_samples) - cooldown.count
    return decay_samples - batch.consumed_after_step(begins_after_step)


def skip_range(text: str) -> tuple[int, int]:
    """'1000-1010 steps' -> (1000, 1010); the recipe has already checked the form."""
    first, last = text.removesuffix(" steps").split("-")
    return int(first), int(last)


_DEVICE_HOURS_BETWEEN_FAILURES = 50_000
"""Llama 3's 16,384 GPUs were interrupted 419 times unexpectedly in 54 days: once in 50,000 hours of one device."""
_STORAGE_SHARE = 0.5
"""Of the time, storage is busy with saving at most this share."""


@dataclass(frozen=True)
class Cadence:
    every_steps: int
    reasoning: str
    """How it came about, for people."""


def seconds_between_failures(configured: Duration | None, *, num_devices: int) -> float:
    """From the recipe, or else from the failure rate of this many devices."""
    return configured.seconds if configured is not None else _DEVICE_HOURS_BETWEEN_FAILURES * 3600 / num_devices


def daly_seconds(cost_seconds: float, failure_seconds: float) -> float:
    """The interval between saves that loses the least time (Daly 2006, the higher-order estimate of Young's rule)."""
    if cost_seconds >= 2 * failure_seconds:
        return failure_seconds
    ratio = cost_seconds / (2 * failure_seconds)
    return math.sqrt(2 * cost_seconds * failure_seconds) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_seconds


def cadence(*, blocking_seconds: float, persist_seconds: float, step_seconds: float, failure_seconds: float) -> Cadence:
    """From a save's measured costs: how long training stood still for it, and how long storage was busy."""
    seconds = max(daly_seconds(blocking_seconds, failure_seconds), persist_seconds / _STORAGE_SHARE)
    steps = max(1, math.ceil(seconds / step_seconds))
    lost = blocking_seconds / (steps * step_seconds) + steps * step_seconds / (2 * failure_seconds)
    why = (
        f"a save stops training for {blocking_seconds:.3g}s and storage needs {persist_seconds:.3g}s for it; with a "
        f"failure every {format_seconds(failure_seconds)} and steps of {step_seconds:.3g}s, {steps:,} steps between "
        f"saves lose the least time (Young/Daly): {100 * lost:.2g}%"
    )
    return Cadence(steps, why)


def kept_steps(
    steps: list[int], keep: KeepSection, losses: Mapping[int, float], suspicious: Collection[int] = ()
) -> set[int]:
    """Which of these steps to keep. `losses`: of those that were evaluated; one that is no number is never the best.
    `suspicious`: they do not count among the last, but the newest of all stays."""
    newest = sorted(set(steps) - set(suspicious))[-max(1, keep.last) :]
    kept = {max(steps), *newest} if steps else set()
    kept |= set(keep.steps) & set(steps)
    if keep.every is not None:
        kept |= {step for step in steps if step % keep.every.count == 0}
    numbers = [step for step, loss in losses.items() if math.isfinite(loss)]
    best = sorted(numbers, key=lambda step: (losses[step], step))
    return kept | set(best[: keep.best])


def kept_checkpoints(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """How many checkpoints lie in each place when the training ends: `durable` (the run folder), and `local` and
    `upload` where the recipe has them. `being_written`: 1 where older ones are deleted: that happens after a save, so
    there must be room for one more."""
    section, plan = recipe.checkpoint, TrainingPlan.of(recipe)
    saves = sorted({*plan.save_steps(), plan.train_steps})
    places = {"durable": _kept(saves, section.keep, "at least")}  # a run also saves when it stops, or on request
    if section.local is not None:
        places["local"] = {"count": section.local.keep, "being_written": 1, "bound": "up to"}
    if (upload := section.upload) is not None:
        every = upload.every.count if isinstance(upload.every, Amount) else 1
        copies = [step for step in saves if step % every == 0 or step == plan.train_steps]
        places["upload"] = _kept(copies, None, "about")  # of copies that wait, only the newest goes
    return places


def _kept(steps: list[int], keep: KeepSection | None, unless_bounded: str) -> dict[str, Any]:
    if keep is None:
        return {"count": len(steps), "being_written": 0, "bound": unless_bounded}
    if keep.every is None:
        return {"count": keep.last + len(keep.steps) + keep.best, "being_written": 1, "bound": "up to"}
    return {"count": len(kept_steps(steps, keep, {})), "being_written": 1, "bound": unless_bounded}
