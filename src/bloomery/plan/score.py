"""What the planner foretells of a run that starts, which the run keeps, and how that compares with what it measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bloomery.base.errors import DataError, Problem
from bloomery.config.recipe import Recipe
from bloomery.monitor import names
from bloomery.monitor.gather import PREDICTED, Gathered
from bloomery.plan.answer import Question, rank_memory
from bloomery.plan.constants import fitted
from bloomery.plan.forecast import forecast
from bloomery.plan.hardware import Machine, known_as, read_catalogue
from bloomery.sizing.layout import Layout, ranks_per_node
from bloomery.sizing.memory import stage_facts


def stored_plan(recipe: Recipe, torch_name: str) -> dict[str, Any]:
    """Facts of a run's `plan` event; none on a device that no table has."""
    catalogue = read_catalogue(None)
    if (name := known_as(torch_name, catalogue)) is None:
        return {}
    machine = Machine.of(catalogue, name, None, ranks_per_node(recipe))
    constants = fitted().on(machine.device)
    found = forecast(recipe, machine, constants)
    memory = rank_memory(Question(recipe, machine, catalogue, constants, None), stage_facts(recipe, Layout.of(recipe)))
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
        "trend": {name: _trend(found) for name, found in errors.items()},
    }


def _trend(errors: list[float]) -> float | None:
    """By how much the error of the newer half is smaller (negative) or larger; None for fewer than two runs."""
    half = len(errors) // 2
    return float(np.median(errors[half:]) - np.median(errors[:half])) if half else None


def _score(run: Path) -> dict[str, Any]:
    found = Gathered()
    found.read(run)
    if not (compared := found.scores()):
        rule = f"a run has its plan in {names.EVENTS_FILE} and steps of the full batch in {names.METRICS_FILE}"
        raise DataError(Problem(f"{run} shows no plan or no step", rule, "give a folder that `bloomery train` wrote"))
    pairs = {
        name: {"predicted": predicted, "measured": measured, "error": predicted / measured - 1}
        for name, (predicted, measured) in compared.items()
    }
    return {"run": str(run), "began": found.first_time, "machine": found.plan["machine"], **pairs}
