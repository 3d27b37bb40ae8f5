"""Dynamic loss scale for fp16: grows after a window of clean steps, shrinks on overflow when patience runs out."""

from __future__ import annotations

from dataclasses import dataclass

from bloomery.base.errors import DivergedError, Problem
from bloomery.config.recipe import LossScaleSection


@dataclass
class LossScale:
    """DeepSpeed's DynamicLossScaler as tr1-13B ran it in 2021: the scale doubles on the last clean step of a window, as
    in megatron-core. (DeepSpeed since moved that to the step after it.) Plain numbers, saved with the checkpoint."""

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
            if min(self.patience, section.hysteresis) > 1:
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
        grows = self.clean_steps % section.window.count == 0
        if grows:
            self.scale *= 2
        if grows or section.consecutive_hysteresis:
            self.patience = section.hysteresis
