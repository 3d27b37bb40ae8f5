"""When to stop: the recipe's amounts, the clock, signals, and files in control/, where `save` also requests a save."""

import math
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bloomery.base import exit_codes, signals
from bloomery.base.errors import BloomeryError, DivergedError, Problem
from bloomery.base.ranks import ALONE, Ranks
from bloomery.base.signals import PULSE, job_seconds
from bloomery.base.units import Amount, Duration, format_seconds
from bloomery.checkpoint.folder import Writer
from bloomery.config.recipe import TrainSection
from bloomery.monitor.meters import IntervalMeter
from bloomery.monitor.record import StepRecord
from bloomery.sizing.schedule import TrainingPlan
from bloomery.train.spikes import RECOVERY_STEPS
from bloomery.train.state import TrainState

REQUESTS = ("save", "profile")
"""Files in control/ that do not stop a run. A save that is due by the clock is such a request too."""
_POLL_SECONDS = 0.2
_SLOW, _LEAST_SECONDS = 3.0, 3.0
"""After a signal, a step may take so many times the slowest of the last ten, and always so long."""
_REMEDIES = {
    "diverged": "lower lr.peak, or pass over the bad data with train.skip",
    "drift": "check the machines of these ranks, then resume with --from a checkpoint from before the drift",
}


@dataclass(frozen=True)
class StopReason:
    kind: str
    """finished, exit_after, deadline, signal, control, error, diverged or drift."""
    text: str
    error: BloomeryError | None = None
    """What to end with, at once and without a save: a newer start has the run, or nothing was learned."""
    last_good: str | None = None
    """The last good checkpoint of a run that has diverged."""

    @property
    def finished(self) -> bool:
        """Whether the training is complete, so that starting it again would do nothing."""
        return self.kind == "finished"

    def facts(self) -> dict[str, Any]:
        """For the ledger."""
        return {"reason": self.kind, "text": self.text, "finished": self.finished, "last_good": self.last_good}

    @property
    def is_failure(self) -> bool:
        """Whether the state may be worse than that of older checkpoints."""
        return self.kind in _REMEDIES


def seconds_left(limit: Amount | Duration | None, first: tuple[int, int, int], record: StepRecord) -> float:
    """Of this job, by `train.exit_after`. `first`: steps, samples and tokens before it."""
    if limit is None:
        return math.inf
    if isinstance(limit, Duration):
        return max(0.0, limit.seconds - job_seconds())
    at = ("steps", "samples", "tokens").index(limit.unit)
    done = (record.step, record.consumed_samples, record.consumed_tokens)[at] - first[at]
    rate = (1 / record.seconds_per_step, record.samples_per_second, record.tokens_per_second)[at]
    return max(0, limit.count - done) / rate if rate else math.inf


