"""Boxes of a tensor: where two meet, and whether many of them make a whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod


@dataclass(frozen=True)
class Box:
    """The part of a tensor that begins at `offset` and is `size` large. A number has the box of no dimensions."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def volume(self) -> int:
        return prod(self.size)

    def meet(self, other: Box) -> Box | None:
        """The part that both hold, in the coordinates of the whole tensor; None if there is none."""
        start = tuple(map(max, self.offset, other.offset))
        size = tuple(
            min(a + m, b + n) - s
            for a, m, b, n, s in zip(self.offset, self.size, other.offset, other.size, start, strict=True)
        )
        return Box(start, size) if all(length > 0 for length in size) else None

    def range_within(self, outer: Box) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(first, one beyond the last) in each dimension, counted from the beginning of a box around this one."""
        begin = tuple(a - b for a, b in zip(self.offset, outer.offset, strict=True))
        return begin, tuple(a + n for a, n in zip(begin, self.size, strict=True))

    def inside(self, shape: tuple[int, ...]) -> bool:
        return len(shape) == len(self.offset) == len(self.size) and all(
            start >= 0 and length > 0 and start + length <= end
            for start, length, end in zip(self.offset, self.size, shape, strict=True)
        )

    def __str__(self) -> str:
        ranges = (f"{start}:{start + length}" for start, length in zip(self.offset, self.size, strict=True))
        return f"[{', '.join(ranges)}]"


def why_not_whole(shape: tuple[int, ...], boxes: Sequence[Box]) -> str:
    """What is wrong with boxes that should cover a tensor of this shape exactly once; empty if nothing is."""
    for box in boxes:
        if not box.inside(shape):
            return f"{box} does not lie within {shape}"
    if _corners(boxes) == _corners([Box((0,) * len(shape), shape)]):
        return ""
    missing = prod(shape) - sum(box.volume for box in boxes)
    return f"{missing:,} of {prod(shape):,} elements are nowhere" if missing > 0 else "some elements are there twice"


def _corners(boxes: Sequence[Box]) -> dict[tuple[int, ...], int]:
    """The corners of all boxes, counted up and down by turns, from which follows how often each element is there. Those
    inside a whole cancel out. No choice of boxes makes it slow."""
    counts: dict[tuple[int, ...], int] = {}
    for box in boxes:
        sides = [((start, 1), (start + length, -1)) for start, length in zip(box.offset, box.size, strict=True)]
        for ends in product(*sides):
            corner = tuple(place for place, _ in ends)
            counts[corner] = counts.get(corner, 0) + prod(sign for _, sign in ends)
    return {corner: count for corner, count in counts.items() if count}
