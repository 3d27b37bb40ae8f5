"""The learning rate as a closed form of the samples consumed: the value Megatron prints beside that count."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bloomery.config.recipe import Schedule


@dataclass(frozen=True)
class LrPlan:
    """Linear warm-up from zero, then a schedule that ends at `decay_samples`; afterwards exactly `min`."""

    peak: float
    min: float
    schedule: Schedule
    warmup_samples: int
    decay_samples: int
    """Counted from the start of training, warm-up included. A constant schedule ignores it."""
    cooldown_samples: int = 0
    """Length of the final decay (wsd only), which ends at `decay_samples`."""

    def at(self, samples: int) -> float:
        """The rate of an update that brings the consumed samples to this number: also what the log prints."""
        if self.warmup_samples > 0 and samples <= self.warmup_samples:
            return self.peak * samples / self.warmup_samples
        if self.schedule == "constant":
            return self.peak
        if samples >= self.decay_samples:
            return self.min
        return self.min + self._share_of_peak(samples) * (self.peak - self.min)

    def _share_of_peak(self, samples: int) -> float:
        """1 at the peak, 0 at the minimum; only for samples between the warm-up and the end of the decay."""
        if self.schedule == "wsd":
            if self.cooldown_samples <= 0:
                return 1.0
            return min(1.0, (self.decay_samples - samples) / self.cooldown_samples)
        done = (samples - self.warmup_samples) / (self.decay_samples - self.warmup_samples)
        return 1.0 - done if self.schedule == "linear" else 0.5 * (math.cos(math.pi * done) + 1.0)
