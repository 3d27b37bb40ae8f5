"""Timeless order: which sample stands at position i of a run, answered in O(1) without a shuffled array.

Each epoch is a keyed bijection on [0, N): a Feistel network over the mixed radix (rows, columns), walked again while
it leaves [0, N). It depends on the seed, the name of the source and the epoch, and on nothing else: not on ranks, batch
sizes, run length or other sources. Changing any constant here changes the data order of every existing run.
"""

import hashlib
import math

import numpy as np
from numpy.typing import NDArray

from bloomery.base.splitmix import GOLDEN, splitmix64_one

_ROUNDS = 6
"""Two rounds fail statistical tests badly, three pass; the rest is margin."""


def stream_key(seed: int, name: str) -> int:
    """64 bits that follow from a seed and a stable name."""
    return int.from_bytes(hashlib.sha256(f"{seed}\0{name}".encode()).digest()[:8], "little")


class TimelessOrder:
    """Endless: position i lies in epoch i // num_samples."""

    def __init__(self, seed: int, source_key: str, num_samples: int) -> None:
        """`source_key` is a name that stays (the recipe's path), never a place in a list."""
        self.num_samples = num_samples
        self._key = stream_key(seed, source_key)
        self._rows = math.isqrt(num_samples - 1) + 1
        self._columns = -(-num_samples // self._rows)

    def locate(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(epochs, samples) at these positions of the run."""
        epochs, places = np.divmod(indices, self.num_samples)
        keys = {epoch: self._round_keys(epoch) for epoch in {*epochs.tolist()}}
        pairs = zip(places.tolist(), epochs.tolist(), strict=True)
        return epochs, np.array([self._walk(place, keys[epoch]) for place, epoch in pairs], np.int64)

    def _round_keys(self, epoch: int) -> list[int]:
        """Each epoch has keys of its own."""
        epoch_key = splitmix64_one(epoch ^ self._key)
        return [splitmix64_one(epoch_key + number * GOLDEN) for number in range(1, _ROUNDS + 1)]

    def _walk(self, place: int, keys: list[int]) -> int:
        """In Python: a micro-batch is a few samples of each source, for which numpy takes longer."""
        while True:
            row, column = divmod(place, self._columns)
            for number, key in enumerate(keys):
                if number % 2 == 0:
                    row = (row + splitmix64_one(column ^ key)) % self._rows
                else:
                    column = (column + splitmix64_one(row ^ key)) % self._columns
            place = row * self._columns + column
            if place < self.num_samples:
                return place
