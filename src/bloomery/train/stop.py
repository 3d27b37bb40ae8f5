"""When to stop and when to save out of turn: the recipe's amounts, the clock, signals, and files in control/."""

from __future__ import annotations

import math
import signal
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bloomery.base import exit_codes, pulse, signals
from bloomery.base.clock import job_seconds
from bloomery.base.energy import Energy
from bloomery.base.errors import BloomeryError, DivergedError, Problem
from bloomery.base.pulse import PULSE
from bloomery.base.ranks import ALONE, Ranks
from bloomery.base.units import Amount, Duration, format_seconds
from bloomery.checkpoint.fence import Writer
from bloomery.monitor.meters import EnergyMeter
from bloomery.sizing.schedule import TrainingPlan
from bloomery.train.spikes import RECOVERY_STEPS
from bloomery.train.state import TrainState

_POLL_SECONDS = 0.2
_SLOW = 3.0
"""After a signal, a step may take so many times the slowest of the last ten."""
_REMEDIES = {
    "diverged": "lower lr.peak, or pass over the bad data with train.skip",
    "drift": "check the machines of these ranks, then go on with --from a checkpoint from before the drift",
}


@dataclass(frozen=True)
class StopReason:
    kind: str
    """finished, exit_after, deadline, signal, control, error, diverged or drift."""
    text: str
    error: BloomeryError | None = None
    """What to end with, at once and without a save: the run is no longer ours, or has not begun."""
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


