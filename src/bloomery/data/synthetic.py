"""Random tokens without any file: for benchmarks, and for machines that hold no data."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bloomery.data.batch import Batch, causal_batch, cut_windows
from bloomery.data.order import splitmix64, stream_key


class SyntheticSource:
    """Uniform ids; token t of the endless stream is a hash of (seed, t), so every sample is there at once."""

    def __init__(self, *, vocab_size: int, seq_length: int, seed: int) -> None:
        self.vocab_size = vocab_size
        self.seq_length = seq_length
        self._key = np.uint64(stream_key(seed, "synthetic"))

    @property
    def num_samples(self) -> int:
        """It never repeats."""
        return 2**62 // self.seq_length

    def batch(self, first: int, count: int) -> Batch:
        return causal_batch(*self.samples(first, count))

    def samples(self, first: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(tokens, labels) of shape (count, seq_length); windows overlap by one as in a real source."""
        positions = np.arange(first, first + count)[:, None] * self.seq_length + np.arange(self.seq_length + 1)
        rows = splitmix64(positions.astype(np.uint64) ^ self._key) % np.uint64(self.vocab_size)
        return cut_windows(rows.astype(np.int64))

    def close(self) -> None:
        """Nothing is open."""
