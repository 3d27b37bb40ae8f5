"""The order of samples that megatron-core and BigScience's Megatron-DeepSpeed give, to the last bit, and how they split
a corpus into train, valid and test. Arrays only.

Documents are repeated for as many epochs as the samples need and shuffled; their tokens, one document behind the other,
are cut into samples of S + 1 tokens that overlap by one; the samples are shuffled. One legacy RandomState makes both
shuffles, in this sequence (its stream is frozen by numpy's NEP 19). A blend takes, step by step, from the source that
is furthest behind its share. What Megatron calls a document here is a sequence of the shard.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from bloomery.sizing.check import split_shares

Part = Literal["train", "valid", "test"]
PARTS: tuple[Part, ...] = ("train", "valid", "test")
Flavour = Literal["megatron", "bigscience"]
"""Whose rounding: megatron-core's, which the timeless order has too, or that of BigScience's Megatron-DeepSpeed."""
_SEPARATE_BELOW = {"megatron": 0.80, "bigscience": 0.95}
"""An incomplete last epoch is kept out of the shuffle of the others if less than this share of it is needed."""
_SURPLUS = 0.005
"""What is requested of the members of a blend beyond their share."""
_MAX_INT32 = 2**31 - 1


@dataclass(frozen=True)
class OrderShape:
    """How many epochs an order has and how they are shuffled: with documents and seed, all that decides it."""

    tokens_per_epoch: int
    seq_length: int
    epochs: int
    separate_last: bool
    """The last epoch is shuffled on its own, behind the others."""

    @classmethod
    def of(cls, flavour: Flavour, *, tokens_per_epoch: int, seq_length: int, samples: int) -> Self:
        """For a run that requests this many samples; `tokens_per_epoch` is above 0."""
        epochs = max(1, -(-(samples * seq_length + 1) // tokens_per_epoch))
        before_last = ((epochs - 1) * tokens_per_epoch - 1) // seq_length
        per_epoch = (tokens_per_epoch - 1) // seq_length
        separate = epochs > 1 and samples - before_last < int(_SEPARATE_BELOW[flavour] * per_epoch)
        return cls(tokens_per_epoch, seq_length, epochs, separate)

    @property
    def num_samples(self) -> int:
        """Samples of all epochs; at least those requested, since epochs are whole."""
        return (self.epochs * self.tokens_per_epoch - 1) // self.seq_length


def build_index(
    starts: NDArray[np.int64], *, first: int, last: int, shape: OrderShape, seed: int
) -> dict[str, NDArray[Any]]:
    """The order of sequences [first, last) of a shard whose sequence k begins at token `starts[k]`: sample j is tokens
    from `samples[shuffle[j]]` up to and with `samples[shuffle[j] + 1]`. `documents`: sequences, shuffled, epoch after
    epoch; `samples`: where each begins (position in `documents`, token within it), and the end of the last."""
    random = np.random.RandomState(seed)
    part = np.arange(first, last, dtype=np.int32)
    documents = np.tile(part, shape.epochs)
    if shape.separate_last:
        random.shuffle(documents[: -len(part)])
        random.shuffle(documents[-len(part) :])
    else:
        random.shuffle(documents)
    lengths = np.diff(starts)
    longest = int(lengths.max())
    samples = _cut(lengths[documents], seq_length=shape.seq_length, num_samples=shape.num_samples)
    if max(len(documents), longest) <= _MAX_INT32:
        samples = samples.astype(np.int32)
    total = shape.num_samples
    first_part = ((shape.epochs - shape.separate_last) * shape.tokens_per_epoch - 1) // shape.seq_length
    shuffle = np.arange(total, dtype=np.int64 if total >= 2**32 - 2 else np.uint32)
    random.shuffle(shuffle[:first_part])
    if first_part != total:
        random.shuffle(shuffle[first_part:])
    return {"documents": documents, "samples": samples, "shuffle": shuffle}


def _cut(lengths: NDArray[np.int64], *, seq_length: int, num_samples: int) -> NDArray[np.int64]:
    """(document, token within it) of every seq_length-th token of documents of these lengths."""
    ends = np.cumsum(lengths)
    # The documents that hold the tokens 0, S, 2S, ...: document k holds as many of them as lie before its end and not
    # before its start. Three times faster than a search for each.
    before_end = -(-ends // seq_length)
    owner = np.repeat(np.arange(len(ends)), np.diff(before_end, prepend=0))
    samples = np.empty((num_samples + 1, 2), np.int64)
    samples[:, 0] = owner
    samples[:, 1] = np.arange(num_samples + 1) * seq_length - (ends - lengths)[owner]
    samples[0] = 0  # also where the first documents are empty
    return samples


@dataclass(frozen=True)
class BlendRequest:
    """What a blend of several sources asks of each of them."""

    weights: NDArray[np.float64]
    """Shares as the greedy choice sees them: normalised twice, as both systems do."""
    member_samples: list[int]
    """Samples to order in each source."""
    size: int
    """Length of the blend. BigScience's own continues to the end of all members; a longer blend begins the same."""

    @classmethod
    def of(cls, flavour: Flavour, weights: Sequence[float], samples: int) -> Self:
        if flavour == "megatron":
            shares = _normalised(np.array(weights))
            targets = [math.ceil(samples * share) for share in shares.tolist()]
            members = [math.ceil(target * (1 + _SURPLUS)) for target in targets]
            return cls(_normalised(shares), members, sum(targets))
        total = plain_sum(weights)
        plain = [weight / total for weight in weights]
        members = [math.ceil(samples * share * (1 + _SURPLUS)) for share in plain]
        return cls(_normalised(np.array(plain)), members, samples)


