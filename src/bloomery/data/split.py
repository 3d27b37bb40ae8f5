"""One corpus, three parts: '949,50,1' cuts the documents, in their order, into train, valid and test."""

from __future__ import annotations

import re
from typing import Literal

from bloomery.base.errors import DataError, Problem, RecipeError

Part = Literal["train", "valid", "test"]
PARTS: tuple[Part, ...] = ("train", "valid", "test")


def split_boundaries(split: str, num_documents: int) -> list[int]:
    """Four document numbers: part k is [result[k], result[k + 1]).

    Megatron-LM's rule: each boundary is int(round(cumulative fraction * documents)) in double precision, and Python's
    round goes to the even neighbour at exactly one half. (Megatron-DeepSpeed rounds the parts instead, which differs.)
    """
    weights = [float(number) for number in re.split(r"[,/]", split)]
    weights += [0.0] * (len(PARTS) - len(weights))
    total = sum(weights)
    if total <= 0:
        raise RecipeError(Problem(f"data.split is '{split}'", "one part at least must be above 0", "use '949,50,1'"))
    boundaries, fraction = [0], 0.0
    for weight in weights:
        fraction += weight / total
        boundaries.append(round(fraction * num_documents))
    return boundaries


def part_range(split: str, part: Part, num_documents: int, *, place: str) -> tuple[int, int]:
    """The documents [first, last) of a part. An empty part is an error: whoever asks for it means to read it."""
    boundaries = split_boundaries(split, num_documents)
    number = PARTS.index(part)
    first, last = boundaries[number], boundaries[number + 1]
    if first == last:
        raise DataError(
            Problem(
                what=f"the split '{split}' of {num_documents} documents leaves none for {part} "
                f"(train, valid, test end at {', '.join(str(end) for end in boundaries[1:])})",
                rule="a part that is used needs at least one document",
                remedy=f"give {part} a larger share in data.split, or prepare more documents",
                place=place,
            )
        )
    return first, last