class StopRules:
    """Asked once before every step. Signals only set a flag; the loop stops between two steps, all saved."""

    def __init__(
        self,
        plan: TrainingPlan,
        *,
        exit_after: Amount | Duration | None,
        control: Path,
        save_seconds_estimate: float,
        evaluate_every: int | None = None,
        ranks: Ranks = ALONE,
        energy: EnergyMeter | None = None,
        spike_patience: int = 50,
        writer: Writer | None = None,
    ) -> None:
        PULSE.learn(0.0)
        self._ranks = ranks
        self._energy = energy or EnergyMeter()
        self._plan = plan
        self._spike_patience = spike_patience
        self._exit_after = exit_after
        self._control = control
        self._writer = writer
        self._save_seconds_estimate = save_seconds_estimate
        self._signal: signal.Signals | None = None
        self._signalled_at = 0.0
        self._requested: StopReason | None = None
        self._polled_at = 0.0
        self._save_seen = False
        self._save_agreed = False
        self._stuck: set[str] = set()
        self._steps_timed: list[float] = []
        self._evaluate_every = evaluate_every
        self._evaluation_seconds = 0.0
        self._first_step: int | None = None
        self._first_samples = 0

    def reason(self, state: TrainState) -> StopReason | None:
        """Why to stop now, or None. All ranks get the same answer: what one of them sees, all act on. What they have
        spent in energy travels with it."""
        PULSE.step = state.step
        mine = self._own_reason(state)
        spent = self._energy.own(fresh=mine is not None)
        stops, saves, *total = self._ranks.sum(
            [float(mine is not None), float(self._save_seen), *spent.to_json().values()]
        )
        state.energy = self._energy.before + Energy(*total)
        self._save_agreed, self._save_seen = self._save_agreed or saves > 0, False
        if not stops:
            return None
        reasons: list[StopReason | None] = self._ranks.gather(mine)
        chosen = next(reason for reason in reasons if reason is not None)
        if chosen.error is not None:
            chosen.error.told_once(self._ranks.rank)
        return chosen

    def _own_reason(self, state: TrainState) -> StopReason | None:
        if self._first_step is None:
            self._first_step, self._first_samples = state.step, state.consumed_samples
        if self._ranks.rank == 0:  # the files are one for all, and taken away when they were seen
            self._poll_control_files()
        if self._requested is not None:
            return self._requested
        if self._signal is not None:
            where = f" on rank {self._ranks.rank}" if self._ranks.size > 1 else ""
            return StopReason("signal", f"received {self._signal.name}{where}")
        is_last = state.step >= self._plan.train_steps
        if state.spikes.steps >= (min(self._spike_patience, RECOVERY_STEPS) if is_last else self._spike_patience):
            many = f"{state.spikes.steps} steps since step {state.spikes.since}"
            return StopReason("diverged", f"the loss or the gradient norm was far above the recent ones in {many}")
        if is_last:
            verb = "reached" if state.step == self._plan.train_steps else "is beyond"
            return StopReason("finished", f"{verb} {self._plan.train_steps:,} steps")
        return self._end_of_job(state)

    def seconds_left(self) -> float:
        """Until the deadline of this job; infinite if it has none."""
        limit = self._exit_after
        return max(0.0, limit.seconds - job_seconds()) if isinstance(limit, Duration) else math.inf

    def count_energy(self, state: TrainState) -> None:
        """What all ranks have spent until this very moment. Collective, for the end of a job."""
        PULSE.learn(0.0)  # what follows the loop may take as long as what came before it
        own = self._energy.own(fresh=True)
        state.energy = self._energy.before + Energy(*self._ranks.sum(list(own.to_json().values())))

    def failure(self, reason: StopReason, step: int) -> DivergedError | None:
        """What a failed training ends with; None if it did not fail."""
        if not reason.is_failure:
            return None
        what, rule, remedy = f"training stopped at step {step}: {reason.text}", "", _REMEDIES[reason.kind]
        if reason.kind == "diverged":
            good = reason.last_good
            rule = f"the last good checkpoint is {good}" if good else "no checkpoint is known to be good"
            remedy = f"start again with --from {good} and {remedy}" if good else f"start afresh: {remedy}"
        return DivergedError(Problem(what, rule, remedy)).told_once(self._ranks.rank)

    def request(self, reason: StopReason) -> None:
        """Stop before the next step, for a reason found elsewhere. The first reason wins."""
        self._requested = self._requested or reason

    def take_save_request(self) -> bool:
        """Whether control/save was touched since the last call; the file is removed. Agreed in `reason`."""
        agreed, self._save_agreed = self._save_agreed, False
        return agreed

    def time_step(self, seconds: float) -> None:
        """Tell how long a step took; the deadline keeps room for the slowest of the last ten."""
        self._steps_timed = [*self._steps_timed[-9:], seconds]
        PULSE.learn(self.step_seconds)

    @property
    def step_seconds(self) -> float:
        """The middle of the last ten steps; 0 before the first."""
        return median(self._steps_timed) if self._steps_timed else 0.0

    def evaluating(self) -> AbstractContextManager[None]:
        """An evaluation has a time limit of its own; the first may compile."""
        usual = pulse.USUAL.steps * self._evaluation_seconds
        return PULSE.excuse(usual or pulse.USUAL.first_seconds)

    def time_evaluation(self, seconds: float) -> None:
        """Tell how long an evaluation took; the deadline keeps room for the slowest."""
        self._evaluation_seconds = max(seconds, self._evaluation_seconds)

    def listening(self) -> AbstractContextManager[None]:
        """Stop signals let the loop stop after its step; a later Ctrl-C leaves at once."""
        return signals.handled(self._on_signal, self._overdue)

    def _on_signal(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if self._signal is None:
            self._signal, self._signalled_at = number, now
            again = " Ctrl-C again leaves without it." if number == signal.SIGINT else ""
            if self._ranks.rank == 0:
                signals.say(f"{number.name}: stopping after this step, with a save.{again}")
        elif number == signal.SIGINT and now - self._signalled_at > signals.ONE_REQUEST_SECONDS:
            raise signals.Interrupted(number.name)

    def _overdue(self, request: signals.Request) -> tuple[int, str] | None:
        """Asked by the guard after a signal: whether the step does not end."""
        silent = PULSE.silent_seconds
        usual = max(signals.ANSWER_SECONDS, _SLOW * max(self._steps_timed, default=0.0))
        is_busy = (PULSE.excused or silent < usual) and not (
            silent > signals.ANSWER_SECONDS and self._ranks.silent_ranks()
        )
        if not request.is_overdue() or (request.insisted is None and is_busy):
            return None
        if request.insisted is not None or not self._steps_timed:
            when = "" if self._steps_timed else " before the first step of this job was done"
            return exit_codes.INTERRUPTED, f"interrupted by {request.name}{when}, without a save"
        why = self._ranks.waits() or f"nothing has happened for {silent:.0f} s, since step {PULSE.step}"
        return exit_codes.LOST_RANK, f"{request.name} ends this run without a save: {why}. Start again to resume"

    def _end_of_job(self, state: TrainState) -> StopReason | None:
        """The length of this job, not of the training."""
        limit = self._exit_after
        if limit is None or self._first_step is None:
            return None
        if isinstance(limit, Duration):
            step_seconds = max(self._steps_timed, default=0.0)
            if self._evaluate_every and (state.step + 1) % self._evaluate_every == 0:
                step_seconds += self._evaluation_seconds
            save_seconds = state.save_seconds if state.save_seconds is not None else self._save_seconds_estimate
            save_seconds *= 2 if state.saving_step is not None else 1  # the last save waits for the one on its way
            if job_seconds() + step_seconds + save_seconds > limit.seconds:
                needed = f"a step ({format_seconds(step_seconds)}) and a save ({format_seconds(save_seconds)})"
                return StopReason("deadline", f"train.exit_after {limit} leaves no time for {needed}")
            return None
        done = {
            "steps": state.step - self._first_step,
            "samples": state.consumed_samples - self._first_samples,
            "tokens": (state.consumed_samples - self._first_samples) * self._plan.seq_length,
        }[limit.unit]
        if done >= limit.count:
            return StopReason("exit_after", f"this job did its {limit}")
        return None

    def _take(self, name: str) -> bool:
        """Whether this control file is there; it is removed, if that is possible."""
        path = self._control / name
        if name in self._stuck or not path.exists():
            return False
        try:
            path.unlink()
        except OSError:  # a folder, or a read-only place: obey once
            self._stuck.add(name)
        return True

    def _poll_control_files(self) -> None:
        now = time.monotonic()
        if now - self._polled_at < _POLL_SECONDS:
            return
        self._polled_at = now
        if self._writer is not None and (error := self._writer.fenced()):
            self.request(StopReason("error", str(error), error))
        self._save_seen |= self._take("save")
        if self._take("stop"):
            self.request(StopReason("control", "control/stop was touched"))
        if (self._control / "kill").exists():  # stays: it also forbids the next start
            self.request(StopReason("control", "control/kill was touched; remove it before the next start"))
