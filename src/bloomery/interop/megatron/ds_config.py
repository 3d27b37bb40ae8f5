"""DeepSpeed's ds_config.json: the table of its keys, what they become, and where they contradict the command line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from bloomery.base.bounded import parse_json
from bloomery.base.errors import Problem, RecipeError
from bloomery.config.yaml_nodes import inline_yaml
from bloomery.interop.megatron.flags import Kind, Row
from bloomery.interop.megatron.recipe import Builder

_SECTIONS = ("zero_optimization", "fp16", "bf16", "nebula")
_LARGEST = 10**18

# Key -> (type, recipe field, flag of the same meaning): where that flag is given, or has a default, the two must agree.
_KEYS: dict[str, tuple[type, str, str]] = {
    "train_batch_size": (int, "batch.global_batch_size", "global-batch-size"),
    "train_micro_batch_size_per_gpu": (int, "batch.micro_batch_size", "micro-batch-size"),
    "gradient_accumulation_steps": (int, "", ""),
    "gradient_clipping": (float, "optimizer.clip_grad_norm", "clip-grad"),
    "fp16.enabled": (bool, "precision", "fp16"),
    "bf16.enabled": (bool, "precision", "bf16"),
    "zero_optimization.stage": (int, "parallel.zero", "zero-stage"),
    "zero_optimization.offload_optimizer": (object, "parallel.offload", ""),
    "zero_optimization.cpu_offload": (object, "parallel.offload", ""),
    "fp16.loss_scale": (float, "loss_scale", ""),
    "fp16.initial_scale_power": (int, "loss_scale.initial", ""),
    "fp16.loss_scale_window": (int, "loss_scale.window", ""),
    "fp16.hysteresis": (int, "loss_scale.hysteresis", ""),
    "fp16.consecutive_hysteresis": (bool, "loss_scale.consecutive_hysteresis", ""),
    "fp16.min_loss_scale": (float, "loss_scale.min", ""),
    "nebula.enabled": (bool, "", ""),
    "nebula.persistent_storage_path": (str, "checkpoint.upload.to", ""),
    "nebula.num_of_version_in_retention": (int, "checkpoint.keep.last", ""),
}
_TYPES = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
_REFUSED = (
    "curriculum_learning", "data_efficiency", "progressive_layer_drop", "compression_training", "quantize_training",
    "sparse_attention", "amp",
)  # fmt: skip
"""Sections that change what is trained."""
_REMARKS: dict[str, tuple[Kind, str]] = {
    "optimizer": ("not needed", "Megatron passes DeepSpeed its own optimizer, so this section is not read"),
    "gradient_accumulation_steps": ("not needed", "follows from the batch, the micro batch and the replicas"),
    "zero_optimization.offload_param": ("differs", "moments are offloaded; weights stay on the device here"),
    "nebula.enabled": ("not needed", "every save is asynchronous, from a pinned-memory snapshot"),
    "nebula.persistent_time_interval": ("left out", "copies follow every save; checkpoint.upload.every counts steps"),
    "nebula.enable_nebula_load": ("not needed", "a start resumes from the newest checkpoint of both places"),
    "nebula.load_path": ("left out", "`bloomery train --from` chooses a checkpoint"),
}
_BOOKKEEPING = """
steps_per_print wall_clock_breakdown dump_state zero_allow_untested_optimizer prescale_gradients memory_breakdown
communication_data_type gradient_predivide_factor sparse_gradients disable_allgather activation_checkpointing
flops_profiler comms_logger tensorboard wandb csv_monitor aio checkpoint data_types zero_force_ds_cpu_optimizer
seq_parallel_communication_data_type autotuning scheduler contiguous_gradients overlap_comm reduce_scatter
reduce_bucket_size allgather_partitions allgather_bucket_size round_robin_gradients sub_group_size
ignore_unused_parameters elastic_checkpoint
"""
"""Keys that change nothing of what is trained, of the file and of zero_optimization."""


def read_ds_config(text: str, place: str) -> dict[str, Any]:
    """Values by dotted key, inside the sections that have rows of their own; without `auto` and null, which Hugging
    Face's Trainer fills in. RecipeError with all that is wrong with it, or that a recipe cannot express."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:  # DeepSpeed refuses a key that occurs twice, too
        if len(found := dict(pairs)) < len(pairs):
            raise ValueError(f"one of the keys {', '.join(map(json.dumps, found))} occurs twice in one object")
        return found

    try:
        content = parse_json(text, object_pairs_hook=once)
        if not isinstance(content, dict):
            raise ValueError("it is no object")
    except ValueError as error:
        rule = "a ds_config is a JSON object: numbers have no underscores, and nothing is computed in it"
        raise RecipeError(Problem(f"not valid JSON: {error}", rule, "correct it", place)) from error
    if "bfloat16" in content:
        content["bf16"] = content.pop("bfloat16")
    ds = dict(_leaves(content, ""))
    wrong = [(f"{key} is {_short(ds[key])}", "it is an object: {...}") for key in ds if key in _SECTIONS]
    for key in ds.keys() & _KEYS.keys():
        kind, value = _KEYS[key][0], ds[key]
        is_number = kind in (int, float) and type(value) in (int, kind)
        if is_number and not 0 <= value <= (127 if key.endswith("_power") else _LARGEST):
            wrong.append((f"{key} is {_short(value)}", f"it is at least 0, and at most 127 (powers) or {_LARGEST:,}"))
        elif not is_number and kind is not object and type(value) is not kind:
            wrong.append((f"{key} is {_short(value)}", f"it is {_TYPES[kind]}"))
    wrong += [(f"{key} is enabled", "it changes what is trained") for key in _REFUSED if _is_on(content.get(key))]
    if ds.get("fp16.enabled") and ds.get("fp16.loss_scale"):
        wrong.append((f"fp16.loss_scale is {_short(ds['fp16.loss_scale'])}", "the scale is dynamic here: 0"))
    if isinstance(scheduler := ds.get("scheduler"), dict) and scheduler.get("type") not in (None, "auto"):
        what = f"scheduler.type is {_short(scheduler['type'])}"
        wrong.append((what, "it would replace Megatron's schedule: use --lr-decay-style and --lr-warmup-*"))
    if wrong:
        remedy = "correct or remove it, if the training may go without"
        raise RecipeError([Problem(what, rule, remedy, place) for what, rule in wrong])
    return ds


