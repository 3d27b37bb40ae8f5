"""Samples for masked-token prediction and, beside it, sentence-order or next-sentence prediction, as BERT and Megatron
do it: `[CLS] A [SEP] B [SEP]` from a shard of sentences; `[CLS] A [SEP]` for masked tokens alone.

Every epoch uses every sentence once: a document is cut into samples of consecutive sentences, and only where the
sentences fall apart into A and B, which of them comes first (sentence order) or whether B is one of another document
(next sentence), and what is masked changes from epoch to epoch. Whole words
are masked, in runs of one to three within a segment (n words with a probability like 1/n), until the share is reached;
of the chosen tokens 80% become the mask, 10% a random token and 10% stay. All chance comes from keys, through
splitmix64: it does not change with the version of a library.
"""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from bloomery.base.errors import DataError, Problem
from bloomery.base.splitmix import GOLDEN, U64, splitmix64
from bloomery.base.units import counted
from bloomery.config.recipe import MaskingSection
from bloomery.data.batch import Batch, ShardSource
from bloomery.data.order import stream_key
from bloomery.data.shards import ShardReader
from bloomery.data.tokenizer import Tokenizer
from bloomery.families.family import IGNORED_LABEL, LM_LOSS, NSP_LOSS, SOP_LOSS

_TWO_WORDS, _THREE_WORDS = 6 / 11, 9 / 11
"""1, 1/2 and 1/3, scaled to sum to 1: a run has two words or more from the first number on, three from the second."""
_MASKED, _MASKED_OR_RANDOM = 0.8, 0.9


