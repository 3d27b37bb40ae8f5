"""Samples for masked-token and sentence-order prediction: `[CLS] A [SEP] B [SEP]` from a shard of sentences.

Every epoch uses every sentence once: a document is cut into samples of consecutive sentences, and only where the
sentences fall apart into A and B, which of them comes first and what is masked changes from epoch to epoch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from bloomery.base.errors import DataError, Problem
from bloomery.base.losses import LM_LOSS, SOP_LOSS
from bloomery.config.recipe import MaskingSection
from bloomery.data.batch import IGNORED_LABEL, Batch
from bloomery.data.causal import check_ids
from bloomery.data.masking import MaskVocabulary, fractions, mask_tokens, random_numbers
from bloomery.data.order import TimelessOrder, splitmix64, splitmix64_one, stream_key
from bloomery.data.shards import ShardReader
from bloomery.data.split import Part, part_range
from bloomery.data.trace import Trace, document_spans

_SPECIAL = 3
"""[CLS] and two [SEP] in every sample."""


class MaskedSource:
    """`read` gives inputs `tokens`, `token_types` and `attention_mask`, and targets `lm loss` and `sop loss`: 1 where
    the two segments have been exchanged, else 0.

    Keeps 12 bytes in memory for each sentence and 16 for each sample.
    """

    def __init__(
        self,
        prefix: str,
        *,
        seq_length: int,
        vocab_size: int,
        seed: int,
        vocabulary: MaskVocabulary,
        masking: MaskingSection | None = None,
        ends_with_eod: bool = False,
        split_sentences: bool | None = None,
        part: Part | Literal["all"] = "all",
        split: str | None = None,
        key: str | None = None,
    ) -> None:
        """`ends_with_eod`: each document ends with a token that says so, which is left out. `split_sentences`: whether
        each sentence is a sequence; None where nothing tells but their number. `key` names the source in the order of
        samples; by default the prefix, as the recipe writes it."""
        self.key = prefix if key is None else key
        self.seq_length = seq_length
        self.vocab_size = min(vocab_size, vocabulary.size)
        self.vocabulary = vocabulary
        self.masking = masking or MaskingSection()
        self._chance = stream_key(seed, f"{self.key}\0masked")
        self.shard = ShardReader(prefix)
        try:
            documents = part_range(split, part, self.shard.num_documents, place=f"{prefix}.idx")
            if split_sentences is None:
                split_sentences = self.shard.num_sequences > self.shard.num_documents
            if not split_sentences:
                raise DataError(_no_sentences(self.shard))
            self.index = index_samples(
                self.shard,
                documents=documents,
                room=seq_length - _SPECIAL,
                short_probability=self.masking.short_sequence_probability,
                ends_with_eod=ends_with_eod,
                chance=self._chance,
            )
            if not len(self.index.first):
                raise DataError(_nothing(prefix, part))
        except BaseException:
            self.shard.close()
            raise
        self.order = TimelessOrder(seed, self.key, len(self.index.first))

    @property
    def num_samples(self) -> int:
        """Samples of one epoch."""
        return self.order.num_samples

    def read(self, ordinals: NDArray[np.int64]) -> Batch:
        """The samples that a run takes from this source at these places."""
        epochs, samples = self.order.locate(ordinals)
        shape = (len(samples), self.seq_length)
        tokens = np.full(shape, self.vocabulary.pad_id, np.int64)
        labels = np.full(shape, IGNORED_LABEL, np.int64)
        token_types, attention_mask = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        exchanged = np.zeros(len(samples), np.int64)
        for row, (epoch, sample) in enumerate(zip(epochs.tolist(), samples.tolist(), strict=True)):
            key = splitmix64_one(splitmix64_one(self._chance ^ epoch) ^ sample)
            where, exchange, mask_key = random_numbers(key, 3).tolist()
            exchanged[row] = exchange >> 63
            first, second = self._pair(sample, where)
            if exchanged[row]:
                first, second = second, first
            seen, predicted = mask_tokens(
                (first, second),
                vocabulary=self.vocabulary,
                probability=self.masking.probability,
                key=mask_key,
            )
            middle, end = len(first) + 1, len(first) + len(second) + 2
            places = np.arange(1, end)
            places = places[places != middle]
            tokens[row, places] = seen
            tokens[row, [0, middle, end]] = self.vocabulary.cls_id, self.vocabulary.sep_id, self.vocabulary.sep_id
            token_types[row, middle + 1 : end + 1] = 1
            attention_mask[row, : end + 1] = 1
            labels[row, places[predicted]] = np.concatenate((first, second))[predicted]
        inputs = {"tokens": tokens, "token_types": token_types, "attention_mask": attention_mask}
        return Batch(
            inputs={name: torch.from_numpy(array) for name, array in inputs.items()},
            targets={LM_LOSS: torch.from_numpy(labels), SOP_LOSS: torch.from_numpy(exchanged)},
        )

    def trace(self, ordinal: int) -> Trace:
        """Where the sample at this place comes from."""
        epoch, sample = self.order.locate_one(ordinal)
        start, stop = self.index.tokens_of(sample)
        return Trace(self.key, epoch, sample, document_spans(self.shard, start, stop - start))

    def close(self) -> None:
        self.shard.close()

    def _pair(self, sample: int, where: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The sample's tokens, cut between two of its sentences, or inside its only one between two words."""
        start, stop = self.index.tokens_of(sample)
        tokens = self.shard.read(start, stop - start).astype(np.int64)
        check_ids(tokens[None], np.array([start]), shard=self.shard, vocab_size=self.vocab_size)
        cuts = self.index.starts[self.index.first[sample] + 1 : self.index.last[sample]] - start
        if not len(cuts):
            cuts = np.flatnonzero(self.vocabulary.word_starts(tokens)[1:]) + 1
        if not len(cuts):
            cuts = np.arange(1, len(tokens))
        cut = int(cuts[where % len(cuts)])
        return tokens[:cut], tokens[cut:]


