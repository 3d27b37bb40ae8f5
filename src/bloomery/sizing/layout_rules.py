"""Rules about how ranks share the work: each says what is wrong and names the nearest legal values."""

from __future__ import annotations

import math
from collections.abc import Iterator

from bloomery.base.units import Duration
from bloomery.config.draft import Draft
from bloomery.config.recipe import ParallelSection, Recipe
from bloomery.families.registry import FAMILIES
from bloomery.sizing.finding import Finding, nearby_divisors
from bloomery.sizing.layout import data_parallel_size, ranks_per_replica, world_size
from bloomery.sizing.parameters import padded_vocab_size

LAYOUT = ("launch.nodes", "launch.gpus_per_node", "parallel.tp", "parallel.pp", "parallel.cp")
_SEVERAL_STAGES = ("interleaved", "zero_bubble")


def tensor_parallel(recipe: Recipe, draft: Draft) -> Iterator[Finding]:
    model, tp, cp = recipe.model, recipe.parallel.tp, recipe.parallel.cp
    tokens = model.seq_length // cp
    sizes = {
        ("model.num_heads",): ("model.num_heads", model.num_heads),
        ("model.num_kv_heads",): ("model.num_kv_heads", model.num_kv_heads),
        ("model.ffn_hidden_size",): ("model.ffn_hidden_size", model.ffn_hidden_size),
        ("model.vocab_multiple", "model.vocab_size"): ("the padded vocabulary", padded_vocab_size(model)),
        ("model.seq_length", "parallel.cp"): ("the number of tokens of a sequence", tokens),
    }
    legal = nearby_divisors(math.gcd(*(size for _, size in sizes.values())), tp)
    for paths, (name, size) in sizes.items():
        is_told = name == "model.num_kv_heads" and size == model.num_heads
        if size % tp and not is_told:
            yield Finding(
                ("parallel.tp", *paths),
                f"parallel.tp is {tp} but {name} is {size}",
                "it must divide evenly across tensor-parallel ranks",
                f"use parallel.tp {legal}",
            )


def context(recipe: Recipe, draft: Draft) -> Iterator[Finding]:
    cp, length = recipe.parallel.cp, recipe.model.seq_length
    if cp == 1:
        return
    if FAMILIES[recipe.model.family].encoder:
        yield Finding(
            ("parallel.cp", "model.family"),
            f"parallel.cp is {cp} but model.family is {recipe.model.family}",
            "its heads read the first token of a whole sequence, so sequences are not cut between ranks",
            "use parallel.cp=1",
        )
    elif length % (2 * cp):
        lower = length // (2 * cp) * 2 * cp
        yield Finding(
            ("parallel.cp", "model.seq_length"),
            f"parallel.cp is {cp} but model.seq_length is {length}",
            "a sequence is cut into 2 * cp equal pieces",
            f"use parallel.cp {nearby_divisors(max(1, length // 2), cp)}, or a sequence of {lower or 2 * cp} tokens",
        )


def pipeline(recipe: Recipe, draft: Draft) -> Iterator[Finding]:
    parallel, layers = recipe.parallel, recipe.model.num_layers
    pp, chunks, schedule = parallel.pp, parallel.chunks, parallel.schedule
    if pp == 1:
        for name in ("schedule", "chunks"):
            default = ParallelSection.model_fields[name].default
            if getattr(parallel, name) != default:
                yield Finding(
                    (f"parallel.{name}", "parallel.pp"),
                    f"parallel.{name} is {getattr(parallel, name)} but parallel.pp is 1",
                    "there is no pipeline, so it would be ignored",
                    f"set it back to {default}, or use several stages",
                )
        return
    if pp * chunks > layers:
        yield Finding(
            ("parallel.pp", "parallel.chunks", "model.num_layers"),
            f"parallel.pp * parallel.chunks is {pp * chunks} but model.num_layers is {layers}",
            "every pipeline stage owns at least one layer",
            f"use at most {layers} stages",
        )
    if (schedule in _SEVERAL_STAGES) != (chunks > 1):
        few = schedule in _SEVERAL_STAGES
        yield Finding(
            ("parallel.chunks", "parallel.schedule"),
            f"parallel.schedule is {schedule} with parallel.chunks {chunks}",
            f"{schedule} runs {'at least two stages' if few else 'one stage'} per rank",
            "use parallel.chunks=2" if few else "use parallel.chunks=1, or the schedule interleaved",
        )
    elif schedule in _SEVERAL_STAGES:
        yield from _rounds(recipe)
    if schedule == "zero_bubble":
        yield from _zero_bubble(recipe)
    if parallel.zero >= 2:
        yield Finding(
            ("parallel.zero", "parallel.pp"),
            f"parallel.zero is {parallel.zero} with parallel.pp {pp}",
            "under a pipeline, gradients stay whole between micro-batches, so ZeRO 2 and 3 would act as ZeRO 1",
            "use parallel.zero=1",
        )


