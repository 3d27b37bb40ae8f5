"""The global batch size of every step: Megatron's ramp-up rule to the last float, in O(levels), not O(steps)."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

from bloomery.config.recipe import BatchSection
from bloomery.sizing.history import NO_HISTORY, History


@dataclass(frozen=True)
class BatchLevel:
    """A stretch of steps with one global batch size."""

    global_batch: int
    first_step: int
    """Steps count from 1."""
    consumed_samples: int
    """Samples consumed before `first_step`."""


@dataclass(frozen=True)
class BatchPlan:
    """Converts between steps and samples. A ramp that starts at or above the full batch counts as no ramp.

    What the history says has been; the rest of the fields hold from its end on."""

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

    def is_rule_of(self, other: BatchPlan) -> bool:
        """Whether both give the same batch to the same samples, their histories apart."""
        return replace(self, history=other.history) == other

    def global_batch_at(self, consumed_samples: int) -> int:
        """Batch of the step that starts when this many samples have been consumed."""
        if consumed_samples < self.history.samples:
            return self._level_at(consumed_samples).global_batch
        if not self.ramp_samples or consumed_samples > self.ramp_samples:
            return self.global_batch_size
        # Megatron divides floats; integer arithmetic would move some level boundaries by a step.
        increments = (self.global_batch_size - self.ramp_start) / self.ramp_increment
        samples_per_increment = self.ramp_samples / increments
        return self.ramp_start + int(consumed_samples / samples_per_increment) * self.ramp_increment

    def levels(self) -> list[BatchLevel]:
        """Batch sizes that really occur, in order; a large batch can jump over a level. The last one never ends."""
        return list(self._levels)

    def global_batch_at_step(self, step: int) -> int:
        """Batch of this step; steps count from 1."""
        return self._level_of(step).global_batch

    def consumed_after_step(self, step: int) -> int:
        """Samples consumed when this step has ended; 0 after step 0."""
        if step <= 0:
            return 0
        level = self._level_of(step)
        return level.consumed_samples + (step - level.first_step + 1) * level.global_batch

    def first_step_reaching(self, samples: int) -> int:
        """Smallest step after which at least this many samples have been consumed; 0 for none."""
        if samples <= 0:
            return 0
        level = self._level_at(samples - 1)
        return level.first_step - 1 + -(-(samples - level.consumed_samples) // level.global_batch)

    def train_steps_for_samples(self, samples: int) -> int:
        """Steps of a training of this many samples, as Megatron counts them: the last partial batch is dropped.

        Where the training would end inside the ramp, Megatron takes one step off the whole ramp for every full batch
        that it exceeds, so the run consumes more samples than asked for. We keep its length.
        """
        if samples < self.history.samples:
            level = self._level_at(samples)
            return level.first_step - 1 + (samples - level.consumed_samples) // level.global_batch
        ramp_steps = self.history.steps
        if self.ramp_samples:
            ramp_steps = max(ramp_steps, self.first_step_reaching(self.ramp_samples + 1))
        return ramp_steps + (samples - self.consumed_after_step(ramp_steps)) // self.global_batch_size

    @cached_property
    def _levels(self) -> tuple[BatchLevel, ...]:
        past = [
            BatchLevel(stretch.global_batch, stretch.first_step, stretch.consumed_samples)
            for stretch in self.history.stretches
        ]
        done = self.history
        levels = [BatchLevel(self.global_batch_at(done.samples), done.steps + 1, done.samples)]
        while levels[-1].global_batch != self.global_batch_size:
            levels.append(self._level_after(levels[-1]))
        return (*past, *levels)

    def _level_after(self, level: BatchLevel) -> BatchLevel:
        """Bisects for the number of steps: the batch never falls as samples grow, float rounding included."""
        too_few, enough = 0, (self.ramp_samples - level.consumed_samples) // level.global_batch + 1
        while enough - too_few > 1:
            steps = (too_few + enough) // 2
            if self.global_batch_at(level.consumed_samples + steps * level.global_batch) > level.global_batch:
                enough = steps
            else:
                too_few = steps
        consumed_samples = level.consumed_samples + enough * level.global_batch
        return BatchLevel(self.global_batch_at(consumed_samples), level.first_step + enough, consumed_samples)

    def _level_at(self, consumed_samples: int) -> BatchLevel:
        index = bisect_right(self._levels, consumed_samples, key=lambda level: level.consumed_samples)
        return self._levels[index - 1]

    def _level_of(self, step: int) -> BatchLevel:
        return self._levels[bisect_right(self._levels, step, key=lambda level: level.first_step) - 1]
