"""How often to save, which checkpoints to keep, and how many that makes."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import ceil, sqrt
from typing import Literal

from bloomery.base.units import Duration, format_seconds
from bloomery.config.recipe import KeepSection, Recipe
from bloomery.sizing.schedule import TrainingPlan

DEVICE_HOURS_BETWEEN_FAILURES = 50_000
"""Llama 3's 16,384 GPUs were interrupted 419 times unexpectedly in 54 days: once in 50,000 hours of one device."""
_STORAGE_SHARE = 0.5
"""Of the time, storage is busy with saving at most this share."""


@dataclass(frozen=True)
class Cadence:
    every_steps: int
    reasoning: str
    """How it came about, for people."""


def seconds_between_failures(configured: Duration | None, *, num_devices: int) -> float:
    """From the recipe, or else from the failure rate of this many devices."""
    return configured.seconds if configured is not None else DEVICE_HOURS_BETWEEN_FAILURES * 3600 / num_devices


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


@dataclass(frozen=True)
class Kept:
    """Checkpoints that lie in one place when the training ends."""

    count: int
    being_written: int
    """1 where older ones are deleted: that happens after a save, so there must be room for one more."""
    bound: Literal["up to", "at least", "about"]
    """A run also saves when it stops, or on request; `every: auto` decides while training; of copies that wait to be
    uploaded only the newest goes."""


def kept_steps(
    steps: list[int], keep: KeepSection, losses: Mapping[int, float], suspicious: Collection[int] = ()
) -> set[int]:
    """Which of these steps to keep. `losses`: of those that were evaluated; one that is no number is never the best.
    `suspicious`: they do not count among the last, but the newest of all stays."""
    newest = sorted(set(steps) - set(suspicious))[-max(1, keep.last) :]
    kept = {max(steps), *newest} if steps else set()
    kept |= set(keep.steps) & set(steps)
    if keep.every is not None:
        kept |= {step for step in steps if step % keep.every.count == 0}
    numbers = [step for step, loss in losses.items() if math.isfinite(loss)]
    best = sorted(numbers, key=lambda step: (losses[step], step))
    return kept | set(best[: keep.best])


def kept_checkpoints(recipe: Recipe) -> dict[str, Kept]:
    """By place: `durable` (the run folder), and `local` and `upload` where the recipe has them."""
    section, plan = recipe.checkpoint, TrainingPlan.of(recipe)
    saves = sorted({*plan.save_steps(), plan.train_steps})
    places = {"durable": _kept(saves, section.keep, "at least")}
    if section.local is not None:
        places["local"] = Kept(section.local.keep, 1, "up to")
    if (upload := section.upload) is not None:
        every = upload.every.count if upload.every else 1
        copies = [step for step in saves if step % every == 0 or step == plan.train_steps]
        places["upload"] = _kept(copies, upload.keep, "about")
    return places


def _kept(steps: list[int], keep: KeepSection | None, unless_bounded: Literal["at least", "about"]) -> Kept:
    if keep is None:
        return Kept(len(steps), 0, unless_bounded)
    if keep.every is None:
        return Kept(keep.last + len(keep.steps) + keep.best, 1, "up to")
    return Kept(len(kept_steps(steps, keep, {})), 1, unless_bounded)
