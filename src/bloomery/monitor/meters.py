"""Averages over a logging interval, without the time of evaluation and saving; how long steps take; and the energy that
a run has used, over all its ranks and jobs."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, TypeAdapter

from bloomery.base import signals
from bloomery.base.bounded import parse_json
from bloomery.base.ranks import Ranks
from bloomery.base.signals import PULSE
from bloomery.base.storage import open_plain
from bloomery.base.units import Energy
from bloomery.monitor import names
from bloomery.monitor.timers import StepTimers

if TYPE_CHECKING:
    from bloomery.base.accelerator import Sensor

_FRESH_SECONDS = 1.0
"""A reading that is younger is used again: sensors are not faster, and steps may be."""
_TAIL_BYTES = 2**20
_Name = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f-\x9f\u{2028}\u{2029}]*$")]
"""On one line."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass
class _Sums:
    """Of the interval so far, as a checkpoint keeps them."""

    losses: dict[_Name, float] = field(default_factory=dict)
    sources: dict[_Name, tuple[float, int]] = field(default_factory=dict)
    """(sum, tokens)"""
    steps: int = 0
    samples: int = 0
    skipped: int = 0
    nan: int = 0


class IntervalMeter:
    """Fed once per finished step."""

    def __init__(self, partial: Mapping[str, Any] | None = None, timers: StepTimers | None = None) -> None:
        """`partial`: what a checkpoint kept of an interval that a stop cut in two; it may raise if it is not."""
        self.timers = timers or StepTimers()
        self.timers.mark("other")
        PULSE.learn(0.0)
        self._started = self._last_step_at = time.monotonic()
        self._recent: deque[float] = deque(maxlen=10)
        self.evaluation_seconds = 0.0
        """Of the slowest evaluation in this job."""
        self._sums = TypeAdapter(_Sums).validate_python(partial or {})
        self._grad_norm = 0.0
        self._num_zeros: float | None = None
        self._params_norm: float | None = None
        if partial:
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
        params_norm: float | None,
        samples: int,
        skipped: bool,
        nan: bool,
        source_losses: Mapping[str, tuple[float, int]],
    ) -> None:
        """Count one step. `source_losses`: (sum, tokens) per source."""
        now, sums = time.monotonic(), self._sums
        self.timers.finish_step()
        self.time_step(now - self._last_step_at)
        self._last_step_at = now
        for name, value in losses.items():
            sums.losses[name] = sums.losses.get(name, 0.0) + value
        for source, (total, tokens) in source_losses.items():
            before, tokens_before = sums.sources.get(source, (0.0, 0))
            sums.sources[source] = (before + total, tokens_before + tokens)
        self._grad_norm, self._num_zeros, self._params_norm = grad_norm, num_zeros, params_norm
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

    def take(self) -> dict[str, Any]:
        """Fields of the record of the interval so far; the next one begins. One NaN makes a mean NaN."""
        sums, seconds = self._sums, max(time.monotonic() - self._started, 1e-9)
        timers = self.timers.take()
        self.drop()
        return {
            "losses": {name: total / sums.steps for name, total in sums.losses.items()},
            "source_losses": {name: total / tokens for name, (total, tokens) in sums.sources.items() if tokens},
            "grad_norm": self._grad_norm,
            "num_zeros": self._num_zeros,
            "params_norm": self._params_norm,
            "timers": timers,
            "skipped_steps": sums.skipped,
            "nan_steps": sums.nan,
            "seconds_per_step": seconds / sums.steps,
            "samples_per_second": sums.samples / seconds,
        }

    def drop(self) -> None:
        """Forget the interval so far: its steps were given up."""
        self._started, self._sums = time.monotonic(), _Sums()
        self.timers.drop()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """For an evaluation: it is timed, and has a time limit of its own; the first one may compile."""
        began = time.monotonic()
        limit = signals.PATIENCE_STEPS * self.evaluation_seconds or signals.FIRST_SECONDS
        with self.paused("eval"), PULSE.excuse(limit):
            yield
        self.evaluation_seconds = max(time.monotonic() - began, self.evaluation_seconds)

    @contextmanager
    def paused(self, phase: str) -> Iterator[None]:
        """Leave out what happens inside; its timer is that of `phase`."""
        began = time.monotonic()
        self.timers.mark("other")
        try:
            yield
        finally:
            self.timers.mark(phase)
            away = time.monotonic() - began
            self._started += away
            self._last_step_at += away


class EnergyMeter:
    """What this rank has used in this job. Read at every step, and so before a counter wraps around."""

    def __init__(self, sensor: Sensor | None = None, *, counted_by: str = "", before: Energy | None = None) -> None:
        """`counted_by`: in words, what measures the run. `before`: what earlier jobs of the run have spent, on all
        ranks."""
        self.counted_by, self.before = counted_by, before or Energy()
        self._sensor = sensor
        self._started = self._read_at = time.monotonic()
        self._first = self._last = 0.0
        self.own(fresh=True)
        self._first = self._last

    def own(self, *, fresh: bool = False) -> Energy:
        """This rank's part of this job so far. Cheap enough for every step: sensors are read once a second. What one
        that no longer answers has counted until then stays."""
        now = time.monotonic()
        if self._sensor is not None and (fresh or now - self._read_at >= _FRESH_SECONDS):
            try:
                self._last, self._read_at = self._sensor.joules(), now
            except (OSError, ValueError):
                self._sensor = None
        return Energy(self._last - self._first, self._read_at - self._started, now - self._started)

    def total(self, ranks: Ranks, *, fresh: bool = False) -> Energy:
        """What all ranks and jobs have spent so far. Collective."""
        return self.before + Energy(*ranks.sum(list(self.own(fresh=fresh).to_json().values())))


def start_meter(sensor: Sensor | str, metrics: Path, known: Sequence[Energy], ranks: Ranks) -> EnergyMeter:
    """This rank's meter. Collective.

    `sensor`: of this rank's device, or why it has none. `known`: what checkpoint and ledger say that earlier jobs of
    the run have spent; the records in `metrics` may know more. The checkpoint may have come from another machine. All
    sums only grow, so the largest one counts."""
    found = ranks.gather(sensor if isinstance(sensor, str) else sensor.name)
    spent = max([*known, *_logged(metrics)], key=Energy.order) if ranks.rank == 0 else None
    own = None if isinstance(sensor, str) else sensor
    return EnergyMeter(own, counted_by="; ".join(dict.fromkeys(found)), before=ranks.broadcast(spent))


def _logged(metrics: Path) -> list[Energy]:
    """Of the last records, whatever became of their steps."""
    try:
        with open(metrics, "rb", opener=open_plain) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            lines = file.read().split(b"\n")
    except OSError:
        return []
    found = []
    for line in lines:
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):  # torn, or without energy
            found.append(Energy.from_json(parse_json(line)[names.FACT_ENERGY]))
    return found


def machine() -> str:
    """The same for all containers of a machine: they share its counters."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return socket.gethostname()
