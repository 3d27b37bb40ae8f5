"""What more nodes bring: the tokens per second of short trainings, one for each number of nodes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bloomery.base.errors import DataError, Problem
from bloomery.config.recipe import Recipe
from bloomery.monitor.page import chart_html, page
from bloomery.plan.trials import Bench


def measure(
    recipe: Recipe, source: str, words: Sequence[str], nodes: int, folder: Path, *, steps: int, strong: bool
) -> dict[str, Any]:
    """From the second half of the steps. `strong`: the global batch stays; else that of each replica does."""
    section = recipe.launch
    ranks, on = (section.gpus_per_node, section.on) if section else (1, "local")
    size = (nodes, ranks) if on != "local" else (1, nodes * ranks)  # here, a node is as many ranks of this machine
    batch = recipe.batch.global_batch_size * (1 if strong else nodes)
    more = [f"launch.nodes={size[0]}", f"launch.gpus_per_node={size[1]}", f"batch.global_batch_size={batch}"]
    bench = Bench(source, words, folder, log_every=steps // 2, figures=1, on=on, limit_seconds=math.inf)
    trial = bench.run(more)
    if trial.outcome != "ok":
        remedy = f"read {bench.output}"
        raise DataError(Problem(f"--nodes {nodes}: its training has no steps to measure", trial.said, remedy))
    return {
        "nodes": nodes,
        "global_batch": batch,
        "tokens_per_second": trial.tokens_per_second,
        "seconds_per_step": trial.step_seconds,
        "tflops_per_device": trial.tflops,
    }


def with_efficiency(points: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tokens per second and node, against those of the fewest nodes."""
    first = min(points, key=lambda point: point["nodes"])
    base = first["tokens_per_second"] / first["nodes"]
    return [{**point, "efficiency": point["tokens_per_second"] / point["nodes"] / base} for point in points]


def picture(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """A page with the curves of all results, by name."""
    charts = ""
    for what in ("tokens_per_second", "efficiency"):
        curves = {
            name: np.array([(point["nodes"], point[what]) for point in points], dtype=np.float64)
            for name, points in results.items()
        }
        charts += chart_html(what.replace("_", " "), curves, x="nodes", from_zero=True, wide=True)
    return page("Scaling · Bloomery", f"<h1>Scaling</h1><div class='charts'>{charts}</div>")
