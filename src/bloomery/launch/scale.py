"""What more nodes bring: the tokens per second of short trainings, one for each number of nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bloomery.base.errors import DataError, Problem
from bloomery.config.recipe import Recipe
from bloomery.monitor import names
from bloomery.monitor.history import scan_metrics
from bloomery.monitor.page import chart_html, page
from bloomery.monitor.record import Record, StepRecord


def overrides(recipe: Recipe, nodes: int, *, steps: int, strong: bool) -> list[str]:
    """A training of some steps that saves nothing. `strong`: the global batch stays; else that of each replica does."""
    section = recipe.launch
    ranks, on = (section.gpus_per_node, section.on) if section else (1, "local")
    size = (nodes, ranks) if on != "local" else (1, nodes * ranks)  # here, a node is as many ranks of this machine
    batch = recipe.batch.global_batch_size * (1 if strong else nodes)
    return [
        f"launch.nodes={size[0]}",
        f"launch.gpus_per_node={size[1]}",
        f"batch.global_batch_size={batch}",
        *short_training(steps),
        "monitor.log_every=1 steps",
    ]


def short_training(steps: int) -> list[str]:
    """Overrides for a training of so many steps whose only checkpoint is its last."""
    return [
        "launch.array=1",
        "batch.rampup=null",
        f"train.for={steps} steps",
        "train.exit_after=null",
        "train.evaluate=null",
        "data.validation={}",
        "data.test={}",
        "lr.schedule=constant",
        "lr.warmup=0 steps",
        "lr.decay=null",
        "lr.min=0",
        "lr.cooldown=null",
        f"checkpoint={{phases: [{{every: {10 * steps} steps}}]}}",
        "monitor.tensorboard=false",
    ]


def measured(run: Path, nodes: int) -> dict[str, Any]:
    """From the second half of its steps. DataError without them."""
    records: list[StepRecord] = []

    def take(record: Record) -> None:
        if isinstance(record, StepRecord):
            records.append(record)

    if (path := run / names.METRICS_FILE).exists():
        scan_metrics(path, take)
    if len(records) < 2:
        raise DataError(Problem(f"{run} has no steps to measure", remedy=f"read {run / names.TEXT_LOG_FILE}"))
    later = records[len(records) // 2 :]
    return {
        "nodes": nodes,
        "global_batch": later[-1].global_batch,
        "tokens_per_second": median(record.tokens_per_second for record in later),
        "seconds_per_step": median(record.seconds_per_step for record in later),
        "tflops_per_device": median(record.tflops for record in later),
    }


def with_efficiency(points: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tokens per second and node, against those of the fewest nodes."""
    first = min(points, key=lambda point: point["nodes"])
    base = first["tokens_per_second"] / first["nodes"]
    return [{**point, "efficiency": point["tokens_per_second"] / point["nodes"] / base} for point in points]


def picture(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """A page with the curves of all results, by name."""

    def curves(of: str) -> dict[str, Any]:
        return {
            name: np.array([(point["nodes"], point[of]) for point in points], dtype=np.float64)
            for name, points in results.items()
        }

    charts = [
        chart_html("tokens per second", curves("tokens_per_second"), x="nodes", from_zero=True, wide=True),
        chart_html("efficiency", curves("efficiency"), x="nodes", from_zero=True, wide=True),
    ]
    return page("Scaling · Bloomery", f"<h1>Scaling</h1><div class='charts'>{''.join(charts)}</div>")
