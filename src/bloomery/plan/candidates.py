"""Setups of our own training: the layout that a recipe has, or all that it could have."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import gcd
from typing import Any

import numpy as np

from bloomery.config.recipe import Recipe
from bloomery.families.registry import FAMILIES
from bloomery.plan.constants import Constants
from bloomery.plan.hardware import Machine
from bloomery.plan.setup import ATTENTION, RECOMPUTE, Column, Setup
from bloomery.plan.step_time import StepTime, step_time
from bloomery.sizing.layout import Layout
from bloomery.sizing.parameters import padded_vocab_size
from bloomery.sizing.schedule import BatchPlan

_MOST_MICRO = 64
_CHUNKS = (1, 2, 3, 4, 6, 8)
COLUMNS = ("tp", "pp", "chunks", "cp", "dp", "zero", "micro_batch", "recompute")


def setup_of(recipe: Recipe, machine: Machine, **columns: Any) -> Setup:
    """Of the recipe's own layout but for `columns`: the degrees, zero, shard, micro_batch, global_batch, recompute."""
    model, parallel, layout = recipe.model, recipe.parallel, Layout.of(recipe)
    own = {
        **{"tp": layout.tp, "pp": layout.pp, "cp": layout.cp, "dp": layout.dp, "shard": layout.shard},
        **{"zero": parallel.zero, "chunks": parallel.chunks, "recompute": RECOMPUTE.index(parallel.recompute)},
        **{"micro_batch": recipe.batch.micro_batch_size, "global_batch": recipe.batch.global_batch_size},
    }
    layouts = {name: np.asarray(value, dtype=np.float64) for name, value in {**own, **columns}.items()}
    device, on_cpu = machine.device, machine.device.torch_name == "cpu"
    may_compile = not on_cpu and parallel.schedule != "zero_bubble"
    return Setup.of(
        layers=model.num_layers,
        hidden=model.hidden_size,
        heads=model.num_heads,
        kv_heads=model.num_kv_heads,
        head_dim=model.head_size,
        ffn=model.ffn_hidden_size,
        gated=FAMILIES[model.family].gated,
        vocab=padded_vocab_size(model),
        tied=model.tie_embeddings,
        seq=model.seq_length,
        **layouts,
        **_state_bytes(layouts, offload=parallel.offload),
        per_operator=0,
        attention=ATTENTION.index("flex" if FAMILIES[model.family].positions == "alibi" else "flash"),
        sequence_parallel=1,
        compiled=recipe.train.compile is True or (recipe.train.compile == "auto" and may_compile),
        peak_flops=device.peak("fp32" if on_cpu and recipe.precision == "auto" else recipe.precision),
        bf16_flops=device.peak("bf16"),
        cores=device.cores,
        memory_bytes=device.memory_gib * 2**30,
        memory_bytes_per_s=device.memory_gb_per_s * 1e9,
        link_bytes_per_s=device.link_gb_per_s * 1e9,
        nic_bytes_per_s=machine.network.gb_per_s * 1e9,
        node=machine.node,
    )


def _state_bytes(layouts: dict[str, Column], *, offload: bool) -> dict[str, Column]:
    """As sizing/memory.py counts exactly, per parameter: 16-bit copies and sums of gradients are whole; masters,
    moments and reduced gradients are shared."""
    alone = layouts["dp"] * layouts["cp"] == 1
    zero = layouts["zero"]
    accumulates = layouts["global_batch"] > layouts["micro_batch"] * layouts["dp"]
    late = alone & ~accumulates
    sums = np.where(late, 2.0, 4.0 * ((zero < 2) & (accumulates | alone)))
    states = np.where(alone, 0.0, 4.0) if offload else 12.0
    return {
        "whole_bytes": np.where(zero == 3, 0.0, 2.0 + sums),
        "late_gradients": late,
        "shared_bytes": states + np.where(alone, 0.0, 4.0 * (sums == 0)),
    }


@dataclass(frozen=True)
class Question:
    """A recipe on a machine."""

    recipe: Recipe
    machine: Machine
    constants: Constants

    @cached_property
    def setup(self) -> Setup:
        return setup_of(self.recipe, self.machine)

    @cached_property
    def time(self) -> StepTime:
        return step_time(self.setup, self.constants)


@dataclass(frozen=True)
class Grid:
    """Every legal layout of a recipe on so many devices, a row each in the order of COLUMNS."""

    rows: Column
    setup: Setup

    @classmethod
    def of(cls, recipe: Recipe, machine: Machine, devices: int) -> Grid:
        rows = np.array(_legal(recipe, devices), dtype=np.float64).reshape(-1, len(COLUMNS))
        columns = dict(zip(COLUMNS, rows.T, strict=True))
        columns["shard"] = np.where(columns["zero"] > 0, columns["dp"] * columns["cp"], 1.0)
        return cls(rows, setup_of(recipe, machine, **columns))


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _legal(recipe: Recipe, devices: int) -> list[tuple[int, ...]]:
    """By the rules of sizing/check.py, which `--why` asks; a test compares the two."""
    model = recipe.model
    encoder = FAMILIES[model.family].encoder
    levels = [level.global_batch for level in BatchPlan.of(recipe.batch).levels]
    unit = gcd(*levels)
    splits = gcd(model.num_heads, model.num_kv_heads, model.ffn_hidden_size, padded_vocab_size(model))
    found: list[tuple[int, ...]] = []
    for tp in (tp for tp in _divisors(min(splits, devices)) if devices % tp == 0 and splits % tp == 0):
        for cp in (1,) if encoder else (1, 2, 4, 8, 16):
            if model.seq_length % (2 * cp if cp > 1 else 1) or devices % (tp * cp) or model.seq_length // cp % tp:
                continue
            for pp in (pp for pp in _divisors(devices // (tp * cp)) if pp <= model.num_layers):
                dp = devices // (tp * cp * pp)
                zeros = (1, 0) if pp > 1 else (1, 0, 2, 3)
                for micro in (n for n in _divisors(min(_MOST_MICRO, max(1, unit // dp))) if unit % (n * dp) == 0):
                    rounds = all(size // (micro * dp) % pp == 0 for size in levels)
                    many = [n for n in _CHUNKS if n == 1 or (pp > 1 and rounds and pp * n <= model.num_layers)]
                    found += [
                        (tp, pp, chunks, cp, dp, zero, micro, recompute)
                        for chunks in many
                        for zero in (zeros if dp * cp > 1 else (0,))
                        for recompute in range(len(RECOMPUTE))
                    ]
    return found
