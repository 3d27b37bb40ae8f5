"""Averages over a logging interval. Time spent in evaluation and saving does not count as training time."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


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


class IntervalMeter:
    """Fed once per settled step."""

    def __init__(self, partial: Mapping[str, Any] | None = None) -> None:
        """`partial`: what a checkpoint kept of an interval that a stop cut in two; it may raise if it is not."""
        self._started = self._last_step_at = time.monotonic()
        self._losses: dict[str, float] = {}
        self._sources: dict[str, tuple[float, int]] = {}
        self._num_zeros: float | None = None
        self._clear()
        if partial:
            self._losses = {name: float(total) for name, total in partial["losses"].items()}
            self._sources = {name: (float(total), int(n)) for name, (total, n) in partial["sources"].items()}
            self._steps, self._samples = int(partial["steps"]), int(partial["samples"])
            self._skipped, self._nan = int(partial["skipped"]), int(partial["nan"])
            self._started -= float(partial["seconds"])

    def partial(self) -> dict[str, Any]:
        """The interval so far, for a checkpoint: a resumed run then logs the same averages as an unbroken one."""
        return {
            "losses": dict(self._losses),
            "sources": dict(self._sources),
            "steps": self._steps,
            "samples": self._samples,
            "skipped": self._skipped,
            "nan": self._nan,
            "seconds": time.monotonic() - self._started,
        }

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
    ) -> float:
        """Count one step; returns the seconds since the one before. `source_losses`: (sum, tokens) per source."""
        now = time.monotonic()
        seconds, self._last_step_at = now - self._last_step_at, now
        for name, value in losses.items():
            self._losses[name] = self._losses.get(name, 0.0) + value
        for source, (total, tokens) in source_losses.items():
            before, tokens_before = self._sources.get(source, (0.0, 0))
            self._sources[source] = (before + total, tokens_before + tokens)
        self._grad_norm, self._num_zeros = grad_norm, num_zeros
        self._steps += 1
        self._samples += samples
        self._skipped += skipped
        self._nan += nan
        return seconds

    def take(self) -> Interval:
        """The averages so far, and begin anew."""
        now = time.monotonic()
        seconds = max(now - self._started, 1e-9)
        interval = Interval(
            losses={name: total / self._steps for name, total in self._losses.items()},
            source_losses={name: total / tokens for name, (total, tokens) in self._sources.items() if tokens},
            grad_norm=self._grad_norm,
            num_zeros=self._num_zeros,
            skipped_steps=self._skipped,
            nan_steps=self._nan,
            seconds_per_step=seconds / self._steps,
            samples_per_second=self._samples / seconds,
        )
        self._started = now
        self._clear()
        return interval

    def drop(self) -> None:
        """Forget the interval so far: its steps were given up."""
        self._started = time.monotonic()
        self._clear()

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

    def _clear(self) -> None:
        self._losses = {}
        self._sources = {}
        self._grad_norm = 0.0
        self._num_zeros = None
        self._steps = self._samples = self._skipped = self._nan = 0
