"""The order in which a pipeline rank works, and how many forward passes it therefore holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from bloomery.config.recipe import PipelineSchedule

Pass = tuple[Literal["forward", "backward"], int]
"""A pass through one of the stages of a rank, counted from 0."""


def passes_of_rank(
    schedule: PipelineSchedule, *, pp: int, pp_rank: int, chunks: int, micro_batches: int
) -> Iterator[Pass]:
    """All passes of one step: some forward ones first, then in turns. Zero bubble puts off a part of its backward
    passes; what that part needs is not counted here."""
    total = micro_batches * chunks
    round_size = micro_batches // max(1, micro_batches // pp)
    behind = pp - 1 - pp_rank
    ahead = {
        "gpipe": total,
        "1f1b": behind,
        "interleaved": (chunks - 1) * round_size + 2 * behind,
        "zero_bubble": (chunks - 1) * round_size + behind,
    }[schedule]
    ahead = min(ahead, total)
    for i in range(total + ahead):
        if i < total:
            yield "forward", i // round_size % chunks
        if i >= ahead:
            yield "backward", chunks - 1 - (i - ahead) // round_size % chunks


def most_held(passes: Iterator[Pass], kept: Sequence[int], working: Sequence[int]) -> tuple[int, int]:
    """(bytes, forward passes) at the peak: what all held passes keep, and what one backward pass needs on top.
    `kept` and `working` are bytes of each stage of the rank."""
    held = [0] * len(kept)
    peak, most = 0, 0
    for direction, chunk in passes:
        if direction == "forward":
            held[chunk] += 1
            most = max(most, sum(held))
        peak = max(peak, sum(n * size for n, size in zip(held, kept, strict=True)) + working[chunk])
        if direction == "backward":
            held[chunk] -= 1
    return peak, most
