"""Timeless blend: which source the sample at a position comes from, and the how-manieth of that source it is.

One period of slots is spread evenly by weight; any position is answered at once, and a prefix of any length holds each
source's share to within one sample. The state is one cursor per source, taken when the weights last changed: a change
of weights starts a new segment there and repeats or loses nothing of the past.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

PERIOD = 1 << 16
"""Slots: weights are exact to 1 / PERIOD."""


@dataclass(frozen=True)
class BlendState:
    """Where the present weights began to hold."""

    first_sample: int
    """Samples of the run before that."""
    cursors: dict[str, int]
    """Samples taken from each source before that; sources no longer in the blend are remembered."""
    weights: dict[str, float]
    lengths: dict[str, int] = field(default_factory=dict)
    """Sequence lengths of cursors that count samples of another length than the run's: of sources that were not in the
    blend when it changed."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> Self:
        return cls(int(facts["first_sample"]), *(dict(facts.get(key, {})) for key in ("cursors", "weights", "lengths")))


class TimelessBlend:
    """Positions to sources, for positions from `state.first_sample` on."""

    def __init__(self, state: BlendState) -> None:
        self.state = state
        self._keys = list(state.weights)
        self._counts = _slot_counts(np.array([state.weights[key] for key in self._keys]))
        owner = np.repeat(np.arange(len(self._keys), dtype=np.int32), self._counts)
        ranks = [np.arange(count, dtype=np.int32) for count in self._counts]
        place = np.concatenate([(rank + 0.5) / len(rank) for rank in ranks])
        rank = np.concatenate(ranks)
        by_place = np.argsort(place, kind="stable")  # of equals, the first source first
        self._owner, self._rank = owner[by_place], rank[by_place]
        self._cursors = np.array([state.cursors.get(key, 0) for key in self._keys])

    @classmethod
    def start(cls, weights: Mapping[str, float]) -> Self:
        """From the first sample of a run. Only the proportions of the weights matter."""
        return cls(BlendState(0, {}, _normalised(weights)))

    @classmethod
    def resume(cls, state: BlendState, weights: Mapping[str, float], *, consumed_samples: int) -> Self:
        """Go on after `consumed_samples`. Changed weights hold from there; every source goes on where it stood."""
        if _normalised(weights) == state.weights and list(weights) == list(state.weights):
            return cls(state)
        taken = cls(state).taken(consumed_samples)
        return cls(BlendState(consumed_samples, taken, _normalised(weights), state.lengths))

    def locate(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(index of the source, ordinal within it) of each position."""
        local = np.asarray(positions, np.int64) - self.state.first_sample
        if local.size and int(local.min()) < 0:
            raise ValueError(f"these weights hold from sample {self.state.first_sample}")
        period, slot = np.divmod(local, PERIOD)
        owner = self._owner[slot].astype(np.int64)
        return owner, self._cursors[owner] + period * self._counts[owner] + self._rank[slot]

    def taken(self, consumed_samples: int) -> dict[str, int]:
        """Samples taken from each source by the first `consumed_samples` of the run."""
        period, slot = divmod(consumed_samples - self.state.first_sample, PERIOD)
        extra = np.bincount(self._owner[:slot], minlength=len(self._keys))
        taken = self._cursors + period * self._counts + extra
        return {**self.state.cursors, **dict(zip(self._keys, taken.tolist(), strict=True))}


def _normalised(weights: Mapping[str, float]) -> dict[str, float]:
    total = sum(weights.values())
    return {key: weight / total for key, weight in weights.items()}


def _slot_counts(weights: NDArray[np.float64]) -> NDArray[np.int64]:
    """Whole slots that sum to PERIOD, by largest remainder; the smallest weight still gets one."""
    exact = weights * PERIOD
    counts = np.maximum(1, np.floor(exact)).astype(np.int64)
    missing = PERIOD - int(counts.sum())
    if missing > 0:
        counts[np.argsort(counts - exact, kind="stable")[:missing]] += 1
    for _ in range(-missing):  # many tiny sources took a slot each: the largest give way
        counts[np.argmax(counts)] -= 1
    return counts
