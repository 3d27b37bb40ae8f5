"""Which tokens of a sample are hidden and what stands in their place, as BERT and Megatron do it.

Whole words are chosen, in runs of one to three within a segment (n words with a probability like 1/n), until the share
is reached; of the chosen tokens 80% become the mask, 10% a random token and 10% stay. All chance comes from one key,
through splitmix64: it does not change with the version of a library.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from bloomery.data.order import U64, splitmix64
from bloomery.data.tokenizer import Tokenizer

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
    fixed: NDArray[np.bool_]
    """Of each id, whether it is one of the four above, which are never predicted."""
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
        fixed = np.zeros(size, bool)
        fixed[[tokenizer.cls_id, tokenizer.sep_id, tokenizer.mask_id, tokenizer.pad_id]] = True
        ordinary = np.ones(size, bool)
        ordinary[list(tokenizer.special_tokens.values())] = False
        return cls(
            cls_id=tokenizer.cls_id,
            sep_id=tokenizer.sep_id,
            mask_id=tokenizer.mask_id,
            pad_id=tokenizer.pad_id,
            continues=continues,
            fixed=fixed,
            replacements=np.flatnonzero(ordinary),
        )

    @property
    def size(self) -> int:
        return len(self.continues)

    def word_starts(self, tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Where a word begins; the first token always begins one."""
        starts = ~self.continues[tokens]
        starts[0] = True
        return starts


def random_numbers(key: int, count: int) -> U64:
    """The first numbers of the key's own generator."""
    return splitmix64(np.uint64(key) + np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))


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
    starts = np.concatenate([vocabulary.word_starts(segment) for segment in segments])
    fixed = vocabulary.fixed[tokens]
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
