"""Which layout to use: every legal one ranked, why a given one is worse, and the recipe of the best."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from bloomery.base.errors import Problem, RecipeError
from bloomery.config.load import LoadedRecipe, load_recipe
from bloomery.config.recipe import LaunchSection, Recipe
from bloomery.plan.candidates import COLUMNS, Grid, Question
from bloomery.plan.memory import Memory, memory
from bloomery.plan.setup import RECOMPUTE, Column
from bloomery.plan.step_time import PARTS, StepTime, step_time
from bloomery.sizing.check import load_checked_recipe
from bloomery.sizing.layout import layout_overrides, world_size

_GIB = 2.0**30
_REASONS = {
    "compute": "more computation (recomputation, or smaller and less efficient matrix products)",
    "bubble": "a larger pipeline bubble: more stages for fewer micro-batches, or an uneven last stage",
    "communication": "more communication that computation does not hide",
    "optimizer": "a longer optimizer step: each rank owns more states",
    "data": "more micro-batches and steps to start",
}


def preference(tokens_per_s: Column, micro_batch: Column) -> Column:
    """By what layouts are chosen. Of predictions that differ by less than the planner's own error, the larger
    micro-batch: what no model sees comes once for each. A doubling is worth 3%; from 2% to 3.5% choose as well."""
    return tokens_per_s * micro_batch**0.04


@dataclass(frozen=True)
class Ranking:
    recipe: Recipe
    grid: Grid
    time: StepTime
    memory: Memory
    safe_bytes: Column
    tokens_per_s: Column
    """Of one device."""
    order: list[int]
    """Rows that fit safely, the best first."""

    @classmethod
    def of(cls, asked: Question) -> Ranking:
        recipe, constants = asked.recipe, asked.constants
        devices = world_size(recipe)
        grid = Grid.of(recipe, asked.machine, devices)
        if not len(grid.rows):
            raise RecipeError(_no_layout(recipe, devices))
        time, used = step_time(grid.setup, constants), memory(grid.setup, constants)
        speed = grid.setup.global_batch * grid.setup.seq / time.total / devices
        safe = used.expected * constants.safe
        fits = np.flatnonzero(safe <= grid.setup.memory_bytes)
        # Of equals the simpler layout: fewer ways to divide the model first.
        simple = grid.rows[fits, 0] * grid.rows[fits, 1] * grid.rows[fits, 3] * 8 + grid.rows[fits, 5]
        wanted = preference(speed, grid.setup.micro_batch)
        order = fits[np.lexsort((simple, -np.round(wanted[fits], 1)))]
        return cls(recipe, grid, time, used, safe, speed, [int(row) for row in order])

    def name(self, row: int) -> str:
        return layout_name(dict(zip(COLUMNS, self.grid.rows[row].astype(int).tolist(), strict=True)))

    def facts(self, most: int) -> list[dict[str, Any]]:
        best = self.tokens_per_s[self.order[0]] if self.order else 1.0
        return [
            {
                "layout": self.name(row),
                "tokens_per_s_per_gpu": round(float(self.tokens_per_s[row]), 1),
                "of_best": round(float(self.tokens_per_s[row] / best), 4),
                "step_seconds": round(float(self.time.total[row]), 4),
                "memory_bytes": int(self.memory.expected[row]),
                "safe_memory_bytes": int(self.safe_bytes[row]),
            }
            for row in self.order[:most]
        ]

    def best(self) -> int:
        """RecipeError where nothing fits."""
        if self.order:
            return self.order[0]
        devices = world_size(self.recipe)
        row = int(np.argmin(self.safe_bytes))
        have, need = float(np.max(self.grid.setup.memory_bytes)), float(self.safe_bytes[row])
        what = f"{self.recipe.name} does not fit on {devices} devices of {have / _GIB:.4g} GiB"
        rule = f"the layout that needs least, {self.name(row)}, takes {need / _GIB:.4g} GiB with a safe margin"
        more = devices * 2 ** max(1, int(np.ceil(np.log2(need / have))))
        remedy = f"use about {more} devices, devices with more memory, or parallel.offload=true"
        raise RecipeError(Problem(what, rule, remedy))


def _no_layout(recipe: Recipe, devices: int) -> Problem:
    batch = recipe.batch.global_batch_size
    rule = "no factors of that number divide heads, layers, tokens and every global batch"
    near = [n for n in range(devices, 0, -1) if batch % n == 0]
    remedy = f"use {near[0]} devices, for example" if near else "use another number of devices"
    return Problem(f"no layout of {recipe.name} takes {devices} devices", rule, remedy)


def layout_name(degrees: dict[str, int]) -> str:
    """As `--why` reads it: `tp4-pp12-dp8-zero1-mb2-full`."""
    parts = [f"{name}{degrees[name]}" for name in ("tp", "pp", "cp", "dp") if degrees[name] > 1]
    parts += [f"zero{degrees['zero']}"]
    parts += [f"interleaved-chunks{degrees['chunks']}"] * (degrees["chunks"] > 1)
    recompute = RECOMPUTE[degrees["recompute"]]
    return "-".join([*parts, f"mb{degrees['micro_batch']}", *([recompute] if recompute != "none" else [])])


def with_layout(loaded_from: str, overrides: list[str], layout: str, node: int) -> tuple[list[str], LoadedRecipe]:
    """(overrides that make the recipe have this layout, the checked recipe). RecipeError says what is illegal in it and
    the nearest legal values."""
    micro = re.search(r"(?:^|-)mb(\d{1,6})(?=-|$)", layout)
    rest = layout.replace(micro[0], "", 1).strip("-") if micro else layout
    words = layout_overrides(rest or "single")
    devices = int(words[-1].partition("=")[2])
    nodes = max(1, devices // node)
    unnamed = ("recompute=none", "schedule=1f1b", "chunks=1", "shard_size=null")
    own = [*(f"parallel.{word}" for word in unnamed), *(word for word in words if word.startswith("parallel."))]
    own += [f"batch.micro_batch_size={micro[1]}"] if micro else []
    own += [f"launch.nodes={nodes}", f"launch.gpus_per_node={devices // nodes}"]
    loaded = load_recipe(loaded_from, [*overrides, *own])
    section = loaded.recipe.launch or LaunchSection()
    own += ["launch.on=hosts"] * (nodes > 1 and section.on == "local")
    return own, load_checked_recipe(loaded_from, [*overrides, *own])


def why(asked: Question) -> list[str]:
    """What a legal layout, that of the recipe, has against the best one: sentences."""
    ranking, time, used = Ranking.of(asked), asked.time, memory(asked.setup, asked.constants)
    best = ranking.best()
    safe = float(used.expected) * asked.constants.safe
    have = float(asked.setup.memory_bytes)
    fits = f"It needs {float(used.expected) / _GIB:.4g} GiB, {safe / _GIB:.4g} GiB with a safe margin"
    if safe <= have:
        says = [f"{fits}, and fits in {have / _GIB:.4g} GiB."]
    elif float(used.expected) <= have:
        says = [f"{fits}: it may run out of the {have / _GIB:.4g} GiB that there are."]
    else:
        says = [f"{fits}: it does not fit in {have / _GIB:.4g} GiB."]
    mine, theirs = float(time.total), float(ranking.time.total[best])
    name = ranking.name(best)
    if mine <= theirs * 1.001:
        return [*says, f"Its step takes {mine:.3g} s: nothing that fits is predicted to be faster."]
    says.append(f"Its step takes {mine:.3g} s, that of the best layout, {name}, {theirs:.3g} s.")
    gaps = {part: float(getattr(time, part)) - float(getattr(ranking.time, part)[best]) for part in PARTS}
    for part in sorted(gaps, key=lambda part: -gaps[part]):
        if gaps[part] > 0.02 * (mine - theirs):
            says.append(f"+{gaps[part]:.3g} s: {_REASONS[part]}.")
    return says
