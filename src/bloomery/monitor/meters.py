"""Averages over a logging interval, and how long steps take. Evaluation and saving do not count as training time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from bloomery.base import pulse
from bloomery.base.pulse import PULSE


@dataclass(frozen=True)
class Interval:
    """What happened since the last record."""

    losses: dict[str, float]
    """Mean of each loss over the steps; one NaN makes it NaN, so that it cannot hide."""
    source_losses: dict[str, float]
    """Mean language-model loss of each source's tokens in a blend; empty without one."""
    grad_norm: float
    """Of the last step."""
    num_zeros: float | None
    """Zeros among the gradients of the last step; None if they were not counted."""
    skipped_steps: int
    nan_steps: int
    seconds_per_step: float
    samples_per_second: float


@dataclass
class _Sums:
    """Of the interval so far, as a checkpoint keeps them."""

    losses: dict[str, float] = field(default_factory=dict)
    sources: dict[str, tuple[float, int]] = field(default_factory=dict)
    """(sum, tokens)"""
    steps: int = 0
    samples: int = 0
    skipped: int = 0
    nan: int = 0


class IntervalMeter:
    """Fed once per finished step."""

    def __init__(self, partial: Mapping[str, Any] | None = None) -> None:
        """`partial`: what a checkpoint kept of an interval that a stop cut in two; it may raise if it is not."""
        PULSE.learn(0.0)
        self._started = self._last_step_at = time.monotonic()
        self._recent: deque[float] = deque(maxlen=10)
        self.evaluation_seconds = 0.0
        """Of the slowest evaluation in this job."""
        self._sums = _Sums()
        self._grad_norm = 0.0
        self._num_zeros: float | None = None
        if partial:
            self._sums = _Sums(
                {name: float(total) for name, total in partial["losses"].items()},
                {name: (float(total), int(tokens)) for name, (total, tokens) in partial["sources"].items()},
                *(int(partial[name]) for name in ("steps", "samples", "skipped", "nan")),
            )
            self._started -= float(partial["seconds"])

    def partial(self) -> dict[str, Any]:
        """The interval so far, for a checkpoint: a resumed run then logs the same averages as an unbroken one."""
        return {**asdict(self._sums), "seconds": time.monotonic() - self._started}

    def add(
        self,
        losses: Mapping[str, float],
        *,
        grad_norm: float,
        num_zeros: float | None,
        samples: int,
        skipped: bool,
        nan: bool,
        source_losses: Mapping[str, tuple[float, int]],
    ) -> None:
        """Count one step. `source_losses`: (sum, tokens) per source."""
        now, sums = time.monotonic(), self._sums
        self.time_step(now - self._last_step_at)
        self._last_step_at = now
        for name, value in losses.items():
            sums.losses[name] = sums.losses.get(name, 0.0) + value
        for source, (total, tokens) in source_losses.items():
            before, tokens_before = sums.sources.get(source, (0.0, 0))
            sums.sources[source] = (before + total, tokens_before + tokens)
        self._grad_norm, self._num_zeros = grad_norm, num_zeros
        sums.steps += 1
        sums.samples += samples
        sums.skipped += skipped
        sums.nan += nan

    def time_step(self, seconds: float) -> None:
        self._recent.append(seconds)
        PULSE.learn(self.step_seconds)

    @property
    def step_seconds(self) -> float:
        """The median of the last ten steps; 0 before the first."""
        return median(self._recent) if self._recent else 0.0

    @property
    def slowest_step_seconds(self) -> float:
        """Of the last ten; 0 before the first."""
        return max(self._recent, default=0.0)

    def take(self) -> Interval:
        """The averages so far; the next interval begins."""
        sums, seconds = self._sums, max(time.monotonic() - self._started, 1e-9)
        interval = Interval(
            losses={name: total / sums.steps for name, total in sums.losses.items()},
            source_losses={name: total / tokens for name, (total, tokens) in sums.sources.items() if tokens},
            grad_norm=self._grad_norm,
            num_zeros=self._num_zeros,
            skipped_steps=sums.skipped,
            nan_steps=sums.nan,
            seconds_per_step=seconds / sums.steps,
            samples_per_second=sums.samples / seconds,
        )
        self.drop()
        return interval

    def drop(self) -> None:
        """Forget the interval so far: its steps were given up."""
        self._started, self._sums = time.monotonic(), _Sums()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """For an evaluation: it is timed, and has a time limit of its own; the first one may compile."""
        began = time.monotonic()
        limit = pulse.USUAL.steps * self.evaluation_seconds or pulse.USUAL.first_seconds
        with self.paused(), PULSE.excuse(limit):
            yield
        self.evaluation_seconds = max(time.monotonic() - began, self.evaluation_seconds)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out what happens inside."""
        began = time.monotonic()
        try:
            yield
        finally:
            away = time.monotonic() - began
            self._started += away
            self._last_step_at += away
