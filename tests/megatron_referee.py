"""Referees for Megatron's orders, written for plainness: lists, loops and exact fractions, no index arrays."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path

import numpy as np

from bloomery.data.shards import HEADER, MAGIC


def write_lengths(prefix: Path, lengths: list[int], *, documents: list[int] | None = None, vocab: int = 65521) -> str:
    """A shard of sequences of these lengths, empty ones too; token t is t % vocab, so that every place is known."""
    sizes = np.array(lengths, "<i4")
    starts = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    doc_idx = np.arange(len(lengths) + 1) if documents is None else np.array(documents)
    with open(f"{prefix}.idx", "wb") as file:
        file.write(HEADER.pack(MAGIC, 1, 8, len(lengths), len(doc_idx)))
        for part in (sizes, (starts[:-1] * 2).astype("<i8"), doc_idx.astype("<i8")):
            file.write(part.tobytes())
    (np.arange(starts[-1]) % vocab).astype("<u2").tofile(f"{prefix}.bin")
    return str(prefix)


def random_lengths(random: np.random.Generator) -> list[int]:
    """A small corpus: sometimes one document, often with empty ones, sometimes with one that is far longer."""
    documents = int(random.choice([1, 2, 3, 10, 40, 120]))
    lengths = random.integers(0 if random.random() < 0.4 else 1, random.choice([3, 20, 60]), documents)
    if random.random() < 0.2:
        lengths[random.integers(documents)] = 500
    lengths[random.integers(documents)] = max(1, lengths[0])
    return [int(length) for length in lengths]


def ordered_samples(
    lengths: list[int], part: range, *, samples: int, seq_length: int, seed: int, separate_below: float
) -> list[list[int]]:
    """All samples of the dataset, in the order in which a run takes them."""
    starts = np.concatenate([[0], np.cumsum(lengths)]).tolist()
    tokens_per_epoch = sum(lengths[document] for document in part)
    epochs = 1
    while (epochs * tokens_per_epoch - 1) // seq_length < samples:
        epochs += 1
    needed_of_last = samples - ((epochs - 1) * tokens_per_epoch - 1) // seq_length
    separate = epochs > 1 and needed_of_last < int(separate_below * ((tokens_per_epoch - 1) // seq_length))
    random = np.random.RandomState(seed)
    blocks = [list(part) * (epochs - 1), list(part)] if separate else [list(part) * epochs]
    for block in blocks:
        random.shuffle(block)
    documents = [document for block in blocks for document in block]
    tokens = [token for document in documents for token in range(starts[document], starts[document + 1])]
    total = (len(tokens) - 1) // seq_length
    first = ((epochs - 1) * tokens_per_epoch - 1) // seq_length if separate else total
    order = []
    for numbers in (list(range(first)), list(range(first, total))):
        random.shuffle(numbers)
        order += numbers
    return [[token % 65521 for token in tokens[s * seq_length : (s + 1) * seq_length + 1]] for s in order]


def bigscience_split(split: str, documents: int) -> list[int]:
    weights = [float(weight) for weight in split.replace("/", ",").split(",")]
    parts = [round(weight / math.fsum(weights) * documents) for weight in weights]
    parts += [0] * (3 - len(parts))
    surplus = sum(parts) - documents
    return [0, parts[0] - surplus, parts[0] + parts[1] - surplus, documents]


def greedy(weights: list[float], size: int, *, fused: bool = False) -> list[int]:
    """Which source each position takes from; `fused` rounds once, as a fused multiply-add does."""
    taken = [0] * len(weights)
    chosen = []
    for position in range(size):
        at = max(position, 1)
        if fused:
            behind = [float(Fraction(weight) * at - count) for weight, count in zip(weights, taken, strict=True)]
        else:
            behind = [weight * at - count for weight, count in zip(weights, taken, strict=True)]
        best = max(range(len(weights)), key=lambda source: (behind[source], -source))
        taken[best] += 1
        chosen.append(best)
    return chosen