def _rounds(recipe: Recipe) -> Iterator[Finding]:
    """Several stages per rank work through micro-batches in rounds of pp."""
    pp, unit = recipe.parallel.pp, recipe.batch.micro_batch_size * max(1, data_parallel_size(recipe))
    full, ramp = recipe.batch.global_batch_size, recipe.batch.rampup
    sizes = [*(range(ramp.start, full, ramp.increment)[:10_000] if ramp else ()), full]
    odd = [size for size in sizes if size % unit == 0 and size // unit % pp]
    if odd:
        yield Finding(
            ("parallel.schedule", "parallel.pp", "batch.global_batch_size", "batch.micro_batch_size", *LAYOUT),
            f"a batch of {odd[0]} samples makes {odd[0] // unit} micro-batches for parallel.pp {pp}",
            f"{recipe.parallel.schedule} takes micro-batches in rounds of pp",
            f"use batches that are multiples of {unit * pp} samples, or the schedule 1f1b",
        )


def _zero_bubble(recipe: Recipe) -> Iterator[Finding]:
    if recipe.train.compile is True:
        yield Finding(
            ("parallel.schedule", "train.compile"),
            "parallel.schedule is zero_bubble with train.compile",
            "torch cannot split the backward pass of compiled blocks",
            "use train.compile=false, or the schedule interleaved",
        )
    ranks = data_parallel_size(recipe) * recipe.parallel.cp
    if ranks > 1 and recipe.precision != "fp32":
        yield Finding(
            ("parallel.schedule", "precision", *LAYOUT),
            f"parallel.schedule is zero_bubble with precision {recipe.precision} and {ranks} data-parallel ranks",
            "torch then adds the gradients of micro-batches in 16 bits",
            "use the schedule interleaved",
        )


def data_parallel(recipe: Recipe, draft: Draft) -> Iterator[Finding]:
    parallel = recipe.parallel
    ranks = ranks_per_replica(recipe)
    if recipe.launch and world_size(recipe) % ranks:
        world = world_size(recipe)
        near = " or ".join(str(n) for n in (world // ranks * ranks, (world // ranks + 1) * ranks) if n)
        yield Finding(
            LAYOUT,
            f"launch asks for {world} ranks",
            f"one replica takes tp * pp * cp = {ranks}, which must divide them",
            f"use a multiple of {ranks} ranks, such as {near}",
        )
        return
    size, copies = parallel.shard_size, max(1, data_parallel_size(recipe)) * parallel.cp
    if size is None:
        return
    if parallel.zero == 0:
        yield Finding(
            ("parallel.shard_size", "parallel.zero"),
            f"parallel.shard_size is {size} but parallel.zero is 0",
            "ZeRO 0 shards nothing, so it would be ignored",
            "set parallel.shard_size=null, or use ZeRO 1, 2 or 3",
        )
    elif copies % size:
        yield Finding(
            ("parallel.shard_size", *LAYOUT),
            f"parallel.shard_size is {size} but there are {copies} data- and context-parallel ranks",
            "it must divide them",
            f"use {nearby_divisors(copies, size)}, or null for all of them",
        )


def launch(recipe: Recipe, draft: Draft) -> Iterator[Finding]:
    if recipe.launch is None:
        return
    on, nodes, limit = recipe.launch.on, recipe.launch.nodes, recipe.launch.time_limit
    if on == "local" and nodes > 1:
        yield Finding(
            ("launch.nodes", "launch.on"),
            f"launch.nodes is {nodes} but launch.on is local",
            "local means this one machine",
            "use launch.on hosts, slurm or azureml, or one node",
        )
    exit_after = recipe.train.exit_after
    if limit and isinstance(exit_after, Duration) and exit_after.seconds >= limit.seconds:
        yield Finding(
            ("train.exit_after", "launch.time_limit"),
            f"train.exit_after is {exit_after} but launch.time_limit is {limit}",
            "the scheduler would kill the job before it saves",
            "leave train.exit_after some minutes below the limit",
        )
