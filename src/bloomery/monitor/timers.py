"""Where the time of a step goes. Nothing waits for the device: its clock is read when the step is long over."""

import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from statistics import median_low
from typing import Any

import torch

OPTIMIZER = "optimizer"
"""The phase that ends a step."""
PHASES = ("data", "forward", "backward", OPTIMIZER, "wait", "other", "save", "eval", "profile")
AWAY = ("save", "eval", "profile")
"""Phases that are no part of a step: their whole time is reported, not that of a step."""
OWN = ("data", "forward", OPTIMIZER)
"""Phases in which a replica does not wait for others (but for the ranks that share its layers)."""

_SLOW, _SLOW_OF_STEP, _SLOW_INTERVALS = 0.25, 0.05, 3


class StepTimers:
    """Phases of the device's work, each between two marks: so they sum to the step. On a CPU, of the processor's."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = None if device is None or device.type == "cpu" else device
        self._marks: deque[tuple[str, Any]] = deque()
        self._spare: list[Any] = []
        self._last: Any = None
        self._seconds: Counter[str] = Counter()
        self._steps = 0

    def mark(self, phase: str) -> None:
        """What was done since the last mark was this phase; the first mark only begins."""
        now: Any = time.perf_counter()
        if self._device is not None:
            now = self._spare.pop() if self._spare else torch.Event(self._device, enable_timing=True)
            now.record()
        self._marks.append((phase, now))

    def finish_step(self) -> None:
        """Count the marks of the oldest step. The device must have done it."""
        while self._marks:
            phase, now = self._marks.popleft()
            if self._last is not None:
                self._seconds[phase] += now - self._last if self._device is None else self._last.elapsed_time(now) / 1e3
                self._spare.append(self._last)
            self._last = now
            if phase == OPTIMIZER:
                self._steps += 1
                return

    def take(self) -> dict[str, float]:
        """Seconds of each phase since the last call: of a step in the mean, or of all in AWAY."""
        found = {name: total / (1 if name in AWAY else max(1, self._steps)) for name, total in self._seconds.items()}
        self.drop()
        return found

    def drop(self) -> None:
        self._seconds, self._steps = Counter(), 0


class SlowRanks:
    """Judges logged intervals: a rank whose own work takes far longer than that of the others, again and again."""

    def __init__(self) -> None:
        self._rank, self._times = -1, 0

    def follow(self, rows: Sequence[Mapping[str, float]], stages: Sequence[int]) -> dict[str, Any] | None:
        """`rows`: the timers of each rank; `stages`: who has the same part of a pipeline, and so the same work. What is
        to be reported, once for a rank that stays slow."""

        def beyond(values: Sequence[float]) -> list[float]:
            alike = [[value for value, other in zip(values, stages, strict=True) if other == own] for own in stages]
            return [value - median_low(each) for value, each in zip(values, alike, strict=True)]

        own = [sum(row[phase] for phase in OWN) for row in rows]
        excess = beyond(own)
        rank = excess.index(max(excess))
        worst, usual = own[rank], own[rank] - excess[rank]
        step = sum(seconds for phase, seconds in rows[rank].items() if phase not in AWAY)
        if worst - usual < max(_SLOW * usual, _SLOW_OF_STEP * step):
            self._times = 0
            return None
        self._rank, self._times = rank, self._times + 1 if rank == self._rank else 1
        if self._times != _SLOW_INTERVALS:
            return None
        above = {each: beyond([row[each] for row in rows])[rank] for each in OWN}
        phase = max(above, key=lambda each: above[each])
        more = {
            "phase": phase,
            "phase_seconds": rows[rank][phase],
            "usual_phase_seconds": rows[rank][phase] - above[phase],
        }
        return {"rank": rank, "seconds": worst, "usual_seconds": usual, **more}


def spread(values: Sequence[float]) -> tuple[float, float, float, int]:
    """Over all ranks: the least, the median, the most, and the rank that has it."""
    return min(values), median_low(values), max(values), values.index(max(values))
