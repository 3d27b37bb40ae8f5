"""Timeless order: which sample stands at position i of a run, answered in O(1) without a shuffled array.

Each epoch is a keyed bijection on [0, N): a Feistel network over the mixed radix (rows, columns), walked again while
it leaves [0, N). It depends on the seed, the name of the source and the epoch, and on nothing else: not on ranks, batch
sizes, run length or other sources. Changing any constant here changes the data order of every existing run.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
from numpy.typing import NDArray

from bloomery.base.splitmix import GOLDEN, MASK, U64, splitmix64, splitmix64_one

_ROUNDS = 6
"""Two rounds fail statistical tests badly, three pass; the rest is margin."""
_FEW = 8
"""Positions for which Python is faster than numpy."""


def stream_key(seed: int, name: str) -> int:
    """64 bits that follow from a seed and a stable name."""
    return int.from_bytes(hashlib.sha256(f"{seed}\0{name}".encode()).digest()[:8], "little")


class TimelessOrder:
    """Endless: position i lies in epoch i // num_samples."""

    def __init__(self, seed: int, source_key: str, num_samples: int) -> None:
        """`source_key` is a name that stays (the recipe's path), never a place in a list."""
        if num_samples < 1:
            raise ValueError(f"an order needs at least one sample, not {num_samples}")
        self.num_samples = num_samples
        self._key = stream_key(seed, source_key)
        self._rows = math.isqrt(num_samples - 1) + 1
        self._columns = -(-num_samples // self._rows)

    def locate(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(epochs, samples) at these positions of the run."""
        if np.size(indices) <= _FEW:
            found = np.array([self.locate_one(int(index)) for index in np.ravel(indices)], np.int64).reshape(-1, 2)
            return found[:, 0].reshape(np.shape(indices)), found[:, 1].reshape(np.shape(indices))
        epochs, places = np.divmod(np.asarray(indices, dtype=np.int64), self.num_samples)
        return epochs, self._walk(places, epochs)

    def locate_one(self, index: int) -> tuple[int, int]:
        """The same for one position, without numpy's overhead."""
        epoch, place = divmod(index, self.num_samples)
        keys = self._round_keys_one(epoch)
        while True:
            row, column = divmod(place, self._columns)
            for number, key in enumerate(keys):
                if number % 2 == 0:
                    row = (row + splitmix64_one(column ^ key)) % self._rows
                else:
                    column = (column + splitmix64_one(row ^ key)) % self._columns
            place = row * self._columns + column
            if place < self.num_samples:
                return epoch, place

    def _walk(self, places: NDArray[np.int64], epochs: NDArray[np.int64]) -> NDArray[np.int64]:
        keys = self._round_keys(epochs)
        result = self._step(places.astype(np.uint64), keys)
        outside = np.flatnonzero(result >= self.num_samples)
        while len(outside):
            result[outside] = self._step(result[outside], keys[:, outside])
            outside = outside[result[outside] >= self.num_samples]
        return result.astype(np.int64)

    def _step(self, places: U64, keys: U64) -> U64:
        rows, columns = np.uint64(self._rows), np.uint64(self._columns)
        row, column = np.divmod(places, columns)
        for number, key in enumerate(keys):
            if number % 2 == 0:
                row = (row + splitmix64(column ^ key) % rows) % rows
            else:
                column = (column + splitmix64(row ^ key) % columns) % columns
        return row * columns + column

    def _round_keys(self, epochs: NDArray[np.int64]) -> U64:
        """(rounds, positions): each epoch has keys of its own."""
        numbers = np.arange(1, _ROUNDS + 1, dtype=np.uint64)[:, None] * np.uint64(GOLDEN)
        epoch_keys = splitmix64(epochs.astype(np.uint64) ^ np.uint64(self._key))
        return splitmix64(epoch_keys[None, :] + numbers)

    def _round_keys_one(self, epoch: int) -> list[int]:
        epoch_key = splitmix64_one(epoch ^ self._key)
        return [splitmix64_one((epoch_key + number * GOLDEN) & MASK) for number in range(1, _ROUNDS + 1)]
