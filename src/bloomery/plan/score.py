"""What the planner would have said of runs that have been, against what they measured.

A prediction is a function of the run's recipe and device, so it is made again, by the constants of today.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bloomery.base.errors import DataError, Problem
from bloomery.config.load import load_recipe
from bloomery.monitor import names
from bloomery.monitor.gather import Gathered
from bloomery.plan.answer import Question, rank_memory, static_facts
from bloomery.plan.constants import Constants
from bloomery.plan.forecast import forecast
from bloomery.plan.hardware import Catalogue, Machine
from bloomery.sizing.layout import ranks_per_node

_QUANTITIES = ("step_seconds", "memory_bytes", "total_seconds")


def scores(runs: Sequence[Path], catalogue: Catalogue, constants: Constants) -> dict[str, Any]:
    """Of each run, the oldest first: predicted, measured, and the error as a share of what was measured."""
    rows = sorted((_score(run, catalogue, constants) for run in runs), key=lambda row: row["began"])
    errors = {name: [abs(row[name]["error"]) for row in rows if row[name]["error"] is not None] for name in _QUANTITIES}
    return {
        "runs": rows,
        "median_error": {name: float(np.median(found)) if found else None for name, found in errors.items()},
        "trend": {name: _trend(found) for name, found in errors.items()},
    }


def _trend(errors: list[float]) -> float | None:
    """By how much the error of the newer half is smaller (negative) or larger; None for fewer than two runs."""
    half = len(errors) // 2
    return float(np.median(errors[half:]) - np.median(errors[:half])) if half else None


def _score(run: Path, catalogue: Catalogue, constants: Constants) -> dict[str, Any]:
    found, saved = Gathered(), run / names.RECIPE_FILE
    found.read(run)
    if (last := found.last_step) is None or not saved.is_file():
        rule = f"a run that trains has {names.RECIPE_FILE} and a step in {names.METRICS_FILE}"
        raise DataError(Problem(f"{run} shows no step of a run", rule, "give the folder that `bloomery train` writes"))
    recipe = load_recipe(str(saved), is_saved=True).recipe
    machine = Machine.of(
        catalogue, _device(str(found.facts.get("device", "cpu")), catalogue), None, ranks_per_node(recipe)
    )
    question = Question(recipe, machine, catalogue, constants, None)
    memory, levels = rank_memory(question, static_facts(recipe)["stages"]), forecast(recipe, machine, constants).levels
    level = next(level for level in reversed(levels) if level.first_step <= last.step)
    total = level.begins_seconds + (last.step - level.first_step + 1) * level.step_seconds
    measured = found.median("tokens_per_second")
    return {
        "run": str(run),
        "began": found.first_time,
        "device": machine.gpu,
        "step_seconds": _pair(level.step_seconds, last.global_batch * recipe.model.seq_length / measured),
        # torch does not count the context
        "memory_bytes": _pair(memory["expected"] - memory["context"], last.peak_memory_bytes),
        "total_seconds": _pair(total, last.step * last.seconds_per_step),
    }


def _device(torch_name: str, catalogue: Catalogue) -> str:
    """Its name in the tables; `Machine.of` refuses one that none has."""
    return next((name for name, device in catalogue.devices.items() if device.torch_name == torch_name), torch_name)


def _pair(predicted: float, measured: float | None) -> dict[str, float | None]:
    error = predicted / measured - 1 if measured else None
    return {"predicted": float(predicted), "measured": measured, "error": error}
