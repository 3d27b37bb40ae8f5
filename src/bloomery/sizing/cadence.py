"""How often to save (`every: auto`): a failure should lose little, and saving should cost little."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, sqrt

from bloomery.base.units import Duration, format_seconds

DEVICE_HOURS_BETWEEN_FAILURES = 50_000
"""Llama 3's 16,384 GPUs were interrupted 419 times unexpectedly in 54 days: once in 50,000 hours of one device."""
_STORAGE_SHARE = 0.5
"""Of the time, storage is busy with saving at most this share."""


@dataclass(frozen=True)
class Cadence:
    every_steps: int
    reasoning: str
    """How it came about, for people."""


def seconds_between_failures(told: Duration | None, *, num_devices: int) -> float:
    """What the recipe says, else what devices of this number are known for."""
    return told.seconds if told is not None else DEVICE_HOURS_BETWEEN_FAILURES * 3600 / num_devices


def daly_seconds(cost_seconds: float, failure_seconds: float) -> float:
    """The interval between saves that loses the least time (Daly 2006, the higher-order estimate of Young's rule)."""
    if cost_seconds >= 2 * failure_seconds:
        return failure_seconds
    ratio = cost_seconds / (2 * failure_seconds)
    return sqrt(2 * cost_seconds * failure_seconds) * (1 + sqrt(ratio) / 3 + ratio / 9) - cost_seconds


def cadence(*, blocking_seconds: float, persist_seconds: float, step_seconds: float, failure_seconds: float) -> Cadence:
    """From a save's measured costs: how long training stood still for it, and how long storage was busy."""
    best = daly_seconds(blocking_seconds, failure_seconds)
    least = persist_seconds / _STORAGE_SHARE
    steps = max(1, ceil(max(best, least) / step_seconds))
    shown = format_seconds(best) if best >= 10 else f"{best:.2g}s"
    why = (
        f"a save stops training for {blocking_seconds:.3g}s and a failure is expected every "
        f"{format_seconds(failure_seconds)}, so an interval of {shown} loses the least (Young/Daly)"
    )
    if least > best:
        why += f"; storage needs {persist_seconds:.3g}s for a save, so not more often than every {least:.3g}s"
    lost = (blocking_seconds + steps * step_seconds * steps * step_seconds / (2 * failure_seconds)) / (
        steps * step_seconds
    )
    why += f"; that is every {steps:,} steps of {step_seconds:.3g}s, and {100 * lost:.2g}% of the time lost"
    return Cadence(steps, why)
