"""One corpus, three parts: '949,50,1' cuts the documents, in their order, into train, valid and test."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from bloomery.base.errors import DataError, Problem, RecipeError
from bloomery.sizing.data_rules import split_shares

Part = Literal["train", "valid", "test"]
PARTS: tuple[Part, ...] = ("train", "valid", "test")
Flavour = Literal["megatron", "bigscience"]
"""Whose rounding: megatron-core's, which the timeless order has too, or that of BigScience's Megatron-DeepSpeed."""


def split_boundaries(split: str, num_documents: int, flavour: Flavour = "megatron") -> list[int]:
    """Four document numbers: part k is [result[k], result[k + 1]); an empty part ends where it begins, or before.

    megatron-core rounds cumulative fractions. BigScience rounds each part and takes the error off all boundaries, by
    which one can even become negative. Python rounds one half to the even neighbour, and so do both.
    """
    weights = split_shares(split)
    total = plain_sum(weights)
    if not 0 < total < math.inf:
        rule = "one part at least must be above 0, and their sum a finite number"
        raise RecipeError(Problem(f"data.split is '{split:.40}'", rule, "use '949,50,1'"))
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


def part_range(
    split: str | None, part: Part | Literal["all"], num_documents: int, *, place: str, flavour: Flavour = "megatron"
) -> tuple[int, int]:
    """The documents [first, last) of a part. An empty part is an error: whoever asks for it means to read it."""
    if (part == "all") != (split is None):
        raise ValueError(f"part {part!r} with split {split!r}: a split is needed for a part, and only then")
    if split is None or part == "all":
        return 0, num_documents
    boundaries = split_boundaries(split, num_documents, flavour)
    number = PARTS.index(part)
    first, last = boundaries[number], boundaries[number + 1]
    if not 0 <= first < last:
        raise DataError(
            Problem(
                what=f"the split '{split}' of {num_documents} documents leaves none for {part} "
                f"(train, valid, test end at {', '.join(str(end) for end in boundaries[1:])})",
                rule="a part that is used needs at least one document"
                + (f", counted as {flavour} rounds" if flavour != "megatron" else ""),
                remedy=f"give {part} a larger share in data.split, or prepare more documents",
                place=place,
            )
        )
    return first, last