def _leaves(content: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if f"{prefix}{key}" in _SECTIONS and isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        elif value not in (None, "auto"):
            yield f"{prefix}{key}", value


def _is_on(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    return bool(value["enabled"]) if "enabled" in value else any(_is_on(each) for each in value.values())


def compare(b: Builder, ds: dict[str, Any], place: str) -> None:
    """Nebula's fields, problems where the file contradicts the flags, and a row for every key of it."""
    if ds.get("nebula.enabled") and (folder := ds.get("nebula.persistent_storage_path")):
        # The run folder is the fast tier; a copy of every checkpoint persists.
        b.raw.setdefault("checkpoint", {})["upload"] = {"to": folder}
        b.raw["checkpoint"]["keep"] = {"last": ds.get("nebula.num_of_version_in_retention", 2)}
        b.places |= {"checkpoint.upload.to": place, "checkpoint.keep.last": place}
    for key, value in ds.items():
        _, path, flag = _KEYS.get(key, (object, "", ""))
        ours: Any = value
        if path == "precision":
            ours = b.has(flag)
        elif flag and (b.has(flag) or path.startswith("batch.")):
            section, _, name = path.partition(".")
            ours = b.value(flag, 0.0) if section != "batch" else b.raw[section][name]
        if value != ours:
            given = b.line.flags.get(flag)
            theirs = f"{given.flag} {given.text}".strip() if given else f"no --{flag}"
            what = f"{key} is {json.dumps(value)} in {place} but the command line has {theirs}"
            b.refuse(flag, what, "DeepSpeed asserts that the two agree, or takes one of them", "make them equal")
        b.rows.append(_row(b, ds, key, path))


def _row(b: Builder, ds: dict[str, Any], key: str, path: str) -> Row:
    flag, (section, _, inner), text = f"ds_config {key}", key.partition("."), _short(ds[key])
    if key in _REMARKS:
        return Row(_REMARKS[key][0], flag, text, remark=_REMARKS[key][1])
    if path and section in ("fp16", "nebula") and inner != "enabled" and not ds.get(f"{section}.enabled"):
        return Row("not needed", flag, text, remark=f"{section} is off")
    if path:
        result: Any = b.raw
        for name in path.split("."):
            result = result.get(name) if isinstance(result, dict) else None
        return Row("mapped", flag, text, path, inline_yaml(result))
    if key in _REFUSED or (inner or key) in _BOOKKEEPING.split() or inner.startswith("stage3_"):
        return Row("not needed", flag, text, remark="it is off, or DeepSpeed's own bookkeeping")
    return Row("not understood", flag, text, remark="nothing here reads it")


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:36]} ..."