@dataclass(frozen=True)
class SampleIndex:
    """Sentence s is tokens [starts[s], starts[s] + lengths[s]); sample i is sentences [first[i], last[i])."""

    starts: NDArray[np.int64]
    lengths: NDArray[np.int32]
    first: NDArray[np.int64]
    last: NDArray[np.int64]

    def tokens_of(self, sample: int) -> tuple[int, int]:
        """The tokens [start, stop) of the shard that a sample is made of."""
        final = self.last[sample] - 1
        return int(self.starts[self.first[sample]]), int(self.starts[final] + self.lengths[final])


def index_samples(
    shard: ShardReader,
    *,
    documents: tuple[int, int],
    room: int,
    short_probability: float,
    ends_with_eod: bool,
    chance: int,
) -> SampleIndex:
    """Fill each sample with as many sentences of its document as fit into `room` tokens, or into a random number of
    them for some. One round a sample of the longest document, over all documents at once."""
    starts, lengths, bounds = _sentences(shard, documents, ends_with_eod=ends_with_eod, longest=room)
    before = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    first, stop = bounds[:-1], bounds[1:]
    first, stop = first[first < stop], stop[first < stop]
    found: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
    while len(first):
        numbers = splitmix64(starts[first].astype(np.uint64) ^ np.uint64(chance))
        is_short = fractions(numbers) < short_probability
        short_target = 2 + (splitmix64(numbers) % np.uint64(room - 1)).astype(np.int64)
        target = before[first] + np.where(is_short, short_target, room)
        last = np.searchsorted(before, target, side="right") - 1
        # Two sentences at least where two fit, for they have an order; and no lonely one left for the end: it joins the
        # others where it can, or they give it one of theirs.
        two = np.minimum(first + 2, stop)
        last = np.maximum(last, np.where(before[two] - before[first] <= room, two, first + 1))
        last = np.minimum(last, stop)
        last = np.where((stop - last == 1) & (before[stop] - before[first] <= room), stop, last)
        lends = (stop - last == 1) & (last - first >= 3) & (before[stop] - before[stop - 2] <= room)
        last = last - lends
        found.append((first, last))
        first, stop = last[last < stop], stop[last < stop]
    firsts = np.concatenate([pair[0] for pair in found]) if found else np.zeros(0, np.int64)
    lasts = np.concatenate([pair[1] for pair in found]) if found else np.zeros(0, np.int64)
    kept = before[lasts] - before[firsts] >= 2  # a single token is no pair
    by_place = np.argsort(firsts[kept], kind="stable")
    return SampleIndex(starts, lengths.astype(np.int32), firsts[kept][by_place], lasts[kept][by_place])


def _sentences(
    shard: ShardReader, documents: tuple[int, int], *, ends_with_eod: bool, longest: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """(first token of each sentence, its length, the sentence at which each document begins with the total at the end),
    without the ends of documents; sentences over `longest` are cut into equal pieces."""
    document_starts = shard.index.document_starts()[documents[0] : documents[1] + 1]
    starts = shard.index.sequence_starts()
    starts, lengths = starts[:-1], np.diff(starts)
    inside = (lengths > 0) & (starts >= document_starts[0]) & (starts < document_starts[-1])
    starts, lengths = starts[inside], lengths[inside]
    if ends_with_eod:
        lengths[np.isin(starts + lengths, document_starts[1:], assume_unique=False)] -= 1
        starts, lengths = starts[lengths > 0], lengths[lengths > 0]
    pieces = -(-lengths // longest)
    if (pieces > 1).any():
        width = np.repeat(-(-lengths // pieces), pieces)
        offset = (np.arange(len(width)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * width
        lengths = np.minimum(width, np.repeat(lengths, pieces) - offset)
        starts = np.repeat(starts, pieces) + offset
    return starts, lengths, np.searchsorted(starts, document_starts)


def _no_sentences(shard: ShardReader) -> Problem:
    return Problem(
        what=f"the shard has {shard.num_documents} documents and {shard.num_sequences} sequences",
        rule="bert learns the order of sentences, so each sentence must be a sequence of its own",
        remedy="prepare it again with `split_sentences: true` (Megatron: --split-sentences)",
        place=f"{shard.prefix}.idx",
    )


def _nothing(prefix: str, part: str) -> Problem:
    where = "the shard" if part == "all" else f"its {part} part"
    remedy = "prepare more text" + ("" if part == "all" else f", or give {part} a larger share in data.split")
    return Problem(f"{where} has no document of two tokens", "a sample is a pair", remedy, f"{prefix}.bin")
