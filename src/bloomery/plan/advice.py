"""What the numbers mean, in sentences: the largest costs, what is absurd, and the rules of thumb of the field."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from bloomery.base.units import format_bytes, format_count
from bloomery.config.recipe import Recipe
from bloomery.plan.forecast import Forecast
from bloomery.sizing.layout import Layout, micro_batches, world_size
from bloomery.sizing.memory import checkpoint_bytes
from bloomery.sizing.parameters import count_parameters
from bloomery.sizing.schedule import BatchPlan, TrainingPlan

_ABSURD_DAYS = 365.0
_FEW_SAMPLES = 16.0
_NEAR = 2.0
_OSTS = 32
"""Storage targets of a usual Lustre file system, where nothing better is known."""
_ZERO_SIZES = ((300e6, 0), (1e9, 1), (10e9, 2))
_CHANGES = {
    "compute": "a faster device, less recomputation, or a lower precision where the hardware has one",
    "bubble": "fewer pipeline stages, more micro-batches per step (a smaller micro-batch or fewer replicas), or an "
    "interleaved schedule",
    "communication": "tensor parallelism within a node only, larger micro-batches, a faster network, or ZeRO 1 for 3",
    "optimizer": "sharding the optimizer over more ranks (ZeRO 1 and above), or fewer micro-batches to add up",
    "data": "larger micro-batches and steps",
    "evaluation": "evaluating less often, or on fewer batches",
    "saves": "saving less often; more ranks each write less",
    "failures": "saving more often, and faster restarts",
}


def largest_costs(recipe: Recipe, found: Forecast) -> list[str]:
    """The three, and what would change them."""
    costs = sorted(found.costs.items(), key=lambda cost: -cost[1])[:3]
    total, parallel, why = found.total_seconds, recipe.parallel, dict[str, str]()
    if parallel.recompute == "full":
        why["compute"] = "About a quarter of it computes activations again (parallel.recompute=full). "
    if parallel.pp > 1:
        count = micro_batches(recipe, Layout.of(recipe))
        why["bubble"] = f"{parallel.pp} pipeline stages share {count} micro-batches in a step of the full batch. "
    return [
        f"{name.capitalize()} takes {spent / total:.1%} of the time, {spent / 86400:.3g} days. {why.get(name, '')}"
        f"What would change it: {_CHANGES[name]}."
        for name, spent in costs
    ]


def warnings(recipe: Recipe, found: Forecast, safe_bytes: float, device_bytes: float, node: int) -> Iterator[str]:
    """What is possible and yet should not be done as it is."""
    if safe_bytes > device_bytes:
        yield (
            f"this may run out of memory: with a safe margin it takes {format_bytes(safe_bytes)} of "
            f"{format_bytes(device_bytes)}. `--search` lists layouts that fit"
        )
    days = found.total_seconds / 86400
    if days > _ABSURD_DAYS:
        enough = world_size(recipe) * days / 60
        tokens = format_count(TrainingPlan.of(recipe).train_tokens)
        yield (
            f"{tokens} tokens would take {days:,.0f} days: it fits, and is absurd. About {enough:,.0f} devices "
            "would need two months"
        )
    if recipe.parallel.tp > node:
        yield f"parallel.tp is {recipe.parallel.tp}, which spans nodes of {node}: its traffic cannot be hidden"
    samples = recipe.batch.global_batch_size / world_size(recipe) * recipe.parallel.tp * recipe.parallel.pp
    if recipe.parallel.pp > 1 and samples <= _NEAR * _FEW_SAMPLES:
        yield (
            f"a replica gets {samples:.4g} samples of a global batch; at {_FEW_SAMPLES:g} and below, a pipeline is "
            "mostly filled and drained. Use a larger batch or fewer replicas"
        )


def advice(recipe: Recipe, machine_node: int) -> list[str]:
    """Rules of thumb, each with its reason."""
    return [_zero(recipe), *_ramp(recipe, machine_node), striping(recipe)]


def _zero(recipe: Recipe) -> str:
    size = count_parameters(recipe.model).total
    stage = next((stage for most, stage in _ZERO_SIZES if size < most), 3)
    if recipe.parallel.pp > 1 and stage > 1:
        return (
            f"ZeRO: by size alone ({format_count(size)} parameters) stage {stage} would be usual, but a pipeline keeps "
            "gradients whole between micro-batches, so stage 1 is what it can use."
        )
    return (
        f"ZeRO: for {format_count(size)} parameters stage {stage} is usual (0 below 300M, 1 below 1B, 2 below "
        f"10B, else 3): higher stages save memory and communicate more. parallel.zero is {recipe.parallel.zero}. "
        "Offload only what does not fit otherwise: the host is slower."
    )


def _ramp(recipe: Recipe, node: int) -> Iterator[str]:
    if recipe.batch.rampup is None:
        return
    layout, micro = Layout.of(recipe), recipe.batch.micro_batch_size
    replica = layout.tp * layout.pp * layout.cp
    levels = [level.global_batch for level in BatchPlan.of(recipe.batch).levels]
    until_end = gcd(*levels) // micro
    devices = until_end * replica
    yield (
        f"Batch ramp: every level must be a multiple of replicas times micro-batch, so until it ends at most "
        f"{until_end} replicas, {devices:,} GPUs ({-(-devices // node):,} nodes of {node}), have work; "
        f"afterwards up to {levels[-1] // micro:,} replicas, {levels[-1] // micro * replica:,} GPUs, at batch "
        f"{levels[-1]:,}. Well before that, at about {_FEW_SAMPLES:g} samples for each replica, efficiency falls."
    )


def striping(recipe: Recipe) -> str:
    """How to lay checkpoints on Lustre: one file for each rank."""
    files, size = world_size(recipe), checkpoint_bytes(recipe.model)
    each = format_bytes(size / files)
    stripes = max(1, -(-_OSTS // files))
    reason = (
        f"{files} files of about {each} already spread over {_OSTS} storage targets"
        if stripes == 1
        else f"{files} files of about {each} must reach all of {_OSTS} storage targets"
    )
    return f"Lustre: `lfs setstripe -c {stripes} -S 4M CHECKPOINTS` before the first save: {reason}."