@dataclass(frozen=True)
class MaskVocabulary:
    """What masking has to know about the tokens."""

    cls_id: int
    sep_id: int
    mask_id: int
    pad_id: int
    continues: NDArray[np.bool_]
    """Of each id, whether it continues the word of the token before it."""
    replacements: NDArray[np.int64]
    """Ids that may stand in for a token: all but the special ones."""

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Self:
        """DataError where a special token is missing. Only WordPiece says which tokens continue a word (`##ing`); with
        another kind of tokenizer every token counts as a word."""
        size = tokenizer.vocab_size
        model = tokenizer.parsed["model"]
        prefix = model.get("continuing_subword_prefix") if model.get("type") == "WordPiece" else None
        continues = np.zeros(size, bool)
        if prefix:
            continues[[number for token, number in model["vocab"].items() if token.startswith(prefix)]] = True
        special = tokenizer.special_tokens
        names = ("[CLS]", "[SEP]", "[MASK]", "[PAD]")
        if missing := [name for name in names if name not in special]:
            what = f"has no {', '.join(missing)}; its special tokens are {', '.join(special) or 'none'}"
            remedy = "use a tokenizer that was made for this family of models"
            raise DataError(Problem(what, remedy=remedy, place=tokenizer.path))
        cls_id, sep_id, mask_id, pad_id = (special[name] for name in names)
        return cls(cls_id, sep_id, mask_id, pad_id, continues, np.setdiff1d(np.arange(size), [*special.values()]))

    def word_starts(self, tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Where a word begins; the first token always begins one."""
        starts = ~self.continues[tokens]
        starts[0] = True
        return starts


def random_numbers(key: int, count: int) -> U64:
    """The first numbers of the key's own generator."""
    return splitmix64(np.uint64(key) + np.arange(count, dtype=np.uint64) * np.uint64(GOLDEN))


def fractions(numbers: U64) -> NDArray[np.float64]:
    """As numbers from 0 up to 1."""
    return (numbers >> np.uint64(11)).astype(np.float64) * 2.0**-53


def mask_tokens(
    segments: tuple[NDArray[np.int64], NDArray[np.int64]], *, vocabulary: MaskVocabulary, probability: float, key: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """(both segments as the model sees them, one behind the other; which tokens it has to predict: at least one)."""
    tokens = np.concatenate(segments)
    count = len(tokens)
    priorities, lengths, kinds, others = random_numbers(key, 4 * count).reshape(4, count)
    starts = np.concatenate([vocabulary.word_starts(segment) for segment in segments if len(segment)])
    fixed = np.isin(tokens, (vocabulary.cls_id, vocabulary.sep_id, vocabulary.mask_id, vocabulary.pad_id))
    places = np.flatnonzero(starts)
    words = len(places)
    span = fractions(lengths[:words])
    chosen = _choose_words(
        order=np.argsort(priorities[:words], kind="stable").tolist(),
        run_lengths=(1 + (span >= _TWO_WORDS) + (span >= _THREE_WORDS)).tolist(),
        first_of_second=int(starts[: len(segments[0])].sum()),
        ends=[*places.tolist(), count],
        taken=bytearray(np.logical_or.reduceat(fixed, places).tobytes()),
        budget=max(1, round(probability * (count - int(fixed.sum())))),
    )
    predicted = np.repeat(np.frombuffer(chosen, bool), np.diff(places, append=count))
    kind = fractions(kinds)
    replacements = vocabulary.replacements[others % np.uint64(len(vocabulary.replacements))]
    seen = np.where(predicted & (kind < _MASKED_OR_RANDOM), replacements, tokens)
    seen[predicted & (kind < _MASKED)] = vocabulary.mask_id
    return seen, predicted


def _choose_words(
    *, order: list[int], run_lengths: list[int], first_of_second: int, ends: list[int], taken: bytearray, budget: int
) -> bytearray:
    """1 for each chosen word. Word w is tokens [ends[w], ends[w + 1]); those in `taken` may not be chosen."""
    words = len(taken)
    chosen = bytearray(words)
    for word in order:
        if taken[word]:
            continue
        last = min(word + run_lengths[word], first_of_second if word < first_of_second else words)
        if (other := taken.find(1, word, last)) >= 0:  # a run ends where another begins
            last = other
        while last > word and ends[last] - ends[word] > budget:
            last -= 1
        if last == word:
            continue
        ones = b"\1" * (last - word)
        chosen[word:last] = taken[word:last] = ones
        budget -= ends[last] - ends[word]
        if budget == 0:
            break
    if 1 not in chosen:  # every word is longer than the share: one whole word all the same
        for word in [word for word in order if not taken[word]][:1]:
            chosen[word] = 1
    return chosen


class MaskedSource(ShardSource):
    """`read` gives inputs `tokens`, `token_types` and `attention_mask`, and targets `lm loss` and, of a second head,
    `sop loss`, 1 where the two segments have been exchanged, or `nsp loss`, 1 where the second is of another document.

    Keeps 12 bytes in memory for each sentence and 16 for each sample (24 for next sentences).
    """

    def __init__(
        self,
        shard: ShardReader,
        *,
        vocabulary: MaskVocabulary,
        vocab_size: int,
        masking: MaskingSection | None = None,
        second: str | None = SOP_LOSS,
        ends_with_eod: bool = False,
        split_sentences: bool | None = None,
        **settings: Any,
    ) -> None:
        """`second`: the loss of the second head, if there is one. `ends_with_eod`: each document ends with a token that
        says so, which is left out. `split_sentences`: whether each sentence is a sequence; None where nothing tells but
        their number. `settings`: those of ShardSource."""
        self.vocabulary, self.second = vocabulary, second
        self.masking = masking or MaskingSection()
        self._ends_with_eod, self._split_sentences = ends_with_eod, split_sentences
        super().__init__(shard, vocab_size=min(vocab_size, len(vocabulary.continues)), **settings)

    def _index_samples(self) -> None:
        shard = self.shard
        self._chance = stream_key(self.seed, f"{self.key}\0masked")
        is_split = self._split_sentences
        if not (shard.num_sequences > shard.num_documents if is_split is None else is_split):
            documents, sequences = counted(shard.num_documents, "document"), counted(shard.num_sequences, "sequence")
            what = f"the shard has {documents} and {sequences}"
            rule = "bert learns the order of sentences, so each sentence must be a sequence of its own"
            remedy = "prepare it again with `split_sentences: true` (Megatron: --split-sentences)"
            raise DataError(Problem(what, rule, remedy, f"{shard.prefix}.idx"))
        # Each sample is filled with as many sentences of its document as fit into `room` tokens, or, for some, into a
        # random number of them. One round a sample of the longest document, over all documents at once.
        room = self.seq_length - (3 if self.second else 2)
        starts, lengths, bounds = self._sentences(longest=room)
        before = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
        first, stop = bounds[:-1], bounds[1:]
        first, stop = first[first < stop], stop[first < stop]
        found: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
        while len(first):
            numbers = splitmix64(starts[first].astype(np.uint64) ^ np.uint64(self._chance))
            is_short = fractions(numbers) < self.masking.short_sequence_probability
            short_target = 2 + (splitmix64(numbers) % np.uint64(room - 1)).astype(np.int64)
            target = before[first] + np.where(is_short, short_target, room)
            last = np.searchsorted(before, target, side="right") - 1
            # Two sentences at least where two fit, for they have an order; and no lonely one left for the end: it joins
            # the others where it can, or they give it one of theirs.
            two = np.minimum(first + 2, stop)
            last = np.maximum(last, np.where(before[two] - before[first] <= room, two, first + 1))
            last = np.minimum(last, stop)
            last = np.where((stop - last == 1) & (before[stop] - before[first] <= room), stop, last)
            lends = (stop - last == 1) & (last - first >= 3) & (before[stop] - before[stop - 2] <= room)
            last = last - lends
            found.append((first, last))
            first, stop = last[last < stop], stop[last < stop]
        firsts, lasts = np.concatenate([np.zeros((2, 0), np.int64), *map(np.array, found)], axis=1)
        kept = before[lasts] - before[firsts] >= 2  # a single token is no pair
        by_place = np.argsort(firsts[kept], kind="stable")
        self.starts, self.lengths = starts, lengths.astype(np.int32)
        """Sentence s is tokens [starts[s], starts[s] + lengths[s])."""
        self.first, self.last = firsts[kept][by_place], lasts[kept][by_place]
        """Sample i is sentences [first[i], last[i])."""
        self.num_samples = len(self.first)
        if self.second == NSP_LOSS:
            self._document = np.searchsorted(bounds, self.first, side="right")
            if self._document[0] == self._document[-1]:
                what, rule = "there is one document", "where the second segment does not follow, it is of another one"
                raise DataError(Problem(what, rule, "use model.second_head=sentence_order", f"{shard.prefix}.idx"))

    def _sentences(self, longest: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """(first token of each sentence, its length, the sentence at which each document begins with the total at the
        end), without the ends of documents; sentences over `longest` are cut into equal pieces."""
        first, last = self.documents
        document_starts = self.shard.document_starts()[first : last + 1]
        starts = self.shard.sequence_starts()
        starts, lengths = starts[:-1], np.diff(starts)
        inside = (lengths > 0) & (starts >= document_starts[0]) & (starts < document_starts[-1])
        starts, lengths = starts[inside], lengths[inside]
        if self._ends_with_eod:
            lengths[np.isin(starts + lengths, document_starts[1:], assume_unique=False)] -= 1
            starts, lengths = starts[lengths > 0], lengths[lengths > 0]
        pieces = -(-lengths // longest)
        if (pieces > 1).any():
            width = np.repeat(-(-lengths // pieces), pieces)
            offset = (np.arange(len(width)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * width
            lengths = np.minimum(width, np.repeat(lengths, pieces) - offset)
            starts = np.repeat(starts, pieces) + offset
        return starts, lengths, np.searchsorted(starts, document_starts)

    def stretches(self, sample: int) -> list[tuple[int, int]]:
        final = self.last[sample] - 1
        return [(int(self.starts[self.first[sample]]), int(self.starts[final] + self.lengths[final]))]

    def read(self, ordinals: NDArray[np.int64]) -> Batch:
        epochs, samples = self.locate(ordinals)
        shape = (len(samples), self.seq_length)
        tokens = np.full(shape, self.vocabulary.pad_id, np.int64)
        labels = np.full(shape, IGNORED_LABEL, np.int64)
        token_types, attention_mask = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        changed = np.zeros(len(samples), np.int64)
        keys = splitmix64(splitmix64(epochs.astype(np.uint64) ^ np.uint64(self._chance)) ^ samples.astype(np.uint64))
        for row, (key, sample) in enumerate(zip(keys.tolist(), samples.tolist(), strict=True)):
            where, change, mask_key, other = random_numbers(key, 4).tolist()
            first, second = self._pair(sample, where)
            if self.second and (change >> 63):
                changed[row] = 1
                pair = (
                    (second, first)
                    if self.second == SOP_LOSS
                    else (first, self._elsewhere(sample, other)[: len(second)])
                )
                first, second = pair
            seen, predicted = mask_tokens(
                (first, second), vocabulary=self.vocabulary, probability=self.masking.probability, key=mask_key
            )
            middle, end = len(first) + 1, len(first) + len(second) + 1 + (self.second is not None)
            places = np.arange(1, end)
            places = places[places != middle]
            tokens[row, places] = seen
            tokens[row, [0, middle, end]] = self.vocabulary.cls_id, self.vocabulary.sep_id, self.vocabulary.sep_id
            token_types[row, middle + 1 : end + 1] = 1
            attention_mask[row, : end + 1] = 1
            labels[row, places[predicted]] = np.concatenate((first, second))[predicted]
        inputs = {"tokens": tokens, "token_types": token_types, "attention_mask": attention_mask}
        targets = {LM_LOSS: labels} | ({self.second: changed} if self.second else {})
        return Batch(
            inputs={name: torch.from_numpy(array) for name, array in inputs.items()},
            targets={name: torch.from_numpy(array) for name, array in targets.items()},
        )

    def _elsewhere(self, sample: int, number: int) -> NDArray[np.int64]:
        """What stands in another document, in a sample drawn from all: from one of its sentences on."""
        other = number % self.num_samples
        if self._document[other] == self._document[sample]:
            other = int(np.searchsorted(self._document, self._document[sample], side="right")) % self.num_samples
        sentence = self.first[other] + (number >> 40) % (self.last[other] - self.first[other])
        return self.ids(int(self.starts[sentence]), self.stretches(other)[0][1])

    def _pair(self, sample: int, where: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The sample's tokens, cut between two of its sentences, or inside its only one between two words; without a
        second head not at all."""
        ((start, stop),) = self.stretches(sample)
        tokens = self.ids(start, stop)
        if self.second is None:
            return tokens, tokens[:0]
        cuts = self.starts[self.first[sample] + 1 : self.last[sample]] - start
        if not len(cuts):
            cuts = np.flatnonzero(self.vocabulary.word_starts(tokens)[1:]) + 1
        if not len(cuts):
            cuts = np.arange(1, len(tokens))
        cut = int(cuts[where % len(cuts)])
        return tokens[:cut], tokens[cut:]
