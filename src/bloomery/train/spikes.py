"""Losses and gradient norms far above what they were: the limits, and how long a run has been beyond them."""

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

RECOVERY_STEPS = 10
"""Normal steps in a row that end a stretch of spikes."""
PROOF_STEPS = 5
"""Normal steps after a checkpoint that prove it to be good: a bad update shows in the steps after it."""
_WINDOW = 64
_FEWEST = 20
"""Steps to know before the recent losses say what is normal."""


@dataclass(frozen=True)
class Limits:
    """What a step may reach. Rounded to fp32, so that the device and the host judge alike."""

    loss: float = math.inf
    grad_norm: float = math.inf


@dataclass
class SpikeWatch:
    """All of it is plain numbers, the same on all ranks, and saved with the checkpoint: a resumed run judges alike."""

    losses: list[float] = field(default_factory=list)
    """Of the last normal steps."""
    grad_norms: list[float] = field(default_factory=list)
    ceiling: float | None = None
    """What no loss may reach, however slowly it climbs: it only ever falls. None before the first step."""
    since: int | None = None
    """The first step of the present stretch of spikes; None if the last steps were normal."""
    steps: int = 0
    """Spikes in this stretch."""
    normal_steps: int = 0
    """Normal steps in a row within this stretch."""
    rewind_due: int | None = None
    """train.on_spike is rewind and a step spiked: go back, and pass over the data up to this step."""
    rewinds: int = 0
    """In a row: each began soon after the one before."""
    rewound: tuple[int, int] | None = None
    """The last rewind: the step of its checkpoint, and the step it continued from. What is between was given up."""

    def limits(self, factor: float, clip_norm: float | None) -> Limits:
        """Of the next step."""
        loss = math.inf if self.ceiling is None else self.ceiling
        norm = math.inf
        if len(self.losses) >= _FEWEST:
            loss = min(loss, _above(self.losses, factor, share=0.1, least=0.1))
        if len(self.grad_norms) == _WINDOW:  # while the rate warms up, healthy ones jump by factors of ten
            norm = max(_above(self.grad_norms, factor, share=factor - 1), clip_norm or 0.0)
        return Limits(_fp32(loss), _fp32(norm))

    def follow(self, step: int, loss: float, grad_norm: float, limits: Limits, *, factor: float, chance: float) -> bool:
        """Judge and count one step; whether it spiked. `chance`: the loss of a model that knows nothing. What is not
        finite is not judged: NaNs have rules of their own."""
        if limits.loss < loss < math.inf or limits.grad_norm < grad_norm < math.inf:
            self.since = self.since or step
            self.steps, self.normal_steps = self.steps + 1, 0
            return True
        if not math.isfinite(loss):
            return False
        if self.since is not None:
            self.normal_steps += 1
            if self.normal_steps >= RECOVERY_STEPS:
                self.since, self.steps, self.normal_steps = None, 0, 0
        self.losses = [*self.losses[1 - _WINDOW :], loss]
        if self.ceiling is None:
            self.ceiling = 1.25 * max(loss, chance)
        elif len(self.losses) >= _FEWEST:
            self.ceiling = min(self.ceiling, _above(self.losses, factor, share=0.5, least=0.5))
        if math.isfinite(grad_norm):
            self.grad_norms = [*self.grad_norms[1 - _WINDOW :], grad_norm]
        return False

    def good_at(self, step: int) -> Callable[[int], bool]:
        """Which steps have a good checkpoint, in a run that is at `step`: enough normal steps have followed, and it is
        not between the checkpoint of the last rewind and where that continued."""
        last, (first, end) = (self.since or step + 1) - 1 - PROOF_STEPS, self.rewound or (0, 0)
        return lambda each: each <= last and not first < each < end


def _above(values: Sequence[float], factor: float, *, share: float, least: float = 0.0) -> float:
    """The median, and above it `factor` times its distance from the 90th percentile, which few outliers do not move;
    at least that share of the median."""
    middle = median(values)
    spread = sorted(values)[len(values) * 9 // 10] - middle
    return middle + max(factor * spread, share * middle, least)


def _fp32(value: float) -> float:
    return value if value > 3e38 else float(struct.unpack("f", struct.pack("f", value))[0])
