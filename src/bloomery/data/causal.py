"""Samples for next-token prediction: a shard's tokens, cut into windows that overlap by one, in timeless order."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bloomery.base.errors import DataError, Problem
from bloomery.data.batch import Batch, Packing, Trace, causal_batch, document_spans
from bloomery.data.order import TimelessOrder
from bloomery.data.shards import ShardReader
from bloomery.data.split import Part, part_range


class CausalSource:
    """Sample i of the part is tokens [start + i * S, start + i * S + S + 1); documents run on behind each other."""

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
        self.packing = packing
        self.seq_length = seq_length
        self.vocab_size = vocab_size
        self.shard = ShardReader(prefix)
        try:
            first, last = part_range(split, part, self.shard.num_documents, place=f"{prefix}.idx")
            self._start_token = self.shard.index.document_start(first)
            self._num_tokens = num_tokens = self.shard.index.document_start(last) - self._start_token
            if num_tokens < seq_length + 1:
                raise DataError(_too_short(prefix, part, last - first, num_tokens, seq_length))
        except BaseException:
            self.shard.close()
            raise
        self.order = TimelessOrder(seed, self.key, self.num_samples_at(seq_length))

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

    def close(self) -> None:
        self.shard.close()


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


def _too_short(prefix: str, part: str, documents: int, num_tokens: int, seq_length: int) -> Problem:
    where = "the shard" if part == "all" else f"its {part} part"
    return Problem(
        what=f"{where} has {num_tokens} tokens in {documents} documents",
        rule=f"one sample takes seq_length + 1 = {seq_length + 1} tokens",
        remedy="prepare more text, use a shorter model.seq_length"
        + ("" if part == "all" else f", or give {part} a larger share in data.split"),
        place=f"{prefix}.bin",
    )
