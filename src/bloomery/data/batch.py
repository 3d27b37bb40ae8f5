"""Samples on their way to the model: what a source yields, a stream of several sources, micro-batches, and the loader
that reads them ahead of the training."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bloomery.data.shards import ShardReader
from bloomery.families.family import IGNORED_LABEL, LM_LOSS


@dataclass(frozen=True)
class DocumentSpan:
    """Tokens [start, start + tokens) of one document of a shard, as they stand in a sample."""

    document: int
    start: int
    tokens: int


@dataclass(frozen=True)
class Trace:
    source: str
    epoch: int
    sample: int
    """Number of the sample within its source, whatever the order."""
    documents: list[DocumentSpan]


def document_spans(shard: ShardReader, start_token: int, count: int) -> list[DocumentSpan]:
    """The documents that tokens [start_token, start_token + count) of a shard belong to, in order."""
    spans = []
    while count > 0:
        document, position = shard.index.document_at(start_token)
        tokens = min(count, shard.index.document_start(document + 1) - start_token)
        spans.append(DocumentSpan(document, position, tokens))
        start_token, count = start_token + tokens, count - tokens
    return spans


_DEPTH = 2
"""Global batches read ahead. One thread is enough: with a warm cache it read 6 to 8 Mtokens/s in micro-batches of one
sample of 2048 tokens and 40 to 89 in those of 64, on one core; a 1B model on an H200 takes 0.05."""


@dataclass(frozen=True)
class Batch:
    """CPU tensors with one row per sample."""

    inputs: dict[str, Tensor]
    """What the model is called with, such as `tokens`."""
    targets: dict[str, Tensor]
    """Labels by the name of their loss, such as `lm loss`."""
    sources: NDArray[np.int64] | None = None
    """Which source of a stream each sample came from; None before a stream has put them together."""

    def row_counts(self) -> dict[str, NDArray[np.int64]]:
        """Labels that carry a loss, per target and sample."""
        return {
            name: (labels != IGNORED_LABEL).reshape(len(labels), -1).sum(1).numpy()
            for name, labels in self.targets.items()
        }

    def pin_memory(self) -> Batch:
        """A copy in page-locked memory, from which a device can fetch without waiting."""
        return Batch(
            inputs={name: tensor.pin_memory() for name, tensor in self.inputs.items()},
            targets={name: tensor.pin_memory() for name, tensor in self.targets.items()},
            sources=self.sources,
        )


class SampleSource(Protocol):
    """One corpus in an order of its own. Ordinals count its samples as a run takes them, from 0, epoch after epoch.

    `read` is a pure function and may be called from a thread.
    """

    key: str
    """A stable name: with the seed it decides the order, and checkpoints and metrics use it."""

    @property
    def num_samples(self) -> int:
        """Samples of one epoch."""
        ...

    def read(self, ordinals: NDArray[np.int64]) -> Batch: ...

    def close(self) -> None: ...


class Source(Protocol):
    """An endless row of samples in a fixed order. `batch` is a pure function and may be called from a thread."""

    @property
    def num_samples(self) -> int:
        """Samples of one epoch; of a stream, of all its sources together."""
        ...

    def batch(self, first: int, count: int) -> Batch:
        """The samples at positions [first, first + count) of the run."""
        ...


@dataclass(frozen=True)
class GlobalBatch:
    """One replica's part of one optimizer step."""

    first_sample: int
    """Samples consumed before this batch, over all replicas."""
    size: int
    """Samples of the whole batch, over all replicas."""
    micro_batches: list[Batch]
    row_counts: dict[str, NDArray[np.int64]]
    """Labels that carry a loss, per target, for each sample of this replica's micro-batches."""
    counts: dict[str, int]
    """Labels that carry a loss, per target: of this replica as it is read, of all replicas as it is trained on."""
    starts: tuple[int, ...] = ()
    """Position in the run of the first sample of each micro-batch."""

    @property
    def sources(self) -> NDArray[np.int64] | None:
        """The source of each sample of this replica's micro-batches."""
        parts = [batch.sources for batch in self.micro_batches if batch.sources is not None]
        return np.concatenate(parts) if parts else None


@dataclass(frozen=True)
class Packing:
    """What happens where one document of a sample ends and the next begins. Ends are found by their token, as Megatron
    finds them: the token belongs to the document that it ends."""

    eod_id: int
    mask_documents: bool = False
    """Adds the input `document_ids`: attention stays within a document."""
    reset_positions: bool = False
    """Adds the input `positions`: they begin at 0 with every document, and with the sample."""
    eod_loss: bool = True
    """False: what follows an end of document is not to be predicted from it."""


