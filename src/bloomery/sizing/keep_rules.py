"""Which checkpoints stay, and how many that makes in each of the places where a recipe keeps them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from bloomery.config.recipe import KeepSection, Recipe
from bloomery.sizing.plan import TrainingPlan


@dataclass(frozen=True)
class Kept:
    """Checkpoints that lie in one place when the training ends."""

    count: int
    being_written: int
    """1 where older ones are deleted: that happens after a save, so there must be room for one more."""
    bound: Literal["up to", "at least", "about"]
    """A run also saves when it stops, or is asked to; `every: auto` decides while training; of copies that wait to be
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