@dataclass
class StopRules:
    """Asked once before every step. Signals only set a flag; the loop stops between two steps, after a save."""

    plan: TrainingPlan
    section: TrainSection
    meter: IntervalMeter
    control: Path
    """The folder of control files."""
    save_seconds_estimate: float = 0.0
    """For the deadline, until a save was measured."""
    ranks: Ranks = ALONE
    writer: Writer | None = None
    _signal: signal.Signals | None = None
    _signalled_at: float = 0.0
    _requested: StopReason | None = None
    _polled_at: float = 0.0
    _seen: set[str] = field(default_factory=set)
    """REQUESTS seen since the last agreement."""
    _agreed: set[str] = field(default_factory=set)
    _after_save: bool = False
    """Whether control/stop-after-save was touched."""
    _first: tuple[int, int] | None = None
    """(step, samples) at which this job began."""
    _last_save: tuple[int, float] = field(default_factory=lambda: (-1, time.monotonic()))
    """(step, when it was begun) of the last one that was seen."""

    @property
    def is_failing(self) -> bool:
        """Whether a stop is requested because the state may be worse than that of older checkpoints."""
        return self._requested is not None and self._requested.is_failure

    def reason(self, state: TrainState) -> StopReason | None:
        """Why to stop now, or None. All ranks get the same answer: what one of them sees, all act on."""
        PULSE.step = state.step
        mine = self._own_reason(state)
        stops, *asked = self.ranks.sum([float(mine is not None), *(float(name in self._seen) for name in REQUESTS)])
        self._agreed |= {name for name, ranks in zip(REQUESTS, asked, strict=True) if ranks}
        self._seen.clear()
        if not stops:
            return None
        reasons: list[StopReason | None] = self.ranks.gather(mine)
        chosen = next(reason for reason in reasons if reason is not None)
        if chosen.error is not None:
            chosen.error.reported_once(self.ranks.rank)
        return chosen

    def _own_reason(self, state: TrainState) -> StopReason | None:
        self._first = self._first or (state.step, state.consumed_samples)
        if self.ranks.rank == 0:  # the files are one for all, and removed once seen
            self._poll_control_files()
            if self._is_save_overdue(state):
                self._seen.add("save")
        if self._requested is not None:
            return self._requested
        if self._after_save and state.step == state.begun_step:
            return StopReason("control", "control/stop-after-save was touched")
        if self._signal is not None:
            where = f" on rank {self.ranks.rank}" if self.ranks.size > 1 else ""
            return StopReason("signal", f"received {self._signal.name}{where}")
        is_last = state.step >= self.plan.train_steps
        patience = self.section.stop_after_spike_steps
        if state.spikes.steps >= (min(patience, RECOVERY_STEPS) if is_last else patience):
            many = f"{state.spikes.steps} steps since step {state.spikes.since}"
            return StopReason("diverged", f"the loss or the gradient norm was far above the recent ones in {many}")
        if is_last:
            verb = "reached" if state.step == self.plan.train_steps else "is beyond"
            return StopReason("finished", f"{verb} {self.plan.train_steps:,} steps")
        return self._end_of_job(state)

    def seconds_left(self) -> float:
        """Until the deadline of this job; infinite if it has none."""
        limit = self.section.exit_after
        return max(0.0, limit.seconds - job_seconds()) if isinstance(limit, Duration) else math.inf

    def failure(self, reason: StopReason, step: int) -> DivergedError | None:
        """What a failed training ends with; None if it did not fail."""
        if not reason.is_failure:
            return None
        what, rule, remedy = f"training stopped at step {step}: {reason.text}", "", _REMEDIES[reason.kind]
        if reason.kind == "diverged":
            good = reason.last_good
            rule = f"the last good checkpoint is {good}" if good else "no checkpoint is known to be good"
            remedy = f"start again with --from {good} and {remedy}" if good else f"start afresh: {remedy}"
        return DivergedError(Problem(what, rule, remedy)).reported_once(self.ranks.rank)

    def request(self, reason: StopReason) -> None:
        """Stop before the next step, for a reason found elsewhere. The first reason wins."""
        self._requested = self._requested or reason

    def _is_save_overdue(self, state: TrainState) -> bool:
        """By the clock of a phase such as `every: 10m`."""
        if state.begun_step != self._last_save[0]:
            self._last_save = (state.begun_step, time.monotonic())
        return time.monotonic() - self._last_save[1] >= self.plan.seconds_between_saves_at(state.step + 1)

    def take_request(self, name: str) -> bool:
        """Whether this one of REQUESTS was made since the last call, as agreed in `reason`."""
        is_made = name in self._agreed
        self._agreed.discard(name)
        return is_made

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Stop signals let the loop stop after its step; a later Ctrl-C leaves at once."""
        with signals.handled(self._on_signal, self._overdue):
            yield
        PULSE.learn(0.0)  # what follows the loop may take as long as what came before it

    def _on_signal(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if self._signal is None:
            self._signal, self._signalled_at = number, now
            again = " Ctrl-C again: no save." if number == signal.SIGINT else ""
            if self.ranks.rank == 0:
                signals.say(f"{number.name}: saving and stopping after this step.{again}")
        elif number == signal.SIGINT and now - self._signalled_at > signals.ONE_REQUEST_SECONDS:
            raise signals.Interrupted(number.name)

    def _overdue(self, request: signals.Request) -> tuple[int, str] | None:
        """Asked by the guard after a signal: whether the step does not end."""
        silent = PULSE.silent_seconds
        slowest = self.meter.slowest_step_seconds
        usual = max(_LEAST_SECONDS, _SLOW * slowest) if slowest else signals.ANSWER_SECONDS
        is_busy = (PULSE.excused or silent < usual) and not (silent > _LEAST_SECONDS and self.ranks.silent_ranks())
        if not request.is_overdue() or (request.insisted is None and is_busy):
            return None
        if request.insisted is not None or not slowest:
            when = "" if slowest else " before the first step was done"
            return exit_codes.INTERRUPTED, f"interrupted by {request.name}{when}, without a save"
        why = self.ranks.waits() or f"nothing has happened for {silent:.0f} s, since step {PULSE.step}"
        return exit_codes.LOST_RANK, f"{request.name} ends this run without a save: {why}. Start again to resume"

    def _end_of_job(self, state: TrainState) -> StopReason | None:
        """The length of this job, not of the training."""
        limit, evaluate = self.section.exit_after, self.section.evaluate
        if limit is None or self._first is None:
            return None
        if isinstance(limit, Duration):
            step_seconds = self.meter.slowest_step_seconds
            if evaluate and (state.step + 1) % evaluate.every.count == 0:
                step_seconds += self.meter.evaluation_seconds
            save_seconds = state.save_seconds if state.save_seconds is not None else self.save_seconds_estimate
            save_seconds *= 2 if state.saving_step is not None else 1  # the last save waits for the one in flight
            if job_seconds() + step_seconds + save_seconds > limit.seconds:
                needed = f"a step ({format_seconds(step_seconds)}) and a save ({format_seconds(save_seconds)})"
                return StopReason("deadline", f"train.exit_after {limit} leaves no time for {needed}")
            return None
        steps, samples = state.step - self._first[0], state.consumed_samples - self._first[1]
        done = {"steps": steps, "samples": samples, "tokens": samples * self.plan.seq_length}[limit.unit]
        if done >= limit.count:
            return StopReason("exit_after", f"this job did its {limit}")
        return None

    def _poll_control_files(self) -> None:
        now = time.monotonic()
        if now - self._polled_at < _POLL_SECONDS:
            return
        self._polled_at = now
        if self.writer is not None and (error := self.writer.fenced()):
            self.request(StopReason("error", str(error), error))
        for name in REQUESTS:
            with suppress(OSError):
                (self.control / name).unlink()
                self._seen.add(name)
        with suppress(OSError):
            (self.control / "stop").unlink()
            self.request(StopReason("control", "control/stop was touched"))
        with suppress(OSError):
            (self.control / "stop-after-save").unlink()
            self._after_save = True
        if os.path.exists(self.control / "kill"):  # stays: it also forbids the next start
            self.request(StopReason("control", "control/kill was touched; remove it before the next start"))
