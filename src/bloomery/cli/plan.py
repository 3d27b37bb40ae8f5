"""`bloomery plan RECIPE`: parameters, memory and checkpoint sizes of the recipe's layout."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import asdict
from typing import Any

from bloomery.base.errors import RecipeError
from bloomery.base.units import format_bytes
from bloomery.cli.arguments import add_json, add_recipe_arguments, load, show
from bloomery.config.recipe import Recipe
from bloomery.sizing.layout import Layout, micro_batches, ranks_per_node, world_size
from bloomery.sizing.memory import (
    HOST_LABELS,
    SAVED_BYTES_PER_PARAMETER,
    STATE_LABELS,
    StageMemory,
    node_bytes,
    precision_problems,
    stage_memories,
)
from bloomery.sizing.parameters import count_parameters, padded_vocab_size
from bloomery.sizing.schedule import kept_checkpoints

_READS = ("name", "model", "batch", "train", "precision", "parallel", "checkpoint", "launch")
_MEMORY = {
    **STATE_LABELS,
    "device": "device, no activations",
    **HOST_LABELS,
}
_PLACES = {"durable": "in the run folder", "local": "on each node (local)", "upload": "in remote storage (upload)"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe_arguments(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    recipe = load(args, reads=_READS).recipe
    if problems := precision_problems(recipe):
        raise RecipeError(problems)
    facts = plan_facts(recipe)
    simulate = shlex.join(["bloomery", "verify", args.recipe, *args.overrides, "--simulate-world", str(facts["world"])])
    return show(args, facts, lambda found: _text(found, simulate))


def plan_facts(recipe: Recipe) -> dict[str, Any]:
    """The JSON of `plan`: a public contract. Pipeline ranks that are alike are one stage, with the numbers of its
    fullest rank; they count from 0."""
    model, parallel = recipe.model, recipe.parallel
    layout = Layout.of(recipe, world_size(recipe))
    parameters = count_parameters(model, vocab_size=padded_vocab_size(model)).total
    stages = stage_memories(recipe, layout)
    node = node_bytes(recipe, layout)
    checkpoint = SAVED_BYTES_PER_PARAMETER * parameters
    sizes = {"durable": checkpoint, "local": node.saves, "upload": checkpoint}
    fullest = max(stage.bytes.device for stage in stages)
    return {
        "name": recipe.name,
        "family": model.family,
        "parameters": count_parameters(model, vocab_size=model.vocab_size).total,
        "padded_parameters": parameters,
        "padded_vocab_size": padded_vocab_size(model),
        "world": layout.world,
        "ranks_per_node": ranks_per_node(recipe),
        "layout": asdict(layout) | {"zero": parallel.zero, "schedule": parallel.schedule, "chunks": parallel.chunks},
        "precision": recipe.precision,
        "micro_batch_size": recipe.batch.micro_batch_size,
        "micro_batches": micro_batches(recipe, layout),
        "stages": [_stage_json(stage) for stage in stages],
        "fullest_device_bytes": fullest,
        "fullest_pipeline_ranks": sorted(
            rank for stage in stages if stage.bytes.device == fullest for rank in stage.pipeline_ranks
        ),
        "node_memory_bytes": asdict(node),
        "checkpoint_bytes": checkpoint,
        "kept": {
            place: asdict(kept) | {"bytes": (kept.count + kept.being_written) * sizes[place]}
            for place, kept in kept_checkpoints(recipe).items()
        },
        "not_counted": ["activations"],
    }


def _stage_json(stage: StageMemory) -> dict[str, Any]:
    return {
        "pipeline_ranks": stage.pipeline_ranks,
        "num_layers": stage.part.num_layers,
        "embedding": stage.part.has_embedding,
        "head": stage.part.has_head,
        "elements": stage.elements.pieces,
        "owned_elements": stage.elements.owned,
        "memory_bytes": asdict(stage.bytes) | {"device": stage.bytes.device},
    }


def _text(facts: dict[str, Any], simulate: str) -> str:
    parameters, rows = facts["padded_parameters"], facts["padded_vocab_size"]
    lines = [
        f"{facts['name']} ({facts['family']}): {parameters:,} parameters, the vocabulary padded to {rows:,}",
        _layout_line(facts),
        "",
        *_table(facts["stages"]),
        "",
        f"Fullest device, without activations: {format_bytes(facts['fullest_device_bytes'])}, of pipeline rank "
        f"{_numbers(facts['fullest_pipeline_ranks'])}",
        f"Host memory of the fullest node: {_node_text(facts['node_memory_bytes'])}",
        f"One checkpoint: {format_bytes(facts['checkpoint_bytes'])}",
        *(f"Checkpoints {_PLACES[place]}: {_kept_text(kept)}" for place, kept in facts["kept"].items()),
        "",
        f"Activations are not counted. This measures them: {simulate}",
    ]
    return "\n".join(lines)


def _node_text(node: dict[str, int]) -> str:
    saves = f"{format_bytes(node['saves'])} for saves (pinned)"
    if not node["offload"]:
        return saves
    return f"{format_bytes(node['host'])}, of it {saves} and {format_bytes(node['offload'])} for offload"


def _kept_text(kept: dict[str, Any]) -> str:
    writing = " and one being written" if kept["being_written"] else ""
    return f"{kept['bound']} {kept['count']:,}{writing}, {format_bytes(kept['bytes'])}"


def _layout_line(facts: dict[str, Any]) -> str:
    layout, nodes = facts["layout"], facts["world"] // facts["ranks_per_node"]
    where = f"{nodes:,} nodes of {facts['ranks_per_node']}" if nodes > 1 else "one node"
    chunks = f" x {layout['chunks']} chunks" if layout["chunks"] > 1 else ""
    ranks = "rank" if facts["world"] == 1 else "ranks"
    batches = "micro-batch" if facts["micro_batches"] == 1 else "micro-batches"
    return (
        f"{facts['world']:,} {ranks} on {where}: tp {layout['tp']} x cp {layout['cp']} x dp {layout['dp']} x "
        f"pp {layout['pp']}{chunks}, ZeRO {layout['zero']} over {layout['shard']}, {facts['precision']}, "
        f"{facts['micro_batches']:,} {batches} of {facts['micro_batch_size']}"
    )


def _table(stages: list[dict[str, Any]]) -> list[str]:
    rows = {
        "pipeline ranks": [_numbers(stage["pipeline_ranks"]) for stage in stages],
        "blocks": [_blocks(stage) for stage in stages],
        "parameters held": [f"{stage['elements']:,}" for stage in stages],
    }
    for name, title in _MEMORY.items():
        sizes = [stage["memory_bytes"][name] for stage in stages]
        if any(sizes):
            rows[title] = [format_bytes(size) for size in sizes]
    widths = [max(len(row[i]) for row in rows.values()) for i in range(len(stages))]
    return [
        f"{title:<26}" + "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
        for title, row in rows.items()
    ]


def _numbers(pipeline_ranks: list[int]) -> str:
    """[0, 2, 3, 4] -> '1, 3-5': people count from 1."""
    first = [rank for rank in pipeline_ranks if rank - 1 not in pipeline_ranks]
    last = [rank for rank in pipeline_ranks if rank + 1 not in pipeline_ranks]
    runs = zip(first, last, strict=True)
    return ", ".join(f"{start + 1}-{end + 1}" if start < end else str(start + 1) for start, end in runs)


def _blocks(stage: dict[str, Any]) -> str:
    ends = ["embedding"] if stage["embedding"] else []
    return " + ".join([*ends, str(stage["num_layers"]), *(["head"] if stage["head"] else [])])
