"""Small sums that people reach for, each under the name of its definition."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from bloomery.base.errors import DataError, Problem
from bloomery.config.load import load_recipe
from bloomery.config.recipe import ModelSection, Recompute
from bloomery.families.registry import FAMILIES, family_defaults
from bloomery.monitor import names
from bloomery.monitor.gather import read_run
from bloomery.plan.constants import constants
from bloomery.plan.memory import activation_bytes_per_layer
from bloomery.plan.setup import RECOMPUTE, Setup
from bloomery.sizing.flops import (
    MEGATRON_FLOPS,
    FlopCount,
    flops_per_token,
    hardware_count,
    megatron_flops_per_token,
)
from bloomery.sizing.parameters import count_parameters
from bloomery.sizing.schedule import TrainingPlan

_DAY = 86400


def gpt(*, layers: int, hidden: int, vocab: int, seq: int, heads: int = 1) -> ModelSection:
    """Of MLPs of 4h and two matrices, as many key as query heads, and a vocabulary that is padded already."""
    shape = {"num_layers": layers, "hidden_size": hidden, "num_heads": heads, "seq_length": seq}
    family = next(name for name, each in FAMILIES.items() if each.positions == "learned" and not each.encoder)
    given = {"family": family, **shape, "vocab_size": vocab, "vocab_multiple": 1}
    return ModelSection.model_construct(**family_defaults(given) | given)


def tflops(
    model: ModelSection, *, global_batch: int, gpus: int, step_seconds: float, recompute: Recompute
) -> dict[str, float]:
    """TFLOP/s of one device, by the name of the definition."""
    counts = {
        MEGATRON_FLOPS: megatron_flops_per_token(model, recompute),
        "hardware": flops_per_token(model, hardware_count(recompute)),
        **{str(each): flops_per_token(model, each) for each in FlopCount if not each.startswith("hardware")},
        "eight_n": 8 * count_parameters(model).total,
    }
    per_second = global_batch * model.seq_length / step_seconds / gpus / 1e12
    return {name: per_second * count for name, count in counts.items()}


def days(*, tokens: float, params: float, gpus: int, tflops: float, factor: float) -> float:
    """tokens * factor * params / speed. The factor is 8 with full recomputation, 6 without."""
    return tokens * factor * params / (gpus * tflops * 1e12 * _DAY)


SCHEMES = {
    # bytes per parameter: (weights, gradients, what ZeRO 1 shares)
    "megatron": (2, 4, 12),
    "zero_paper": (2, 2, 12),
    "deepspeed_bf16": (2, 6, 12),
}
"""megatron: 16-bit weights, fp32 gradients, fp32 masters and two moments: 18. zero_paper: gradients in 16 bit: 16.
deepspeed_bf16: gradients in 16 and in 32 bit: 20."""


def state_bytes(params: float, ranks: int) -> list[dict[str, Any]]:
    """Of one of so many data-parallel ranks, by scheme and ZeRO stage."""
    rows = []
    for scheme, (weights, gradients, states) in SCHEMES.items():
        row: dict[str, Any] = {"scheme": scheme, "bytes_per_parameter": weights + gradients + states}
        for stage in range(4):
            shared = states * (stage >= 1) + gradients * (stage >= 2) + weights * (stage >= 3)
            whole = weights + gradients + states - shared
            row[f"zero{stage}_bytes"] = round(params * (whole + shared / ranks))
        rows.append(row)
    return rows


def activation_bytes(
    model: ModelSection,
    *,
    micro_batch: int,
    tp: int,
    pp: int,
    chunks: int,
    recompute: Recompute,
    sequence_parallel: bool,
) -> float:
    """Of the first pipeline stage of a GPT with unfused attention (Korthikanti et al. 2022): what it keeps in 16 bit
    for the backward passes of all micro-batches in flight."""
    h, layers = model.hidden_size, model.num_layers
    unused = dict.fromkeys(Setup.__dataclass_fields__, 0)
    setup = Setup.of(
        **unused
        | {"hidden": h, "ffn": 4 * h, "seq": model.seq_length, "heads": model.num_heads, "micro_batch": micro_batch}
        | {"tp": tp, "cp": 1, "sequence_parallel": sequence_parallel}
    )
    layer = activation_bytes_per_layer(setup, np.asarray(float(RECOMPUTE.index(recompute))), constants("start"))
    extra = (pp - 1) / (pp * chunks) if chunks > 1 else 0.0  # micro-batches in flight times layers of a stage
    return float(layer) * layers * (1 + extra)


def left(run: Path) -> dict[str, Any]:
    """What remains of a live run, at its median speed."""
    recipe, found = run / names.RECIPE_FILE, read_run(run)
    if found.last_step is None or not recipe.is_file():
        rule = f"a run that trains has {names.RECIPE_FILE} and a step in {names.METRICS_FILE}"
        raise DataError(Problem(f"{run} shows no step of a run", rule, "give the folder that `bloomery train` writes"))
    goal = TrainingPlan.of(load_recipe(str(recipe), is_saved=True).recipe).train_tokens
    last, speed = found.last_step, found.median("tokens_per_second")
    tokens = max(0, goal - last.consumed_tokens)
    return {
        "step": last.step,
        "train_steps": last.train_steps,
        "tokens_left": tokens,
        "tokens_per_s": speed,
        "days_left": tokens / speed / _DAY,
    }
