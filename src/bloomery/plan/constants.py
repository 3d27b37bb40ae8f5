"""The constants of the models of time and memory: constants.json, which benchmarks/fit_planner.py writes, what
measurements of our own training say besides, and what `bloomery calibrate` has measured on a machine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from bloomery.base.errors import Problem, RecipeError
from bloomery.plan.hardware import Device
from bloomery.plan.memory import Footprint, Memory, memory, stage_memory
from bloomery.plan.setup import Setup
from bloomery.plan.step_time import Pace, StepTime, step_time

Part = TypeVar("Part", Pace, Footprint)
FILE = Path(__file__).with_name("constants.json")
OWN: Mapping[str, float] = MappingProxyType(
    {
        "speed": 1.14,
        "small_dimension": 0.78,
        "fp8": 0.82,
        "cast_bytes": 6.0,
        "flex": 0.66,
        "inner_passes": 6.5,
        "loss_passes": 1.6,
        "again": 0.75,
        "sum_bytes": 10.0,
        "optimizer_passes": 1.2,
        "micro_batch_s": 0.0008,
        "step_s": 0.002,
        # What torch counts: of blocks that are compiled, 32 bytes per token and unit.
        "slack": 1.0,
        "kept": 0.941,
        "workspace": 1.23,
        "logit_bytes": 2.0,
        "end_bytes": 16.3,
        "gated_bytes": 6.6,
    }
)
"""`bloomery train` where it differs from the stacks of published runs, by 16 short trainings on H200s: 2 to 24 layers
of 1024 to 4096, micro-batches of 2 to 32, each way to recompute, bf16 and fp8, ALiBi (docs/plan.md)."""


@dataclass(frozen=True)
class Constants:
    pace: Pace
    footprint: Footprint
    own: Mapping[str, float] = field(default_factory=lambda: OWN)
    """Of our own training, on one machine: `speed`, and what replaces the constants of these names."""

    def on(self, device: Device) -> Constants:
        """With what was measured there. RecipeError for a constant that there is not."""
        known = {"speed", *(each.name for part in (self.pace, self.footprint) for each in fields(part))}
        if unknown := sorted(set(device.measured) - known):
            rule = "`measured` has constants of plan/step_time.py and plan/memory.py"
            raise RecipeError(Problem(f"{unknown[0]} is no constant of the planner", rule, "run `bloomery calibrate`"))
        return replace(self, own={**self.own, **device.measured})

    def time(self, setup: Setup) -> StepTime:
        found = step_time(setup, self.own_pace)
        return StepTime(*(getattr(found, part.name) / self.own["speed"] for part in fields(StepTime)))

    def memory(self, setup: Setup) -> Memory:
        return memory(setup, self.own_footprint)

    def stage_memory(self, setup: Setup, *, is_last: bool) -> Memory:
        return stage_memory(setup, self.own_footprint, is_last=is_last)

    @property
    def own_pace(self) -> Pace:
        return self._with_own(self.pace)

    @property
    def own_footprint(self) -> Footprint:
        return self._with_own(self.footprint)

    @property
    def safe(self) -> float:
        return self.own_footprint.safe

    def _with_own(self, part: Part) -> Part:
        return replace(part, **{each.name: self.own[each.name] for each in fields(part) if each.name in self.own})


@cache
def fitted() -> Constants:
    """As shipped: fitted to published runs. The defaults of the classes are what the fit starts from."""
    found = json.loads(FILE.read_text())
    return Constants(Pace(**found["pace"]), Footprint(**found["footprint"]))
