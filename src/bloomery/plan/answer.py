"""Everything that `bloomery plan RECIPE` says, as one record; what a run keeps of it, against what the run measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bloomery.base.errors import DataError, Problem
from bloomery.config.recipe import Recipe
from bloomery.monitor import names
from bloomery.monitor.gather import PREDICTED, read_run
from bloomery.plan.advice import advice, largest_costs, warnings
from bloomery.plan.candidates import Question
from bloomery.plan.constants import fitted
from bloomery.plan.forecast import (
    Assumptions,
    Forecast,
    forecast,
    scaling,
    speed_facts,
    storage_facts,
    training_facts,
)
from bloomery.plan.hardware import Catalogue, Machine, known_as, read_catalogue
from bloomery.plan.memory import stage_memory
from bloomery.plan.search import Ranking
from bloomery.plan.step_time import PARTS
from bloomery.sizing.layout import Layout, ranks_per_node
from bloomery.sizing.memory import checkpoint_bytes, layout_facts, node_bytes, stage_facts
from bloomery.sizing.parameters import count_parameters, padded_vocab_size
from bloomery.sizing.schedule import kept_checkpoints

MOST_LAYOUTS = 10


@dataclass(frozen=True)
class Answer:
    facts: dict[str, Any]
    """The JSON of `plan`: a public contract. Pipeline ranks that are alike are one stage, with the numbers of its
    fullest rank; they count from 0."""
    warnings: list[str]
    forecast: Forecast
    ranking: Ranking


def answer(asked: Question, catalogue: Catalogue, usd_per_gpu_hour: float | None) -> Answer:
    """`usd_per_gpu_hour`: None for the table's."""
    recipe, machine, time = asked.recipe, asked.machine, asked.time
    found, ranking, static = forecast(asked), Ranking.of(asked), static_facts(recipe)
    assumed = Assumptions.of(recipe, machine, catalogue, usd_per_gpu_hour)
    used = rank_memory(asked, static["stages"])
    device_bytes = machine.device.memory_gib * 2**30
    facts = static | {
        "memory_bytes": used | {"device_has": round(device_bytes)},
        "step": speed_facts(asked),
        "step_share": {part: float(getattr(time, part) / time.total) for part in PARTS},
        "training": training_facts(asked, found, assumed),
        "machine": {
            "gpu": machine.gpu,
            "gpu_source": machine.device.source,
            "network": machine.network_name,
            "network_gb_per_s": machine.network.gb_per_s,
            "network_source": machine.network.source,
            "gpus_per_node": machine.node,
        },
        "storage": storage_facts(recipe, catalogue),
        "layouts": ranking.facts(MOST_LAYOUTS),
        "legal_layouts": len(ranking.grid.rows),
        "fitting_layouts": len(ranking.order),
        "scaling": scaling(asked, catalogue),
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


def rank_memory(asked: Question, stages: list[dict[str, Any]]) -> dict[str, int]:
    """Of the fullest rank, by part: what it holds of the weights is exact, the rest is estimated."""
    setup, constants = asked.setup, asked.constants
    ranks = []
    for stage in stages:
        held = stage["memory_bytes"]
        estimated = stage_memory(setup, constants, is_last=stage["head"])
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
    return fullest | {"expected": expected, "safe": round(expected * constants.safe)}


def stored_plan(recipe: Recipe, torch_name: str) -> dict[str, Any]:
    """Facts of the `plan` event of a run that starts; none on a device that no table has."""
    catalogue = read_catalogue(None)
    if (name := known_as(torch_name, catalogue)) is None:
        return {}
    machine = Machine.of(catalogue, name, None, ranks_per_node(recipe))
    asked = Question(recipe, machine, fitted().on(machine.device))
    found, memory = forecast(asked), rank_memory(asked, stage_facts(recipe, Layout.of(recipe)))
    tokens = recipe.batch.global_batch_size * recipe.model.seq_length
    step = found.levels[-1].step_seconds
    return {
        "step_seconds": step,
        "tokens_per_second": tokens / step,
        "global_batch": found.levels[-1].global_batch,
        "memory_bytes": memory["expected"] - (0 if torch_name == "cpu" else memory["context"]),
        "total_seconds": found.total_seconds,
        "machine": name,
        "machine_source": machine.device.source,
        "network": machine.network_name,
        "failures": found.failures,
    }


def scores(runs: Sequence[Path]) -> dict[str, Any]:
    """Of each run, the oldest first: predicted, measured, and the error as a share of what was measured."""
    rows = sorted(map(_score, runs), key=lambda row: row["began"])
    errors = {name: [abs(row[name]["error"]) for row in rows if name in row] for name in PREDICTED}
    return {
        "runs": rows,
        "median_error": {name: float(np.median(found)) if found else None for name, found in errors.items()},
        # By how much the error of the newer half is smaller (negative) or larger.
        "trend": {
            name: float(np.median(found[len(found) // 2 :]) - np.median(found[: len(found) // 2]))
            if found[1:]
            else None
            for name, found in errors.items()
        },
    }


def _score(run: Path) -> dict[str, Any]:
    found = read_run(run)
    if not (compared := found.scores()):
        rule = f"a run has its plan in {names.EVENTS_FILE} and steps of the full batch in {names.METRICS_FILE}"
        raise DataError(Problem(f"{run} shows no plan or no step", rule, "give a folder that `bloomery train` wrote"))
    pairs = {
        name: {"predicted": predicted, "measured": measured, "error": predicted / measured - 1}
        for name, (predicted, measured) in compared.items()
    }
    return {"run": str(run), "began": found.first_time, "machine": found.plan["machine"], **pairs}
