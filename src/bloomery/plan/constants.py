"""The constants of the models of time and memory. constants.json has each by its name: what it means, where a fit
begins, what benchmarks/fit_planner.py has fitted to published runs, and `ours` where `bloomery train` differs from
those, by 16 short trainings on H200s: 2 to 24 layers of 1024 to 4096, micro-batches of 2 to 32, each way to recompute,
bf16 and fp8, ALiBi (docs/plan.md). What `bloomery calibrate` has measured on a machine replaces both."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

from bloomery.base.errors import Problem, RecipeError
from bloomery.plan.hardware import Device

FILE = Path(__file__).with_name("constants.json")


class Constants(SimpleNamespace):
    """A number by each name of the file."""

    if TYPE_CHECKING:

        def __getattribute__(self, name: str) -> float: ...

    def but(self, values: Mapping[str, float]) -> Constants:
        return Constants(**{**vars(self), **values})

    def on(self, device: Device) -> Constants:
        """With what was measured there. RecipeError for a constant that there is not."""
        if unknown := sorted(set(device.measured) - set(vars(self))):
            rule = "`measured` has constants of plan/constants.json"
            raise RecipeError(Problem(f"{unknown[0]} is no constant of the planner", rule, "run `bloomery calibrate`"))
        return self.but(device.measured)


def constants(*columns: str) -> Constants:
    """Each from the first of these columns of the file that it has."""
    parts = json.loads(FILE.read_text()).values()
    rows = {name: row for part in parts for name, row in part.items()}
    return Constants(**{name: next(row[each] for each in columns if each in row) for name, row in rows.items()})


@cache
def fitted() -> Constants:
    """Of our own training."""
    return constants("ours", "fitted")