def causal_batch(rows: NDArray[np.int64], packing: Packing | None = None) -> Batch:
    """Next-token prediction from rows of S + 1 tokens: each label is the token that follows."""
    tokens, labels = np.ascontiguousarray(rows[:, :-1]), np.ascontiguousarray(rows[:, 1:])
    arrays = {"tokens": tokens}
    if packing is not None:
        is_end = tokens == packing.eod_id
        is_first = np.zeros_like(is_end)
        is_first[:, 1:] = is_end[:, :-1]
        if packing.mask_documents:
            arrays["document_ids"] = np.cumsum(is_first, axis=1, dtype=np.int64)
        if packing.reset_positions:
            places = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int64), tokens.shape)
            arrays["positions"] = places - np.maximum.accumulate(np.where(is_first, places, 0), axis=1)
        if not packing.eod_loss:
            labels = np.where(is_end, IGNORED_LABEL, labels)  # a copy: one row alone shares its memory with the tokens
    inputs = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return Batch(inputs=inputs, targets={LM_LOSS: torch.from_numpy(labels)})


def read_batch(
    source: Source,
    first: int,
    size: int,
    *,
    micro_batch_size: int,
    replica: int = 0,
    replicas: int = 1,
    pin_memory: bool = False,
    end: int | None = None,
) -> GlobalBatch:
    """Samples [first, first + size) of the run, this replica's share of them; those from `end` on carry no loss.

    Each window of micro_batch_size * replicas samples is dealt out to the replicas in their order, so the set of
    samples in a global batch depends on neither number.
    """
    window = micro_batch_size * replicas
    if size <= 0 or size % window:
        raise ValueError(
            f"a batch of {size} samples is not a multiple of {micro_batch_size} per micro-batch x {replicas}"
        )
    starts = range(first + replica * micro_batch_size, first + size, window)
    micro_batches = [source.batch(start, micro_batch_size) for start in starts]
    if end is not None:
        micro_batches = [
            _without_loss_from(end - start, batch) for start, batch in zip(starts, micro_batches, strict=True)
        ]
    rows = [micro_batch.row_counts() for micro_batch in micro_batches]
    row_counts = {name: np.concatenate([counts[name] for counts in rows]) for name in rows[0]}
    if pin_memory:
        micro_batches = [micro_batch.pin_memory() for micro_batch in micro_batches]
    counts = {name: int(each.sum()) for name, each in row_counts.items()}
    return GlobalBatch(first, size, micro_batches, row_counts, counts, tuple(starts))


def _without_loss_from(row: int, batch: Batch) -> Batch:
    """The batch with no labels from this row on."""
    rows = len(next(iter(batch.targets.values())))
    if row >= rows:
        return batch
    targets = {name: labels.clone() for name, labels in batch.targets.items()}
    for labels in targets.values():
        labels[max(0, row) :] = IGNORED_LABEL
    return Batch(batch.inputs, targets, batch.sources)


class Blend(Protocol):
    """Says which source a position belongs to."""

    def locate(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(index of the source, ordinal within it) of each position."""
        ...

    def taken(self, consumed_samples: int) -> dict[str, int]:
        """Samples taken from each source, by its key, by the first `consumed_samples` of the run."""
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


class Loader:
    """One replica's batches, in order, read ahead in one thread, which the first `take` starts. Its whole state is the
    number of samples consumed."""

    def __init__(
        self,
        source: Source,
        *,
        micro_batch_size: int,
        batch_size_at: Callable[[int], int],
        replica: int = 0,
        replicas: int = 1,
        pin_memory: bool = False,
    ) -> None:
        """`batch_size_at(consumed_samples)` is the size of the global batch that begins there, for any number."""
        if not 0 <= replica < replicas:
            raise ValueError(f"replica {replica} of {replicas}")
        self._source, self._batch_size_at = source, batch_size_at
        self._micro_batch_size, self._pin_memory = micro_batch_size, pin_memory
        self._replica, self._replicas = replica, replicas
        self._consumed_samples = self._submitted_samples = 0
        self._prefetched: deque[Future[GlobalBatch]] = deque()
        self._thread: ThreadPoolExecutor | None = None

    @property
    def consumed_samples(self) -> int:
        """Samples before the next batch, over all replicas: save it, and `seek` to it to resume."""
        return self._consumed_samples

    def seek(self, consumed_samples: int) -> None:
        """The next batch begins at this sample. Costs nothing however far it is."""
        self.close()
        self._consumed_samples = self._submitted_samples = consumed_samples

    def take(self) -> GlobalBatch:
        """The next global batch. Raises what went wrong while reading it; the position then stays."""
        self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="bloomery-loader")
        while len(self._prefetched) <= _DEPTH:
            self._prefetched.append(self._thread.submit(self._read, self._submitted_samples))
            self._submitted_samples += self._batch_size_at(self._submitted_samples)
        try:
            batch = self._prefetched.popleft().result()
        except BaseException:
            self.seek(self._consumed_samples)
            raise
        self._consumed_samples = batch.first_sample + batch.size
        return batch

    def close(self) -> None:
        """Ends the thread. The source stays open; a later `take` starts again."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
        self._thread = None
        self._prefetched.clear()
        self._submitted_samples = self._consumed_samples

    def _read(self, first: int) -> GlobalBatch:
        return read_batch(
            self._source,
            first,
            self._batch_size_at(first),
            micro_batch_size=self._micro_batch_size,
            replica=self._replica,
            replicas=self._replicas,
            pin_memory=self._pin_memory,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
