"""The whole training in numbers: every amount of the recipe as samples and steps, the batch ramp taken into account."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from bloomery.base.units import Amount
from bloomery.config.recipe import LrSection, Recipe
from bloomery.sizing.batch import BatchPlan
from bloomery.sizing.history import NO_HISTORY, History, Stretch
from bloomery.sizing.lr import LrPlan
from bloomery.sizing.phases import PhaseSummary, SavePhase, resolve_phases


@dataclass(frozen=True)
class TrainingPlan:
    """Pure arithmetic on a recipe; steps count from 1, and nothing here depends on the layout."""

    train_steps: int
    train_samples: int
    """Samples consumed after the last step."""
    asked_samples: int
    """What `train.for` says, in samples; whole steps make `train_samples` differ from it."""
    seq_length: int
    batch: BatchPlan
    lr: LrPlan
    warmup_ends_at_step: int
    """First step that has consumed the whole warm-up; 0 without one."""
    save_phases: tuple[SavePhase, ...]
    skip_ranges: tuple[tuple[int, int], ...]
    """First and last step of each range whose data is passed over, both included."""

    @classmethod
    def of(cls, recipe: Recipe, history: History = NO_HISTORY) -> Self:
        """`history`: of a run that has changed its batch or its sequence length on the way."""
        batch, seq_length = BatchPlan.of(recipe.batch, history), recipe.model.seq_length
        train_steps = amount_in_steps(recipe.train.for_, batch=batch, seq_length=seq_length)
        train_samples = batch.consumed_after_step(train_steps)
        lr = _lr_plan(recipe.lr, batch=batch, seq_length=seq_length, train_samples=train_samples)
        return cls(
            train_steps=train_steps,
            train_samples=train_samples,
            asked_samples=amount_in_samples(recipe.train.for_, batch=batch, seq_length=seq_length),
            seq_length=seq_length,
            batch=batch,
            lr=lr,
            warmup_ends_at_step=batch.first_step_reaching(lr.warmup_samples),
            save_phases=resolve_phases(recipe.checkpoint.phases),
            skip_ranges=tuple(_skip_range(text) for text in recipe.train.skip),
        )

    @classmethod
    def going_on(cls, recipe: Recipe, then: TrainingPlan, step: int) -> Self:
        """The plan of a run that has done `step` steps as `then` planned them. They stay counted as they were."""
        batch, seq_length = BatchPlan.of(recipe.batch), recipe.model.seq_length
        same = batch.is_rule_of(then.batch) and seq_length == then.seq_length
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
        return any(
            phase.every_steps is None
            and phase.first_step <= step
            and (phase.last_step is None or step <= phase.last_step)
            for phase in self.save_phases
        )

    def save_steps(self) -> list[int]:
        """All steps of the training after which the schedule saves."""
        return [step for phase in self.save_phases for step in phase.steps(train_steps=self.train_steps)]

    def phase_summaries(self) -> list[PhaseSummary]:
        """The saving phases that begin within the training."""
        return [
            PhaseSummary(
                first_step=phase.first_step,
                last_step=self.train_steps if phase.last_step is None else min(phase.last_step, self.train_steps),
                every_steps=phase.every_steps,
                num_saves=sum(1 for _ in phase.steps(train_steps=self.train_steps)),
            )
            for phase in self.save_phases
            if phase.first_step <= self.train_steps
        ]

    def is_skipped(self, step: int) -> bool:
        """Whether this step's data is passed over: it counts as consumed, and no update is made."""
        return any(first <= step <= last for first, last in self.skip_ranges)

    def _history_at(self, step: int) -> History:
        """What has been after this step."""
        samples = self.batch.consumed_after_step(step)
        lived = [level for level in self.batch.levels() if self.history.steps < level.first_step <= step]
        stretches = [
            Stretch(
                level.first_step,
                level.consumed_samples,
                self.tokens_at(level.consumed_samples),
                level.global_batch,
                self.seq_length,
            )
            for level in lived
        ]
        return History(step, samples, self.tokens_at(samples), (*self.history.stretches, *stretches))


def amount_in_steps(amount: Amount, *, batch: BatchPlan, seq_length: int) -> int:
    """Length of a training of this amount, in steps; a partial last batch is dropped."""
    if amount.unit == "steps":
        return amount.count
    return batch.train_steps_for_samples(amount_in_samples(amount, batch=batch, seq_length=seq_length))


def amount_in_samples(amount: Amount, *, batch: BatchPlan, seq_length: int) -> int:
    """Samples consumed at this point, counted from the start of training; a partial sequence of tokens is dropped."""
    match amount.unit:
        case "steps":
            return batch.consumed_after_step(amount.count)
        case "samples":
            return amount.count
        case "tokens":
            return batch.history.samples_at(amount.count, seq_length=seq_length)


def _lr_plan(lr: LrSection, *, batch: BatchPlan, seq_length: int, train_samples: int) -> LrPlan:
    decay_samples = train_samples
    if lr.decay is not None:
        decay_samples = amount_in_samples(lr.decay, batch=batch, seq_length=seq_length)
    return LrPlan(
        peak=lr.peak,
        min=lr.min,
        schedule=lr.schedule,
        warmup_samples=amount_in_samples(lr.warmup, batch=batch, seq_length=seq_length),
        decay_samples=decay_samples,
        cooldown_samples=_cooldown_samples(lr.cooldown, decay_samples, batch=batch, seq_length=seq_length),
    )


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


def _skip_range(text: str) -> tuple[int, int]:
    """'1000-1010 steps' -> (1000, 1010); the recipe has already checked the form."""
    first, last = text.removesuffix(" steps").split("-")
    return int(first), int(last)
