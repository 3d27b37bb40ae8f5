"""From the time of a step to a whole training: days, money, energy, and what its checkpoints take."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from bloomery.config.recipe import Recipe
from bloomery.plan.candidates import Question, setup_of
from bloomery.plan.hardware import Bandwidth, Catalogue, Machine
from bloomery.plan.setup import Column
from bloomery.plan.step_time import PARTS, step_time
from bloomery.sizing.flops import FlopCount, flops_per_token, hardware_count
from bloomery.sizing.layout import Layout, world_size
from bloomery.sizing.memory import checkpoint_bytes
from bloomery.sizing.schedule import TrainingPlan, seconds_between_failures

_DAY = 86400.0
_SNAPSHOT_BYTES_PER_S = 20e9
"""To pinned host memory, of one device."""
_RESTART_SECONDS = 600.0


@dataclass(frozen=True)
class Assumptions:
    """What no recipe says."""

    usd_per_gpu_hour: float
    grams_per_kwh: float
    grid: str = "WORLD"
    """The country whose electricity that is."""
    pue: float = 1.2
    """Energy of the building over that of the machines."""
    load: float = 0.9
    """Of the devices' rated power, while training."""
    host_share: float = 0.25
    """Of what the devices draw, for the host around them."""

    @classmethod
    def of(cls, recipe: Recipe, machine: Machine, catalogue: Catalogue, price: float | None) -> Assumptions:
        carbon = recipe.monitor.carbon
        country = carbon.country if carbon and carbon.country in catalogue.grams_per_kwh else "WORLD"
        own = machine.device.usd_per_hour if price is None else price
        return cls(own, catalogue.grams_per_kwh[country], country)

    def energy(self, gpu_hours: float, watts: float) -> tuple[float, float]:
        """(kWh, kg of CO2 equivalents)."""
        kwh = gpu_hours * watts * self.load * (1 + self.host_share) * self.pue / 1000
        return kwh, kwh * self.grams_per_kwh / 1000


@dataclass(frozen=True)
class Level:
    """Steps with one global batch."""

    global_batch: int
    first_step: int
    steps: int
    step_seconds: float
    begins_seconds: float


@dataclass(frozen=True)
class Forecast:
    levels: list[Level]
    costs: dict[str, float]
    """Seconds of the whole training, by what they go to."""
    failures: float

    @property
    def total_seconds(self) -> float:
        return sum(self.costs.values())


def forecast(asked: Question) -> Forecast:
    recipe = asked.recipe
    plan, devices = TrainingPlan.of(recipe), world_size(recipe)
    levels = [level for level in plan.batch.levels if level.first_step <= plan.train_steps]
    ends = [*(level.first_step for level in levels[1:]), plan.train_steps + 1]
    steps = np.array([end - level.first_step for level, end in zip(levels, ends, strict=True)])
    batches = np.array([float(level.global_batch) for level in levels])
    time = step_time(setup_of(recipe, asked.machine, global_batch=batches), asked.constants)
    seconds = np.broadcast_to(time.total, steps.shape)
    begins = np.concatenate([[0.0], np.cumsum(steps * seconds)])
    rows = zip(levels, steps.tolist(), seconds.tolist(), begins.tolist(), strict=False)
    costs = {part: float((steps * getattr(time, part)).sum()) for part in PARTS}
    saves = len({*plan.save_steps(), plan.train_steps})
    costs["evaluation"] = 0.0
    if section := recipe.train.evaluate:
        groups = max(1, len(recipe.data.validation) if recipe.data else 1)
        batches_read = plan.train_steps // section.every.count * section.steps * groups
        costs["evaluation"] = batches_read * float(seconds[-1]) / 3  # a forward pass is a third of a step
    # A save stops training for its snapshot; storage is written behind it.
    costs["saves"] = saves * (checkpoint_bytes(recipe.model) / devices / _SNAPSHOT_BYTES_PER_S)
    busy = float((steps * seconds).sum()) + costs["saves"] + costs["evaluation"]
    between = seconds_between_failures(recipe.checkpoint.failure_every, num_devices=devices)
    costs["failures"] = busy / between * (_RESTART_SECONDS + min(busy / max(1, saves) / 2, between))
    found = [Level(level.global_batch, level.first_step, n, took, start) for level, n, took, start in rows]
    return Forecast(found, costs, busy / between)


