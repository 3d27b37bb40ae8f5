"""Timeless blend: which source the sample at a position comes from, and its index within the source.

The slots of a period are spread evenly by weight, and any position is answered at once, without a table of them. In a
prefix of any length each source is less than DRIFT samples off its share, however many sources there are. The state is
one cursor per source, taken when the weights last changed: a change of weights starts a new blend segment there and
repeats or loses nothing of the past.
"""

import heapq
import math
from collections.abc import Mapping
from dataclasses import asdict, field
from typing import Annotated, Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

PERIOD = 1 << 30
"""Slots: weights are exact to 1 / PERIOD. Twice its square still fits into 64 bits."""
_FIRST_PERIOD = 1 << 16
"""Of blends whose state has none."""
DRIFT = 1.68
"""Samples that a source may be off its share of slots; `_Pairs` says why."""
_ROUNDING = 1e-9
"""Relative. Far more than shares can be off by rounding when all weights are scaled alike, and about a slot."""


@dataclass(frozen=True, config=ConfigDict(strict=True))
class BlendState:
    """The present blend segment: where its weights began to hold."""

    first_sample: NonNegativeInt
    """Samples of the run before that."""
    cursors: dict[str, NonNegativeInt]
    """Samples taken from each source before that; sources no longer in the blend are remembered."""
    weights: dict[str, PositiveFloat]
    lengths: dict[str, PositiveInt] = field(default_factory=dict)
    """Sequence lengths of cursors that count samples of another length than the run's: of sources that were not in the
    blend when it changed."""
    period: Annotated[int, Field(ge=1, le=PERIOD)] = PERIOD
    """Its slots. These weights keep the number that they began with: another one would give another order."""

    def __post_init__(self) -> None:
        if not math.isclose(sum(self.weights.values()), 1, rel_tol=1e-6) or len(self.weights) > self.period:
            raise ValueError(f"a blend has shares that sum to 1, not {self.weights!r:.200}")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> Self:
        """ValueError, or another error of Python's, where it cannot be one."""
        return cls(**{"period": _FIRST_PERIOD, **facts})


class TimelessBlend:
    """Positions to sources, for positions from `state.first_sample` on."""

    def __init__(self, state: BlendState) -> None:
        self.state = state
        self._keys = list(state.weights)
        self._counts = _slot_counts(np.array([state.weights[key] for key in self._keys]), state.period)
        self._pairs = _Pairs(self._counts.tolist())
        self._cursors = np.array([state.cursors.get(key, 0) for key in self._keys])

    @classmethod
    def start(cls, weights: Mapping[str, float]) -> Self:
        """From the first sample of a run. Only the proportions of the weights matter."""
        return cls(BlendState(0, {}, _normalised(weights)))

    def locate(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(index of the source, ordinal within it) of each position."""
        local = np.asarray(positions, np.int64) - self.state.first_sample
        if local.size and int(local.min()) < 0:
            raise ValueError(f"these weights hold from sample {self.state.first_sample}")
        period, slot = np.divmod(local, self.state.period)
        owner, rank = self._pairs.locate(slot)
        return owner, self._cursors[owner] + period * self._counts[owner] + rank

    def taken(self, consumed_samples: int) -> dict[str, int]:
        """Samples taken from each source by the first `consumed_samples` of the run."""
        period, slot = divmod(consumed_samples - self.state.first_sample, self.state.period)
        taken = self._cursors + period * self._counts + self._pairs.taken(slot)
        return {**self.state.cursors, **dict(zip(self._keys, taken.tolist(), strict=True))}


def same_shares(one: Mapping[str, float], other: Mapping[str, float]) -> bool:
    """Whether these weights make the same blend: the same sources in the same order, in the same proportions."""
    shares = [_normalised(weights).values() for weights in (one, other)]
    return list(one) == list(other) and all(
        math.isclose(*pair, rel_tol=_ROUNDING) for pair in zip(*shares, strict=True)
    )


def _normalised(weights: Mapping[str, float]) -> dict[str, float]:
    total = sum(weights.values())
    return {key: weight / total for key, weight in weights.items()}


def _slot_counts(weights: NDArray[np.float64], period: int) -> NDArray[np.int64]:
    """Whole slots that sum to the period, by largest remainder; the smallest weight still gets one."""
    exact = weights * period
    counts = np.maximum(1, np.floor(exact)).astype(np.int64)
    missing = period - int(counts.sum())
    if missing > 0:
        counts[np.argsort(counts - exact, kind="stable")[:missing]] += 1
    for _ in range(-missing):  # many tiny sources took a slot each: the largest give way
        counts[np.argmax(counts)] -= 1
    return counts


class _Pairs:
    """Sources are paired, the lightest first, until one node holds all: Huffman's tree. The slots of a node go to its
    two children in turn.

    Of every prefix of a node's slots, each of its two children gets its share to within half a slot. It also inherits
    its parent's error, by the part that it is of the parent. So a source is off by at most the sum of own / ancestor
    over itself and its ancestors below the root, halved. In this tree no node is lighter than its sibling's children,
    so they weigh at least 1, 1, 2, 3, 5, 8, ... times what the source does: half the sum of the reciprocal Fibonacci
    numbers, DRIFT, is never reached.
    """

    def __init__(self, counts: list[int]) -> None:
        """`counts`: slots of each source in a period."""
        self._sources = len(counts)
        heap = [(count, number) for number, count in enumerate(counts)]
        heapq.heapify(heap)
        rows: list[tuple[int, int, int, int]] = []
        while len(heap) > 1:
            (less, lighter), (more, heavier) = heapq.heappop(heap), heapq.heappop(heap)
            heapq.heappush(heap, (less + more, len(counts) + len(rows)))
            rows.append((lighter, heavier, less, less + more))
        self._rows = np.array(rows, np.int64).reshape(-1, 4)
        """Of each pair: its lighter node, its heavier one, slots of the lighter, of both. Nodes are the sources, then
        the pairs; the last one holds all."""

    def locate(self, slots: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(source, index within the source's slots of the period) of each slot."""
        places = np.array(slots, np.int64)
        nodes = np.full_like(places, self._sources + len(self._rows) - 1)
        while len(inner := np.nonzero(nodes >= self._sources)[0]):
            lighter, heavier, less, both = self._rows[nodes[inner] - self._sources].T
            place = places[inner]
            before = _share(place, less, both)
            is_lighter = _share(place + 1, less, both) > before
            nodes[inner] = np.where(is_lighter, lighter, heavier)
            places[inner] = np.where(is_lighter, before, place - before)
        return nodes, places

    def taken(self, slots: int) -> list[int]:
        """Slots of each source among the first of a period."""
        taken = [0] * (self._sources + len(self._rows))
        taken[-1] = slots
        for node, (lighter, heavier, less, both) in reversed([*enumerate(self._rows.tolist(), self._sources)]):
            taken[lighter] = _share(taken[node], less, both)
            taken[heavier] = taken[node] - taken[lighter]
        return taken[: self._sources]


Whole = TypeVar("Whole", int, NDArray[np.int64])


def _share(slots: Whole, less: Whole, both: Whole) -> Whole:
    """What the lighter node of a pair gets of the pair's first slots: slots * less / both, rounded, halves up."""
    return (2 * less * slots + both) // (2 * both)