def _normalised(weights: NDArray[np.float64]) -> NDArray[np.float64]:
    return weights / np.sum(weights)  # numpy's sum, since both systems use it: Python's rounds otherwise


def build_blend(weights: NDArray[np.float64], size: int) -> dict[str, NDArray[Any]]:
    """By position: `sources` (which it takes from) and `ordinals` (index within the source); by source: `taken` in all.

    Position i takes from the source with the largest w * max(i, 1) - taken, the first of equals. The product is rounded
    before the difference, as on x86; Megatron compiled for aarch64 fuses the two and often gives another order.
    """
    sources, ordinals = np.empty(size, np.int32), np.empty(size, np.int64)
    taken, behind = np.zeros(len(weights)), np.empty(len(weights))
    step = max(1, (1 << 20) // len(weights))
    for first in range(0, size, step):
        positions = np.arange(first, min(first + step, size))
        for position, due in zip(positions.tolist(), np.maximum(positions, 1)[:, None] * weights, strict=True):
            source = int(np.subtract(due, taken, out=behind).argmax())
            sources[position], ordinals[position] = source, taken[source]
            taken[source] += 1.0
    return {"sources": sources, "ordinals": ordinals, "taken": taken.astype(np.int64)}


# ---------------------------------------------------------------- parts of a shard


def split_boundaries(split: str, num_documents: int, flavour: Flavour = "megatron") -> list[int]:
    """Four document numbers: part k is [result[k], result[k + 1]); an empty part ends where it begins, or before.

    megatron-core rounds cumulative fractions. BigScience rounds each part and takes the error off all boundaries, by
    which one can even become negative. Python rounds one half to the even neighbour, and so do both.
    """
    weights = split_shares(split)
    total = plain_sum(weights)
    fractions = [weight / total for weight in weights]
    if flavour == "megatron":
        return [0, *(round(plain_sum(fractions[: k + 1]) * num_documents) for k in range(len(fractions)))]
    ends = [sum(round(fraction * num_documents) for fraction in fractions[: k + 1]) for k in range(len(fractions))]
    return [0, *(end - (ends[-1] - num_documents) for end in ends)]


def plain_sum(numbers: Sequence[float]) -> float:
    """From left to right: `sum` of Python 3.12 and later rounds otherwise."""
    total = 0.0
    for number in numbers:
        total += number
    return total
