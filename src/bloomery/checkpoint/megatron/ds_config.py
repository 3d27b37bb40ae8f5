"""DeepSpeed's ds_config.json: what it says about the training, and where it contradicts the command line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from bloomery.base.errors import Problem, RecipeError
from bloomery.checkpoint.megatron.flags import Row

_NO_MATTER = (
    "steps_per_print", "wall_clock_breakdown", "dump_state", "zero_allow_untested_optimizer", "prescale_gradients",
    "communication_data_type", "gradient_predivide_factor", "sparse_gradients", "memory_breakdown", "disable_allgather",
    "activation_checkpointing", "flops_profiler", "comms_logger", "tensorboard", "wandb", "csv_monitor", "aio",
    "zero_force_ds_cpu_optimizer", "seq_parallel_communication_data_type", "checkpoint",
)  # fmt: skip
_ZERO_NO_MATTER = (
    "contiguous_gradients", "overlap_comm", "reduce_scatter", "reduce_bucket_size", "allgather_partitions",
    "allgather_bucket_size", "round_robin_gradients", "sub_group_size", "stage3_max_live_parameters",
    "stage3_max_reuse_distance", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold",
    "stage3_gather_16bit_weights_on_model_save", "ignore_unused_parameters", "elastic_checkpoint",
)  # fmt: skip


@dataclass
class DsConfig:
    """None where the file says nothing, or `auto`."""

    place: str
    zero_stage: int | None = None
    train_batch_size: int | None = None
    micro_batch_size: int | None = None
    accumulation_steps: int | None = None
    fp16: bool | None = None
    bf16: bool | None = None
    gradient_clipping: float | None = None
    static_loss_scale: float = 0.0
    loss_scale: dict[str, Any] = field(default_factory=dict)
    """Fields of the recipe's section."""
    optimizer: dict[str, Any] = field(default_factory=dict)
    """`lr`, `betas`, `eps`, `weight_decay`."""
    offload: bool = False
    rows: list[Row] = field(default_factory=list)
    """What it does not decide, or this reader does not understand."""


def read_ds_config(text: str, place: str) -> DsConfig:
    """RecipeError with all that is wrong with it."""
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        rule = "ds_config is JSON: numbers have no underscores, and nothing is computed in it"
        where = f"line {error.lineno} of the file, column {error.colno}"
        raise RecipeError(Problem(f"not valid JSON: {error.msg} ({where})", rule, "mend it", place)) from error
    if not isinstance(content, dict):
        raise RecipeError(Problem(f"it holds {type(content).__name__}", "a ds_config is a JSON object", "", place))
    found = DsConfig(place)
    problems: list[Problem] = []

    def take(holder: Mapping[str, Any], key: str, kinds: tuple[type, ...], path: str) -> Any:
        value = holder.get(key)
        if value is None or value == "auto":
            return None
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            wanted = " or ".join(kind.__name__ for kind in kinds)
            problems.append(Problem(f"{path} is {json.dumps(value)}", f"must be {wanted}", "", place))
            return None
        return value

    def section(key: str) -> dict[str, Any]:
        return take(content, key, (dict,), key) or {}

    number = (int, float)
    zero, fp16, bf16 = section("zero_optimization"), section("fp16"), section("bf16") or section("bfloat16")
    found.zero_stage = take(zero, "stage", (int,), "zero_optimization.stage")
    found.offload = bool(zero.get("cpu_offload")) or any(
        isinstance(part, dict) and part.get("device", "none") != "none"
        for part in (zero.get("offload_optimizer"), zero.get("offload_param"))
    )
    found.train_batch_size = take(content, "train_batch_size", (int,), "train_batch_size")
    found.micro_batch_size = take(content, "train_micro_batch_size_per_gpu", (int,), "train_micro_batch_size_per_gpu")
    found.accumulation_steps = take(content, "gradient_accumulation_steps", (int,), "gradient_accumulation_steps")
    found.gradient_clipping = take(content, "gradient_clipping", number, "gradient_clipping")
    found.fp16 = take(fp16, "enabled", (bool,), "fp16.enabled")
    found.bf16 = take(bf16, "enabled", (bool,), "bf16.enabled")
    found.static_loss_scale = take(fp16, "loss_scale", number, "fp16.loss_scale") or 0.0
    power = take(fp16, "initial_scale_power", (int,), "fp16.initial_scale_power")
    found.loss_scale = {
        "initial": 2.0 ** (16 if power is None else power),
        "window": f"{take(fp16, 'loss_scale_window', (int,), 'fp16.loss_scale_window') or 1000} steps",
        "hysteresis": take(fp16, "hysteresis", (int,), "fp16.hysteresis") or 2,
        "min": float(take(fp16, "min_loss_scale", number, "fp16.min_loss_scale") or 1.0),
    }
    params = section("optimizer").get("params") or {}
    found.optimizer = {
        key: params[key] for key in ("lr", "betas", "eps", "weight_decay") if params.get(key) not in (None, "auto")
    }
    found.rows = list(_other_rows(content, zero))
    if problems:
        raise RecipeError(problems)
    return found


def contradictions(config: DsConfig, flags: Mapping[str, tuple[str, Any, str]]) -> list[Problem]:
    """Where the two say different things. `flags`: subject -> (flag as written, its value, its place)."""
    pairs = {
        "zero_optimization.stage": (config.zero_stage, "zero_stage"),
        "train_batch_size": (config.train_batch_size, "global_batch_size"),
        "train_micro_batch_size_per_gpu": (config.micro_batch_size, "micro_batch_size"),
        "gradient_accumulation_steps": (config.accumulation_steps, "accumulation_steps"),
        "gradient_clipping": (config.gradient_clipping, "clip_grad"),
        "fp16.enabled": (config.fp16, "fp16"),
        "bf16.enabled": (config.bf16, "bf16"),
        "optimizer.params.lr": (config.optimizer.get("lr"), "lr"),
        "optimizer.params.betas": (config.optimizer.get("betas"), "betas"),
        "optimizer.params.eps": (config.optimizer.get("eps"), "eps"),
        "optimizer.params.weight_decay": (config.optimizer.get("weight_decay"), "weight_decay"),
    }
    problems = []
    for path, (value, subject) in pairs.items():
        written, other, place = flags.get(subject, ("", None, ""))
        if value is None or other is None or value == other:
            continue
        problems.append(
            Problem(
                f"{path} is {json.dumps(value)} in {config.place} but the command line says {written}",
                "DeepSpeed asserts that the two agree, or silently takes one of them",
                "make them equal",
                place,
            )
        )
    return problems


def _other_rows(content: Mapping[str, Any], zero: Mapping[str, Any]) -> Iterator[Row]:
    read = {
        "zero_optimization", "fp16", "bf16", "bfloat16", "train_batch_size", "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps", "gradient_clipping", "optimizer",
    }  # fmt: skip
    for key, value in content.items():
        if key not in read:
            known = key in _NO_MATTER
            remark = "DeepSpeed's own bookkeeping" if known else "nothing here reads it"
            yield Row("not needed" if known else "not understood", f"ds_config {key}", _short(value), remark=remark)
    for key, value in zero.items():
        if key not in ("stage", "offload_optimizer", "offload_param", "cpu_offload"):
            known = key in _ZERO_NO_MATTER
            remark = "how DeepSpeed moves what it shards" if known else "nothing here reads it"
            kind = "not needed" if known else "not understood"
            yield Row(kind, f"ds_config zero_optimization.{key}", _short(value), remark=remark)  # type: ignore[arg-type]


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:36]} ..."
