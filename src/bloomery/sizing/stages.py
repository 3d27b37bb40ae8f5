"""Which layers each pipeline stage owns. The embedding and the head count as one layer's work each."""

from __future__ import annotations


def stage_layers(num_layers: int, num_stages: int) -> list[range]:
    """Layers of every stage, in order; each has at least one.

    The work is evened out: 70 layers on 12 stages give BLOOM's [embedding + 5] [6] x 10 [5 + head]. What does not
    divide goes to middle stages first.
    """
    if num_stages > num_layers:
        raise ValueError(f"{num_stages} stages need at least as many layers, not {num_layers}")
    layers = [1] * num_stages
    for _ in range(num_layers - num_stages):
        layers[min(range(num_stages), key=lambda stage: (_work(layers, stage), _from_middle(stage, num_stages)))] += 1
    starts = [sum(layers[:stage]) for stage in range(num_stages)]
    return [range(start, start + count) for start, count in zip(starts, layers, strict=True)]


def stages_of_rank(pp_rank: int, pp: int, chunks: int) -> list[int]:
    """The stages that one pipeline rank owns: they are dealt out in turn."""
    return [pp_rank + chunk * pp for chunk in range(chunks)]


def _work(layers: list[int], stage: int) -> int:
    return layers[stage] + (stage == 0) + (stage == len(layers) - 1)


def _from_middle(stage: int, num_stages: int) -> float:
    return abs(stage - (num_stages - 1) / 2)
