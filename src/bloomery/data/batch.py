"""Samples on their way to the model: sources of them, a stream of several sources, micro-batches, and the loader that
reads them ahead of the training."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bloomery.base.errors import DataError, Problem
from bloomery.base.units import counted
from bloomery.data.megatron_order import PARTS, Flavour, Part, split_boundaries
from bloomery.data.order import TimelessOrder
from bloomery.data.shards import ShardReader
from bloomery.families.family import IGNORED_LABEL, LM_LOSS


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

    def without_loss_from(self, row: int) -> Batch:
        """The same without labels from this row on."""
        targets = {name: labels.clone() for name, labels in self.targets.items()}
        for labels in targets.values():
            labels[max(0, row) :] = IGNORED_LABEL
        return replace(self, targets=targets)

    def labelled_only(self, width: int) -> Batch:
        """The same with the first `width` labels of each sample and, as input `predicted`, their places: the head is
        needed nowhere else. Samples with fewer are filled up with places that have no label."""
        labels = self.targets[LM_LOSS].numpy()
        places = np.argsort(labels == IGNORED_LABEL, axis=1, kind="stable")[:, :width]
        chosen = torch.from_numpy(np.take_along_axis(labels, places, axis=1))
        inputs = {**self.inputs, "predicted": torch.from_numpy(places.copy())}
        return replace(self, inputs=inputs, targets={**self.targets, LM_LOSS: chosen})

    def pin_memory(self) -> Batch:
        """A copy in page-locked memory, from which a device can fetch without waiting."""
        inputs, targets = (
            {name: tensor.pin_memory() for name, tensor in tensors.items()} for tensors in (self.inputs, self.targets)
        )
        return Batch(inputs, targets, self.sources)


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


class ShardSource:
    """A part of one shard as samples; a subclass says what a sample is and in which order they come."""

    num_samples: int
    """Of one epoch."""
    flavour: Flavour = "megatron"
    """Whose rounding cuts the shard into parts."""

    def __init__(
        self,
        shard: ShardReader,
        *,
        seq_length: int,
        vocab_size: int,
        seed: int,
        part: Part = "train",
        split: str | None = None,
        split_by: str = "documents",
        key: str | None = None,
        packing: Packing | None = None,
    ) -> None:
        """`part` is that of `split`; without one it is the whole shard. `key` names the source in the order of
        samples; by default the shard's prefix, as the recipe writes it. `packing` keeps documents of one sample
        apart."""
        self.key = shard.prefix if key is None else key
        self.packing, self.seq_length, self.vocab_size, self.seed = packing, seq_length, vocab_size, seed
        self.shard, self.part, self.split, self.split_by = shard, part, split, split_by
        self._index_samples()
        if self.num_samples < 1:
            of = f"{counted(shard.num_tokens, 'token')} in {counted(shard.num_documents, 'document')}"
            what = f"{f'the {part} part of ' * bool(split)}{of} gives no sample"
            rule = f"one takes seq_length + 1 = {seq_length + 1} tokens (bert: two of one document)"
            remedy = "prepare more text or use a shorter model.seq_length"
            remedy += f" or another data.split{' or data.split_by=tokens' * (split_by != 'tokens')}" * bool(split)
            raise DataError(Problem(what, rule, remedy, f"{shard.prefix}.bin"))
        self.order = TimelessOrder(seed, self.key, self.num_samples)

    def _index_samples(self) -> None:
        """What the samples of the part are; sets `num_samples`."""
        raise NotImplementedError

    def locate(self, ordinals: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(epochs, samples) that a run takes from this source at these places: in timeless order, unless a subclass has
        another."""
        return self.order.locate(ordinals)

    def stretches(self, sample: int) -> list[tuple[int, int]]:
        """Tokens [start, stop) of the shard that make up a sample, in order."""
        raise NotImplementedError

    def read(self, ordinals: NDArray[np.int64]) -> Batch:
        """The samples that a run takes from this source at these places."""
        rows = np.empty((len(ordinals), self.seq_length + 1), np.int64)
        for row, sample in zip(rows, self.locate(ordinals)[1].tolist(), strict=True):
            np.concatenate([self.ids(*stretch) for stretch in self.stretches(sample)], out=row)
        return causal_batch(rows, self.packing)

    def ids(self, start: int, stop: int) -> NDArray[np.int64]:
        """Tokens [start, stop) of the shard. DataError for an id outside the vocabulary."""
        ids = self.shard.read(start, stop - start).astype(np.int64)
        wrong = ids.view(np.uint64) >= self.vocab_size  # as unsigned numbers, negative ids are large
        if wrong.any():
            document, position = self.shard.document_at(start + int(wrong.argmax()))
            what = f"document {document} holds token id {ids[wrong.argmax()]} at position {position}"
            rule = f"ids must be from 0 to {self.vocab_size - 1}, below model.vocab_size or the tokenizer's"
            remedy = "use the tokenizer the shard was made with, or make the shard again with `bloomery prepare`"
            raise DataError(Problem(what, rule, remedy, f"{self.shard.prefix}.bin"))
        return ids

    def part_of(self, count: int) -> tuple[int, int]:
        """The documents, sequences or tokens [first, last) of the part, of so many. DataError for an empty part."""
        if self.split is None:
            return 0, count
        ends = split_boundaries(self.split, count, self.flavour)
        first, last = ends[PARTS.index(self.part) :][:2]
        if not 0 <= first < last:
            what = f"the split '{self.split}' of {counted(count, self.split_by[:-1])} leaves none for {self.part} "
            what += f"(train, valid, test end at {', '.join(map(str, ends[1:]))})"
            remedy = f"prepare more {self.split_by}, or give {self.part} a larger share in data.split"
            if self.split_by != "tokens":
                remedy = f"use data.split_by=tokens, {remedy}"
            raise DataError(Problem(what, "a part that is used needs one", remedy, f"{self.shard.prefix}.idx"))
        return first, last

    @property
    def documents(self) -> tuple[int, int]:
        """[first, last) of the shard that the part reads, at least a sequence of each."""
        return self.part_of(self.shard.num_documents)

    def epochs(self, samples: int) -> float:
        """How often so many samples go through the part."""
        return samples / self.num_samples


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

    def __init__(self, sources: Sequence[ShardSource], blend: Blend) -> None:
        self.sources = list(sources)
        self.blend = blend

    @property
    def keys(self) -> list[str]:
        return [source.key for source in self.sources]

    def batch(self, first: int, count: int) -> Batch:
        """The samples at positions [first, first + count) of the run. A pure function; may be called from a thread."""
        owners, ordinals = self.blend.locate(np.arange(first, first + count))
        rows = {owner: np.flatnonzero(owners == owner) for owner in sorted({*map(int, owners)})}
        batches = [self.sources[owner].read(ordinals[own]) for owner, own in rows.items()]
        if len(batches) == 1:
            return replace(batches[0], sources=owners)
        places = np.argsort(np.concatenate(list(rows.values())))

        def joined(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
            """By numpy: torch would wake its threads for copies this small."""
            whole = {name: np.concatenate([part[name].numpy() for part in parts]) for name in parts[0]}
            return {name: torch.from_numpy(array[places]) for name, array in whole.items()}

        return Batch(joined([part.inputs for part in batches]), joined([part.targets for part in batches]), owners)


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


def read_batch(
    source: Stream,
    first: int,
    size: int,
    *,
    micro_batch_size: int,
    replica: int = 0,
    replicas: int = 1,
    pin_memory: bool = False,
    end: int | None = None,
    labels_per_sample: int | None = None,
) -> GlobalBatch:
    """Samples [first, first + size) of the run, this replica's share of them; those from `end` on carry no loss. With
    `labels_per_sample`, as `labelled_only`.

    Each window of micro_batch_size * replicas samples is dealt out to the replicas in their order, so the set of
    samples in a global batch depends on neither number.
    """
    window = micro_batch_size * replicas
    assert size % window == 0, f"a batch of {size} samples is no multiple of {window}"
    starts = range(first + replica * micro_batch_size, first + size, window)
    micro_batches, rows = [], []
    for start in starts:
        batch = source.batch(start, micro_batch_size)
        if end is not None:
            batch = batch.without_loss_from(end - start)
        if labels_per_sample is not None:
            batch = batch.labelled_only(labels_per_sample)
        rows.append(batch.row_counts())
        micro_batches.append(batch.pin_memory() if pin_memory else batch)
    row_counts = {name: np.concatenate([counts[name] for counts in rows]) for name in rows[0]}
    counts = {name: int(each.sum()) for name, each in row_counts.items()}
    return GlobalBatch(first, size, micro_batches, row_counts, counts, tuple(starts))


_DEPTH = 2
"""Global batches read ahead. One thread is enough: with a warm cache it read 6 to 8 Mtokens/s in micro-batches of one
sample of 2048 tokens and more in larger ones, on one core; a 1B model on an H200 takes 0.05."""


class Loader:
    """One replica's batches, in order, read ahead in one thread, which the first `take` starts. Its whole state is the
    number of samples consumed."""

    def __init__(self, source: Stream, *, batch_size_at: Callable[[int], int], **settings: Any) -> None:
        """`batch_size_at(consumed_samples)` is the size of the global batch that begins there, for any number.
        `settings`: those of read_batch."""
        self._source, self._batch_size_at, self._settings = source, batch_size_at, settings
        self.consumed_samples = 0
        """Samples before the next batch, over all replicas: save it, and `seek` to it to resume."""
        self._submitted_samples = 0
        self._prefetched: deque[Future[GlobalBatch]] = deque()
        self._thread: ThreadPoolExecutor | None = None

    def seek(self, consumed_samples: int) -> None:
        """The next batch begins at this sample. Costs nothing however far it is."""
        self.close()
        self.consumed_samples = self._submitted_samples = consumed_samples

    def take(self) -> GlobalBatch:
        """The next global batch. Raises what went wrong while reading it; the position then stays."""
        self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="bloomery-loader")
        while len(self._prefetched) <= _DEPTH:
            first, size = self._submitted_samples, self._batch_size_at(self._submitted_samples)
            self._prefetched.append(self._thread.submit(read_batch, self._source, first, size, **self._settings))
            self._submitted_samples += size
        try:
            batch = self._prefetched.popleft().result()
        except BaseException:
            self.seek(self.consumed_samples)
            raise
        self.consumed_samples = batch.first_sample + batch.size
        return batch

    def close(self) -> None:
        """Ends the thread. The source stays open; a later `take` starts again."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
        self._thread = None
        self._prefetched.clear()
        self._submitted_samples = self.consumed_samples
