"""Timeless blend: which source the sample at a position comes from, and the how-manieth of that source it is.

One period of slots is spread evenly by weight, and any position is answered at once. In a prefix of any length each
source is less than DRIFT samples off its share, however many sources there are. The state is one cursor per source,
taken when the weights last changed: a change of weights starts a new segment there and repeats or loses nothing of the
past.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

PERIOD = 1 << 16
"""Slots: weights are exact to 1 / PERIOD."""
DRIFT = 1.68
"""Samples that a source may be off its share of slots; `_spread` says why."""


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
        self._owner, self._rank = _spread(self._counts.tolist())
        self._cursors = np.array([state.cursors.get(key, 0) for key in self._keys])

    def shares(self) -> dict[str, float]:
        """What each source gets of the samples: its weight, rounded to whole slots."""
        return dict(zip(self._keys, (self._counts / PERIOD).tolist(), strict=True))

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


def _spread(counts: list[int]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """(source, how-manieth of that source in the period) of each slot.

    Sources are paired, the lightest first, until one node holds all: Huffman's tree. Of every prefix of a node's slots,
    each of its two children gets its share to within half a slot. It also inherits its parent's error, by the part that
    it is of the parent. So a source is off by at most the sum of own / ancestor over itself and its ancestors below the
    root, halved. In this tree no node is lighter than its sibling's children, so they weigh at least 1, 1, 2, 3, 5, 8,
    ... times what the source does: half the sum of the reciprocal Fibonacci numbers, DRIFT, is never reached.
    """
    heap = [(count, number) for number, count in enumerate(counts)]
    heapq.heapify(heap)
    pairs: list[tuple[tuple[int, int], tuple[int, int]]] = []
    """(slots, node) of the lighter one, and of the heavier."""
    while len(heap) > 1:
        pair = (heapq.heappop(heap), heapq.heappop(heap))
        heapq.heappush(heap, (pair[0][0] + pair[1][0], len(counts) + len(pairs)))
        pairs.append(pair)
    starts = [0] * (len(counts) + len(pairs))
    """In a row in which the slots of every node, sources first and the root last, stand side by side."""
    for node, ((less, lighter), (_, heavier)) in reversed([*enumerate(pairs, len(counts))]):
        starts[lighter], starts[heavier] = starts[node], starts[node] + less
    numbers = np.argsort(starts[: len(counts)])
    lengths = np.array(counts)[numbers]
    owners = np.repeat(numbers.astype(np.int32), lengths)
    ranks = np.arange(PERIOD, dtype=np.int32) - np.array(starts, np.int32)[owners]
    places = ranks.astype(np.float64)
    """Among the slots of the source, then of its parent, and so on. In place: new arrays would take longest."""
    for (less, lighter), (more, heavier) in pairs:
        first = places[starts[lighter] : starts[lighter] + less]
        second = places[starts[heavier] : starts[heavier] + more]
        # The n-th slot comes where the share reaches n - 1/2, of the lighter one if both are due. Floats are exact
        # here: what is no whole number is at least 1 / (2 * PERIOD) away from one.
        for part, size in ((first, less), (second, more)):
            part += 0.5
            part *= less + more
            part /= size
        np.ceil(first, out=first)
        first -= 1
        np.floor(second, out=second)
    slots = places.astype(np.intp)
    owner, rank = np.empty_like(owners), np.empty_like(ranks)
    owner[slots], rank[slots] = owners, ranks
    return owner, rank
