"""The constants of the models of time and memory: constants.json, which benchmarks/fit_planner.py writes."""

import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from bloomery.plan.memory import Footprint
from bloomery.plan.step_time import Pace

FILE = Path(__file__).with_name("constants.json")


@dataclass(frozen=True)
class Constants:
    pace: Pace = field(default_factory=Pace)
    footprint: Footprint = field(default_factory=Footprint)


@cache
def fitted() -> Constants:
    """As shipped: fitted to published runs. The defaults of the classes are what the fit starts from."""
    found = json.loads(FILE.read_text())
    return Constants(Pace(**found["pace"]), Footprint(**found["footprint"]))
