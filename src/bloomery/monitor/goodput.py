"""The goodput ledger: every second of a run's life, across its jobs, booked once, from events and metrics."""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bloomery.monitor import names

Values = NDArray[np.float64]
Flags = NDArray[np.bool_]

PARTS = {
    "training": "steps that count",
    "lost work": "steps that a restart or a rewind threw away",
    "compile": "of each job's first record, what its steps took beyond normal ones",
    "evaluation": "",
    "exposed save": "training stood still while a checkpoint was copied",
    "start-up": "from the start of a job's process to its first step",
    "queue": "between two jobs, for the scheduler",
    "down": "between two jobs, with no scheduler to wait for; after a crash, from the last sign on",
    "hung": "from the last sign of life until the hang was found",
    "other": "between records, and none of these",
}
_ALWAYS = ("training", "lost work", "evaluation")


@dataclass
class _Job:
    began: float = math.inf
    """The start of its process."""
    started: float = math.inf
    end: float = -math.inf
    step: int = 0
    """Of the last sign."""
    mark: float = math.inf
    """When that was."""
    is_queued: bool = False
    save_seconds: float = 0.0
    hang: float = 0.0
    rewinds: list[tuple[int, int]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_ALWAYS, 0.0))
    first: tuple[int, float, str] | None = None
    """Steps of the first record, seconds of each, and how they are booked."""
    step_seconds: float = 0.0


class Ledger:
    """Takes all events, then all records, and keeps a few numbers of each job."""

    def __init__(self) -> None:
        self._jobs: dict[int, _Job] = {}

    def event(self, event: dict[str, Any]) -> None:
        time, number, kind = event.get("time"), event.get("job"), event["kind"]
        if not isinstance(time, int | float) or not isinstance(number, int) or not isinstance(event.get("step"), int):
            return
        if kind == names.Event.NOTE:  # anyone may write one, at any time
            return
        job = self._jobs.setdefault(number, _Job())
        job.end = max(job.end, time)
        if kind == names.Event.START:
            job.started = job.mark = time
            job.began = time - _number(event.get(names.FACT_SETUP_SECONDS))
            job.step, job.is_queued = event["step"], bool(event.get(names.FACT_SCHEDULER))
        elif kind == names.Event.SAVE:
            job.save_seconds += _number(event.get("blocking_seconds"))
        elif kind == names.Event.HANG:
            job.hang = time
        elif kind == names.Event.REWIND and isinstance(event.get("passed_over"), list):
            first, last = event["passed_over"]
            job.rewinds.append((first, last))

    def records(
        self, number: int, steps: Values, times: Values, seconds: Values, is_step: Flags, *, abandoned: bool = False
    ) -> None:
        """Of one job, in the order written. `seconds`: of each step; a validation has none."""
        job = self._jobs.setdefault(number, _Job())
        if job.mark == math.inf:  # no start in the ledger
            job.began = job.started = job.mark = float(times[0])
            job.step = int(steps[0])
        before = np.concatenate([[job.step], steps[:-1]])
        away = np.maximum(0.0, np.diff(times, prepend=job.mark))
        begin, is_lost = before, np.full(len(steps), abandoned)
        for first, last in job.rewinds:
            begin = np.where((before <= last) & (last < steps), np.maximum(begin, last), begin)
            is_lost |= (first <= steps) & (steps <= last)
        num_steps = np.maximum(0, steps - begin)
        newest = np.maximum.accumulate(np.where(is_step, np.arange(1, len(steps) + 1), 0))
        each = np.concatenate([[job.step_seconds], seconds])[newest]  # a validation: of the step before it
        trained = np.where(np.isfinite(each), np.minimum(away, num_steps * each), 0.0)
        job.seconds["lost work"] += float(trained[is_lost].sum())
        job.seconds["training"] += float(trained[~is_lost].sum())
        job.seconds["evaluation"] += float((away - trained)[~is_step].sum())
        if job.first is None and (found := np.flatnonzero(is_step & (num_steps > 0))).size:
            i = found[0]
            usual = min(float(seconds[i]), float(away[i] / num_steps[i]))
            job.first = int(num_steps[i]), usual, "lost work" if is_lost[i] else "training"
        job.mark, job.step, job.step_seconds = float(times[-1]), int(steps[-1]), float(each[-1])
        job.end = max(job.end, float(times.max()))

    def parts(self, step_seconds: float) -> dict[str, float]:
        """Seconds of each part; together the time from the first start to the last sign. `step_seconds`: of a normal
        step."""
        total = dict.fromkeys(PARTS, 0.0)
        jobs = sorted((job for job in self._jobs.values() if math.isfinite(job.mark)), key=lambda job: job.started)
        for i, job in enumerate(jobs):
            following, end = jobs[i + 1] if i + 1 < len(jobs) else None, job.end
            if following is not None:  # a process may train several times
                following.began = max(following.began, min(end, following.started))
                end = min(end, following.began)
            total["start-up"] += max(0.0, min(job.started, end) - job.began)
            for name, seconds in _parts_of(job, max(0.0, end - job.started), step_seconds).items():
                total[name] += seconds
            if following is not None:
                total["queue" if following.is_queued else "down"] += following.began - max(
                    end, min(job.started, following.began)
                )
        return total


def _parts_of(job: _Job, room: float, step_seconds: float) -> dict[str, float]:
    """Of the time from its first step on, no part more than the others left."""
    seconds = dict(job.seconds)
    if job.first is not None and math.isfinite(step_seconds):
        steps, each, booked = job.first
        seconds["compile"] = min(seconds[booked], max(0.0, steps * (each - step_seconds)))
        seconds[booked] -= seconds["compile"]
    seconds["exposed save"] = job.save_seconds
    seconds["hung"] = max(0.0, job.hang - job.mark) if job.hang else 0.0
    for name, wanted in seconds.items():
        seconds[name] = min(wanted, room)
        room -= seconds[name]
    return {**seconds, "other": room}


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) and value > 0 else 0.0
