"""Dynamic loss scale for fp16: grows after a window of clean steps, shrinks on overflow when patience runs out."""

from __future__ import annotations

from dataclasses import dataclass

from bloomery.base.errors import DivergedError, Problem
from bloomery.config.recipe import LossScaleSection


@dataclass
class LossScale:
    """DeepSpeed's state machine, the one tr1-13B ran with. All of it is plain numbers, saved with the checkpoint."""

    scale: float
    patience: int
    """Overflows that may still pass without shrinking the scale."""
    clean_steps: int = 0
    """Clean steps since the last overflow."""

    @classmethod
    def start(cls, section: LossScaleSection) -> LossScale:
        return cls(scale=section.initial, patience=section.hysteresis)

    def update(self, section: LossScaleSection, *, overflow: bool) -> None:
        """Follow one step. DivergedError when an overflow meets the smallest scale."""
        if overflow:
            self.clean_steps = 0
            if self.patience > 1:
                self.patience -= 1
                return
            if self.scale <= section.min:
                what = f"gradients overflow even at the smallest loss scale, {section.min}"
                remedy = (
                    "lower lr.peak, use bf16, or go back to an earlier checkpoint and skip this data with train.skip"
                )
                raise DivergedError(Problem(what, "fp16 cannot hold these gradients", remedy))
            self.scale = max(self.scale / 2, section.min)
            return
        self.clean_steps += 1
        after_first = self.clean_steps - 1  # the reference grows on the step after the window, not on its last
        if after_first > 0 and after_first % section.window.count == 0:
            self.scale *= 2
            self.patience = section.hysteresis
