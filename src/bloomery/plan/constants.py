"""The constants of the models of time and memory: constants.json, which benchmarks/fit_planner.py writes, and what
measurements of our own training say besides."""

import json
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path

from bloomery.plan.memory import Footprint, Memory, memory, stage_memory
from bloomery.plan.setup import Setup
from bloomery.plan.step_time import Pace, StepTime, step_time

FILE = Path(__file__).with_name("constants.json")


@dataclass(frozen=True)
class Own:
    """`bloomery train` against the stacks of published runs: docs/benchmarks.md, gpt-1.3b and bloom-1.3b on one H200
    at micro-batch 16, which ran 1.23 and 1.20 times as fast and kept 0.70 of the bytes."""

    speed: float = 1.13
    step_s: float = 0.01
    """Between steps. Measured steps are of one length, which cannot tell this from `speed`: with more here, products on
    an A100 would be faster than any that was measured (0.87 of the peak)."""
    kept: float = 0.72
    """Of activations and logits: blocks are compiled, which makes cheap operators again."""


@dataclass(frozen=True)
class Constants:
    pace: Pace
    footprint: Footprint
    own: Own = Own()

    def time(self, setup: Setup) -> StepTime:
        found = step_time(setup, replace(self.pace, step_s=self.own.step_s))
        return StepTime(*(getattr(found, part.name) / self.own.speed for part in fields(StepTime)))

    def memory(self, setup: Setup) -> Memory:
        return self._own(memory(setup, self.footprint))

    def stage_memory(self, setup: Setup, *, is_last: bool) -> Memory:
        return self._own(stage_memory(setup, self.footprint, is_last=is_last))

    def _own(self, found: Memory) -> Memory:
        kept = self.own.kept
        return replace(found, activations=found.activations * kept, logits=found.logits * kept)


@cache
def fitted() -> Constants:
    """As shipped: fitted to published runs. The defaults of the classes are what the fit starts from."""
    found = json.loads(FILE.read_text())
    return Constants(Pace(**found["pace"]), Footprint(**found["footprint"]))
