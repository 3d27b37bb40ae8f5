"""`bloomery plan RECIPE`: parameters, memory and checkpoint sizes of the recipe's layout."""

import argparse
import shlex
from typing import Any

from bloomery.base.errors import RecipeError
from bloomery.cli.arguments import add_json, add_recipe_arguments, as_text, load, show
from bloomery.config.recipe import Recipe
from bloomery.sizing.layout import Layout, ranks_per_node
from bloomery.sizing.memory import SAVED_BYTES_PER_PARAMETER, layout_facts, node_bytes, precision_problems, stage_facts
from bloomery.sizing.parameters import count_parameters, padded_vocab_size
from bloomery.sizing.schedule import kept_checkpoints

_READS = ("name", "model", "batch", "train", "precision", "parallel", "checkpoint", "launch")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe_arguments(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    recipe = load(args, reads=_READS).recipe
    if problems := precision_problems(recipe):
        raise RecipeError(problems)
    facts = plan_facts(recipe)
    words = ["bloomery", "verify", args.recipe, *args.overrides, "--simulate-world", str(facts["world"])]
    hint = f"\n\nActivations are not counted. This measures them: {shlex.join(words)}"
    return show(args, facts, lambda facts: as_text(facts) + hint)


def plan_facts(recipe: Recipe) -> dict[str, Any]:
    """The JSON of `plan`: a public contract. Pipeline ranks that are alike are one stage, with the numbers of its
    fullest rank; they count from 0."""
    model = recipe.model
    layout = Layout.of(recipe)
    parameters = count_parameters(model, vocab_size=padded_vocab_size(model)).total
    stages = stage_facts(recipe, layout)
    node = node_bytes(recipe, layout)
    checkpoint = SAVED_BYTES_PER_PARAMETER * parameters
    sizes = {"durable": checkpoint, "local": node["saves"], "upload": checkpoint}
    fullest = max(stage["memory_bytes"]["device"] for stage in stages)
    return {
        "name": recipe.name,
        "family": model.family,
        "parameters": count_parameters(model).total,
        "padded_parameters": parameters,
        "padded_vocab_size": padded_vocab_size(model),
        "ranks_per_node": ranks_per_node(recipe),
        **layout_facts(recipe, layout),
        "stages": stages,
        "fullest_device_bytes": fullest,
        "fullest_pipeline_ranks": sorted(
            rank for stage in stages if stage["memory_bytes"]["device"] == fullest for rank in stage["pipeline_ranks"]
        ),
        "node_memory_bytes": node,
        "checkpoint_bytes": checkpoint,
        "kept": {
            place: kept | {"bytes": (kept["count"] + kept["being_written"]) * sizes[place]}
            for place, kept in kept_checkpoints(recipe).items()
        },
        "not_counted": ["activations"],
    }
