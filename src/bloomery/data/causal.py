"""Samples for next-token prediction: a shard's tokens, cut into windows that overlap by one, in timeless order; and how
a run that resumes continues in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bloomery.base.errors import DataError, Problem
from bloomery.config.recipe import Recipe
from bloomery.data.batch import Batch, Packing, Trace, causal_batch, document_spans
from bloomery.data.blend import BlendState, TimelessBlend
from bloomery.data.megatron_order import Flavour, Part, part_range
from bloomery.data.order import TimelessOrder
from bloomery.data.shards import ShardReader
from bloomery.sizing.schedule import TrainingPlan


class ShardSource:
    """A part of one shard as samples; a subclass says what a sample is and in which order they come."""

    def __init__(
        self,
        prefix: str,
        *,
        seq_length: int,
        vocab_size: int,
        seed: int,
        part: Part | Literal["all"] = "all",
        split: str | None = None,
        key: str | None = None,
        packing: Packing | None = None,
    ) -> None:
        """`key` names the source in the order of samples; by default the prefix, as the recipe writes it. `packing`
        keeps documents of one sample apart."""
        self.key = prefix if key is None else key
        self.packing, self.seq_length, self.vocab_size, self.seed = packing, seq_length, vocab_size, seed
        self.part, self.split = part, split
        self.shard = ShardReader(prefix)
        try:
            self._index_samples()
        except BaseException:
            self.shard.close()
            raise

    def _index_samples(self) -> None:
        """What the samples of the part are. DataError where there are none."""
        raise NotImplementedError

    def _part_of(self, count: int, flavour: Flavour = "megatron") -> tuple[int, int]:
        """The documents, or sequences, [first, last) of the part, of so many."""
        return part_range(self.split, self.part, count, place=f"{self.shard.prefix}.idx", flavour=flavour)

    @property
    def where(self) -> str:
        """For messages."""
        return "the shard" if self.part == "all" else f"its {self.part} part"

    @property
    def num_samples(self) -> int:
        """Samples of one epoch."""
        raise NotImplementedError

    @property
    def documents(self) -> tuple[int, int]:
        """[first, last) of the shard that the part reads, at least a sequence of each."""
        return self._part_of(self.shard.num_documents)

    def epochs(self, samples: int) -> float:
        """How often so many samples go through the part."""
        return samples / self.num_samples

    def standing(self, samples: int) -> tuple[int | None, int | None]:
        """(epoch, sample of it) behind so many."""
        return divmod(samples, self.num_samples)

    def close(self) -> None:
        self.shard.close()


class CausalSource(ShardSource):
    """Sample i of the part is tokens [start + i * S, start + i * S + S + 1); documents run on behind each other."""

    def _index_samples(self) -> None:
        first, last = self._part_of(self.shard.num_documents)
        self._start_token = self.shard.index.document_start(first)
        self._num_tokens = self.shard.index.document_start(last) - self._start_token
        if self._num_tokens < self.seq_length + 1:
            what = f"{self.where} has {self._num_tokens} tokens in {last - first} documents"
            rule = f"one sample takes seq_length + 1 = {self.seq_length + 1} tokens"
            remedy = "prepare more text, use a shorter model.seq_length"
            remedy += "" if self.part == "all" else f", or give {self.part} a larger share in data.split"
            raise DataError(Problem(what, rule, remedy, f"{self.shard.prefix}.bin"))
        self.order = TimelessOrder(self.seed, self.key, self.num_samples_at(self.seq_length))

    @property
    def num_samples(self) -> int:
        """Samples of one epoch."""
        return self.order.num_samples

    def num_samples_at(self, seq_length: int) -> int:
        """Samples of one epoch, if they had this length."""
        return (self._num_tokens - 1) // seq_length

    def read(self, ordinals: NDArray[np.int64]) -> Batch:
        """The samples that a run takes from this source at these places."""
        _, samples = self.order.locate(ordinals)
        starts = self._start_token + samples * self.seq_length
        rows = np.empty((len(starts), self.seq_length + 1), np.int64)
        for row, start in zip(rows, starts, strict=True):
            row[:] = self.shard.read(int(start), self.seq_length + 1)
        check_ids(rows, starts, shard=self.shard, vocab_size=self.vocab_size)
        return causal_batch(rows, self.packing)

    def trace(self, ordinal: int) -> Trace:
        """Where the sample at this place comes from."""
        epoch, sample = self.order.locate_one(ordinal)
        start = self._start_token + sample * self.seq_length
        return Trace(self.key, epoch, sample, document_spans(self.shard, start, self.seq_length + 1))


def check_ids(rows: NDArray[np.int64], starts: NDArray[np.int64], *, shard: ShardReader, vocab_size: int) -> None:
    """DataError for an id outside the vocabulary. Each row is a stretch of the shard that begins at its start."""
    # As unsigned numbers, negative ids are large: one maximum finds both mistakes.
    if rows.size == 0 or rows.view(np.uint64).max() < vocab_size:
        return
    row, column = np.unravel_index(int(np.argmax(rows.view(np.uint64) >= vocab_size)), rows.shape)
    document, position = shard.index.document_at(int(starts[row] + column))
    raise DataError(
        Problem(
            what=f"document {document} holds token id {rows[row, column]} at position {position}",
            rule=f"ids must be from 0 to {vocab_size - 1}, below the vocabulary size {vocab_size}",
            remedy="use the tokenizer the shard was made with and set model.vocab_size to its size, "
            "or make the shard again with `bloomery prepare`",
            place=f"{shard.prefix}.bin",
        )
    )


@dataclass(frozen=True)
class DataCursor:
    """How far a checkpoint has come in its data."""

    recipe: Recipe
    plan: TrainingPlan
    step: int
    consumed_samples: int
    blend: BlendState | None
    """None for orders without state, and for a run that has taken nothing."""


def blend_after(
    cursor: DataCursor, weights: Mapping[str, float], sources: Sequence[CausalSource], *, seq_length: int
) -> tuple[TimelessBlend, list[str]]:
    """The blend of the run that resumes, and notices about it.

    Samples of another length are other samples, and no cursor knows which of them have been seen. So a source whose
    cursor counts another length begins its next epoch, in which again every sample comes once.
    """
    assert cursor.blend is not None
    state, notices = cursor.blend, list[str]()
    lengths = dict.fromkeys({**state.cursors, **state.weights}, cursor.recipe.model.seq_length) | state.lengths
    resized = [source for source in sources if lengths.get(source.key, seq_length) != seq_length]
    if not resized and cursor.recipe.model.seq_length == seq_length:
        return TimelessBlend.resume(state, weights, consumed_samples=cursor.consumed_samples), notices
    cursors = TimelessBlend(state).taken(cursor.consumed_samples)
    for source in resized:
        length = lengths.pop(source.key)
        epoch_samples = source.num_samples_at(length)
        unread = -cursors[source.key] % epoch_samples
        epochs = (cursors[source.key] + unread) // epoch_samples
        cursors[source.key] = epochs * source.num_samples
        rest = f"{unread * length:,} tokens of epoch {epochs - 1} stay" if unread else "nothing stays"
        notices.append(f"{source.key}: samples of {seq_length:,} tokens begin with epoch {epochs}; {rest} unread")
    lengths = {key: length for key, length in lengths.items() if length != seq_length}
    start = TimelessBlend.start(weights).state
    first = cursor.consumed_samples
    return TimelessBlend(replace(start, first_sample=first, cursors=cursors, lengths=lengths)), notices
