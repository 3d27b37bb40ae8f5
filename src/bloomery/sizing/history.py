"""What a run did before its batch or its sequence length last changed: a plan counts on from there."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True)
class Stretch:
    """Steps of the past with one global batch size and one sequence length."""

    first_step: int
    """Steps count from 1."""
    consumed_samples: int
    """Before `first_step`."""
    consumed_tokens: int
    """Before `first_step`."""
    global_batch: int
    seq_length: int


@dataclass(frozen=True)
class History:
    """Empty for a run that has never changed either. Kept in the checkpoint."""

    steps: int = 0
    """Steps done when the present batch and sequence length took over; samples and tokens of these steps follow."""
    samples: int = 0
    tokens: int = 0
    stretches: tuple[Stretch, ...] = ()
    """Of these steps, in order."""

    @classmethod
    def from_json(cls, facts: Mapping[str, Any] | None) -> Self:
        """What `dataclasses.asdict` made of it; None for a checkpoint from before there was a history."""
        if facts is None:
            return cls()
        return cls(**{**facts, "stretches": tuple(Stretch(**each) for each in facts["stretches"])})

    def tokens_at(self, consumed_samples: int, *, seq_length: int) -> int:
        """Tokens in the first samples of the run; `seq_length` is the present one."""
        if consumed_samples >= self.samples:
            return self.tokens + (consumed_samples - self.samples) * seq_length
        stretch = self._at(consumed_samples, "consumed_samples")
        return stretch.consumed_tokens + (consumed_samples - stretch.consumed_samples) * stretch.seq_length

    def samples_at(self, consumed_tokens: int, *, seq_length: int) -> int:
        """Whole samples in the first tokens of the run; `seq_length` is the present one."""
        if consumed_tokens >= self.tokens:
            return self.samples + (consumed_tokens - self.tokens) // seq_length
        stretch = self._at(consumed_tokens, "consumed_tokens")
        return stretch.consumed_samples + (consumed_tokens - stretch.consumed_tokens) // stretch.seq_length

    def _at(self, count: int, unit: str) -> Stretch:
        return self.stretches[bisect_right(self.stretches, count, key=lambda stretch: getattr(stretch, unit)) - 1]


NO_HISTORY = History()
"""Of a run that has never changed its batch or its sequence length."""
