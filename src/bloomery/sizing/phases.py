"""Which steps save a checkpoint: the phases of `checkpoint.phases`, resolved to step numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bloomery.config.recipe import PhaseSection


@dataclass(frozen=True)
class SavePhase:
    """A stretch of steps with one saving interval."""

    first_step: int
    last_step: int | None
    """None: the phase has no end of its own."""
    every_steps: int | None
    """None: `auto`, decided while training from what saving costs."""

    def saves_at(self, step: int) -> bool:
        """At absolute multiples of the interval, whatever the phase's first step, and at the phase's own end."""
        if step < self.first_step or (self.last_step is not None and step > self.last_step):
            return False
        return step == self.last_step or (self.every_steps is not None and step % self.every_steps == 0)

    def steps(self, *, train_steps: int) -> Iterator[int]:
        """The saving steps within a training of `train_steps`, ascending."""
        last_step = train_steps if self.last_step is None else min(self.last_step, train_steps)
        if self.every_steps is None:
            yield from [last_step] if last_step == self.last_step else []
            return
        first_multiple = -(-self.first_step // self.every_steps) * self.every_steps
        yield from range(first_multiple, last_step + 1, self.every_steps)
        if last_step == self.last_step and last_step % self.every_steps and last_step >= self.first_step:
            yield last_step


@dataclass(frozen=True)
class PhaseSummary:
    """A phase as it falls within the training, for printing."""

    first_step: int
    last_step: int
    every_steps: int | None
    num_saves: int


def resolve_phases(phases: list[PhaseSection]) -> tuple[SavePhase, ...]:
    """Each phase starts on the step after the previous one's `until`."""
    resolved: list[SavePhase] = []
    first_step = 1
    for phase in phases:
        last_step = None if phase.until is None else phase.until.count
        every = None if phase.every == "auto" else phase.every.count
        resolved.append(SavePhase(first_step, last_step, every))
        if last_step is None:
            break
        first_step = last_step + 1
    return tuple(resolved)
