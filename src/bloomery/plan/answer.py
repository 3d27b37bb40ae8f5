"""Everything that `bloomery plan RECIPE` says, as one record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bloomery.config.recipe import Recipe
from bloomery.plan.advice import advice, largest_costs, warnings
from bloomery.plan.candidates import setup_of
from bloomery.plan.constants import Constants
from bloomery.plan.forecast import (
    Assumptions,
    Forecast,
    forecast,
    scaling,
    speed_facts,
    storage_facts,
    training_facts,
)
from bloomery.plan.hardware import Catalogue, Machine
from bloomery.plan.memory import stage_memory
from bloomery.plan.search import Ranking
from bloomery.plan.step_time import PARTS, step_time
from bloomery.sizing.layout import Layout, ranks_per_node, world_size
from bloomery.sizing.memory import checkpoint_bytes, layout_facts, node_bytes, stage_facts
from bloomery.sizing.parameters import count_parameters, padded_vocab_size
from bloomery.sizing.schedule import kept_checkpoints

MOST_LAYOUTS = 10


@dataclass(frozen=True)
class Question:
    recipe: Recipe
    machine: Machine
    catalogue: Catalogue
    constants: Constants
    usd_per_gpu_hour: float | None
    """None: the table's."""

    def ranking(self) -> Ranking:
        return Ranking.of(self.recipe, self.machine, world_size(self.recipe), self.constants)


@dataclass(frozen=True)
class Answer:
    facts: dict[str, Any]
    """The JSON of `plan`: a public contract. Pipeline ranks that are alike are one stage, with the numbers of its
    fullest rank; they count from 0."""
    warnings: list[str]
    forecast: Forecast
    ranking: Ranking


def answer(question: Question) -> Answer:
    recipe, machine, constants = question.recipe, question.machine, question.constants
    found = forecast(recipe, machine, constants)
    assumed = Assumptions.of(recipe, machine, question.catalogue, question.usd_per_gpu_hour)
    ranking = question.ranking()
    static = static_facts(recipe)
    used = rank_memory(question, static["stages"])
    device_bytes = machine.device.memory_gib * 2**30
    time = step_time(setup_of(recipe, machine), constants)
    facts = static | {
        "memory_bytes": used | {"device_has": round(device_bytes)},
        "step": speed_facts(recipe, machine, float(time.total)),
        "step_share": {part: float(getattr(time, part) / time.total) for part in PARTS},
        "training": training_facts(recipe, machine, found, assumed),
        "machine": _machine_facts(machine),
        "storage": storage_facts(recipe, question.catalogue),
        "layouts": ranking.facts(MOST_LAYOUTS),
        "legal_layouts": len(ranking.grid.rows),
        "fitting_layouts": len(ranking.order),
        "scaling": scaling(recipe, machine, constants, question.catalogue),
        "largest_costs": largest_costs(recipe, found),
        "advice": advice(recipe, machine.node),
    }
    said = warnings(recipe, found, used["safe"], device_bytes, machine.node)
    return Answer(facts, list(said), found, ranking)


def static_facts(recipe: Recipe) -> dict[str, Any]:
    """What follows from the recipe alone, to the byte."""
    model = recipe.model
    layout = Layout.of(recipe)
    stages = stage_facts(recipe, layout)
    node = node_bytes(recipe, layout)
    checkpoint = checkpoint_bytes(model)
    sizes = {"durable": checkpoint, "local": node["saves"], "upload": checkpoint}
    fullest = max(stage["memory_bytes"]["device"] for stage in stages)
    return {
        "name": recipe.name,
        "family": model.family,
        "parameters": count_parameters(model).total,
        "padded_parameters": count_parameters(model, padded=True).total,
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
    }


def rank_memory(question: Question, stages: list[dict[str, Any]]) -> dict[str, int]:
    """Of the fullest rank, by part: what it holds of the weights is exact, the rest is estimated."""
    recipe = question.recipe
    setup = setup_of(recipe, question.machine)
    ranks = []
    for stage in stages:
        held = stage["memory_bytes"]
        estimated = stage_memory(setup, question.constants, is_last=stage["head"])
        estimates = ("activations", "logits", "buffers", "context")
        # The estimate is of the stage with most layers.
        share = stage["num_layers"] / float(setup.layers_of_stage)
        parts = {name: round(float(getattr(estimated, name))) for name in estimates}
        parts["activations"] = round(parts["activations"] * min(1.0, share))
        weights = held["masters"] + held["compute_copies"]
        gradients = max(held["gradients"], held["reduced_gradients"])
        if setup.late_gradients > 0:
            gradients = max(0, gradients - parts["activations"] - parts["logits"])
        ranks.append({"weights": weights, "gradients": gradients, "optimizer": held["optimizer"], **parts})
    fullest = max(ranks, key=lambda parts: sum(parts.values()))
    expected = sum(fullest.values())
    return fullest | {"expected": expected, "safe": round(expected * question.constants.safe)}


def _machine_facts(machine: Machine) -> dict[str, Any]:
    return {
        "gpu": machine.gpu,
        "gpu_source": machine.device.source,
        "network": machine.network_name,
        "network_gb_per_s": machine.network.gb_per_s,
        "network_source": machine.network.source,
        "gpus_per_node": machine.node,
    }
