"""Several sources as one row of samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bloomery.data.batch import Batch, SampleSource


class Blend(Protocol):
    """Says which source a position belongs to."""

    def locate(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(index of the source, ordinal within it) of each position."""
        ...


class Stream:
    """The run's samples: the blend says where each comes from, the source reads it."""

    def __init__(self, sources: Sequence[SampleSource], blend: Blend) -> None:
        self.sources = list(sources)
        self.blend = blend

    @property
    def num_samples(self) -> int:
        return sum(source.num_samples for source in self.sources)

    @property
    def keys(self) -> list[str]:
        return [source.key for source in self.sources]

    def batch(self, first: int, count: int) -> Batch:
        """The samples at positions [first, first + count) of the run."""
        owners, ordinals = self.blend.locate(np.arange(first, first + count))
        parts = {int(owner): np.flatnonzero(owners == owner) for owner in np.flatnonzero(np.bincount(owners))}
        batches = {owner: self.sources[owner].read(ordinals[rows]) for owner, rows in parts.items()}
        if len(batches) == 1:
            only = next(iter(batches.values()))
            return Batch(only.inputs, only.targets, owners)

        def joined(tensors: dict[int, Tensor]) -> Tensor:
            one = next(iter(tensors.values()))
            whole = torch.empty((count, *one.shape[1:]), dtype=one.dtype)
            rows_of_whole = whole.numpy()  # the same memory; torch would wake its threads for a copy this small
            for owner, rows in parts.items():
                rows_of_whole[rows] = tensors[owner].numpy()
            return whole

        some = next(iter(batches.values()))
        inputs = {name: joined({o: batch.inputs[name] for o, batch in batches.items()}) for name in some.inputs}
        targets = {name: joined({o: batch.targets[name] for o, batch in batches.items()}) for name in some.targets}
        return Batch(inputs, targets, owners)

    def close(self) -> None:
        for source in self.sources:
            source.close()