def training_facts(asked: Question, found: Forecast, assumed: Assumptions) -> dict[str, Any]:
    """Days, cost, energy and carbon of the whole training."""
    seconds, watts, plan = found.total_seconds, asked.machine.device.watts, TrainingPlan.of(asked.recipe)
    gpu_hours = world_size(asked.recipe) * seconds / 3600
    kwh, carbon_kg = assumed.energy(gpu_hours, watts)
    return {
        "tokens": plan.train_tokens,
        "steps": plan.train_steps,
        "days": seconds / _DAY,
        "days_by_part": {part: spent / _DAY for part, spent in found.costs.items()},
        "failures": found.failures,
        "gpu_hours": gpu_hours,
        "usd": gpu_hours * assumed.usd_per_gpu_hour,
        "energy_mwh": kwh / 1000,
        "carbon_tonnes": carbon_kg / 1000,
        "assumed": asdict(assumed) | {"watts_per_gpu": watts},
    }


def speed_facts(asked: Question) -> dict[str, Any]:
    """Of a step of the full batch: tokens/s, FLOP/s by every definition, and shares of the peak."""
    recipe, step_seconds = asked.recipe, float(asked.time.total)
    tokens = recipe.batch.global_batch_size * recipe.model.seq_length
    per_device = tokens / step_seconds / world_size(recipe)
    counts = {definition: flops_per_token(recipe.model, definition) * per_device for definition in FlopCount}
    peak = asked.machine.device.peak(recipe.precision)
    again = hardware_count(recipe.parallel.recompute)
    return {
        "step_seconds": step_seconds,
        "tokens_per_s": tokens / step_seconds,
        "tokens_per_s_per_gpu": per_device,
        "tflops_per_gpu": {str(definition): rate / 1e12 for definition, rate in counts.items()},
        "mfu": counts[FlopCount.MODEL_FULL] / peak,
        "mfu_definition": str(FlopCount.MODEL_FULL),
        "hfu": counts[again] / peak,
        "hfu_definition": str(again),
        "peak_tflops": peak / 1e12,
    }


def write_minutes(size_bytes: float, storage: Bandwidth) -> float:
    return size_bytes / 1e9 / storage.gb_per_s / 60


def storage_facts(recipe: Recipe, catalogue: Catalogue) -> list[dict[str, Any]]:
    size = checkpoint_bytes(recipe.model)
    return [
        {"storage": name, "gb_per_s": tier.gb_per_s, "write_minutes": write_minutes(size, tier), "source": tier.source}
        for name, tier in catalogue.storage.items()
    ]


def scaling(asked: Question, known: Catalogue) -> list[dict[str, Any]]:
    """Efficiency against the number of nodes, for the recipe's layout with more replicas, on three networks."""
    recipe, machine = asked.recipe, asked.machine
    layout, batch = Layout.of(recipe), recipe.batch
    replica = layout.tp * layout.pp * layout.cp
    base = max(1, -(-replica // machine.node))
    most = batch.global_batch_size // batch.micro_batch_size
    nodes = [base * 2**n for n in range(16) if base * 2**n * machine.node // replica <= most]
    if not nodes:  # the batch is too small for a whole node
        return []
    dp = np.array([float(max(1, n * machine.node // replica)) for n in nodes])
    shard = np.ones_like(dp) if recipe.parallel.zero == 0 else dp * layout.cp
    rates: dict[str, Column] = {}
    for name in dict.fromkeys((machine.network_name, "infiniband-hdr", "ethernet-100g")):
        there = machine.on(name, known.networks[name])
        setup = setup_of(recipe, there, dp=dp, shard=shard)
        used = setup.micro_batches * setup.micro_batch * dp  # what a batch that does not divide leaves over is not done
        rates[name] = used / step_time(setup, asked.constants).total / (dp * replica)
    best = max(float(rate[0]) for rate in rates.values())
    return [
        {"nodes": n, "samples_per_gpu": batch.global_batch_size / (n * machine.node)}
        | {name: float(rate[i]) / best for name, rate in rates.items()}
        for i, n in enumerate(nodes)
    ]
