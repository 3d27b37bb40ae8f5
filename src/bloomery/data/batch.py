"""Samples on their way to the model: what a source yields, and how a global batch is cut into micro-batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

IGNORED_LABEL = -100
"""A label that carries no loss."""


@dataclass(frozen=True)
class Batch:
    """CPU tensors with one row per sample."""

    inputs: dict[str, Tensor]
    """What the model is called with, such as `tokens`."""
    targets: dict[str, Tensor]
    """Labels by the name of their loss, such as `lm loss`."""

    def counts(self) -> dict[str, int]:
        """Labels that carry a loss, per target."""
        return {name: int((labels != IGNORED_LABEL).sum()) for name, labels in self.targets.items()}

    def pin_memory(self) -> Batch:
        """A copy in page-locked memory, from which a device can fetch without waiting."""
        return Batch(
            inputs={name: tensor.pin_memory() for name, tensor in self.inputs.items()},
            targets={name: tensor.pin_memory() for name, tensor in self.targets.items()},
        )


class Source(Protocol):
    """An endless row of samples in a fixed order. `batch` depends on its arguments alone and may run in a thread."""

    seq_length: int

    @property
    def num_samples(self) -> int:
        """Samples of one epoch."""
        ...

    def batch(self, first: int, count: int) -> Batch:
        """The samples at positions [first, first + count) of the run."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class GlobalBatch:
    """One replica's part of one optimizer step."""

    first_sample: int
    """Samples consumed before this batch, over all replicas."""
    size: int
    """Samples of the whole batch, over all replicas."""
    micro_batches: list[Batch]
    counts: dict[str, int]
    """Labels that carry a loss, per target, over this replica's micro-batches."""


def causal_batch(tokens: NDArray[np.int64], labels: NDArray[np.int64]) -> Batch:
    """Next-token prediction."""
    return Batch(inputs={"tokens": torch.from_numpy(tokens)}, targets={"lm loss": torch.from_numpy(labels)})


def cut_windows(rows: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Rows of S + 1 tokens to (tokens, labels) of S: each label is the token that follows."""
    return np.ascontiguousarray(rows[:, :-1]), np.ascontiguousarray(rows[:, 1:])


def read_batch(
    source: Source,
    first: int,
    size: int,
    *,
    micro_batch_size: int,
    replica: int = 0,
    replicas: int = 1,
    pin_memory: bool = False,
) -> GlobalBatch:
    """Samples [first, first + size) of the run, this replica's share of them.

    Each window of micro_batch_size * replicas samples is dealt out to the replicas in their order, so the set of
    samples in a global batch depends on neither number.
    """
    window = micro_batch_size * replicas
    if size <= 0 or size % window:
        raise ValueError(
            f"a batch of {size} samples is not a multiple of {micro_batch_size} per micro-batch x {replicas}"
        )
    micro_batches = [
        source.batch(start, micro_batch_size)
        for start in range(first + replica * micro_batch_size, first + size, window)
    ]
    counts: dict[str, int] = {}
    for micro_batch in micro_batches:
        for name, count in micro_batch.counts().items():
            counts[name] = counts.get(name, 0) + count
    if pin_memory:
        micro_batches = [micro_batch.pin_memory() for micro_batch in micro_batches]
    return GlobalBatch(first_sample=first, size=size, micro_batches=micro_batches, counts=counts)
