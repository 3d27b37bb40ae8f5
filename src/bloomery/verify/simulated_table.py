"""A simulated world for people and for scripts."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from bloomery.base.units import format_bytes
from bloomery.config.recipe import Recipe
from bloomery.sizing.memory import HOST_LABELS, STATE_LABELS
from bloomery.verify.simulate import SimulatedRank, SimulatedWorld

_METHOD = """\
Masters, copies, gradients and optimizer state are exact: counted from the pieces of the rank. Activations are
simulated: fake micro-batches go forward and backward through the rank's own stages while every tensor is counted;
attention and dropout keep what an accelerator's kernels keep. There is no allocator in it (rounding, fragmentation,
CUDA context, communication buffers come on top), and nothing is compiled (compiled code keeps less)."""

_MEMORY = {
    **STATE_LABELS,
    "receive_buffers": "receive buffers",
    "kept_per_micro_batch": "  kept per micro-batch",
    "activations": "activations, at peak",
    "peak": "peak of a step",
    **HOST_LABELS,
}


def world_json(world: SimulatedWorld, recipe: Recipe) -> dict[str, Any]:
    """The JSON of `verify --simulate-world`: a public contract. Sizes are in bytes."""
    layout, parallel = world.layout, recipe.parallel
    return {
        "name": world.name,
        "world": world.world,
        "layout": dataclasses.asdict(layout)
        | {"zero": parallel.zero, "schedule": parallel.schedule, "chunks": parallel.chunks},
        "recompute": parallel.recompute,
        "precision": recipe.precision,
        "micro_batch_size": recipe.batch.micro_batch_size,
        "micro_batches": world.micro_batches,
        "parameters": world.parameters,
        "built_parameters": world.built_parameters,
        "ranks": [_rank_json(rank) for rank in world.ranks],
        "seconds": round(world.seconds, 1),
        "torch": torch.__version__,
    }


def world_table(world: SimulatedWorld, recipe: Recipe) -> str:
    layout, parallel = world.layout, recipe.parallel
    chunks = f" x {parallel.chunks} chunks" if parallel.chunks > 1 else ""
    pipeline = f", {parallel.schedule}" if layout.pp > 1 else ""
    rows = {
        "pipeline rank": [f"{rank.place['pp'] + 1} of {layout.pp}" for rank in world.ranks],
        "layers": [_layers(rank) for rank in world.ranks],
        "parameters held": [f"{rank.elements:,}" for rank in world.ranks],
        "forward passes held": [str(rank.in_flight) for rank in world.ranks],
    }
    for name, title in _MEMORY.items():
        sizes = [getattr(rank.memory, name) for rank in world.ranks]
        if any(sizes):
            rows[title] = [format_bytes(size) for size in sizes]
    rows = {"": [f"rank {rank.rank:,}" for rank in world.ranks]} | rows
    widths = [max(len(row[i]) for row in rows.values()) for i in range(len(world.ranks))]
    lines = [
        f"{title:<24}" + "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
        for title, row in rows.items()
    ]
    return "\n".join(
        [
            f"{world.name} on {world.world:,} simulated ranks: tp {layout.tp} x cp {layout.cp} x dp {layout.dp} x "
            f"pp {layout.pp}{chunks}, ZeRO {parallel.zero} over {layout.shard}{pipeline}, recompute "
            f"{parallel.recompute}, {recipe.precision}, {world.micro_batches:,} micro-batches of "
            f"{recipe.batch.micro_batch_size}",
            f"parameters of all stages: {world.built_parameters:,}, as the formula says",
            "",
            *lines,
            "",
            _METHOD,
            f"Took {world.seconds:.1f} s.",
        ]
    )


def _rank_json(rank: SimulatedRank) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "place": rank.place,
        "layers": [list(layers) for layers in rank.layers],
        "embedding": rank.has_embedding,
        "head": rank.has_head,
        "elements": rank.elements,
        "owned_elements": rank.owned_elements,
        "forward_passes_held": rank.in_flight,
        "memory_bytes": dataclasses.asdict(rank.memory),
    }


def _layers(rank: SimulatedRank) -> str:
    parts = ["embedding"] if rank.has_embedding else []
    parts += [f"{layers[0]}-{layers[-1]}" if len(layers) > 1 else str(layers[0]) for layers in rank.layers]
    return " + ".join([*parts, "head"] if rank.has_head else parts)
