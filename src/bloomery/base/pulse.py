"""When this job began, and how far its main thread is, for threads that must judge it when it does not answer."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

_STARTED = time.monotonic()
"""The command line imports this first, so that imports and set-up count towards a deadline."""


@dataclass(frozen=True)
class Patience:
    """How long the ranks of a run may wait for each other."""

    steps: float = 10.0
    """In a step: so many times the median of the last ones,"""
    least_seconds: float = 60.0
    """but at least this."""
    first_seconds: float = 590.0
    """For what is done once and may compile or load: set-up, the first step, the first evaluation."""


USUAL = Patience()


@dataclass
class Pulse:
    step: int = 0
    """The last one that is done."""
    beats: int = 0
    """Agreements with other ranks that are behind us."""
    waiting: bool = False
    """Whether the main thread waits for other ranks to agree."""
    since: float = field(default_factory=time.monotonic)
    """When any of that changed last."""
    limit: float = USUAL.first_seconds
    """How long it may take to change again."""
    excused: bool = False
    """Whether `limit` is that of something that has a time limit of its own."""

    @property
    def silent_seconds(self) -> float:
        return time.monotonic() - self.since

    def mark(self, *, waiting: bool) -> None:
        """An agreement begins, or has come."""
        self.beats += not waiting
        self.waiting, self.since = waiting, time.monotonic()

    def learn(self, step_seconds: float) -> None:
        """From the median step; 0 before there is one."""
        usual = max(USUAL.least_seconds, USUAL.steps * step_seconds)
        self.limit = usual if step_seconds else USUAL.first_seconds

    @contextlib.contextmanager
    def excuse(self, seconds: float) -> Iterator[None]:
        """Within it, the main thread does something else that may take so long."""
        before = self.limit, self.excused
        self.limit, self.excused, self.since = max(self.limit, seconds), True, time.monotonic()
        try:
            yield
        finally:
            (self.limit, self.excused), self.since = before, time.monotonic()


PULSE = Pulse()
"""Of this process."""


def job_seconds() -> float:
    """Wall-clock seconds since this process began its work."""
    return time.monotonic() - _STARTED
